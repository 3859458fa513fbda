"""Methods of a Hugging Face dataset, called on a cached one.

Some choose rows: what they return is a view of the cached dataset. To know its rows, they are called for a dataset of row
numbers. Others change the dataset behind the cache, or make another one, which would not be cached: they are refused.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from stocache.errors import DatasetError

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


def method_of(dataset: Any, name: str, view: Callable[[Any, Any], Any]) -> Callable[..., Any] | None:
    """Return what stands for a method of ``dataset`` on the cached one; None where it may be called as it is.

    Args:
        view: called with a Hugging Face dataset and its row numbers in ``dataset``; returns the cached view.
    """
    library = sys.modules.get("datasets")
    if library is None or not isinstance(dataset, library.Dataset):
        return None
    if name in _CHOOSING:
        return _choosing(dataset, name, view, library)
    if name in _CHANGING or name in _MAKING:
        return functools.partial(_refuse, name, name in _CHANGING)
    return None


def _refuse(name: str, changing: bool, *args: Any, **kwargs: Any) -> Any:
    why = "changes what samples look like, and those that are cached would stay as they are"
    if not changing:
        why = "makes another dataset, of which nothing would be cached"
    raise DatasetError(f"{name}() {why}. Call it before CachedDataset: CachedDataset(dataset.{name}(...), ...).")


def _choosing(dataset: Any, name: str, view: Callable[[Any, Any], Any], library: Any) -> Callable[..., Any]:
    @functools.wraps(getattr(dataset, name))
    def choose(*args: Any, **kwargs: Any) -> Any:
        columns = {"row": np.arange(len(dataset))}
        by = kwargs.get("stratify_by_column")
        features = library.Features({"row": library.Value("int64")})
        if by is not None:
            columns[by], features[by] = dataset.with_format(None)[by][:], dataset.features[by]
        numbers = library.Dataset.from_dict(columns, features)
        chosen = getattr(numbers, name)(*args, **kwargs)
        if isinstance(chosen, dict):
            return library.DatasetDict({part: viewed(its) for part, its in chosen.items()})
        return viewed(chosen)

    def viewed(numbers: Any) -> Any:
        rows = np.asarray(numbers.with_format(None)["row"][:], dtype=np.int64)
        return view(dataset.select(rows), rows)

    return choose
