"""What a dataset returns for several indices at once, made of its samples.

``dataset[[3, 1]]``, ``dataset[:8]``: what that is, every dataset decides by itself: a list of samples, their columns, their
columns stacked. So the dataset is asked once, and its answer is compared with each way of putting the same samples together.
With the way that gives it, bit for bit, further answers are made of cached samples. Where none does, the dataset is asked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.pytree import flatten_one
from stocache.samples.record_encoder import Record

Combine: TypeAlias = Callable[[Sequence[Any]], Any]


def indices_in(key: Any, length: int) -> list[int] | None:
    """Return the indices that a list, array, tensor or slice stands for; None where it stands for something else."""
    if isinstance(key, slice):
        try:
            return list(range(*key.indices(length)))
        except TypeError:
            return None
    if not isinstance(key, list | tuple | range | np.ndarray | Tensor) or len(np.shape(key)) != 1:
        return None
    index = np.asarray(key)
    if index.dtype.kind not in "iu" or (index < -length).any() or (index >= length).any():
        return None
    return (index % length).tolist() if length else []


def way_to(result: Any, samples: Sequence[Any]) -> Combine | None:
    """Return the way to put ``samples`` together that gives ``result``; None where none of those known does."""
    wanted = _bytes_of(result)
    if wanted is None:
        return None
    for combine in _WAYS:
        try:
            made = combine(samples)
        except Exception:  # whatever stacking these raises
            continue
        if type(made) is type(result) and _bytes_of(made) == wanted:
            return combine
    return None


def _bytes_of(value: Any) -> Any:
    """Return all there is to a value, comparable; None where it has parts without bytes of their own."""
    try:
        record = Record(value)
    except SampleError:
        return None
    return record.treedef, record.pack()


def _columns(samples: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Return what holds the parts of each sample with their columns in place of the parts."""
    parted = [flatten_one(sample) for sample in samples]
    if parted[0] is None:
        return join(list(samples))
    container = parted[0][0]
    if any(its is None or its[0] != container for its in parted):
        raise ValueError("the samples differ in structure")
    columns = zip(*(its[1] for its in parted if its is not None), strict=True)
    return container.unflatten_fn()([_columns(column, join) for column in columns])


def _table(samples: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return a dict of lists, as Hugging Face's datasets do; of values that no format would have stacked."""
    if any(isinstance(value, Tensor | np.ndarray | np.generic) for sample in samples for value in sample.values()):
        raise TypeError("they might have been stacked, if they had one shape")
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _stacked(values: list[Any], numbers: Callable[[list[Any]], Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray | np.generic):
        return np.stack(values)
    if isinstance(values[0], bool | int | float | complex):
        return numbers(values)
    return values


_WAYS: tuple[Combine, ...] = (
    list,
    tuple,
    _table,
    *(partial(_columns, join=partial(_stacked, numbers=numbers)) for numbers in (list, torch.tensor, np.array)),
)
