"""Recommend settings for a dataset: measure it for a while, predict epochs, and rank them."""

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tqdm import tqdm

from stocache.datasets.wrapping import check_dataset
from stocache.errors import DatasetError, LimitError
from stocache.loader.choice.choice import GilTrial, candidates, holds_cache, rank
from stocache.loader.choice.measure import measure_costs
from stocache.loader.choice.model import UNCACHED, Costs, Forecast, Setting, predict
from stocache.loader.dataloader import DataLoader
from stocache.system.figures import format_seconds, plural
from stocache.system.limits import GIB, format_size, recommended_limit
from stocache.system.ranks import is_first_rank

_BEST = 5
_TRIAL_LOAD_S = 0.05  # a load may take that long if threads are to be tried
_TRIAL_LEFT_S = 35.0  # more than the trial waits at most
_MOST_BATCH = 1 << 20


@dataclass(frozen=True)
class Advised:
    """One recommended setting.

    Attributes:
        forecast: its predicted epochs; ``forecast.setting`` is the setting.
        size_limit_gib: for `CachedDataset`; 0 for no cache.
        code: the line of code that uses it.
    """

    forecast: Forecast
    size_limit_gib: float
    code: str


@dataclass(frozen=True)
class Advice:
    """The result of `advise`. ``str()`` is a report.

    Attributes:
        settings: the best settings, the best first; at most five.
        costs: the measured costs.
        step_ms: of the training step that was assumed, for a batch of ``batch_size``.
        batch_size: the first of the batch sizes that were passed.
        memory_bytes: the largest cache that the machine can give.
        name: the class of the dataset.
    """

    settings: tuple[Advised, ...]
    costs: Costs
    step_ms: float
    batch_size: int
    memory_bytes: int
    name: str

    @property
    def best(self) -> Advised:
        """The recommended setting."""
        return self.settings[0]

    def predict(self, setting: Setting) -> Forecast:
        """Return the forecast of any setting."""
        return predict(self.costs, setting, _step_s(self.step_ms, setting.batch_size, self.batch_size))

    def __str__(self) -> str:
        return "\n".join([*_describe(self), "", *_table(self.settings), "", *_notes(self)])


def advise(
    dataset: Any,
    *,
    step_ms: float = 0.0,
    batch_size: int | Sequence[int] = 32,
    time_limit_s: float = 60.0,
    collate_fn: Callable[[list[Any]], object] | None = None,
    transform: Callable[[Any], object] | None = None,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Advice:
    """Return which limit of the cache, number of workers and codec to use for a map-style dataset on this machine.

        print(stocache.advise(dataset, step_ms=40, batch_size=256))

    It measures the costs of samples and batches, predicts an epoch for each setting, and ranks the settings by that. Of those
    whose predicted times differ by less than 2 %, the cheaper is the better: without a codec, with fewer workers, with less
    memory. Settings that do not fit in memory are not proposed.

    Args:
        dataset: as for `CachedDataset`.
        step_ms: milliseconds of a training step. It is assumed to run on a GPU and use no CPU time.
        batch_size: samples in a batch; or several sizes to choose among. ``step_ms`` belongs to the first; for
            the others it is scaled in proportion.
        time_limit_s: seconds after which it ends; 10 to 25 s are usual. Slow samples leave less time, and the report says on
            how many samples it rests.
        collate_fn: as for the DataLoader; None for torch's, or for lists where that does not take the samples.
        transform, allow_pickle: as for `CachedDataset`.
        progress: whether to show a bar on stderr.

    Raises:
        LimitError: ``step_ms``, ``batch_size`` or ``time_limit_s`` is not a possible number.
        DatasetError: the dataset is not map-style, has no samples, or is cached already; or no sample was loaded in time.
        WorkerError: a process that loaded samples died.
        Exception: the error of a sample that cannot be loaded.

    Child processes, which end with the call, load the samples; or if these would stall, this process does, with copies. So the
    dataset object and the random generators of this process stay as they are.

    Examples:
        >>> advice = advise(TensorDataset(torch.rand(64, 3)), batch_size=16, time_limit_s=3, progress=False)
        >>> print(advice.best.code)
        DataLoader(...dataset..., batch_size=16, shuffle=True...)
    """
    began = time.monotonic()
    step_ms, sizes = _check_step(step_ms), _check_sizes(batch_size)
    if not _is_number(time_limit_s) or time_limit_s <= 0:
        raise LimitError(f"time_limit_s={time_limit_s!r} must be a positive number of seconds.")
    check_dataset(dataset)
    if holds_cache(dataset):
        raise DatasetError("the dataset is, or wraps, a CachedDataset. Pass the dataset inside it.")
    if not len(dataset):
        raise DatasetError(f"{type(dataset).__name__} has length 0. There is nothing to measure.")
    hidden = not progress or not is_first_rank()
    with tqdm(total=round(time_limit_s), unit="s", delay=1, disable=hidden, leave=False, bar_format=_BAR) as bar:

        def show(seconds: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(max(0.0, seconds - bar.n))

        costs = measure_costs(
            dataset,
            batch_sizes=sizes,
            make_loader=DataLoader,
            time_limit_s=time_limit_s,
            collate_fn=collate_fn,
            transform=transform,
            allow_pickle=allow_pickle,
            on_progress=show,
        )
        if costs.load_s < _TRIAL_LOAD_S and time.monotonic() - began < time_limit_s - _TRIAL_LEFT_S:
            show(time.monotonic() - began, "threads")
            trial = GilTrial()
            costs = dataclasses.replace(costs, thread_speed_up=trial.speed_up(dataset), gil_share=trial.held)
    costs = dataclasses.replace(costs, took_s=time.monotonic() - began)
    most = recommended_limit()
    forecasts = [
        predict(costs, setting, _step_s(step_ms, setting.batch_size, sizes[0])) for setting in candidates(costs, sizes, most)
    ]
    cached = ", transform=transform" * (transform is not None) + ", allow_pickle=True" * allow_pickle
    settings = tuple(_advised(forecast, cached, collate_fn) for forecast in rank(forecasts, _BEST))
    return Advice(settings, costs, step_ms, sizes[0], most, type(dataset).__name__)


_BAR = "{desc}: {n:.0f} of at most {total} s |{bar}|"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_step(step_ms: Any) -> float:
    if not _is_number(step_ms) or step_ms < 0:
        raise LimitError(f"step_ms={step_ms!r} must be a finite number of milliseconds, 0 or more.")
    return float(step_ms)


def _check_sizes(batch_size: Any) -> tuple[int, ...]:
    many = batch_size if isinstance(batch_size, list | tuple) else [batch_size]
    try:
        sizes = tuple(dict.fromkeys(operator.index(size) for size in many))
    except TypeError:
        sizes = ()
    if not sizes or not all(1 <= size <= _MOST_BATCH for size in sizes) or any(isinstance(size, bool) for size in many):
        raise LimitError(f"batch_size={batch_size!r} must be a number of samples from 1 to {_MOST_BATCH}, or a list of them.")
    return sizes


def _step_s(step_ms: float, size: int, first_size: int) -> float:
    return step_ms / 1000 * size / first_size


def _advised(forecast: Forecast, cached: str, collate_fn: object) -> Advised:
    """Return a setting; ``cached`` has more arguments of `CachedDataset`."""
    setting = forecast.setting
    limit = float(f"{setting.limit_bytes / GIB:.3g}")
    dataset = "dataset"
    if setting.limit_bytes:
        codec = f", codec={setting.codec!r}" if setting.codec is not None else ""
        dataset = f"CachedDataset(dataset, size_limit_gib={limit:g}{codec}{cached})"
    workers = f", num_workers={setting.workers}, persistent_workers=True" if setting.workers else ""
    collate = ", collate_fn=collate_fn" if collate_fn is not None else ""
    code = f"DataLoader({dataset}, batch_size={setting.batch_size}, shuffle=True{workers}{collate})"
    return Advised(forecast, limit, code)


def _describe(advice: Advice) -> list[str]:
    costs = advice.costs
    loads = sorted(costs.loads_s)
    cuts = statistics.quantiles(loads, n=20) if len(loads) > 1 else loads * 19
    mean, median, most, longest = map(format_seconds, (costs.load_s, statistics.median(loads), cuts[18], loads[-1]))
    first = f", the first time {costs.cold_ratio:.2f} times as long" if costs.cold_ratio > 1 else ""
    lines = [
        f"{advice.name}: {plural(costs.samples, 'sample')}, {format_size(costs.batch_bytes)} each in a batch. Measured for "
        f"{costs.took_s:.0f} s, on {plural(costs.timed, 'sample')}, with {costs.cores} CPUs.",
        f"  load      {mean} (median {median}, 95 % {most}, longest {longest}), {costs.cpu_share:.0%} of it CPU time{first}; "
        f"with all CPUs busy {costs.busy_ratio:.2f} times the CPU time",
    ]
    for way, each in costs.ways.items():
        busy = each.at(costs.cores)
        per_sample_s = busy.sample_s + busy.batch_s / advice.batch_size
        hand_s = busy.main_batch_s + busy.main_sample_s * advice.batch_size
        name = "no cache" if way == UNCACHED else f"codec {way}" if way is not None else "cache"
        size = ""
        if way != UNCACHED:
            size = f"{format_size(each.sample_bytes)} for each sample"
            plain = costs.ways.get(None)
            if way is not None and plain is not None and each.sample_bytes:
                size += f" (ratio {plain.sample_bytes / each.sample_bytes:.2f})"
            size += f", {format_seconds(each.fill_s)} to fill, "
        what = "batched" if way == UNCACHED else "read and batched"
        lines.append(
            f"  {name:<9} {size}{what} in {format_seconds(per_sample_s)} (a worker: {1 / max(per_sample_s, 1e-9):,.0f}/s), "
            f"{format_seconds(hand_s)} to hand over a batch of {advice.batch_size}"
        )
    if costs.thread_speed_up is not None:
        lines.append(
            f"  threads   a thread holds the GIL for {costs.gil_share:.0%} of its time; two make {costs.thread_speed_up:.2f} "
            f"times as many samples as one"
        )
    lines.append(f"  memory    {format_size(advice.memory_bytes)} for a cache")
    return lines


def _table(settings: Sequence[Advised]) -> list[str]:
    rows = [("", "epoch", "first", "waiting", "cached", "memory", "workers", "codec", "batch")]
    for number, each in enumerate(settings, 1):
        forecast, setting = each.forecast, each.forecast.setting
        times = format_seconds(forecast.epoch_s), format_seconds(forecast.first_epoch_s)
        shares = f"{forecast.wait_share:.0%}", f"{forecast.cached_share:.0%}"
        chosen = str(setting.workers), setting.codec or "-", str(setting.batch_size)
        rows.append((str(number), *times, *shares, format_size(forecast.memory_bytes), *chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for at, each in enumerate(settings):
        lines.insert(2 * at + 2, f"{'':{widths[0]}}  {each.code}")
    return lines


def _notes(advice: Advice) -> list[str]:
    step = f"a step of {advice.step_ms:g} ms for {advice.batch_size} samples" if advice.step_ms else "no training step"
    notes = [
        f"Predicted, with {step}, which uses no CPU time. epoch: a later one, with persistent workers. first: the "
        f"one that fills the cache. waiting: the share of an epoch for which the loop waits. memory: of the cache and of "
        f"batches in flight."
    ]
    if advice.costs.has_transform:
        notes.append("Transforms of the dataset run after the cache, and are part of these times.")
    if advice.costs.timed < 20:
        notes.append(f"This rests on {plural(advice.costs.timed, 'sample')} only.")
    return notes + [f"{text[0].upper()}{text[1:]}." for text in advice.costs.missing]
