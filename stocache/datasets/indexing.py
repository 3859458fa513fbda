"""Answer an index of several samples with cached samples, in the form in which the dataset answers it.

Each dataset decides what ``dataset[[3, 1]]`` and ``dataset[:8]`` return: a list of samples, their columns, or their columns
stacked or concatenated. So the dataset is asked once, and its result is compared with each known way to collate the same
samples. If one gives an equal result, bit for bit, later results are collated from cached samples. If none does, the dataset is
asked each time. The first samples that differ in size are compared again: some datasets pad these.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stocache.errors import SampleError
from stocache.samples.flatten import flatten_one
from stocache.samples.record_encoder import EncodedSample

Collate: TypeAlias = Callable[[Sequence[Any]], Any]


def indices_in(key: object, length: int) -> list[int] | None:
    """Return the indices that a list, array, tensor or slice stands for; None where it is not a valid index."""
    if isinstance(key, slice):
        try:
            return list(range(*key.indices(length)))
        except TypeError:
            return None
    if not isinstance(key, list | tuple | range | np.ndarray | Tensor) or len(np.shape(key)) != 1:
        return None
    indices = np.asarray(key)
    if indices.dtype.kind not in "iu" or (indices < -length).any() or (indices >= length).any():
        return None
    return (indices % length).tolist() if length else []


def find_collate(result: object, samples: Sequence[object]) -> Collate | None:
    """Return the function that collates ``samples`` to ``result``; None where no known one does."""
    wanted = type(result), _comparable(result)
    return next((own for own in _COLLATES if _collated(own, samples) == wanted), None) if wanted[1] is not None else None


def pads(collate: Collate, samples: Sequence[object], result: object) -> bool:
    """Return whether the ``result`` of the dataset is not what ``collate`` makes of ``samples``, if it can collate them."""
    return _collated(collate, samples) not in (None, (type(result), _comparable(result)))


def differ_in_size(samples: Sequence[object]) -> bool:
    """Return whether samples have lists, tuples, arrays or tensors of several sizes."""
    sizes = map(_sizes, samples)
    first = next(sizes, None)
    return any(size != first for size in sizes)


def _sizes(value: Any) -> Any:
    if isinstance(value, dict):
        return list(map(_sizes, value.values()))
    if isinstance(value, list | tuple):
        return [len(value), *(_sizes(part) for part in value if isinstance(part, dict | list | tuple | Tensor | np.ndarray))]
    return value.shape if isinstance(value, Tensor | np.ndarray) else None


def _collated(collate: Collate, samples: Sequence[object]) -> tuple[type, Any] | None:
    """Return the type of the collated samples, and what is comparable of them; None where they cannot be collated."""
    try:
        collated = collate(samples)
    except Exception:  # whatever the samples raise when they are stacked
        return None
    return type(collated), _comparable(collated)


def _comparable(value: object) -> Any:
    """Return the structure and the bytes of a value, to compare; None where it has parts that have no bytes of their own."""
    try:
        record = EncodedSample(value)
    except SampleError:
        return None
    return record.treedef, record.pack()


def _collate_columns(samples: Sequence[object], join: Callable[[list[Any]], object]) -> Any:
    """Return the container of the samples with a column in place of each part; ``join`` makes the columns."""
    flat = [flatten_one(sample) for sample in samples]
    if flat[0] is None:
        return join(list(samples))
    container = flat[0][0]
    if any(parts is None or parts[0] != container for parts in flat):
        raise ValueError("the samples differ in structure")
    columns = zip(*(parts[1] for parts in flat if parts is not None), strict=True)
    return container.unflatten_fn()([_collate_columns(column, join) for column in columns])


def _collate_lists(samples: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return a dict of lists, as datasets of Hugging Face do; only of values that no format would have stacked."""
    if any(isinstance(value, Tensor | np.ndarray | np.generic) for sample in samples for value in sample.values()):
        raise TypeError("these might have been stacked if they had one shape")
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _stack(values: list[Any], numbers: Callable[[list[Any]], object]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray | np.generic):
        return np.stack(values)
    if isinstance(values[0], bool | int | float | complex):
        return numbers(values)
    return values


def _concatenate(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], Tensor) else np.concatenate(values)


_COLLATES: tuple[Collate, ...] = (
    list,
    tuple,
    _collate_lists,
    *(partial(_collate_columns, join=partial(_stack, numbers=numbers)) for numbers in (list, torch.tensor, np.array)),
    partial(_collate_columns, join=_concatenate),
)
