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
_BLOCKS, _BLOCK = 64, 4096  # of a larger array: so many, each of so many bytes


def table_digests(dataset: object) -> dict[str, str]:
    """Return a digest of each array, tensor, list, dict and frame of plain values in a dataset, by its name.

    Of a table above 1 MiB or 131,072 entries, only a part is read: 64 evenly spread blocks, or every k-th entry.
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
    if isinstance(part, torch.Tensor):
        plain = type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout == torch.strided and part.device.type == "cpu"
        part = part.detach().contiguous().view(-1).view(torch.uint8).numpy() if plain and part.numel() else None
    if type(part) is np.ndarray and not part.dtype.hasobject and part.size:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if flat.nbytes > _WHOLE:
            starts = np.linspace(0, flat.nbytes - _BLOCK, _BLOCKS).astype(np.int64)
            flat = flat[(starts[:, None] + np.arange(_BLOCK)).ravel()]
        return flat.tobytes()
    if type(part) is np.ndarray and part.dtype.hasobject:
        part = part.ravel().tolist()
    if hasattr(type(part), "iloc") and hasattr(part, "items"):  # a frame of pandas
        return b"".join(_content(column.to_numpy()) for _, column in part.items())
    if type(part) is dict:
        part = list(part.items())
    if type(part) is list and part:
        return marshal.dumps(
            part[:: 1 + len(part) // _ENTRIES], 2
        )  # ValueError: other values. It does not depend on references
    return b""
