"""Lossless codecs: more samples in the same bytes, for the time it takes to unpack them at each hit."""

import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stocache.errors import CodecError


class Codec:
    """One of the codecs, "zstd" or "lz4", by name; safe to use from several threads.

    Raises:
        CodecError: there is none of that name, or the package it needs is not installed.
    """

    def __init__(self, name: str) -> None:
        if name not in _CODECS:
            raise CodecError(f"codec={name!r} is unknown. Use {' or '.join(map(repr, _CODECS))}, or None.")
        module, self._make, self._claimed = _CODECS[name]
        try:
            self._module = importlib.import_module(module)
        except ImportError:
            raise CodecError(f"codec={name!r} needs a package that is not installed: pip install 'stocache[codecs]'") from None
        self._own = threading.local()

    def compress(self, data: bytes) -> bytes | None:
        """Return ``data`` in fewer bytes; None when that would save less than a sixteenth."""
        packed = self._functions()[0](data)
        return packed if len(packed) < len(data) * 15 // 16 else None

    def decompress(self, data: Any, limit: int) -> bytes:
        """Return the bytes that were compressed into the buffer ``data``: at most ``limit``, or nothing is allocated.

        Raises:
            ValueError: they are more, or ``data`` is damaged.
        """
        claimed = self._claimed(self._module, data)
        if not 0 <= claimed <= min(limit, _MOST_PER_BYTE * (len(data) + 64)):
            raise ValueError(f"compressed data claims {claimed} bytes, where {limit} are due")
        try:
            return self._functions()[1](data)
        except Exception as error:  # of classes that only the packages know
            raise ValueError(f"compressed data is damaged: {error}") from error

    def _functions(self) -> "_Functions":
        """Return this thread's functions: the contexts of zstd are not to be shared."""
        functions: _Functions | None = getattr(self._own, "functions", None)
        if functions is None:
            functions = self._own.functions = self._make(self._module)
        return functions


_Functions = tuple[Callable[[Any], bytes], Callable[[Any], bytes]]


def _zstd(module: ModuleType) -> _Functions:
    return module.ZstdCompressor(level=1).compress, module.ZstdDecompressor().decompress


def _lz4(module: ModuleType) -> _Functions:
    return module.compress, module.decompress


def _zstd_claimed(module: ModuleType, data: Any) -> int:
    try:
        return int(module.frame_content_size(data))
    except Exception:  # a ZstdError, of a header that is damaged
        return -1


def _lz4_claimed(module: ModuleType, data: Any) -> int:
    return int.from_bytes(data[:4], "little") if len(data) >= 4 else -1


_MOST_PER_BYTE = 1 << 16
"""Bytes that one compressed byte can make, at most: zstd writes 128 KiB of one value in 4."""

_CODECS: dict[str, tuple[str, Callable[[ModuleType], _Functions], Callable[[ModuleType, Any], int]]] = {
    "zstd": ("zstandard", _zstd, _zstd_claimed),
    "lz4": ("lz4.block", _lz4, _lz4_claimed),
}
