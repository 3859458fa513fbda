"""Share the tables of a dataset between processes: one read-only copy of its lists, dicts, arrays and tensors.

NOTE [ Lists that grow in workers ]
    A forked worker shares the memory of its parent until one of them writes there. Python counts the references to an object in
    the object, so a list of ten million paths is copied page by page as its items are read, once for each worker
    (pytorch/pytorch#13246). A spawned worker gets a copy at once. Here the items lie in shared memory as bytes, before a table
    of their offsets, and an object is made of an item when it is read.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from stocache.errors import SampleError
from stocache.shm.tables.arrays import SharedArray, SharedTensor
from stocache.shm.tables.libraries import share_table
from stocache.shm.tables.sequences import SharedMapping, SharedSequence
from stocache.system.objects import vars_of
from stocache.system.platform import here
from stocache.system.walking import walk

LARGE = 1 << 20  # bytes, from which an attribute of a dataset is worth sharing
_LOOKED_AT = 1000  # items, to estimate the size of a list

_TABLES: dict[str, Callable[[Any], Any]] = {  # by library: the size of a table
    "pandas": lambda table: np.sum(table.memory_usage(deep=False)),
    "pyarrow": lambda table: table.nbytes,
    "scipy": lambda matrix: matrix.data.nbytes,  # its indices may take as much
}


def share(value: Any) -> Any:
    """Return one read-only copy of a value for all processes that get it, forked or spawned; it pickles in 200 bytes or so.

        self.paths = stocache.share(paths)      # in a dataset
        dataset = stocache.share(dataset)       # or all its attributes of 1 MiB and more, in a copy of it

    Args:
        value: a list or tuple of str, of bytes, of paths or of numbers of one type; a dict of these; a numpy array, or a tensor
            on the CPU; a Series or DataFrame of pandas, a table or column of Arrow, a sparse matrix of scipy; or an object with
            attributes, such as a dataset. Attributes that cannot be shared stay as before.

    Returns:
        A list or tuple becomes a sequence, a dict a mapping, an array a read-only array, a tensor a tensor: writing to that
        changes it for one process alone. They are indexed, sliced and walked through as before. Slices of a sequence are lists.
        Objects of pandas, Arrow and scipy keep their classes. Objects with buffers of Arrow are sent as a handle by
        `multiprocessing` and torch's workers; plain ``pickle`` copies these buffers.

    Raises:
        SampleError: the items are of several types, or of a different one; a table has many Python objects; or the machine has
            no shared memory.

    Examples:
        >>> import pickle
        >>> paths = share([f"photos/{number:06}.jpg" for number in range(100_000)])
        >>> paths[7], len(paths), len(pickle.dumps(paths)) < 300
        ('photos/000007.jpg', 100000, True)
    """
    if not here.SHARES_MEMORY:  # threads have it unchanged
        return value
    if isinstance(value, SharedSequence | SharedMapping | SharedArray | SharedTensor):
        return value
    if _library_of(value) in _TABLES:
        return share_table(value, size_of(value))
    if isinstance(value, torch.Tensor):
        return SharedTensor.of(value)
    if type(value) is np.ndarray:  # a subclass, as a masked array, has more than its values
        return SharedArray.of(value)
    if type(value) in (list, tuple):
        return SharedSequence.of(value)
    if type(value) is dict:
        return SharedMapping.of(value)
    kind = type(value)
    has_finalizer = hasattr(kind, "__del__")  # which would close what the copy still has
    is_plain = getattr(kind, "__new__", None) is object.__new__ and not has_finalizer
    if not is_plain or isinstance(value, type) or any(vars(cls).get("__slots__") for cls in kind.__mro__):
        raise SampleError(f"a {kind.__name__} cannot be shared. Share a list, a dict, an array, a tensor, or a plain dataset.")
    return _with_shared_attributes(value)


def _with_shared_attributes(value: Any) -> Any:
    changed = _shared_tables(value)
    for name, inner in vars(value).items():
        if name == "dataset" and (made := _of_inner(inner)) is not inner:  # as of torch's Subset
            changed[name] = made
        elif name == "datasets" and type(inner) is list:  # as of ConcatDataset
            made = list(map(_of_inner, inner))
            if any(map(operator.is_not, made, inner)):
                changed[name] = made
    if not changed:
        return value
    made = object.__new__(type(value))  # no code of the user runs
    vars(made).update(vars(value) | changed)
    return made


def _of_inner(dataset: Any) -> Any:
    with contextlib.suppress(SampleError):
        return share(dataset) if vars_of(dataset) else dataset
    return dataset


def _shared_tables(value: Any) -> dict[str, Any]:
    """Return the large attributes of an object that can be shared, by name, as shared ones."""
    shared = {}
    for name, attribute in vars_of(value).items():
        if size_of(attribute) >= LARGE:
            with contextlib.suppress(Exception):  # of objects, or of a kind that cannot be shared
                shared[name] = share(attribute)
    return shared


@contextlib.contextmanager
def tables_shared(dataset: object) -> Iterator[None]:
    """Share the large attributes of a dataset, and of those within it, with the processes that are started meanwhile."""
    kept = []
    try:
        for each in walk(dataset):
            shared, attributes = _shared_tables(each), vars_of(each)
            kept.append((attributes, {name: attributes[name] for name in shared}))
            attributes.update(shared)
        yield
    finally:
        for attributes, own in kept:
            attributes.update(own)


def _library_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def size_of(value: Any) -> int:
    """Return about how many bytes a value that can be shared takes; 0 for others."""
    if (library := _library_of(value)) in _TABLES:
        with contextlib.suppress(Exception):  # a different class of that library
            return int(_TABLES[library](value))
    if type(value) is np.ndarray:
        return value.nbytes
    if isinstance(value, torch.Tensor):
        plain = value.device.type == "cpu" and value.layout == torch.strided
        return (
            value.nbytes if plain and not value.untyped_storage().is_shared() else 0
        )  # what is shared already may be written to
    if type(value) in (list, tuple, dict):
        items = list(islice(value.items() if type(value) is dict else ((item,) for item in value), _LOOKED_AT))
        each = sum(sys.getsizeof(part) for item in items for part in item) / max(1, len(items))
        return sys.getsizeof(value) + int(each * len(value))
    return 0
