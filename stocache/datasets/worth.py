"""Measure whether a cache is worth it: what a sample costs, made by its dataset and served from the cache."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from stocache.cache.stats import SlotState
from stocache.samples.indices import spread
from stocache.system.generators import Kept
from stocache.system.loading.children import in_children
from stocache.system.loading.code import own_generators

_TIMED_S, _ROUNDS, _PATIENCE_S = 0.03, 16, 20.0  # to time samples; to wait for them
_DECODED = 4  # samples


def saved_s_of(cached: Any) -> float | None:
    """Return the seconds that a `CachedDataset` saves for each cached sample; None if that cannot be measured."""
    if cached._split is not None and cached._split.saved_s is not None:  # measured when the program was cut
        return float(cached._split.saved_s)
    costs = costs_of(cached)
    return None if costs is None else costs[0] - costs[1]


def costs_of(cached: Any) -> tuple[float, float] | None:
    """Return the seconds that a cached sample of a `CachedDataset` takes at least: made by its dataset, and served.

    A child process times it. None if it cannot.
    """
    try:
        return next(in_children([partial(_least_seconds, cached)], cached.dataset, _PATIENCE_S), None)
    except Exception:  # whatever a dataset raises in a child process; or no sample is cached
        return None


def _least_seconds(cached: Any) -> Iterator[tuple[float, float]]:
    indices = np.flatnonzero(cached.cache.aux_array.numpy() == SlotState.SET).tolist()
    yield min(_time_each(cached.dataset.__getitem__, indices)), min(_time_each(partial(_serve, cached), indices))


def _serve(cached: Any, idx: int) -> Any:
    """Return a cached sample as served, without counting it."""
    sample = cached.cache.peek(idx)
    return sample if cached._split is None else cached._split.finish(idx, sample)


def _time_each(load: Callable[[int], object], indices: list[int]) -> Iterator[float]:
    """Yield the seconds that each sample takes, several times; fewer if they are slow, but two: the first call may compile."""
    until = None
    for idx in _ROUNDS * indices:
        began = time.perf_counter()
        load(idx)
        yield (took_s := time.perf_counter() - began)
        if until is not None and time.perf_counter() > until:
            return
        until = until or began + took_s + _TIMED_S


def decoded_again(cached: Any) -> str:
    """Return which decoders of a `CachedDataset` serve from memory if samples are made twice alike; "" if none does.

    It loads samples in this process, so it is for a child process.
    """
    kept = Kept(own_generators(cached.dataset))
    for _ in range(2):
        kept.restore()
        for idx in spread(len(cached), _DECODED):
            cached.dataset[idx]
    return ", ".join(library for library, (_, hits) in cached._decoders.stats().items() if hits)
