"""CacheOptions: the size of a cache, the name by which other processes find it, and how samples of varying size are kept."""

import os
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from stocache.errors import CacheNameError, LimitError
from stocache.samples.codecs import Codec
from stocache.system.limits import parse_size

OnBusy: TypeAlias = Literal["uncached", "raise"]
"""What to do when another process holds the lock of the named caches."""


@dataclass(frozen=True)
class CacheOptions:
    """The options that caches have in common.

    Attributes:
        size_limit_gib: GiB for the cache on this machine: 32, 0.5, "32GiB" or "500MB". "auto" takes what the machine can spare
            (`recommended_limit`); 0 caches nothing. The limit covers the samples and one state byte for each sample of the
            dataset. A header of about 80 KB comes on top. In a `RaggedCache` each sample of the dataset takes 9 bytes, and each
            cached one 16 more, 1, 2 or 4 for each size in it, and up to 7 for alignment.
        name: the name by which every process of this user on this machine finds the same cache, if its other arguments are
            equal too: DDP ranks, other jobs, notebooks. The first process makes the cache, and the last one to close it
            deletes it. Where killed processes left it behind, the next process takes it over with its samples. None makes a
            cache that only this process and those it starts or sends it to can use.
        persist: True keeps a named cache when no process uses it, so that the next run starts warm. ``stocache rm`` deletes it.
        fingerprint: a text that identifies the samples in a named cache. Change it whenever the samples change: a cache that
            was left behind with another fingerprint is made anew.
        disk: a folder on a local disk for the samples that do not fit in memory; see `DiskCache`. Needs ``disk_limit``.
        disk_limit: bytes for that folder: 500 (GiB), "500GB".
        on_busy: what to do when another process, which may be stopped, holds the lock of the named caches for 10 seconds:
            "uncached" warns and caches nothing, "raise" raises `BusyError`.
        admission: which samples a `RaggedCache` keeps when not all fit. "all" keeps the first ones until the limit is reached:
            under shuffling a random share. "cost" measures how long each sample takes to load, and keeps those with the highest
            cost per byte: most of them in the first epoch if its order is random, all in the second.
        codec: how a `RaggedCache` compresses samples, without loss: "zstd" (smaller) or "lz4" (faster). Needs
            ``pip install 'stocache[codecs]'``.
        allow_pickle: True lets a `RaggedCache` pickle what it cannot store otherwise: other objects, sparse tensors, arrays of
            objects. A program that writes to such a cache can run code in the processes that read it: share its name only
            with programs that you trust.

    Raises:
        LimitError: a size is not a size, the admission is unknown, or only one of ``disk`` and ``disk_limit`` is given.
        CodecError: the codec is unknown, or not installed.
        CacheNameError: ``persist`` or ``fingerprint`` is given without a name, or is not a text; ``on_busy`` is unknown.
    """

    size_limit_gib: float | str = "auto"
    _: KW_ONLY
    name: str | None = None
    persist: bool = False
    fingerprint: str | None = None
    on_busy: OnBusy = "uncached"
    admission: Literal["all", "cost"] = "all"
    codec: Literal["zstd", "lz4"] | None = None
    allow_pickle: bool = False
    disk: str | os.PathLike[str] | None = None
    disk_limit: float | str | None = None

    def __post_init__(self) -> None:
        if self.size_limit_gib != "auto":
            parse_size(self.size_limit_gib)
        if self.admission not in ("all", "cost"):
            raise LimitError(f"admission={self.admission!r} is unknown. Use 'all' or 'cost'.")
        if self.codec is not None:
            Codec(self.codec)
        if self.on_busy not in ("uncached", "raise"):
            raise CacheNameError(f"on_busy={self.on_busy!r} is unknown. Use 'uncached' or 'raise'.")
        if self.name is None and (self.persist or (self.fingerprint is not None and self.disk is None)):
            raise CacheNameError("persist and fingerprint are for caches with a name, fingerprint also for a disk. Give one.")
        if (self.disk is None) != (self.disk_limit is None):
            raise LimitError("disk and disk_limit go together: a folder, and the bytes that it may have. Give both.")
        if self.disk_limit is not None:
            parse_size(self.disk_limit, "disk_limit")
        if not isinstance(self.fingerprint, str | None):
            kind = type(self.fingerprint).__name__
            raise CacheNameError(f"fingerprint={self.fingerprint!r:.100} is a {kind}. Give a str, or None.")

    def in_memory(self, *, ragged: bool) -> dict[str, Any]:
        """Return the arguments of a `SharedCache`, or of a `RaggedCache`, with these options."""
        left_out = {"disk", "disk_limit"} | (set() if ragged else {"admission", "codec", "allow_pickle"})
        arguments = {name: value for name, value in vars(self).items() if name not in left_out}
        return arguments if self.name is not None else arguments | {"fingerprint": None}
