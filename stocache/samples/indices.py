"""Check the arguments of users: the length of a dataset, and indices of samples."""

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stocache.errors import LimitError, SampleIndexError

_T = TypeVar("_T")


def length_of(value: Any) -> int | None:
    """Return the length of a value; None if it does not have one."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def spread(length: int, count: int) -> list[int]:
    """Return at most ``count`` indices of ``length`` samples, evenly spread, with the first and the last."""
    return sorted(set(np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()))


def check_len(dataset_len: Any) -> int:
    """Return ``dataset_len`` as an int.

    Raises:
        LimitError: it is not an integer, or negative.
    """
    try:
        length = operator.index(dataset_len)
    except TypeError:
        raise LimitError(f"dataset_len={dataset_len!r:.100} is not an integer.") from None
    if length < 0:
        raise LimitError(f"dataset_len={length} is negative.")
    return length


def check_index(idx: Any, dataset_len: int, call: str) -> int:
    """Return ``idx`` as an int in ``[0, dataset_len)``; ``call`` names the method in errors.

    Raises:
        SampleIndexError: it is not such an index.
    """
    try:
        index = operator.index(idx)
    except TypeError:
        raise SampleIndexError(f"{call}({idx!r:.100}): a sample index is one integer, not a {type(idx).__name__}.") from None
    if not 0 <= index < dataset_len:
        raise SampleIndexError(f"{call}({index}): outside the dataset of {dataset_len} samples.")
    return index


def check_indices(indices: Any, dataset_len: int, call: str) -> NDArray[np.int64]:
    """Return ``indices`` as a contiguous array of integers in ``[0, dataset_len)``; ``call`` names the method in errors.

    Raises:
        SampleIndexError: they are not such indices.
    """
    try:
        index = indices.cpu().numpy() if isinstance(indices, Tensor) else np.asarray(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleIndexError(f"{call}: indices are a {type(indices).__name__} that does not hold integers: {error}") from None
    if index.size == 0:
        return np.empty(0, np.int64)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise SampleIndexError(f"{call}: indices are {index.dtype}{list(index.shape)}, expected a list of integers.")
    index = np.ascontiguousarray(index, dtype=np.int64)
    if index.view(np.uint64).max() >= dataset_len:  # a negative index is a huge one
        raise SampleIndexError(
            f"{call}: indices from {index.min()} to {index.max()} reach outside the dataset of {dataset_len} samples."
        )
    return index


def after_each(call: Callable[[int], None] | None, values: Iterable[_T]) -> Iterator[_T]:
    """Yield values, each after a call with its position."""
    for position, value in enumerate(values):
        if call is not None:
            call(position)
        yield value


def as_array(index: Any) -> Any:
    """Return indices as an array; or unchanged, if they are not plain integers: numpy would round, or read text."""
    if type(index) is not list or not index or not type(index[0]) is int is type(index[-1]):
        return index
    try:
        return np.frombuffer(array("q", index), np.int64)
    except (TypeError, OverflowError):
        return index
