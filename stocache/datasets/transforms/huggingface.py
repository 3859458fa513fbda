"""Wrap Hugging Face datasets: finish samples with the transform of a dataset, and say which of its methods lose the cache.

``set_transform`` and ``with_transform`` give a dataset a function of batches, which runs whenever samples are read. All of it
runs after the cache, which holds the samples without it.

Some methods choose rows. They return a dataset without the cache, with one warning. Other methods change the dataset behind the
cache, or make other rows. These are refused.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stocache.datasets.transforms.pipelines import step_name
from stocache.errors import DatasetError

logger = logging.getLogger("stocache")

_CHOOSING = frozenset({"select", "shuffle", "train_test_split", "shard", "skip", "take"})
_CHANGING = frozenset({
    "set_format", "set_transform", "reset_format", "formatted_as", "with_format", "with_transform", "map", "filter",
    "sort", "flatten", "flatten_indices", "batch", "repeat", "cast", "cast_column", "class_encode_column", "add_column",
    "add_item", "remove_columns", "rename_column", "rename_columns", "select_columns", "align_labels_with_mapping",
    "to_iterable_dataset", "prepare_for_task",
})  # fmt: skip

_warned: set[str] = set()  # names of methods


def method_beside_cache(dataset: object, name: str) -> Callable[..., Any] | None:
    """Return what a cached dataset has in place of a method that loses the cache: it warns, or is a `DatasetError`.

    None for any other attribute, and for a dataset of another library.
    """
    if _library_of(dataset) is None:
        return None
    if name in _CHOOSING:
        return functools.partial(_choose_uncached, name, getattr(dataset, name))
    return functools.partial(_refuse, name) if name in _CHANGING else None


def _library_of(dataset: object) -> Any:
    """Return Hugging Face's module if a dataset is of it; else None. A user's own module may be called "datasets", too."""
    module = sys.modules.get("datasets.arrow_dataset")
    return sys.modules["datasets"] if module is not None and isinstance(dataset, module.Dataset) else None


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    call = f"dataset.{name}(...)"
    how = f"{call}; CachedDataset(dataset, ...)" if name.startswith(("set_", "reset_")) else f"CachedDataset({call}, ...)"
    raise DatasetError(f"{name}() changes samples, but not the cached ones. Call it before CachedDataset: {how}.")


def _choose_uncached(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s() returns a dataset without the cache. Call it before CachedDataset, or wrap its result: "
            "CachedDataset(dataset.%s(...), ...).", name, name,
        )  # fmt: skip
    return method(*args, **kwargs)


class ReadTransform:
    """Makes the samples of a Hugging Face dataset with a transform: the counterpart of `BoundCut`.

    Args:
        dataset: the dataset.
        encoded: whether images are cached as encoded files. Audio and video always are: a decoder cannot be cached.

    Attributes:
        function: the transform of the dataset, which gets whole batches; None without one.
    """

    __slots__ = ("_encoded", "_remaining", "_source", "function")

    def __init__(self, dataset: Any, encoded: bool) -> None:
        form = dataset.format
        self.function = form["format_kwargs"]["transform"] if form["type"] == "custom" else None
        names = list(dataset.column_names) if form["output_all_columns"] else list(form["columns"])
        self._remaining = [name for name in names if name not in form["columns"]]
        source = dataset.with_format(None, columns=names)
        self._encoded = _encoded_features(dataset.features, encoded)
        for name, feature in self._encoded.items():
            source = source.cast_column(name, type(feature)(decode=False))
        self._source = source

    @property
    def rest(self) -> list[str]:
        """The names of the steps that run after the cache."""
        return ["decode"] * bool(self._encoded) + [step_name(self.function)] * (self.function is not None)

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        return self._read(self._source[idx])

    def load_many(self, indices: list[int]) -> list[Any]:
        """Return the parts of the samples ``indices`` that are cached."""
        return [self._read(sample) for sample in self._source.__getitems__(indices)]

    def _read(self, sample: dict[str, Any]) -> dict[str, Any]:
        for name in self._encoded:
            value = sample[name]
            if value is not None and value["bytes"] is None and os.path.isfile(value["path"]):
                with open(value["path"], "rb") as file:
                    sample[name] = value | {"bytes": file.read()}
        return sample

    def finish(self, idx: int, sample: object) -> Any:
        """Return sample ``idx`` after the transform, which gets it as a batch of one."""
        return self.finish_many([sample])[0]

    def finish_many(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples after the transform, which gets them as one batch."""
        if not samples:
            return []
        columns = {name: [self._decoded(name, sample[name]) for sample in samples] for name in samples[0]}
        if self.function is not None:
            remaining = {name: columns.pop(name) for name in self._remaining}
            columns = self.function(columns)
            columns.update(remaining)
        return [{name: column[row] for name, column in columns.items()} for row in range(len(samples))]

    def _decoded(self, name: str, value: object) -> Any:
        feature = self._encoded.get(name)
        return value if feature is None or value is None else feature.decode_example(value)


def _encoded_features(features: Any, images: bool) -> dict[str, Any]:
    """Return the features that are cached as encoded files, by the names of their columns."""
    library = sys.modules["datasets"]
    names = ["Image"] * images + [name for name in ("Audio", "Video") if hasattr(library, name)]
    kinds = tuple(getattr(library, name) for name in names)
    return {name: its for name, its in features.items() if isinstance(its, kinds) and its.decode}


def find_read_transform(dataset: Any, encoded: bool) -> ReadTransform | None:
    """Return the read transform of a Hugging Face dataset with a transform, audio, video, or images to encode; else None.

    Raises:
        DatasetError: ``encoded`` is set, but the dataset has no images, or has a format.
    """
    if _library_of(dataset) is None:
        return None
    kind = dataset.format["type"]
    found = ReadTransform(dataset, encoded) if kind in (None, "custom") else None
    if encoded and (found is None or not found._encoded):
        raise DatasetError(
            "store='encoded' is for datasets of Hugging Face with images, and with no format but set_transform. Leave it out."
        )
    return found if found is not None and found.rest else None
