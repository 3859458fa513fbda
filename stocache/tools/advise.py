"""Recommend settings for a dataset: run short epochs of the real loader with some, and rank them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tqdm import tqdm

from stocache.datasets.wrapping import check_dataset
from stocache.errors import DatasetError, LimitError
from stocache.loader.choice.choice import holds_cache, method_by_rule, rank, worker_counts
from stocache.loader.choice.measure import Epoch, Samples, Setting, Study, measure
from stocache.loader.dataloader import DataLoader
from stocache.system.figures import format_seconds, plural, round_digits
from stocache.system.limits import GIB, format_size, recommended_limit
from stocache.system.platform import here
from stocache.system.ranks import is_first_rank

_BEST = 5
_MOST_BATCH = 1 << 20


@dataclass(frozen=True)
class Advised:
    """One recommended setting.

    Attributes:
        setting: the options of the cache and the loader.
        epoch_s: seconds of an epoch at the measured rate, the training step included.
        size_limit_gib: for `CachedDataset`; 0 for no cache.
        code: the line of code that uses it.
    """

    setting: Setting
    epoch_s: float
    size_limit_gib: float
    code: str


@dataclass(frozen=True)
class Advice:
    """The result of `advise`. ``str()`` is a report.

    Attributes:
        settings: the best settings, the best first; at most five.
        samples: what is known of the samples.
        epochs: all settings that were tried, with their measured seconds.
        length: samples of the dataset.
        step_ms: of the training step that was assumed, for a batch of ``batch_size``.
        batch_size: the first of the batch sizes that were passed.
        memory_bytes: the largest cache that the machine can give.
        took_s: seconds that measuring took.
        name: the class of the dataset.
    """

    settings: tuple[Advised, ...]
    samples: Samples
    epochs: tuple[Epoch, ...]
    length: int
    step_ms: float
    batch_size: int
    memory_bytes: int
    took_s: float
    name: str

    @property
    def best(self) -> Advised:
        """The recommended setting."""
        return self.settings[0]

    def __str__(self) -> str:
        return "\n".join([*_describe(self), "", *_list_settings(self), "", *_notes(self)])


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

    It runs short epochs with several numbers of workers, which are processes or threads, without a cache and with one; and
    with a codec, if not all samples fit in memory without. It ranks these settings by the measured times. Of the settings that
    keep up with the training step, or whose times differ by less than 5 %, the cheaper is the better: without a codec, with
    fewer workers, with less memory.

    Args:
        dataset: as for `CachedDataset`.
        step_ms: milliseconds of a training step. It is assumed to run on a GPU and use no CPU time.
        batch_size: samples in a batch; or several sizes to choose among. ``step_ms`` belongs to the first; for
            the others it is scaled in proportion.
        time_limit_s: seconds after which it ends. Slow samples leave less time, and then fewer settings are tried.
        collate_fn: as for the DataLoader; None for torch's, or for lists if that does not take the samples.
        transform, allow_pickle: as for `CachedDataset`.
        progress: whether to show a bar on stderr.

    Raises:
        LimitError: ``step_ms``, ``batch_size`` or ``time_limit_s`` is not a possible number.
        DatasetError: the dataset is not map-style, has no samples, or is cached already; or no epoch was run in time.
        WorkerError: a process that loaded samples died.
        Exception: the error of a sample that cannot be loaded.

    A child process, which ends with the call, runs the epochs; or if it would stall, this process does, with a copy. So the
    dataset object and the random generators of this process stay unchanged.

    Examples:
        >>> advice = advise(TensorDataset(torch.rand(64, 3)), batch_size=16, time_limit_s=3, progress=False)
        >>> print(advice.best.code)
        DataLoader(...dataset..., batch_size=16, shuffle=True...)
    """
    began = time.monotonic()
    if not _is_number(step_ms) or step_ms < 0:
        raise LimitError(f"step_ms={step_ms!r} must be a finite number of milliseconds, 0 or more.")
    step_ms, sizes = float(step_ms), _check_sizes(batch_size)
    if not _is_number(time_limit_s) or time_limit_s <= 0:
        raise LimitError(f"time_limit_s={time_limit_s!r} must be a positive number of seconds.")
    length, most = check_measurable(dataset), recommended_limit()
    rule, step_s = method_by_rule(dataset, False), step_ms / 1000 / sizes[0]
    hidden = not progress or not is_first_rank()
    with tqdm(total=round(time_limit_s), unit="s", delay=1, disable=hidden, leave=False, bar_format=_BAR) as bar:

        def show(seconds: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(max(0.0, seconds - bar.n))

        study = Study(
            DataLoader,
            worker_counts(here.usable_cpus()),
            sizes,
            methods=("multiprocessing", "thread") if rule is None or rule[0] == "thread" else ("multiprocessing",),
            codecs=(None, "lz4", "zstd"),
            choose_caches=lambda samples: _choose_caches(samples, length, most),
            collate_fn=collate_fn,
            options={"transform": transform, "allow_pickle": allow_pickle},
            time_limit_s=time_limit_s,
            step_s=step_s,
            on_progress=show,
        )
        samples, epochs = measure(dataset, study)
    if not epochs:
        raise DatasetError(f"{type(dataset).__name__}: no epoch was run in {time_limit_s:g} s. Use a longer time_limit_s.")
    cached = ", transform=transform" * (transform is not None) + ", allow_pickle=True" * allow_pickle
    settings = tuple(
        _advised(epoch.setting, epoch.with_step(step_s) * length, cached, collate_fn) for epoch in rank(epochs, step_s, _BEST)
    )
    took_s = time.monotonic() - began
    return Advice(settings, samples, tuple(epochs), length, step_ms, sizes[0], most, took_s, type(dataset).__name__)


def check_measurable(dataset: Any) -> int:
    """Return the length of a dataset. Raise DatasetError if it is not map-style, has no samples, or is cached already."""
    if isinstance(dataset, str | bytes):
        raise DatasetError("it is text. Pass a map-style dataset, with __len__ and __getitem__.")
    length = check_dataset(dataset)
    if holds_cache(dataset):
        raise DatasetError("the dataset is, or wraps, a CachedDataset. Pass the dataset inside it.")
    if not length:
        raise DatasetError(f"{type(dataset).__name__} has length 0. There is nothing to measure.")
    return length


def _choose_caches(samples: Samples, length: int, most: int) -> list[tuple[int, str | None]]:
    """Return the limits and codecs to try, each for as many samples as fit; codecs only if not all do without."""
    needed = {codec: samples.limit_for(codec, length) for codec in samples.cached_bytes}
    tried = [None] if needed.get(None, most + 1) <= most else list(needed)
    caches: list[tuple[int, str | None]] = [(0, None)]
    for codec in tried:
        fits = needed[codec] <= most
        caches.append((int(round_digits(min(needed[codec], most) / GIB, 3, up=fits) * GIB), codec))
    return [caches[0], *(cache for cache in caches[1:] if cache[0])]


_BAR = "{desc}: {n:.0f} of at most {total} s |{bar}|"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_sizes(batch_size: Any) -> tuple[int, ...]:
    sizes = batch_size if isinstance(batch_size, list | tuple) else [batch_size]
    if not sizes or not all(_is_number(each) and each in range(1, _MOST_BATCH + 1) for each in sizes):
        raise LimitError(f"batch_size={batch_size!r} must be a number of samples from 1 to {_MOST_BATCH}, or a list of them.")
    return tuple(dict.fromkeys(map(int, sizes)))


def _advised(setting: Setting, epoch_s: float, cached: str, collate_fn: object) -> Advised:
    """Return a setting; ``cached`` has more arguments of `CachedDataset`."""
    limit = float(f"{setting.limit_bytes / GIB:.3g}")
    dataset = "dataset"
    if setting.limit_bytes:
        codec = f", codec={setting.codec!r}" if setting.codec is not None else ""
        dataset = f"CachedDataset(dataset, size_limit_gib={limit:g}{codec}{cached})"
    workers = f", num_workers={setting.workers}, persistent_workers=True" if setting.workers else ""
    method = ", worker_method='thread'" if setting.workers and setting.method == "thread" else ""
    collate = ", collate_fn=collate_fn" if collate_fn is not None else ""
    code = f"DataLoader({dataset}, batch_size={setting.batch_size}, shuffle=True{workers}{method}{collate})"
    return Advised(setting, epoch_s, limit, code)


def _describe(advice: Advice) -> list[str]:
    samples = advice.samples
    lines = [
        f"{advice.name}: {plural(advice.length, 'sample')}. Measured {plural(len(advice.epochs), 'setting')} "
        f"in {advice.took_s:.0f} s, with {plural(here.usable_cpus(), 'CPU')}.",
        f"  load      {format_seconds(samples.load_s)} (mean of {plural(samples.timed, 'sample')})",
    ]
    plain = samples.cached_bytes.get(None)
    for codec, nbytes in samples.cached_bytes.items():
        ratio = f" (ratio {plain / nbytes:.2f})" if codec is not None and plain is not None and nbytes else ""
        name = "cache" if codec is None else f"codec {codec}"
        whole = format_size(samples.limit_for(codec, advice.length))
        lines.append(f"  {name:<9} {format_size(nbytes)} for each sample{ratio}, {whole} for all")
    return [*lines, f"  memory    {format_size(advice.memory_bytes)} for a cache"]


def _list_settings(advice: Advice) -> list[str]:
    lines = []
    for number, each in enumerate(advice.settings, 1):
        rate, nbytes = advice.length / max(each.epoch_s, 1e-9), each.setting.limit_bytes
        cached = f", with a cache of {format_size(nbytes)}" if nbytes else ""
        lines += [f"{number}. {format_seconds(each.epoch_s)} an epoch, {rate:,.0f} samples/s{cached}:", f"   {each.code}"]
    return lines


def _notes(advice: Advice) -> list[str]:
    step = f"a step of {advice.step_ms:g} ms for {advice.batch_size} samples" if advice.step_ms else "no training step"
    notes = [
        f"With {step}, which uses no CPU time. An epoch is a later one, with persistent workers, at the rate of short epochs "
        f"over a part of the samples."
    ]
    if advice.samples.draws:
        notes.append(
            "Samples draw from the global random number generators, which threads would share: only processes were tried."
        )
    return notes + [f"{text[0].upper()}{text[1:]}." for text in advice.samples.left_out]
