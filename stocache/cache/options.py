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
        size_limit_gib: GiB for the cache on this machine: 32, 0.5, "32GiB" or "500MB". "auto" takes the memory that the machine
            can spare (`recommended_limit`); 0 caches nothing. The limit covers the samples and one state byte for each sample
            of the dataset. On top come a header of 132 KiB (``EXTENTS_AT`` in shm/layout.py) and 4 bytes for each sample of the
            dataset. In a `RaggedCache` each sample of the dataset takes 9 bytes, and each cached one 16 more, 1, 2, 4 or 8 for
            each size in it, and up to 7 for alignment.
        name: the name by which every process of this user on this machine finds the same cache, if its other arguments are
            equal too: DDP ranks, other jobs, notebooks. The first process makes the cache, and the last one to close it
            deletes it. Where killed processes left it behind, the next process takes it over with its samples. A cache without
            a name ends with its processes. Ranks of one job share it if ``share_ranks`` allows that.
        persist: True keeps a named cache when no process uses it, so that the next run starts warm. ``stocache rm`` deletes it.
        fingerprint: a text that identifies the samples. Change it whenever the samples change: a named cache that was left
            behind with another fingerprint is replaced. Ranks with other fingerprints do not share a cache without a name.
        share_ranks: True lets the ranks of one job on this machine use one cache without a name, if its arguments are the same
            and its samples are known to be the same: by the same ``fingerprint``, by a `SharedCacheDDP`, or because a
            `CachedDataset` has compared them. Otherwise each rank has a cache of its own, and its part of the limit.
        disk: a folder on a local disk for the samples that do not fit in memory; see `DiskCache`. Needs ``disk_limit``.
        disk_limit: bytes for that folder: 500 (GiB), "500GB".
        on_busy: what to do when another process, which may be stopped, holds the lock of the named caches for 10 seconds:
            "uncached" warns and caches nothing, "raise" raises `BusyError`.
        admission: which samples a `RaggedCache` keeps when not all fit. "all" keeps the first ones until the limit is reached:
            under shuffling a random share. "cost" measures how long each sample takes to load, and keeps those with the highest
            cost per byte: most of them in the first epoch if its order is random, all in the second.
        codec: how a `RaggedCache` compresses samples, without loss: "zstd" (smaller) or "lz4" (faster). Needs
            ``pip install 'stocache[codecs]'``.
        allow_pickle: True lets a `RaggedCache` pickle values that it cannot store otherwise: other objects, sparse tensors,
            arrays of objects. A program that writes to such a cache can run code in the processes that read it: share its name
            only with programs that you trust.
        narrow: True lets a `RaggedCache` keep numbers that are made of 8-bit or 16-bit integers as these, if they come back the
            same to the last bit: images as floats, also normalised ones, and masks. Others are kept as they are.

    Raises:
        LimitError: a size is not a size, the admission is unknown, or only one of ``disk`` and ``disk_limit`` is given.
        CodecError: the codec is unknown, or not installed.
        CacheNameError: ``persist`` is given without a name, ``fingerprint`` is not a text, or ``on_busy`` is unknown.

    Examples:
        >>> images = TensorDataset(torch.zeros(20, 3, 64, 64))  # 49 KB each
        >>> options = CacheOptions("500KB", disk="on-disk", disk_limit="10MB", fingerprint="v1")
        >>> with CachedDataset(images, options) as dataset:
        ...     stats = dataset.warm(progress=False)
        >>> stats.total.filled, stats.disk.filled
        (10, 20)
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
    narrow: bool | Literal["auto"] = False
    disk: str | os.PathLike[str] | None = None
    disk_limit: float | str | None = None
    share_ranks: bool = True

    @classmethod
    def of(cls, size_limit_gib: "float | str | CacheOptions", **options: Any) -> "CacheOptions":
        """Return the options that are given one by one, or together in place of the size.

        Raises:
            LimitError: both are given.
        """
        if not isinstance(size_limit_gib, CacheOptions):
            return cls(size_limit_gib, **options)
        given = [name for name, value in options.items() if value != getattr(cls, name)]
        if given:
            raise LimitError(f"{given[0]} is one of the CacheOptions that were given. Give it there.")
        return size_limit_gib

    def __post_init__(self) -> None:
        if self.size_limit_gib != "auto":
            parse_size(self.size_limit_gib)
        if self.admission not in ("all", "cost"):
            raise LimitError(f"admission={self.admission!r} is unknown. Use 'all' or 'cost'.")
        if self.narrow not in (False, True, "auto"):
            raise LimitError(f"narrow={self.narrow!r:.100} is unknown. Use True, False or 'auto'.")
        if self.codec is not None:
            Codec(self.codec)
        if self.on_busy not in ("uncached", "raise"):
            raise CacheNameError(f"on_busy={self.on_busy!r} is unknown. Use 'uncached' or 'raise'.")
        if self.name is None and self.persist:
            raise CacheNameError("persist is for caches with a name. Give one.")
        if (self.disk is None) != (self.disk_limit is None):
            raise LimitError("disk and disk_limit go together: a folder, and the bytes that it may have. Give both.")
        if self.disk_limit is not None:
            parse_size(self.disk_limit, "disk_limit")
        if not isinstance(self.fingerprint, str | None):
            kind = type(self.fingerprint).__name__
            raise CacheNameError(f"fingerprint={self.fingerprint!r:.100} is a {kind}. Give a str, or None.")


def check_share(share: object) -> None:
    """Raise LimitError unless this is a share of the time."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise LimitError(f"audit={share!r} is not a share of the time. Use a number from 0 to 1.")
