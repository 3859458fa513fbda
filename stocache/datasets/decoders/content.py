"""Find what a decoder is asked to decode: the bytes, or the file if there are no bytes at hand; and its arguments as text."""

import contextlib
import enum
import io
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stocache.system.platform import here

_MOST_BYTES = 1 << 28  # a larger file is not read to find its digest
_KEPT_BYTES = 1 << 24  # of the buffer that a thread uses again
_SETTLED_NS = 5_000_000_000  # a file may change again within the resolution of its time, and on other machines later
_buffers = threading.local()
_NUMBERS_AND_TEXTS = (bool, int, float, str, bytes, type(None))


class Content(NamedTuple):
    """What a decoder is asked to decode.

    Attributes:
        data: the bytes; or what stands for a file.
        again: returns the same of the file now; None if nothing can have changed.
        stream: an open file whose position a decoder moves; else None.
        suffix: how its path ends, by which some libraries choose a format.
    """

    data: Any
    again: Callable[[], Any] | None = None
    stream: Any = None
    suffix: str = ""


def content_of(source: Any) -> Content | None:
    """Return the content of a path, bytes, an array of bytes or an open file; None if it cannot be read twice."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        data = _read_path(path)
        return None if data is None else Content(data, partial(_read_path, path), suffix=os.path.splitext(os.fsdecode(path))[1])
    if isinstance(source, bytes):
        return Content(source)
    if isinstance(source, Tensor):
        source = source.numpy() if source.dtype == torch.uint8 and source.is_cpu else None
    if isinstance(source, np.ndarray):
        return Content(source.data) if source.dtype == np.uint8 and source.flags.c_contiguous else None
    if isinstance(source, bytearray | memoryview):
        return Content(bytes(source))
    return of_stream(source, source.tell()) if hasattr(source, "read") and hasattr(source, "tell") else None


def _read_path(path: str | bytes, begin: int = 0, most: int = _MOST_BYTES) -> memoryview | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):  # the decoder says so; or it is a URL
        return None
    try:
        return _read(descriptor, begin, most)
    finally:
        os.close(descriptor)


def of_stream(stream: Any, begin: int, most: int = _MOST_BYTES) -> Content | None:
    """Return up to ``most`` bytes of an open file from a position on; None if it cannot go back, or has more than are read."""
    if type(stream) is io.BytesIO:
        view = stream.getbuffer()[begin : begin + most]
        return Content(view, stream=stream) if len(view) < _MOST_BYTES else None
    if type(stream) is io.BufferedReader and isinstance(stream.name, str):
        found = _read(stream.fileno(), begin, most)
        return None if found is None else Content(found, partial(_read_path, stream.name, begin, most), stream)
    if isinstance(stream, io.TextIOBase) or not stream.seekable() or not stream.readable():
        return None
    before = stream.tell()
    try:
        stream.seek(begin)
        data = stream.read(most)
    finally:
        stream.seek(before)
    return Content(data, stream=stream) if isinstance(data, bytes) and len(data) < _MOST_BYTES else None


def _read(descriptor: int, begin: int, most: int) -> memoryview | None:
    """Return bytes of a file, in a buffer that this thread may use again; None if they are too many, or not there."""
    status = os.fstat(descriptor)
    size = min(most, status.st_size - begin)
    if not stat.S_ISREG(status.st_mode) or not 0 < size < _MOST_BYTES:
        return None
    buffer: bytearray = getattr(_buffers, "buffer", bytearray())
    if len(buffer) < size:
        buffer = bytearray(size)
        if size <= _KEPT_BYTES:
            _buffers.buffer = buffer
    view = memoryview(buffer)[:size]
    return view if os.preadv(descriptor, [view], begin) == size else None


def of_file(status: os.stat_result) -> bytes | None:
    """Return what stands for a file whose bytes are not at hand; None if it may be changing.

    Its time must be some seconds ago, and this process must not have it open for writing.
    """
    if time.time_ns() - status.st_mtime_ns < _SETTLED_NS or _is_written_here(status):
        return None
    return repr((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()


def _is_written_here(status: os.stat_result) -> bool:
    for fd in map(int, os.listdir(here.OPEN_FILES)):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.path.samestat(os.fstat(fd), status) and here.open_mode(fd) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def text_of(value: Any) -> str:
    """Return an argument of a decoder as text.

    Raises:
        TypeError: it is not a plain value.
    """
    if type(value) in _NUMBERS_AND_TEXTS or isinstance(value, np.dtype | np.generic | torch.dtype | torch.device | type(...)):
        return repr(value)
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, slice):
        return f"slice({text_of((value.start, value.stop, value.step))})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"{type(value).__name__} is not a plain value")


def is_plain(value: Any, fixed: bool = False) -> bool:
    """Whether a cached copy of a result is the same: dense arrays and tensors, numbers and texts, in containers.

    ``fixed``: it may be an array that must not be written.
    """
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if type(value) is np.ndarray:
        return value.flags.forc and (fixed or value.flags.writeable) and not value.dtype.hasobject
    if type(value) is Tensor:
        return value.is_cpu and not value.requires_grad and torch.empty_like(value).stride() == value.stride()
    return isinstance(value, np.generic) or type(value) in _NUMBERS_AND_TEXTS


def nbytes_of(value: Any) -> int:
    """Return about how many bytes a plain value takes."""
    if isinstance(value, tuple | list | dict):
        return sum(map(nbytes_of, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, bytes | str) else getattr(value, "nbytes", 8)
