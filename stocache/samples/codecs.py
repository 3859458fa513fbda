"""Compress samples without loss: more of them fit into the same memory, and each read takes longer."""

import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stocache.errors import CodecError


class Codec:
    """A codec by name, "zstd" or "lz4". Several threads may use it.

    Raises:
        CodecError: the name is unknown, or the package of the codec is not installed.
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
        """Return ``data`` compressed; None if that saves less than a sixteenth."""
        packed = self._functions()[0](data)
        return packed if len(packed) < len(data) * 15 // 16 else None

    def decompress(self, data: Any, limit: int) -> bytes:
        """Return the bytes that were compressed into the buffer ``data``.

        Raises:
            ValueError: they are more than ``limit``, and then nothing is allocated; or ``data`` is damaged.
        """
        try:
            claimed = self._claimed(self._module, data)
            if not 0 <= claimed <= min(limit, _MOST_PER_BYTE * (len(data) + 64)):
                raise ValueError(f"it claims {claimed} bytes, not {limit}")
            return self._functions()[1](data)
        except Exception as error:  # its class is only in the packages
            raise ValueError(f"compressed data is damaged: {error}") from error

    def _functions(self) -> "_Functions":
        """Return this thread's functions: threads must not share a context of zstd."""
        functions: _Functions | None = getattr(self._own, "functions", None)
        if functions is None:
            functions = self._own.functions = self._make(self._module)
        return functions


_Functions = tuple[Callable[[Any], bytes], Callable[[Any], bytes]]


def _zstd(module: ModuleType) -> _Functions:
    return module.ZstdCompressor(level=1).compress, module.ZstdDecompressor().decompress


def _lz4(module: ModuleType) -> _Functions:
    return module.compress, module.decompress


_MOST_PER_BYTE = 1 << 16
"""The most bytes that one compressed byte can become: zstd writes 128 KiB of one value in 4 bytes."""

_CODECS: dict[str, tuple[str, Callable[[ModuleType], _Functions], Callable[[ModuleType, Any], int]]] = {
    "zstd": ("zstandard", _zstd, lambda module, data: module.frame_content_size(data)),
    "lz4": ("lz4.block", _lz4, lambda module, data: int.from_bytes(data[:4], "little")),
}
