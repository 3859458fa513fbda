"""Load a few samples in a child process, to find their structure and the attributes that they are made with.

NOTE [ What a sample is made of ]
    The first sample is loaded twice, and so is each for which random numbers were drawn; one that is quick to load several
    times, because two random flips may be equal by chance. If one differs, something random runs before the cache: see
    NOTE [ The audit ]. While the first sample is loaded again, all attributes of the dataset that are read are recorded. Cached
    samples are made with these, so they must not be changed afterwards. Attributes that loading itself sets (a file that is
    opened when it is first needed) are left out.
"""

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from stocache.errors import SampleError, WorkerError
from stocache.samples.indices import spread
from stocache.samples.record_decoder import pack_sample, unpack_sample
from stocache.system.describe import describe, difference
from stocache.system.loading.children import (
    ChildError,
    PackedError,
    SlowError,
    in_children,
    pack_error,
    unpack_error,
    with_prefix,
)
from stocache.system.loading.fallback import loads_only_here, run_here, warn_of_this_process
from stocache.system.objects import get_many_of, recorded_reads, vars_of
from stocache.system.rng import LineOfDraw, RngMonitor

logger = logging.getLogger("stocache")

_BUDGET_S = 20.0  # after which no further sample is begun, once there are two
_SHORT_S = 1.0  # for samples after the first for which random numbers were drawn
_QUICK_S = 0.05  # for a sample that may be loaded more than twice
AGAIN = 8  # times, for a sample for which random numbers were drawn
_PATIENCE_S = 120.0  # for one sample; then the probe ends without it

_ADVICE = (
    "This is the probe, which loads some samples in a child process before your loop, to see what they look like. If the "
    "dataset is made ready later (by worker_init_fn), give CachedDataset example=sample, one as the dataset returns it; or "
    "probe=0, and samples are kept as ones of varying size"
)


@dataclass
class Probe:
    """The result of a probe.

    Attributes:
        samples: the loaded samples, by index.
        example: a sample that the user gave in place of the probe, or None.
        reads: attributes of the dataset that samples are made with.
        loaded_here: whether samples were loaded in this process, because a child could not; None where none was loaded.
        unfit: the error of the first sample that cannot be kept, where none can; else None.
        finding: the dependence of a sample on more than its index: a sentence without its end. None if there is no other.
    """

    samples: dict[int, Any] = field(default_factory=dict)
    example: Any = None
    reads: frozenset[str] = frozenset()
    loaded_here: bool | None = None
    unfit: Exception | None = None
    finding: str | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The samples by their names in errors."""
        return (
            {f"sample {idx}": sample for idx, sample in self.samples.items()}
            if self.example is None
            else {"example": self.example}
        )


class _Started(NamedTuple):
    """Sent by the child before it loads a sample."""

    idx: int


class _Loaded(NamedTuple):
    """Sent by the child after it loaded a sample: its record, or an error. ``raised``: by the dataset, not by packing."""

    idx: int
    record: bytes | None = None
    error: PackedError = (None, "", "")
    raised: bool = False


class _LoadedAgain(NamedTuple):
    """Sent by the child after it loaded a sample again. ``place``: where it differs. ``drawn``: the line that drew numbers."""

    idx: int
    place: str | None
    drawn: str | None
    reads: frozenset[str] = frozenset()


def probe_samples(dataset: object, length: int, count: int, load: Callable[[int], object] | None = None) -> Probe:
    """Load ``count`` samples, evenly spread, in a child process. Samples that fail, or cannot be kept, are left out.

    Args:
        load: called in place of ``dataset.__getitem__``, where cached samples are made in another way.

    Raises:
        WorkerError: the child died before it had loaded a sample.
        Exception: the dataset raises for all samples. The error of the first, with a message that names the probe.
    """
    indices = spread(length, count)
    if not indices:
        return Probe()
    load_many = get_many_of(dataset) if load is None else None
    load = partial(operator.getitem, dataset) if load is None else load
    job = partial(_load_all, dataset, load, load_many, indices)
    found = _ProbeResults(dataset)
    try:
        with contextlib.closing(in_children([job], dataset, _PATIENCE_S)) as items:
            found.take(items)
    except ChildError as error:
        if not isinstance(error, SlowError) or found.started is None:
            return _probe_here(dataset, job, error)
        logger.warning("sample %d is not loaded after %.0f s. %s.", found.started, _PATIENCE_S, _ADVICE)
    except WorkerError as error:
        if not found.probe.samples:
            raise WorkerError(f"probing sample {found.started}: {error} {_ADVICE}.") from None
        logger.warning("probing sample %s: %s", found.started, str(error))
    if found.failure is not None and loads_only_here(partial(load, found.failure[0]), found.failure[1]):
        return _probe_here(dataset, job, found.failure[1])
    return found.result(here=False)


def _probe_here(dataset: object, job: Callable[[], Iterator[object]], reason: Exception) -> Probe:
    warn_of_this_process(reason)
    found = _ProbeResults(dataset)
    found.take(run_here(job))
    return found.result(here=True)


class _ProbeResults:
    """The results of `_load_all` so far.

    Attributes:
        probe: the result.
        started: the last sample that was begun, or None.
        errors: by sample; and whether the dataset raised it, or the sample cannot be kept.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset, self.probe = dataset, Probe()
        self.started: int | None = None
        self.errors: list[tuple[int, Exception, bool]] = []

    def take(self, items: Iterable[Any]) -> None:
        """Take the items that `_load_all` yields."""
        probe = self.probe
        for item in items:
            if isinstance(item, _Started):
                self.started = item.idx
            elif isinstance(item, _LoadedAgain):
                probe.reads = probe.reads or item.reads
                probe.finding = probe.finding or _finding(self._dataset, item)
            elif item.record is not None:
                probe.samples[item.idx] = unpack_sample(item.record)
            else:
                self.errors.append((item.idx, unpack_error(item.error), item.raised))

    @property
    def failure(self) -> tuple[int, Exception] | None:
        """The first sample and its error, if the dataset raised one for every sample."""
        fails = not self.probe.samples and self.errors and all(raised for _, _, raised in self.errors)
        return self.errors[0][:2] if fails else None

    def result(self, here: bool) -> Probe:
        """Return the probe. ``here``: whether this process has loaded the samples. Raises the error of the dataset."""
        if self.failure is not None:
            idx, problem = self.failure
            raise with_prefix(problem, f"probing sample {idx} of {type(self._dataset).__name__}. {_ADVICE}. It raised")
        probe = self.probe
        probe.loaded_here = here if here or probe.samples or self.errors else None
        if not probe.samples:
            probe.unfit = next((problem for _, problem, raised in self.errors if not raised), None)
        return probe


def _finding(dataset: object, again: _LoadedAgain) -> str | None:
    """Return the dependence of a sample on more than its index, as a sentence; None if there is no other."""
    drawn = "" if again.drawn is None else f"; random numbers were drawn in {again.drawn}"
    if again.place is not None:
        name = type(dataset).__name__
        return f"sample {again.idx} of {name} was different when it was loaded again{drawn} ({again.place:.300})"
    if drawn:
        log_draws_without_effect(dataset, again.idx, drawn)
    return None


def log_draws_without_effect(dataset: object, idx: int, drawn: str = "") -> None:
    """Log that a sample does not depend on the numbers drawn for it, and the consequence. ``drawn``: where, as a clause."""
    logger.info(
        "sample %d of %s does not depend on random numbers%s. Cached samples draw none, so the random numbers that follow "
        "differ from those without the cache.", idx, type(dataset).__name__, drawn,
    )  # fmt: skip


def _load_all(
    dataset: object,
    load: Callable[[int], object],
    load_many: Callable[[list[int]], Iterable[object]] | None,
    indices: list[int],
) -> Iterator[_Started | _Loaded | _LoadedAgain]:
    began, count = time.monotonic(), 0
    drawn: list[tuple[int, Any, int]] = []  # samples for which random numbers were drawn, and how often to load each once more
    new: set[str] = set()  # attributes that were set by the first load
    for idx in indices:
        if count > 1 and time.monotonic() - began > _BUDGET_S:
            break
        yield _Started(idx)
        before, monitor, loading = dict(vars_of(dataset)), RngMonitor(), time.monotonic()
        try:
            sample = load(idx)
        except Exception as error:
            yield _Loaded(idx, error=pack_error(error), raised=True)
            continue
        draws, quick = monitor.changed(), time.monotonic() - loading < _QUICK_S
        try:
            record = pack_sample(sample, f"sample {idx}")
        except SampleError as error:
            yield _Loaded(idx, error=pack_error(error))
            continue
        yield _Loaded(idx, record)
        count += 1
        first = describe(sample, strides=False)
        del sample
        if count == 1:
            # see NOTE [ What a sample is made of ]
            new = {name for name, value in vars_of(dataset).items() if before.get(name, before) is not value}
            if not draws:
                with recorded_reads(dataset) as reads:
                    place = load_again(load, idx, first)
                if place is None and load_many is not None:
                    place = load_again(lambda idx: next(iter(load_many([idx]))), idx, first)
                    place = place and f"by __getitems__: {place}"
                yield _LoadedAgain(idx, place, None, frozenset(reads - new))
        if draws:
            drawn.append((idx, first, AGAIN if quick else 0))
    if drawn:  # now, when others have been loaded, too: some mix a sample with recent ones
        idx, first, times = drawn[0]
        with recorded_reads(dataset) as reads, LineOfDraw() as line:
            place = load_again(load, idx, first)
        place = place or load_again(load, idx, first, times)
        yield _LoadedAgain(idx, place, line.text, frozenset(reads - new))
        began = time.monotonic()
        for idx, first, times in drawn[1:]:
            if time.monotonic() - began < _SHORT_S and (place := load_again(load, idx, first, times or 1)) is not None:
                yield _LoadedAgain(idx, place, line.text)
                return


def load_again(load: Callable[[int], object], idx: int, first: object, times: int = 1) -> str | None:
    """Load a sample again, some times; return where it differs from its first description. None if it never does."""
    for _ in range(times):
        with contextlib.suppress(Exception):  # then there is nothing to compare
            place = difference(first, describe(load(idx), strides=False))
            if place is not None:
                return place
    return None
