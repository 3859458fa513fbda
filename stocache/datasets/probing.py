"""Load a few samples in a child process, to find their structure and the attributes that they are made with.

NOTE [ What a sample is made of ]
    The first sample is loaded twice. While it is loaded again, all attributes of the dataset that are read are recorded. Cached
    samples are made with these, so they must not be changed afterwards. Attributes that loading itself sets (a file that is
    opened when it is first needed) are left out. A load that draws random numbers is not cached: see NOTE [ The audit ].

    Four more things make a sample depend on more than its index:
    - the dataset reads a pipe, a socket or an iterator, see NOTE [ Streams ];
    - a load takes a seed from the system (`LineOfSeed`), even if the loads here are equal;
    - a list or dict of the dataset grows when a sample is loaded again, by more than numbers and texts: the program may read
      it. If it grows only with the first load of a sample, or by numbers and texts, the program loads the probed samples anew;
    - ``__getitems__``, which torch's loader asks for a batch, returns other samples than ``__getitem__``: it is asked for
      one, two and three of them, in other orders, with equal random numbers.
"""

import contextlib
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from stocache.errors import SampleError, WorkerError
from stocache.samples.indices import spread
from stocache.samples.record_decoder import pack_sample, unpack_sample
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, is_own, own_generators, parts_of
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
from stocache.system.loading.streams import find_iterator, is_of_closed_stream
from stocache.system.objects import get_many_of, recorded_names, vars_of
from stocache.system.rng import LineOfSeed

logger = logging.getLogger("stocache")

_BUDGET_S = 20.0  # after which no further sample is begun, once there are two
_QUICK_S = 0.05  # for a sample that may be loaded with a look at each call
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
        failed: samples that could not be loaded, or cannot be kept.
        example: a sample that the user gave in place of the probe, or None.
        reads: attributes of the dataset that samples are made with.
        loaded_here: whether samples were loaded in this process, because a child could not; None where none was loaded.
        unfit: the error of the first sample that cannot be kept, where none can; else None.
        finding: the dependence of a sample on more than its index: a sentence without its end. None if there is no other.
        draws: whether that are random numbers, so that the program may be cut.
        survey: where it may be; see `Planner.survey`.
        keeps: whether the dataset keeps something of each sample that it loads.
    """

    samples: dict[int, Any] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    example: Any = None
    reads: frozenset[str] = frozenset()
    loaded_here: bool | None = None
    unfit: Exception | None = None
    finding: str | None = None
    draws: bool = False
    survey: list[Any] = field(default_factory=list)
    keeps: bool = False

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
    """Sent by the child after it loaded a sample again. ``place``: where it differs. ``reads``: attributes that it has read."""

    idx: int
    place: str | None
    reads: frozenset[str]


class _Found(NamedTuple):
    """Sent by the child. ``text``, ``draws``: as of `Probe`; no text if the dataset keeps something of each sample."""

    text: str | None
    draws: bool = False


class _Surveyed(NamedTuple):
    """Sent by the child: an item of `Probe.survey`."""

    item: Any


def probe_samples(
    dataset: object,
    length: int,
    count: int,
    load: Callable[[int], object] | None = None,
    survey: Callable[[], Iterator[Any]] | None = None, first: Sequence[int] = (),
) -> Probe:  # fmt: skip
    """Load ``count`` samples, evenly spread, in a child process. Samples that fail, or cannot be kept, are left out.

    Args:
        load: called in place of ``dataset.__getitem__``, where only a part of the samples is cached.
        survey: called at the first sample that draws random numbers, which is the last one then; yields `Probe.survey`.
        first: samples to load first, in the opposite order.

    Raises:
        WorkerError: the child died before it had loaded a sample.
        Exception: the dataset raises for all samples. The error of the first, with a message that names the probe.
    """
    indices = list(dict.fromkeys([*reversed(first), *spread(length, count)]))
    if not indices:
        return Probe()
    job = partial(_load_all, dataset, load or partial(operator.getitem, dataset), indices, survey)
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
    if any(is_of_closed_stream(error) for _, error, _ in found.errors):
        name = type(dataset).__name__
        found.probe.finding = f"{name} reads a pipe or socket that is open in this process, which a child process cannot"
        return found.probe
    if found.failure is not None and loads_only_here(partial(operator.getitem, dataset, found.failure[0]), found.failure[1]):
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
                if item.place is not None:
                    name = type(self._dataset).__name__
                    probe.finding = f"sample {item.idx} of {name} was different when it was loaded again ({item.place:.300})"
            elif isinstance(item, _Surveyed):
                probe.survey.append(item.item)
            elif isinstance(item, _Found):
                probe.finding, probe.keeps = probe.finding or item.text, probe.keeps or item.text is None
                probe.draws = probe.draws or item.draws
            elif item.record is not None:
                probe.samples[item.idx] = unpack_sample(item.record)
            else:
                self.errors.append((item.idx, unpack_error(item.error), item.raised))
                probe.failed.append(item.idx)

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
        iterator = find_iterator(self._dataset, probe.reads)
        if iterator is not None and probe.finding is None:
            probe.finding = f"samples of {type(self._dataset).__name__} are made with {iterator}"
        probe.loaded_here = here if here or probe.samples or self.errors else None
        if not probe.samples:
            probe.unfit = next((problem for _, problem, raised in self.errors if not raised), None)
        return probe


def _load_all(
    dataset: object, load: Callable[[int], object], indices: list[int], survey: Callable[[], Iterator[Any]] | None
) -> Iterator[_Started | _Loaded | _LoadedAgain | _Found | _Surveyed]:
    began, name, line = time.monotonic(), type(dataset).__name__, LineOfSeed()
    done: list[int] = []  # samples that can be kept
    new: set[str] = set()  # attributes that were set by the first load
    keeps, quick, drawn = False, False, False
    for idx in indices:
        if len(done) > 1 and time.monotonic() - began > _BUDGET_S:
            break
        yield _Started(idx)
        before, sizes, kept, loading = dict(vars_of(dataset)), _sizes(dataset), Kept(own_generators(dataset)), time.monotonic()
        try:
            with line if quick else contextlib.nullcontext():
                sample = load(idx)
        except Exception as error:
            yield _Loaded(idx, error=pack_error(error), raised=True)
            continue
        draws, quick = kept.drawn() or line.text is not None, time.monotonic() - loading < _QUICK_S
        if draws and not drawn:
            drawn, where = True, f"random numbers are drawn to load sample {idx} of {name}"
            if line.text is not None:
                where = f"samples of {name} are made with a seed or bytes that the system draws in {line.text}"
            yield _Found(where, draws=True)
            if survey is not None:
                kept.restore()
                yield from map(_Surveyed, survey())
                return
        keeps = keeps or bool(_grown(dataset, sizes))
        try:
            record = pack_sample(sample, f"sample {idx}")
        except SampleError as error:
            yield _Loaded(idx, error=pack_error(error))
            continue
        yield _Loaded(idx, record)
        done.append(idx)
        first = describe(sample, strides=False)
        del sample
        if len(done) == 1:
            # see NOTE [ What a sample is made of ]
            new = {name for name, value in vars_of(dataset).items() if before.get(name, before) is not value}
            with recorded_names(dataset) as reads, line:
                place = None if draws else _load_again(load, idx, first)
            yield _LoadedAgain(idx, place, frozenset(reads - new))
        if draws and drawn is None:
            drawn = idx
    if done and keeps:
        yield _Found(None)
        sizes = _sizes(dataset)
        with contextlib.suppress(Exception):
            load(done[0])
        for grown in [each for each, container in _grown(dataset, sizes).items() if not _is_log(container)][:1]:
            yield _Found(f"{name} keeps what it loads: {grown} grows each time that a sample is loaded")
    if line.text is not None and not drawn:
        yield _Found(f"samples of {name} are made with a seed or bytes that the system draws in {line.text}", draws=True)
    yield from map(_Found, _differences_of_batches(dataset, done))


def _sizes(dataset: object) -> dict[str, int]:
    """Return the lengths of the containers without a limit in a dataset and in the user's objects in it, by their names."""
    return {name: len(part) for name, part in parts_of(dataset, follow=is_own) if _may_grow(part)}


def _may_grow(part: Any) -> bool:
    return isinstance(part, list | dict | set | deque) and getattr(part, "maxlen", None) is None


def _grown(dataset: object, before: dict[str, int]) -> dict[str, Any]:
    """Return the containers that are longer than before, by their names."""
    parts = parts_of(dataset, follow=is_own)
    return {name: part for name, part in parts if _may_grow(part) and len(part) > before.get(name, len(part))}


def _is_log(container: Any) -> bool:
    """Whether what a container has got last is a number, a text or a tuple of these."""
    last = [*(container.values() if isinstance(container, dict) else container)][-1]
    return all(isinstance(item, int | float | str) for item in (last if type(last) is tuple else (last,)))


def _differences_of_batches(dataset: Any, indices: list[int]) -> Iterator[str]:
    """Yield where the ``__getitems__`` of a dataset first returns other samples than its ``__getitem__``."""
    load_many, kept = get_many_of(dataset), Kept(own_generators(dataset))
    for order in ([0], [1, 0], [2, 0, 1]) if load_many is not None else ():
        wanted = [indices[at] for at in order if at < len(indices)]
        with contextlib.suppress(Exception):  # then there is nothing to compare
            kept.restore()
            singly = [describe(dataset[idx], strides=False) for idx in wanted]
            kept.restore()
            together = [describe(sample, strides=False) for sample in load_many(wanted)]
            if (place := difference(tuple(singly), tuple(together))) is not None:
                yield f"samples {wanted} of {type(dataset).__name__} are different by __getitems__ ({place:.300})"
                return


def _load_again(load: Callable[[int], object], idx: int, first: object) -> str | None:
    """Load a sample again; return where it differs from its first description. None if it does not."""
    with contextlib.suppress(Exception):  # then there is nothing to compare
        return difference(first, describe(load(idx), strides=False))
    return None
