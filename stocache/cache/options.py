"""The options of caches: where samples are kept and who shares them, which samples are cached, and how that is checked.

NOTE [ Options ]
    Each option is a field of one class here. It is spelled out, ``CachedDataset(photos, 32, name="photos", audit=0)``, or given
    in an object of its class, ``CachedDataset(photos, CacheOptions(32, name="photos"), AuditOptions(audit=0))``, but not both.
"""

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar

from stocache.cache.placement import Placement
from stocache.errors import CacheNameError, LimitError
from stocache.samples.codecs import Codec
from stocache.system.limits import parse_size

OnBusy: TypeAlias = Literal["uncached", "raise"]
"""What to do when another process holds the lock of the named caches."""

OnChange: TypeAlias = Literal["uncached", "raise", "keep"]
"""What to do when samples are found to depend on more than their index."""

SHARING = "name", "persist", "fingerprint", "on_busy", "share_ranks"
"""The options of caches whose samples have one shape; `RECORDS` are for values that are stored one by one."""

RECORDS = "admission", "codec", "allow_pickle", "narrow"

_T = TypeVar("_T")


def _check(name: str, value: Any, choices: tuple[Any, ...], error: type[Exception] = LimitError) -> None:
    """Raise an error unless an option has one of its values."""
    if value not in choices:
        raise error(f"{name}={value!r:.100} is unknown. Use {' or '.join(map(repr, choices))}.")


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
            deletes it. If killed processes left it behind, the next process takes it over with its samples. A cache without
            a name ends with its processes. Ranks of one job share it if ``share_ranks`` allows that.
        persist: True keeps a named cache when no process uses it, so that the next run starts warm. ``stocache rm`` deletes it.
        fingerprint: a text that identifies the samples. Change it whenever the samples change: a named cache that was left
            behind with a different fingerprint is replaced. Ranks with other fingerprints do not share a cache without a name.
        share_ranks: True lets the ranks of one job on this machine use one cache without a name, if its arguments are the same
            and its samples are known to be the same: by the same ``fingerprint``, by a `SharedCacheDDP`, or because a
            `CachedDataset` has compared them. Otherwise each rank has a cache of its own, and its part of the limit.
        disk: a folder on a local disk for the samples that do not fit in memory; see `DiskCache`. Needs ``disk_limit``.
        disk_limit: bytes for that folder: 500 (GiB), "500GB".
        on_busy: what to do when another process, which may be stopped, holds the lock of the named caches for 10 seconds:
            "uncached" warns and caches nothing, "raise" raises `BusyError`.
        admission: which samples a `RaggedCache` keeps when not all fit. "all" keeps the first ones until the limit is reached:
            under shuffling a random share. "cost" measures how long each sample takes to load, and keeps the samples with the
            highest cost per byte: most of them in the first epoch if its order is random, all in the second.
        codec: how a `RaggedCache` compresses samples, without loss: "zstd" (smaller) or "lz4" (faster). Needs
            ``pip install 'stocache[codecs]'``.
        allow_pickle: True lets a `RaggedCache` pickle values that it cannot store otherwise: other objects, sparse tensors,
            arrays of objects. A program that writes to a cache of this kind can run code in the processes that read it: share
            its name only with programs that you trust.
        narrow: True keeps numbers that are made of 8-bit or 16-bit integers as these (images as floats, also normalised ones,
            masks, grey images of three channels): two to eight times as many samples fit. Each sample is compared to the last
            bit before it is kept. A sample that is not made of these numbers is kept unchanged if samples vary in size; it
            stays uncached if all have one shape and the probed ones, or all but one of them, are narrow. "auto", for a
            `CachedDataset`, does so if not all samples would fit.

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

    def __post_init__(self) -> None:
        if self.size_limit_gib != "auto":
            parse_size(self.size_limit_gib)
        _check("admission", self.admission, ("all", "cost"))
        _check("narrow", self.narrow, (True, False, "auto"))
        _check("on_busy", self.on_busy, ("uncached", "raise"), CacheNameError)
        if self.codec is not None:
            Codec(self.codec)
        if self.name is None and self.persist:
            raise CacheNameError("persist is for caches with a name. Give one.")
        if (self.disk is None) != (self.disk_limit is None):
            raise LimitError("disk and disk_limit go together: a folder, and the bytes that it may have. Give both.")
        if self.disk_limit is not None:
            parse_size(self.disk_limit, "disk_limit")
        if not isinstance(self.fingerprint, str | None):
            kind = type(self.fingerprint).__name__
            raise CacheNameError(f"fingerprint={self.fingerprint!r:.100} is a {kind}. Give a str, or None.")


@dataclass(frozen=True)
class SampleOptions:
    """The options of a `CachedDataset` that say which samples are cached, and in which form.

    Attributes:
        placement: which samples are cached when all have one shape and not all fit: "scattered", evenly spread; "prefix", the
            first; or a `Placement`: ``Placement.from_env()`` assigns each of several machines its own part. Samples of varying
            size are kept in the order in which they come. For a `StorageDataset` of blocks, whole blocks are cached, also of
            samples of varying size, which are then scattered as well (NOTE [ Admitting blocks ]).
        variable: whether samples vary in size. None finds out. True keeps them in a `RaggedCache` in any case; False in a
            `SharedCache`, which is faster, and needs samples of one structure with the same dtypes and shapes.
        probe: how many samples, evenly spread, to load in a child process to find that out; fewer if loading takes long. They
            are cached, unless they have to be timed for ``admission="cost"``. With 0, samples are cached as ones of varying
            size.
        example: a sample as the dataset returns it, in place of the probe: for datasets that are slow, or not ready yet
            (``worker_init_fn`` makes them ready).
        copy: False returns views of the cache if nothing runs after it: writing to one changes all later epochs. If something
            does, samples are copied in any case.
        split: True caches what the program of the dataset has made before it draws random numbers, and runs the rest each time
            (NOTE [ Cut programs ]). "straight" does not move later statements before the cut. False cuts nothing.
        cut: where the program is cut: "latest", as late as that allows; "smallest", where the cached part is smallest. None
            takes the latest cut at which all samples fit, else the smallest, but not one that saves next to nothing.
        store: "encoded" caches the bytes of image files, and decodes them after the cache: for datasets that call an attribute
            ``loader`` with a path, such as torchvision's folders, and for datasets of Hugging Face with images.
        decoders: whether to cache what decoders of libraries (Pillow, OpenCV, soundfile and others) return for the same bytes,
            with the same limit, if samples cannot be cached. See NOTE [ Serving decoders ].

    Raises:
        LimitError: an option is unknown.

    Examples:
        >>> numbers = TensorDataset(torch.arange(12))
        >>> with CachedDataset(numbers, "1MB", SampleOptions(placement="prefix", probe=2)) as dataset:
        ...     dataset[3]
        (tensor(3),)
    """

    _: KW_ONLY
    placement: Literal["prefix", "scattered"] | Placement = "scattered"
    variable: bool | None = None
    probe: int = 8
    example: Any = None
    copy: bool = True
    split: bool | Literal["straight"] = True
    cut: Literal["latest", "smallest"] | None = None
    store: Literal["decoded", "encoded"] = "decoded"
    decoders: bool = True

    def __post_init__(self) -> None:
        _check("split", self.split, (True, False, "straight"))
        _check("cut", self.cut, (None, "latest", "smallest"))
        _check("store", self.store, ("decoded", "encoded"))


@dataclass(frozen=True)
class AuditOptions:
    """The options of a `CachedDataset` that say how cached samples are compared with the dataset.

    Attributes:
        audit: the share of the time for loading samples that are cached from the dataset as well, to compare them. The first
            cached sample that each process serves in an epoch is compared in any case; with 0 none is. See NOTE [ The audit ].
        on_change: what happens when a sample is found to depend on more than its index: on random numbers that the dataset
            draws, an epoch, an attribute that was set, an edited file. "uncached": from then on the dataset makes each sample
            itself, as without a cache, with one warning that names the cause. "raise": a `DatasetError`. "keep": the cached
            samples are served, without a warning.

    Examples:
        >>> with CachedDataset(TensorDataset(torch.arange(12)), "1MB", AuditOptions(on_change="raise")) as dataset:
        ...     dataset[3]
        (tensor(3),)

    Raises:
        LimitError: ``audit`` is not a share of the time, or ``on_change`` is unknown.
    """

    _: KW_ONLY
    audit: float = 0.01
    on_change: OnChange = "uncached"

    def __post_init__(self) -> None:
        if isinstance(self.audit, bool) or not isinstance(self.audit, int | float) or not 0 <= self.audit <= 1:
            raise LimitError(f"audit={self.audit!r} is not a share of the time. Use a number from 0 to 1.")
        _check("on_change", self.on_change, ("uncached", "raise", "keep"))


def take_options(
    owner: str, objects: Collection[object], given: Mapping[str, Any], kinds: Mapping[Any, Collection[str]]
) -> list[Any]:
    """Return an object of each class of options, from objects of these classes and options that are spelled out.

    Args:
        owner: what takes them, for messages.
        objects: those that are given; or the size in place of `CacheOptions`.
        given: options that are spelled out.
        kinds: the classes, and the names of the options that have an effect.

    Raises:
        TypeError: there is no such option.
        LimitError: an option has no effect here, or is given twice.
    """
    names = [name for own in kinds.values() for name in own]
    for name in (name for name in given if name not in names):
        places = [f" It is an option of {kind.__name__}." for kind in ALL_OPTIONS.keys() - kinds if name in ALL_OPTIONS[kind]]
        close = [f" Did you mean {each}?" for each in difflib.get_close_matches(name, names, 1)]
        raise TypeError(f"{owner} has no option {name!r}.{(*places, *close, '')[0]}")
    found: dict[type, Any] = {}
    for value in objects:
        kind = type(value) if type(value) in kinds else CacheOptions
        if kind in found:
            raise LimitError(f"{owner}: {kind.__name__} is given twice. Give each class of options once.")
        found[kind] = value
    return [_object_of(owner, kind, names, found, given) for kind, names in kinds.items()]


def _object_of(owner: str, kind: type, names: Collection[str], found: Mapping[type, Any], given: Mapping[str, Any]) -> Any:
    options, value = {name: option for name, option in given.items() if name in names}, found.get(kind)
    if not isinstance(value, kind):
        return kind(value, **options) if kind in found else kind(**options)
    if options:
        raise LimitError(f"{owner}: {next(iter(options))} is one of the {kind.__name__} that were given. Give it there.")
    for field in fields(kind):
        if field.name not in (*names, "size_limit_gib") and getattr(value, field.name) != field.default:
            raise LimitError(f"{owner}: {field.name} of the {kind.__name__} has no effect here. Leave it out.")
    return value


def shows_options(*names: str) -> Callable[[_T], _T]:
    """Show options in the signature of a function that takes them by name."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        for field in (field for kind in ALL_OPTIONS for field in fields(kind) if field.name in names):
            parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default))
        function.__signature__ = signature.replace(parameters=parameters)
        return function

    return decorate


ALL_OPTIONS: dict[Any, Collection[str]] = {
    kind: [field.name for field in fields(kind) if field.name != "size_limit_gib"]
    for kind in (CacheOptions, SampleOptions, AuditOptions)
}
"""The classes of options, and the names in each but the size."""
