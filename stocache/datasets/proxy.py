"""Stand in for a dataset: its attributes are read and set through its `CachedDataset`, and what that means for the cache."""

import copy
from types import MethodType
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import Dataset, MapDataPipe
from typing_extensions import TypeVar

from stocache.cache.states import SlotState
from stocache.cache.stats import MISSING
from stocache.datasets.audit import Audit
from stocache.datasets.loaders import SampleLoader
from stocache.datasets.parts import FollowedMethod, follow
from stocache.datasets.transforms import huggingface
from stocache.datasets.transforms.part_transform import as_transform
from stocache.errors import DatasetError
from stocache.observe.recording.epochs import EpochCounter
from stocache.system.objects import attribute_of

_T = TypeVar("_T", default=Any)
_Self = TypeVar("_Self", bound="DatasetProxy[Any]")

_SAMPLE_ATTRIBUTES = frozenset({"transform", "transforms", "target_transform"})
"""Attributes that samples are made with, by the conventions of torchvision and timm, whether or not the probe saw it."""


class DatasetProxy(Dataset[_T]):
    """The part of `CachedDataset` that stands in for the dataset: its attributes, its class, views and copies of it."""

    dataset: Any
    cache: Any
    _split: Any
    _loader: Any
    _audit: Audit
    _epochs: EpochCounter
    _reads: Any
    _rows: Any
    _whole: Any
    _plan: Any
    _len: int
    _initialised: bool

    @property
    def _source(self) -> Any:
        """The dataset that has all samples, of a view as well."""
        return self.dataset if self._whole is None else self._whole

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that are not here; during unpickling all are missing, even the dataset
        owner = self.__dict__.get("dataset", self)
        if name.startswith("__") or owner is self:
            raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
        method = huggingface.cached_method(self.dataset, name, self._view)
        if method is not None:
            return method
        value = getattr(self.dataset, name)
        if self._initialised and callable(value):  # a call may change the dataset
            self._audit.doubt()
            if isinstance(value, MethodType) and value.__self__ is self.dataset:
                return FollowedMethod(value, self._follow)
        return value

    def _follow(self, name: str, result: object) -> Any:
        return follow(name, result, self, self._view)

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
        """Set an attribute of the dataset. Where cached samples were made with another value, ``on_change`` applies."""
        before, kind = getattr(self.dataset, name), type(self.dataset).__name__
        splits = self._whole is None and self._split is not None and name in _SAMPLE_ATTRIBUTES
        if self._whole is not None:
            self._leave(f"{name} of a part of {kind} was set")
        elif not splits and name in self._reads | _SAMPLE_ATTRIBUTES and before is not value and self._holds_samples():
            self._audit.change(
                f"{name} of {kind} was set: its samples are made with it, and some are cached as they were. For one part of "
                f"the samples, give transform={{0: ...}} or {{'image': ...}}"
            )
        setattr(self.dataset, name, value)
        if splits:
            try:
                self._follow_transforms()
            except BaseException:
                setattr(self.dataset, name, before)
                raise
        self._audit.doubt()

    def _has(self, name: str) -> bool:
        """Return whether the dataset has an attribute."""
        return attribute_of(self.dataset, name, MISSING) is not MISSING

    def _leave(self, finding: str) -> None:
        """Have the dataset of a view make all samples itself, unless ``on_change`` is "keep"."""
        audit = Audit(self.dataset, self._len, 0, self._audit.on_change)
        audit.change(finding)
        if audit.changed:
            vars(self).update(_rows=None, _whole=None, _split=None, _audit=audit)

    def _follow_transforms(self) -> None:
        """Split again when a transform of the dataset has been set or changed.

        Raises:
            DatasetError: cached samples were made with another beginning, and ``on_change`` is not "uncached".
        """
        if self._split is None or self._audit.changed or not self._split.has_changed():
            return
        old = self._split if self._holds_samples() else None
        try:
            split = self._plan(self._source, old=old)
            if split is None:
                raise DatasetError(
                    f"the transforms of {type(self._source).__name__} were changed, and cannot be split any more. Make a new "
                    f"CachedDataset."
                )
        except DatasetError as error:
            if self._audit.on_change != "uncached":
                raise
            self._audit.change(str(error))
        else:
            split.bind()
            self._split, self._loader = split, split if split.has_rest else SampleLoader(self._source)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the wrapped dataset, so that `isinstance` finds it; ``type()`` is ours. Code that knows the class may ask.

        Not of one that wraps another: its ``dataset`` would be taken for ours. Nor of a DataPipe, which torch serves otherwise.
        """
        dataset = vars(self).get("dataset")
        stands_in = isinstance(dataset, Dataset) and not isinstance(dataset, MapDataPipe) and not hasattr(dataset, "dataset")
        return type(dataset) if stands_in else type(self)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would compare the class
        return _new, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        self._follow_transforms()
        return vars(self)

    def _holds_samples(self) -> bool:
        """Return whether samples are cached, or may be at any moment, by other ranks."""
        return self.cache.serves_ranks or bool((self.cache.aux_array == SlotState.SET).any())

    def _view(self: _Self, dataset: object, rows: NDArray[Any]) -> _Self:
        """Return a view of some samples of this cached dataset; ``dataset`` has their attributes."""
        return self._replace(
            dataset=dataset,
            _rows=rows if self._rows is None else self._rows[rows],
            _whole=self._source,
            _len=len(rows),
            _collates={},
            _sizes_compared=set(),
            _epochs=EpochCounter(self.cache.counts()),
        )

    def _replace(self: _Self, **attributes: Any) -> _Self:
        """Return a shallow copy with other values of some attributes."""
        replaced = copy.copy(self)
        vars(replaced).update(attributes)
        return replaced


def _new(kind: type[_Self]) -> _Self:
    return kind.__new__(kind)
