"""Notice changes of a dataset's tables, such as labels in an array or a list, that are made in place."""

import contextlib
import marshal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from stocache.system.generators import parts_of
from stocache.system.hashing import checksum
from stocache.system.objects import recorded_reads

_WHOLE = 1 << 20  # bytes of an array that are compared as a whole
_ENTRIES = 1 << 17  # of a list
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by bytes


def table_digests(dataset: object) -> dict[str, str]:
    """Return a digest of each array, tensor, list, dict and frame of plain values in a dataset, by its name.

    Of a table above 1 MiB or 131,072 entries, only every k-th entry is read.
    """
    found = {}
    for name, part in parts_of(dataset):
        with contextlib.suppress(Exception):  # another thread changes it now, or its class has a fault
            if content := _content(part):
                found[name] = checksum(content)
    return found


def used_by_loads(
    dataset: object, load: Callable[[int], object], indices: Iterable[int]
) -> Iterator[tuple[set[str], set[str]]]:
    """Load samples. Yield the names of the tables that loading changes, and of the attributes that it reads. For a child."""
    before = table_digests(dataset)
    with recorded_reads(dataset) as reads:
        for idx in indices:
            with contextlib.suppress(Exception):  # it is raised again when the sample is requested
                load(idx)
    yield {name for name, digest in table_digests(dataset).items() if before.get(name) != digest}, reads


def _content(part: Any) -> bytes:
    """Return the bytes of a table, or of some blocks of it; b"" if it is not a table."""
    if type(part) in (torch.Tensor, torch.nn.Parameter) and part.device.type == "cpu":
        part = part.detach().view(_INTEGERS[part.itemsize]).numpy()
    if type(part) is np.ndarray and part.dtype.hasobject:
        part = part.ravel().tolist()
    elif type(part) is np.ndarray:
        rows = part.reshape(-1) if part.flags.c_contiguous else part
        some = rows[:: 1 + rows.nbytes // _WHOLE]
        return some.tobytes() if some.nbytes < 2 * _WHOLE else b""
    if hasattr(type(part), "iloc") and hasattr(part, "items"):  # a frame of pandas
        return b"".join(_content(column.to_numpy()) for _, column in part.items())
    if type(part) is dict:
        part = list(part.items())
    # marshal raises ValueError for other than plain values; what it writes in version 2 does not depend on references
    return marshal.dumps(part[:: 1 + len(part) // _ENTRIES], 2) if type(part) is list and part else b""
