"""Stand in for a dataset: its attributes are read and set through its `CachedDataset`, and what that means for the cache."""

import copy
import inspect
import logging
import operator
from typing import Any

from torch.utils.data import Dataset, get_worker_info
from typing_extensions import TypeVar

from stocache.cache.stats import MISSING, SlotState
from stocache.datasets.audit import Audit
from stocache.datasets.decoders.cache import DecoderCache, open_decoders
from stocache.datasets.decoders.patches import install_imported
from stocache.datasets.transforms import huggingface
from stocache.datasets.transforms.part_transform import as_transform
from stocache.errors import DatasetError
from stocache.samples.indices import length_of
from stocache.system.limits import parse_size
from stocache.system.objects import attribute_of, vars_of
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)

_SHARED_NAMES = frozenset({"dataset", "transform", "set_epoch", "prefetch_blocks", "expect"})
"""Names of ours with the same meaning as in a dataset."""
_said_hidden: set[tuple[type, str]] = set()


class DatasetProxy(Dataset[_T]):
    """The part of `CachedDataset` that stands in for the dataset: its length, its attributes, and copies of it."""

    _audit: Audit
    _split: Any
    _loader: Any
    _len: int
    _initialised: bool
    _decoders: DecoderCache | None = None  # in place of samples that cannot be cached

    def __len__(self) -> int:
        """Return the number of samples. If the dataset has become longer or shorter, ``on_change`` applies.

        Raises:
            DatasetError: it has, and ``on_change`` is not "uncached".
        """
        now = length_of(self.dataset)
        if now is not None and now != self._len:
            finding = f"{type(self.dataset).__name__} had {self._len} samples when it was wrapped, and has {now} now"
            self._audit.change(finding)
            if not self._audit.changed:  # on_change="keep"
                raise DatasetError(f"{finding}. Wrap it when it is complete, or wrap it again.")
            super().__setattr__("_len", now)
        if self._initialised and self._audit.changed:  # a sampler asks when an epoch begins
            self._serve_decoders()
        return self._len

    def _number(self, idx: Any) -> int | None:
        """Return an index as an int that counts from the start; None if it is not the index of one sample, or is outside."""
        try:
            number = operator.index(idx)
        except TypeError:
            return None
        number += self._len if number < 0 else 0
        if number >= self._len:
            len(self)  # the dataset may have become longer
        return number if 0 <= number < self._len and not getattr(idx, "ndim", None) else None

    @property
    def transform(self) -> Any:
        """The transform of the dataset; if it has none, the one that runs after the cache."""
        return self.dataset.transform if self._has("transform") else self.after_cache

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that are not here; during unpickling all are missing, even the dataset
        owner = self.__dict__.get("dataset", self)
        if name.startswith("__") or owner is self:
            raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
        value = huggingface.method_beside_cache(self.dataset, name) or getattr(self.dataset, name)
        if self._initialised and callable(value):  # a call may change the dataset
            self._audit.doubt()
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if not self._initialised:
            super().__setattr__(name, value)
        elif name in ("dataset", "cache"):
            raise DatasetError(f"{name} of a CachedDataset cannot be replaced: the cache has its samples. Make a new one.")
        elif name == "after_cache" or (name == "transform" and not self._has(name)):
            super().__setattr__("after_cache", as_transform(value))
        elif name != "transform" and (name in vars(self) or hasattr(type(self), name) or not self._has(name)):
            super().__setattr__(name, value)
        else:
            self._set_in_dataset(name, value)

    def _set_in_dataset(self, name: str, value: object) -> None:
        """Set an attribute of the dataset. If cached samples were made with a different value, ``on_change`` applies."""
        before = getattr(self.dataset, name)
        setattr(self.dataset, name, value)
        if not self.cache.serves_ranks and not bool((self.cache.aux_array == SlotState.SET).any()):
            self._audit.values.hold()  # nothing is cached, and no other rank fills the cache
        try:
            self._follow_transforms()
        except BaseException:
            setattr(self.dataset, name, before)
            raise
        self._audit.doubt()

    def _serve_decoders(self) -> None:
        """Cache what decoders return, if samples are not cached any more. See NOTE [ Serving decoders ]."""
        where, samples = self._wrapping
        if self._decoders is not None:
            install_imported()
        elif self._audit.changed and samples.decoders and not self.cache.closed and (size := where.size_limit_gib):
            limit = size if size == "auto" else f"{max(0, parse_size(size) - self.cache.stats().reserved_bytes)}B"
            vars(self)["_decoders"] = open_decoders(limit, self._decoders_job, self._audit.share)

    def _has(self, name: str) -> bool:
        """Return whether the dataset has an attribute."""
        return attribute_of(self.dataset, name, MISSING) is not MISSING

    def _follow_transforms(self) -> None:
        """Cut the program again when a transform of the dataset has been set.

        If a different part of the samples is cached then, a cache of this process begins anew.

        Raises:
            DatasetError: the cache has a name or a disk, and ``on_change`` is "raise".
        """
        self._audit.check_values(self._loader.load)
        if self._audit.changed or not self._audit.values.new(transforms=True):
            return
        from stocache.datasets.wrapping import Wrapper  # here: loaders start faster

        (where, samples), wrapper = self._wrapping, None
        before = "" if self._split is None else self._split.before_text()
        if get_worker_info() is None and samples.split and samples.probe:
            wrapper = Wrapper(self.dataset, self._len, where, samples)
            wrapper.cut(before)
        split = None if wrapper is None else wrapper.split
        if before and split is not None and split.before_text() == before:
            split.bind()
            self._split = self._loader = split
        elif wrapper is not None and where.name is None and where.disk is None:
            self._take(wrapper)
        else:
            kind = type(self.dataset).__name__
            self._audit.change(f"a transform of {kind} was set: its samples are made with it, and some are cached as they were")
        self._audit.values.hold()

    def _warn_of_hidden(self) -> None:
        """Warn, once for each class, of public attributes of the dataset whose names this object has for others."""
        kind, own = type(self.dataset), {*dir(type(self)), *vars(self)} - _SHARED_NAMES
        names = (name for name in sorted(own) if name[0] != "_")
        hidden = ", ".join(name for name in names if inspect.getattr_static(self.dataset, name, MISSING) is not MISSING)
        if hidden and (kind, hidden) not in _said_hidden and is_first_rank():
            _said_hidden.add((kind, hidden))
            logger.warning(
                "a CachedDataset has attributes of its own called %s. Ask its `dataset` for those of %s.", hidden, kind.__name__
            )

    def __copy__(self) -> Any:
        memo = {id(value): value for value in (self.after_cache, *vars_of(self.dataset).values())}
        memo[id(self.dataset)] = copy.copy(self.dataset)
        return copy.deepcopy(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would compare the class
        return object.__new__, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        self._follow_transforms()
        return vars(self)


def cut_of(cached: Any) -> str:
    """Return which lines of the dataset's program are cached, and which run each time; empty if whole samples are cached."""
    return "" if cached._split is None or cached.is_left else str(cached._split.text)


def rest_of_cut(cached: Any) -> str:
    """Return what runs each time for a cached sample, or what decoders are served, in brackets; empty if there is neither."""
    return f" ({rest})" if (rest := cut_of(cached).rpartition("run each time: ")[2] or decoders_of(cached)) else ""


def decoders_of(cached: Any) -> str:
    """Return how many results of decoders came from memory; empty if none was asked for."""
    return "" if cached is None or cached._decoders is None else str(cached._decoders)


def has_decoders(cached: Any) -> bool:
    """Whether results of decoders are cached in place of samples."""
    return cached._decoders is not None


def finding_of(cached: Any) -> str | None:
    """Return what samples depend on besides their index, if this process has found that; else None."""
    finding: str | None = cached._audit.finding
    return finding
