"""Notice changes of a dataset's tables, such as labels in an array or a list, that are made in place."""

import contextlib
import marshal
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from stocache.samples.indices import spread
from stocache.system.hashing import checksum, digest
from stocache.system.loading.code import names_in, variables_of
from stocache.system.objects import attribute_of, recorded_names
from stocache.system.walking import is_own_or_dataset, parts_of

_WHOLE = 1 << 18  # bytes of a table that are read when an epoch begins
_BLOCK = 1024  # entries of an array
_CONVERTED = 128  # bytes that an item counts which `_plain` converts, in some us
_AT_ONCE = 1 << 18  # bytes of a large array: memory that is used again is faster than new memory
_ITEM = re.compile(r"\[([4-9]|\d\d+)\]")  # in the name of an item of a list after the first four: one sample's, not a table
_ROWS = 1 << 16  # of a frame


def table_digests(dataset: object, variables: Any) -> dict[str, str]:
    """Return a digest of each array, tensor, list, dict and frame of plain values in a dataset and in variables, by its name.

    Of a table above 256 KiB, only entries evenly spread are read.
    """
    found = {}
    roots = [(dataset, "dataset"), *variables_of(variables)]

    def follow(part: object) -> bool:  # not objects of libraries, such as transforms, which note in themselves what they do
        return part is dataset or is_own_or_dataset(part)

    for name, part in (each for root in roots for each in parts_of(*root, follow=follow)):
        if _ITEM.search(name) or (isinstance(part, torch.Tensor) and part.device.type != "cpu"):
            continue
        with contextlib.suppress(Exception):  # another thread changes it now, or its class has a fault
            if (text := table_text(part, _WHOLE)) is not None:
                found[name] = text
    return found


def table_text(value: Any, whole: int) -> str | None:
    """Return a digest of an array, tensor, frame, `multiprocessing.Value`, or a list, dict or set of plain values, paths and
    arrays; None for any other value.

    Args:
        whole: bytes of a table that are read; of a larger one, entries evenly spread.

    Raises:
        Exception: whatever the class of the value raises.
    """
    if hasattr(type(value), "get_obj"):
        value = np.frombuffer(value.get_obj(), np.uint8)
    if isinstance(value, np.memmap) and value.nbytes > whole:
        return digest((str(value.filename), value.offset, value.dtype, value.shape))
    if isinstance(value, np.ndarray | torch.Tensor):
        return _array_text(value, whole)
    if hasattr(type(value), "iloc"):
        return _frame_text(value)
    if isinstance(value, set | frozenset):
        return _list_text(sorted(marshal.dumps(item, 2) for item in value), whole)
    if type(value) in (list, tuple) or isinstance(value, dict):
        with contextlib.suppress(ValueError):  # other than plain values
            return _list_text(list(dict.items(value)) if isinstance(value, dict) else value, whole)
    return None


def used_by_loads(dataset: Any, load: Any, indices: Iterable[int], variables: Any) -> Iterator[tuple[set[str], ...]]:
    """Make samples, in a child. Yield the names of the tables that this changes, of the attributes of the dataset that it
    reads, and all names in the lines that run.
    """
    before = table_digests(dataset, variables)
    with recorded_names(dataset) as reads:
        names = names_in(load, indices)
    yield {name for name, digest in table_digests(dataset, variables).items() if before.get(name) != digest}, reads, names


def _list_text(value: Any, whole: int) -> str:
    """Return a text for a list of plain values, paths, arrays, and lists and dicts of these. Raises ValueError for others."""
    few, nbytes, is_plain = value[:: len(value) // 100 + 1], _CONVERTED, False
    with contextlib.suppress(ValueError):
        nbytes, is_plain = len(marshal.dumps(few, 2)) // max(1, len(few)) + 1, True
    rows = value[:: max(1, -(-len(value) // max(1, whole // nbytes)))]
    rows = rows if is_plain else [*map(_plain, rows)]
    # In version 2, what marshal writes does not depend on identities
    parts = [checksum(marshal.dumps(rows[at : at + 10_000], 2)) for at in range(0, len(rows), 10_000)]
    return digest((len(value), parts))


def _plain(value: Any) -> Any:
    """Return a value with paths, arrays and named tuples as plain values."""
    if isinstance(value, list | tuple | dict):
        return [*map(_plain, dict.items(value) if isinstance(value, dict) else value)]
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return _array_text(value, 8 * _BLOCK)  # a block at least, whatever its dtype
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _array_text(array: Any, whole: int) -> str:
    """Return a text for an array or tensor; of a large one, for blocks of it."""
    if isinstance(array, torch.Tensor) and array.layout != torch.strided:
        if array.numel() > whole:
            raise ValueError("too large")
        array = array.to_dense()
    kind, nbytes = (str(array.dtype), tuple(array.shape)), array.nbytes
    if isinstance(array, torch.Tensor):
        array = array.detach().as_subclass(torch.Tensor)
        is_contiguous = array.is_contiguous()
        if is_contiguous and array.is_cpu:  # numpy takes rows faster
            array = array.reshape(-1).view(torch.uint8).numpy()
    elif array.dtype.hasobject:
        return f"{_list_text(array.reshape(-1).tolist(), whole)} {kind}"
    else:
        array = array if array.flags.c_contiguous else array.T
        is_contiguous = array.flags.c_contiguous
    if nbytes > whole:
        if is_contiguous:
            flat = array.reshape(-1)
            array = flat[: len(flat) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
        rows = spread(len(array), len(array) * whole // nbytes)
        step = max(1, len(rows) * _AT_ONCE // whole)
        return digest((kind, [_checksum_of(array[rows[at : at + step]]) for at in range(0, len(rows), step)]))
    return digest((kind, _checksum_of(array)))


def _checksum_of(array: Any) -> str:
    if isinstance(array, torch.Tensor):
        array = array.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return checksum(array.tobytes())


def _frame_text(frame: Any) -> str:
    """Return a text for a table frame or a series."""
    rows = frame.iloc[spread(len(frame), _ROWS)]
    try:
        hashed, labels = sys.modules["pandas"].util.hash_pandas_object, rows.index
        values = hashed(rows, index=False).values.tolist()
        # pandas would keep the numbers of a range once they are hashed, in the frame of the user
        values += [labels.start, labels.step] if hasattr(labels, "step") else hashed(labels, index=False).values.tolist()
    except (KeyError, TypeError):  # of another library; or cells that are lists
        values = rows.values.tolist()
    return digest((len(frame), [*attribute_of(frame, "columns", ())], values))
