"""Load a few samples in a child process, to find their structure, and whether they depend on more than their index.

NOTE [ What a sample is made of ]
    The first sample is loaded twice, and must be equal. A load that draws random numbers is not cached: see NOTE [ The audit ].

    Four more things make a sample depend on more than its index:
    - the dataset reads a pipe, a socket or an iterator, see NOTE [ Streams ]. An iterator is looked for in the attributes that
      are read while the first sample is loaded again, without those that loading sets;
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
from typing import Any

from stocache.errors import SampleError, WorkerError
from stocache.samples.indices import spread
from stocache.samples.record_decoder import pack_sample, unpack_sample
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, LineOfSeed
from stocache.system.loading.children import ChildError, SlowError, in_children, pack_error, unpack_error, with_prefix
from stocache.system.loading.code import own_generators
from stocache.system.loading.fallback import loads_only_here, run_here, warn_of_this_process
from stocache.system.loading.streams import find_iterator, is_of_closed_stream
from stocache.system.objects import get_many_of, recorded_names, vars_of
from stocache.system.walking import is_own, parts_of

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
        errors: of samples that could not be loaded, or cannot be kept, by index; and whether the dataset raised the error.
        example: a sample that the user gave in place of the probe, or None.
        reads: attributes of the dataset that samples are made with.
        loaded_here: whether samples were loaded in this process, because a child could not; None if none was loaded.
        finding: the dependence of a sample on more than its index: a sentence without its end. None if there is no other.
        draws: whether that are random numbers, so that the program may be cut.
        keeps: names of the containers in which the dataset keeps something of each sample that it loads.
        begun: the last sample that was begun, or None.
    """

    samples: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, tuple[Exception, bool]] = field(default_factory=dict)
    example: Any = None
    reads: frozenset[str] = frozenset()
    loaded_here: bool | None = None
    finding: str | None = None
    draws: bool = False
    keeps: frozenset[str] = frozenset()
    begun: Any = None

    @property
    def named(self) -> dict[str, Any]:
        """The samples by their names in errors."""
        if self.example is not None:
            return {"example": self.example}
        return {f"sample {idx}": sample for idx, sample in self.samples.items()}

    @property
    def unfit(self) -> Exception | None:
        """The error of the first sample that cannot be kept, if none can."""
        errors = (error for error, raised in self.errors.values() if not raised)
        return None if self.samples else next(errors, None)

    @property
    def failure(self) -> tuple[int, Exception] | None:
        """The first sample and its error, if the dataset raised one for every sample."""
        fails = not self.samples and all(raised for _, raised in self.errors.values())
        return next(((idx, error) for idx, (error, _) in self.errors.items()), None) if fails else None

    def take(self, items: Iterable[tuple[str, Any]]) -> None:
        """Take what `_load_all` yields: names of attributes, each with a value that is new."""
        for name, value in items:
            if name == "samples":
                self.samples[self.begun] = unpack_sample(value)
            elif name == "errors":
                self.errors[self.begun] = unpack_error(value[0]), value[1]
            else:
                setattr(self, name, value if name == "begun" else getattr(self, name) or value)


def probe_samples(
    dataset: object,
    length: int,
    count: int,
    load: Callable[[int], object] | None = None,
    first: Sequence[int] = (),
    stops: bool = False,
) -> Probe:
    """Load ``count`` samples, evenly spread, in a child process. Samples that fail, or cannot be kept, are left out.

    Args:
        load: called in place of ``dataset.__getitem__``, if only a part of the samples is cached.
        first: samples to load first, in the opposite order.
        stops: whether to end with the first sample that draws random numbers, which is not kept.

    Raises:
        WorkerError: the child died before it had loaded a sample.
        Exception: the dataset raises for all samples. The error of the first, with a message that names the probe.
    """
    indices = list(dict.fromkeys([*reversed(first), *spread(length, count)]))
    if not indices:
        return Probe()
    job = partial(_load_all, dataset, load or partial(operator.getitem, dataset), indices, stops)
    probe, name = Probe(), type(dataset).__name__
    reason: Exception | None = None  # to load in this process
    try:
        with contextlib.closing(in_children([job], dataset, _PATIENCE_S)) as items:
            probe.take(items)
    except ChildError as error:
        if isinstance(error, SlowError) and probe.begun is not None:
            logger.warning("sample %d is not loaded after %.0f s. %s.", probe.begun, _PATIENCE_S, _ADVICE)
        else:
            reason = error
    except WorkerError as error:
        if not probe.samples:
            raise WorkerError(f"probing sample {probe.begun}: {error} {_ADVICE}.") from None
        logger.warning("probing sample %s: %s", probe.begun, str(error))
    if any(is_of_closed_stream(error) for error, _ in probe.errors.values()):
        probe.finding = f"{name} reads a pipe or socket that is open in this process, which a child process cannot"
        return probe
    if reason is None and probe.failure is not None:
        idx, problem = probe.failure
        reason = problem if loads_only_here(partial(operator.getitem, dataset, idx), problem) else None
    if reason is not None:
        warn_of_this_process(reason)
        probe = Probe()
        probe.take(run_here(job))
    if probe.failure is not None:
        idx, problem = probe.failure
        raise with_prefix(problem, f"probing sample {idx} of {name}. {_ADVICE}. It raised")
    if probe.finding is None and (iterator := find_iterator(dataset, probe.reads)) is not None:
        probe.finding = f"samples of {name} are made with {iterator}"
    if reason is not None or probe.samples or probe.errors:
        probe.loaded_here = reason is not None
    return probe


def _load_all(dataset: object, load: Callable[[int], object], indices: list[int], stops: bool) -> Iterator[tuple[str, Any]]:
    """Load samples in a child process, and yield what `Probe.take` takes."""
    began, name, line = time.monotonic(), type(dataset).__name__, LineOfSeed()
    done: list[int] = []  # samples that can be kept
    keeps, quick, drawn = frozenset[str](), False, False

    def drawing() -> Iterator[tuple[str, Any]]:
        finding = f"random numbers are drawn to load sample {idx} of {name}"
        if line.text is not None:
            finding = f"samples of {name} are made with a seed or bytes that the system draws in {line.text}"
        yield from (("finding", finding), ("draws", True))

    for idx in indices:
        if len(done) > 1 and time.monotonic() - began > _BUDGET_S:
            break
        yield "begun", idx
        before, sizes, kept, loading = dict(vars_of(dataset)), _sizes(dataset), Kept(own_generators(dataset)), time.monotonic()
        try:
            with line if quick else contextlib.nullcontext():
                sample = load(idx)
        except Exception as error:
            yield "errors", (pack_error(error), True)
            continue
        draws, quick = kept.drawn() or line.text is not None, time.monotonic() - loading < _QUICK_S
        if draws and not drawn:
            drawn = True
            yield from drawing()
            if stops:
                return
        keeps |= _grown(dataset, sizes).keys()
        try:
            yield "samples", pack_sample(sample, f"sample {idx}")
        except SampleError as error:
            yield "errors", (pack_error(error), False)
            continue
        done.append(idx)
        first = describe(sample, strides=False)
        del sample
        if len(done) == 1:
            # see NOTE [ What a sample is made of ]
            new = {key for key, value in vars_of(dataset).items() if before.get(key, before) is not value}
            with recorded_names(dataset) as reads, line:
                place = None if draws else _load_again(load, idx, first)
            if place is not None:
                yield "finding", f"sample {idx} of {name} was different when it was loaded again ({place:.300})"
            yield "reads", frozenset(reads - new)
    if done and keeps:
        yield "keeps", keeps
        sizes = _sizes(dataset)
        with contextlib.suppress(Exception):
            load(done[0])
        for grown in [each for each, container in _grown(dataset, sizes).items() if not _is_log(container)][:1]:
            yield "finding", f"{name} keeps what it loads: {grown} grows each time that a sample is loaded"
    if line.text is not None and not drawn:
        yield from drawing()
    yield from (("finding", finding) for finding in _differences_of_batches(dataset, done))


def _containers(dataset: object) -> dict[str, Any]:
    """Return the containers without a limit in a dataset and in the user's objects in it, by their names."""
    parts = [(name, part) for name, part in parts_of(dataset, follow=is_own) if isinstance(part, list | dict | set | deque)]
    return {name: part for name, part in parts if not isinstance(part, deque) or part.maxlen is None}


def _sizes(dataset: object) -> dict[str, int]:
    return {name: len(part) for name, part in _containers(dataset).items()}


def _grown(dataset: object, before: dict[str, int]) -> dict[str, Any]:
    """Return the containers that are longer than before, by their names."""
    return {name: part for name, part in _containers(dataset).items() if len(part) > before.get(name, len(part))}


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
