"""Describe the samples of a dataset, so that ranks share a cache only if their samples are the same."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache.cache.allocate import Proof
from stocache.datasets.probing import Probe
from stocache.datasets.transforms.splitting import Split
from stocache.samples.indices import length_of, spread
from stocache.system.describe import describe
from stocache.system.generators import parts_of

_ENTRIES = 256  # of a table
_DISTINCT = 4  # probed samples that differ from each other are enough
_PLAIN = (int, float, str, bytes, bool, type(None), np.generic)


def proof_of(dataset: object, probe: Probe, split: Split | None) -> Proof | None:
    """Return the description of a dataset's samples; None where no sample is known."""
    samples = probe.samples if probe.example is None else {-1: probe.example}
    if not samples:
        return None
    facts = {
        "dataset": describe(type(dataset))[1],
        "tables": _digest(list(_tables(dataset))),
        "steps before the cache": "" if split is None else split.before_text(),
    }
    digests = {idx: _digest(describe(sample, strides=False)) for idx, sample in samples.items()}
    if len({*digests.values()}) < min(_DISTINCT, len(digests)):  # empty masks or small labels, which prove little
        parts = parts_of(dataset, follow=_leads_to_datasets)
        facts["attributes"] = _digest([(name, describe(value)) for name, value in parts if isinstance(value, _PLAIN)])
    return Proof(facts, digests)


def _tables(dataset: object) -> Iterator[Any]:
    """Yield some entries of each list, array or table frame of a dataset, or of one within it, that has one for each sample."""
    lengths = set[int]()
    for name, value in parts_of(dataset, follow=_leads_to_datasets):
        if isinstance(value, Dataset) or value is dataset:
            lengths |= {length_of(value) or 0}
        elif _is_table(value) and (length := length_of(value) or 0) in lengths:
            rows = spread(length, _ENTRIES)
            if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
                yield name, describe(value[rows])
            elif hasattr(value, "iloc"):
                yield name, repr(value.iloc[rows].values.tolist())
            elif isinstance(value, list | tuple | range) and _is_plain([value[row] for row in rows]):
                yield name, describe([value[row] for row in rows])


def _is_table(value: object) -> bool:
    """Return whether a value may be asked for its length: that of a Compose of MONAI seeds its transforms again."""
    return isinstance(value, np.ndarray | torch.Tensor | list | tuple | range) or hasattr(type(value), "iloc")


def _leads_to_datasets(value: object) -> bool:
    return isinstance(value, Dataset) or (isinstance(value, list) and len(value) > 0 and isinstance(value[0], Dataset))


def _is_plain(values: list[Any]) -> bool:
    """Return whether values are numbers, texts and None, or short tuples and lists of these."""
    return all(
        isinstance(each, _PLAIN) or (type(each) in (tuple, list) and len(each) < 9 and _is_plain(each)) for each in values
    )


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=8).hexdigest()
