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
        module, self._make = _CODECS[name]
        try:
            self._module = importlib.import_module(module)
        except ImportError:
            raise CodecError(f"codec={name!r} needs a package that is not installed: pip install 'stocache[codecs]'") from None
        self._own = threading.local()

    def compress(self, data: bytes) -> bytes | None:
        """Return ``data`` in fewer bytes; None when that would save less than a sixteenth."""
        packed = self._functions()[0](data)
        return packed if len(packed) < len(data) * 15 // 16 else None

    def decompress(self, data: Any) -> bytes:
        """Return the bytes that were compressed into the buffer ``data``."""
        return self._functions()[1](data)

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


_CODECS: dict[str, tuple[str, Callable[[ModuleType], _Functions]]] = {"zstd": ("zstandard", _zstd), "lz4": ("lz4.block", _lz4)}
