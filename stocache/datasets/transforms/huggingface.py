"""Wrap Hugging Face datasets: finish samples with the transform of a dataset, and say which of its methods lose the cache.

``set_transform`` and ``with_transform`` give a dataset a function of batches, which runs whenever samples are read. All of it
runs after the cache, which holds the samples without it.

Some methods choose rows. They return a dataset without the cache, with one warning. Other methods change the dataset behind the
cache, or make other rows. These are refused.
"""

import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from stocache.datasets.transforms.pipelines import step_name
from stocache.errors import DatasetError
from stocache.samples.record_encoder import EncodedSample

logger = logging.getLogger("stocache")

_CHOOSING = frozenset({"select", "shuffle", "train_test_split", "shard", "skip", "take"})
_CHANGING = frozenset({"set_format", "set_transform", "reset_format", "formatted_as", "with_format", "with_transform"})
_MAKING = frozenset(
    {
        *(
            "map",
            "filter",
            "sort",
            "flatten",
            "flatten_indices",
            "batch",
            "repeat",
            "cast",
            "cast_column",
            "class_encode_column",
        ),
        *("add_column", "add_item", "remove_columns", "rename_column", "rename_columns", "select_columns"),
        *("align_labels_with_mapping", "to_iterable_dataset", "prepare_for_task"),
    }
)

_warned: set[str] = set()  # names of methods


def method_beside_cache(dataset: object, name: str) -> Callable[..., Any] | None:
    """Return what a cached dataset has in place of a method that loses the cache: it warns, or is a `DatasetError`.

    None for any other attribute, and for a dataset of another library.
    """
    if _library_of(dataset) is None:
        return None
    if name in _CHOOSING:
        return functools.partial(_choose_uncached, name, getattr(dataset, name))
    return functools.partial(_refuse, name, name in _CHANGING) if name in _CHANGING | _MAKING else None


def _library_of(dataset: object) -> Any:
    """Return Hugging Face's module if a dataset is of it; else None. A user's own module may be called "datasets", too."""
    module = sys.modules.get("datasets.arrow_dataset")
    return sys.modules["datasets"] if module is not None and isinstance(dataset, module.Dataset) else None


def _refuse(name: str, changing: bool, *args: Any, **kwargs: Any) -> Any:
    why = "changes samples, but those that are cached would stay as they are"
    if not changing:
        why = "makes another dataset, which would not be cached"
    call = f"dataset.{name}(...)"
    how = f"{call}; CachedDataset(dataset, ...)" if name.startswith(("set_", "reset_")) else f"CachedDataset({call}, ...)"
    raise DatasetError(f"{name}() {why}. Call it before CachedDataset: {how}.")


def _choose_uncached(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s() returns a dataset without the cache. Call it before CachedDataset, or wrap its result: "
            "CachedDataset(dataset.%s(...), ...).", name, name,
        )  # fmt: skip
    return method(*args, **kwargs)


def warn_of_widening(dataset: Any, sample: Any) -> None:
    """Warn if a Hugging Face dataset has a format that makes its samples much larger than stored; say how to avoid that.

    The formats "torch" and "numpy" make int64 of the integers in arrays and lists, and float32 of float16. With ``dtype=`` they
    make that type of *all* numbers, so labels of 300 become 44; except those of columns that are not in ``columns=``.
    """
    library = _library_of(dataset)
    if library is None or not isinstance(sample, dict):
        return
    form = dataset.format
    kind, columns = form["type"], [name for name in form["columns"] if name in sample]
    if kind not in ("torch", "numpy") or "dtype" in form["format_kwargs"]:
        return
    wide, saved = {}, 0
    for name in columns:
        stored, arrays = _stored_dtype(dataset.features[name]), list(_arrays(sample[name]))
        gain = 0 if stored is None else sum(value.nbytes - math.prod(value.shape) * stored.itemsize for value in arrays)
        if stored is not None and gain > 0:
            wide[name], saved = stored.name, saved + gain
    nbytes = EncodedSample(sample, allow_pickle=True).parts()[1] if wide else 0
    if saved <= _WORTH * nbytes:
        return
    what = ", ".join(f"{name} ({dtype})" for name, dtype in wide.items())
    logger.warning(
        "with_format(%r) widens %s: a sample has %d bytes, and would have %d. %s", kind, what, nbytes, nbytes - saved,
        _remedy(dataset, kind, columns, wide),
    )  # fmt: skip


_WORTH = 0.7  # of the bytes of a sample: more than a tokenizer's int32 and int8 would save, less than pixels


def _remedy(dataset: Any, kind: str, columns: list[str], wide: dict[str, str]) -> str:
    """Return advice that keeps the columns ``wide``, given with their dtypes, as they are stored."""
    library, (dtype, *others) = sys.modules["datasets"], dict.fromkeys(wide.values())
    rest = [dataset.features[name] for name in columns if name not in wide]
    prefix = "torch." if kind == "torch" else "numpy."
    if others or not all(isinstance(feature, library.Value | library.ClassLabel) for feature in rest):
        convert = "to" if kind == "torch" else "astype"
        name, dtype = next(iter(wide.items()))
        return (
            f"Narrow them in a Dataset of your own, between it and CachedDataset, whose __getitem__ has "
            f"row[{name!r}] = row[{name!r}].{convert}({prefix}{dtype})."
        )
    selected = "" if dataset.format["output_all_columns"] or len(columns) == len(dataset.column_names) else (
        f".select_columns({columns!r})"
    )  # fmt: skip
    text = (
        f"Use dataset{selected}.with_format({kind!r}, columns={list(wide)!r}, output_all_columns=True, dtype={prefix}{dtype})"
    )
    return f"{text}: the other columns then come as Python's own values." if rest else f"{text}."


def _stored_dtype(feature: object) -> "np.dtype[Any] | None":
    """Return the dtype of the numbers in arrays or lists of a feature; None where there are none, or of several dtypes."""
    while hasattr(feature, "feature"):  # lists
        feature = feature.feature
    try:
        dtype = np.dtype(getattr(feature, "dtype", None) or "O")
    except TypeError:  # of str, images, times
        return None
    return dtype if dtype.kind in "iuf" else None


def _arrays(value: object) -> Iterator[Any]:
    """Yield the tensors and arrays that have dimensions, of one or in a list."""
    if isinstance(value, list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, Tensor | np.ndarray) and value.ndim:
        yield value


class ReadTransform:
    """Makes the samples of a Hugging Face dataset with a transform: the counterpart of `splitting.BoundPlan`.

    Args:
        dataset: the dataset.
        encoded: whether images are cached as encoded files. Audio and video always are: a decoder cannot be cached.
    """

    __slots__ = ("_columns", "_dataset", "_encoded", "_function", "_remaining", "_source", "before")

    def __init__(self, dataset: Any, encoded: bool) -> None:
        self._dataset = dataset
        form = dataset.format
        transformed = form["type"] == "custom"
        self._function = form["format_kwargs"]["transform"] if transformed else None
        self._columns: list[str] = list(form["columns"])
        names = list(dataset.column_names) if form["output_all_columns"] else self._columns
        self._remaining = [name for name in names if name not in self._columns]
        source = dataset.with_format(None, columns=names)
        self._encoded = _encoded_features(dataset.features, encoded)
        for name, feature in self._encoded.items():
            source = source.cast_column(name, type(feature)(decode=False))
        self._source = source
        self.before: dict[Any, tuple[Any, ...]] = {}  # steps of transforms that are attributes

    @property
    def rest(self) -> list[str]:
        """The names of the steps that run after the cache."""
        return ["decode"] * bool(self._encoded) + [step_name(self._function)] * (self._function is not None)

    @property
    def takes_batches(self) -> bool:
        """Whether the dataset has a transform, which gets whole batches; images are decoded one by one."""
        return self._function is not None

    def has_changed(self) -> bool:
        """Whether the transform has been set since this was made."""
        form = self._dataset.format
        return form["type"] == "custom" and form["format_kwargs"]["transform"] is not self._function

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
        if self._function is not None:
            remaining = {name: columns.pop(name) for name in self._remaining}
            columns = self._function(columns)
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
