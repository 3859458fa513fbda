"""Choose among settings by their forecasts; choose the number of workers of a loader."""

import itertools
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from stocache.cache.ragged import RaggedCache
from stocache.datasets.cached import CachedDataset
from stocache.errors import DatasetError
from stocache.observe.costs import Costs
from stocache.observe.measure import count_cores, measure_costs
from stocache.observe.model import Forecast, Setting, cached_share, predict
from stocache.observe.trials import MakeLoader
from stocache.system.limits import GIB, MIB
from stocache.system.objects import vars_of

logger = logging.getLogger("stocache")

SAME = 1.02  # settings whose times differ by less are taken to be equally fast
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the largest limit that is of use
_ROOM = 1.02  # of a cache that holds all samples, to the bytes that were measured
_MOST_WORKERS = 128
_AUTO_S = 10.0  # for num_workers="auto"
_FALLBACK = 8


def worker_counts(costs: Costs) -> list[int]:
    """Return the numbers of workers that are worth a forecast. torch warns of more than there are CPUs."""
    most = 0 if costs.stalls else min(costs.cores, _MOST_WORKERS)
    powers = itertools.takewhile(lambda number: number < most, (2**power for power in itertools.count()))
    return list(dict.fromkeys((0, *powers, most)))


def limits_gib(costs: Costs, codec: str | None, most_bytes: int) -> list[float]:
    """Return the values of ``size_limit_gib`` that are worth a forecast, besides 0. Only the last may hold all samples."""
    if codec not in costs.ways:
        return []
    needed = costs.ways[codec].nbytes(costs.samples) * _ROOM + MIB
    room = min(needed, most_bytes)
    limits = [round_up(share * room / GIB) for share in _SHARES]
    if needed > most_bytes:
        limits[-1] = round_down(room / GIB)
    parts = [limit for limit in limits[:-1] if cached_share(costs, int(limit * GIB), codec) < 1]
    return [limit for limit in [*parts, limits[-1]] if 0 < limit * GIB <= most_bytes]


def round_up(gib: float) -> float:
    """Return ``gib`` rounded up to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(gib)) - 2) if gib > 0 else 1.0
    return float(f"{math.ceil(gib / unit - 1e-9) * unit:.3g}")


def round_down(gib: float) -> float:
    """Return ``gib`` rounded down to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(gib)) - 2) if gib > 0 else 1.0
    return float(f"{math.floor(gib / unit + 1e-9) * unit:.3g}")


def candidates(costs: Costs, batch_sizes: Sequence[int], most_bytes: int) -> list[Setting]:
    """Return all settings to choose among, with caches of at most ``most_bytes``."""
    caches: list[tuple[float, str | None]] = [(0.0, None)]
    caches += [(limit, codec) for codec in (None, "lz4", "zstd") for limit in limits_gib(costs, codec, most_bytes)]
    return [
        Setting(int(limit * GIB), workers, codec, size)
        for limit, codec in caches
        for workers in worker_counts(costs)
        for size in batch_sizes
    ]


def rank(forecasts: Sequence[Forecast], count: int) -> list[Forecast]:
    """Return the best forecasts, the best first. Of equally fast ones the cheaper is the better.

    Cheaper means: without a codec, then with fewer workers, then with less memory.
    """
    left, best = sorted(forecasts, key=lambda forecast: forecast.epoch_s), list[Forecast]()
    while left and len(best) < count:
        as_fast = [forecast for forecast in left if forecast.epoch_s <= left[0].epoch_s * SAME]
        best.append(min(as_fast, key=_price))
        left.remove(best[-1])
    return best


def _price(forecast: Forecast) -> tuple[bool, int, int, float]:
    setting = forecast.setting
    return setting.codec is not None, setting.workers, forecast.memory_bytes, forecast.epoch_s


def with_chosen_workers(dataset: Any, arguments: Mapping[str, Any], make_loader: MakeLoader) -> dict[str, Any]:
    """Return arguments of torch's DataLoader with a number in place of ``num_workers="auto"``.

    If it is 0, arguments that torch refuses without workers are left out.

    Args:
        arguments: of the constructor, without default values; "self" and "dataset" are left out of the result.
    """
    chosen = {name: value for name, value in arguments.items() if name not in ("self", "dataset")}
    size = chosen.get("batch_size", getattr(chosen.get("batch_sampler"), "batch_size", 1))
    size = size if isinstance(size, int) and size > 0 else 1
    chosen["num_workers"] = choose_workers(dataset, size, chosen.get("collate_fn"), make_loader)
    if not chosen["num_workers"]:
        for name in ("persistent_workers", "multiprocessing_context"):
            chosen.pop(name, None)
    return chosen


def choose_workers(
    dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, make_loader: MakeLoader
) -> int:
    """Return the number of workers for a loader, for ``num_workers="auto"``, and log why.

    It is the smallest number with which an epoch is predicted to be as fast as it can be if the training step takes no time;
    never more than there are CPUs. The costs of samples and batches are measured for up to 10 s. An iterable dataset gets 0
    workers, because each would yield all samples. A dataset that cannot be measured gets one for each CPU, at most 8.
    """
    workers, reason = _choose(dataset, batch_size, collate_fn, make_loader)
    logger.info("num_workers='auto' chooses %d: %s", workers, reason)
    return workers


def _choose(
    dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, make_loader: MakeLoader
) -> tuple[int, str]:
    if isinstance(dataset, IterableDataset):
        return 0, "the dataset is iterable, and each worker would yield all of its samples"
    if multiprocessing.current_process().daemon:
        return 0, "this process is daemonic, and may not start workers"
    fallback, cores = min(count_cores(), _FALLBACK), count_cores()
    cached = dataset if isinstance(dataset, CachedDataset) else None
    source = dataset if cached is None else cached.dataset
    if _holds_cache(source):
        return fallback, "the dataset wraps a CachedDataset, which is not measured"
    codec: str | None = None
    if cached is not None and isinstance(cached.cache, RaggedCache):
        codec = cached.cache.codec
    try:
        if not len(source):
            return 0, "the dataset has no samples"
        costs = measure_costs(
            source,
            batch_sizes=(batch_size,),
            make_loader=make_loader,
            time_limit_s=_AUTO_S,
            codecs=(codec,),
            collate_fn=collate_fn,
            transform=None if cached is None else cached.after_cache,
            passes=1,
        )
    except Exception as error:  # of a sample: it is raised again when the sample is requested
        return fallback, f"samples cannot be measured ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    limit = 0 if cached is None else cached.cache.stats().capacity_bytes
    codec = codec if codec in costs.ways else None
    forecasts = [predict(costs, Setting(limit, workers, codec, batch_size)) for workers in worker_counts(costs)]
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)  # ranks of torchrun share the CPUs
    if share > 1:
        forecasts = [each for each in forecasts if each.setting.workers <= max(1, cores // share)]
    best = rank(forecasts, 1)[0]
    return best.setting.workers, (
        f"an epoch is predicted to take {best.epoch_s:.3g} s with {best.cached_share:.0%} of the samples cached; "
        + ", ".join(f"{each.setting.workers} workers: {each.epoch_s:.3g} s" for each in forecasts)
    )


def _holds_cache(dataset: Any) -> bool:
    """Whether a dataset gets samples from a `CachedDataset`."""
    for _ in range(32):
        if isinstance(dataset, CachedDataset):
            return True
        dataset = vars_of(dataset).get("dataset")
        if dataset is None:
            return False
    return False


def check_length(dataset: Any) -> None:
    """Raise DatasetError if a dataset has no samples, or is a `CachedDataset`."""
    if _holds_cache(dataset):
        raise DatasetError("the dataset is, or wraps, a CachedDataset. Pass the dataset inside it.")
    if not len(dataset):
        raise DatasetError(f"{type(dataset).__name__} has length 0. There is nothing to measure.")
