"""Measure the transforms of a dataset, and try out where to cut them, in child processes or with copies of all of it."""

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from stocache.errors import SampleError
from stocache.samples.record_decoder import pack_sample
from stocache.samples.record_encoder import EncodedSample
from stocache.system.describe import describe
from stocache.system.generators import GENERATORS, Kept, own_generators, parts_of, seed_all
from stocache.system.rng import RngMonitor
from stocache.transforms.patching import Site, StandIn, find_transform, patch
from stocache.transforms.pipelines import Pipeline
from stocache.transforms.recording import Deviation, NeedsValue, Program
from stocache.transforms.splitting import BoundPlan, CutPlan, Split, next_arguments, open_pipelines

Example: TypeAlias = tuple[int, int]
"""The index of a sample in the dataset, and in the leaf that makes it."""

_SLOW_S = 2.0  # after which no further sample is begun
_ROUNDS = 8


class CannotSplit(Exception):
    """The reason why transforms cannot be split. Never raised to users."""


class MeasuredCall(NamedTuple):
    """A measured call of a transform.

    Attributes:
        site: where the dataset holds the transform.
        style: how many arguments it is called with, and the names of others.
        upstream: the number of the call whose output is its input, or None.
        steps: how many steps the transform has.
        seconds: of each step of its deterministic beginning.
        sizes: bytes of the value before and after each of these steps; None where it cannot be cached.
        result_size: bytes of its output.
        total_s: seconds of the call.
        draws: whether it drew random numbers.
    """

    site: Site
    style: tuple[Any, ...]
    upstream: int | None
    steps: int
    seconds: tuple[float, ...]
    sizes: tuple[int | None, ...]
    result_size: int
    total_s: float
    draws: bool

    @property
    def rest_s(self) -> float:
        """Seconds after the deterministic beginning."""
        return self.total_s - sum(self.seconds)


class MeasuredSample(NamedTuple):
    """A measured load of a sample.

    Attributes:
        size: bytes of the sample, as the dataset returns it.
        load_s: seconds to load it.
        calls: the calls of transforms, in order.
        decodes: whether the input of its transforms is an image.
    """

    size: int
    load_s: float
    calls: tuple[MeasuredCall, ...]
    decodes: bool


class LoadedPart(NamedTuple):
    """The cached part of a sample, loaded in one process.

    Attributes:
        idx: of the sample.
        record: the part; None where it is only compared.
        description: of the part; see `describe`.
        drawn: whether random numbers were drawn, or seeds set, while it was loaded.
    """

    idx: int
    record: bytes | None
    description: Any
    drawn: bool = False


# ---------------------------------------------------------------------------------------------------- samples and their parts


def make_plain(dataset: Any, steps: Sequence[Any], indices: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
    """Yield rounds, indices and descriptions of samples as the dataset makes them, in up to `_ROUNDS` rounds.

    Leaves out samples that fail in the first round. When loading is slow, no further sample is begun in the first round, and no
    third round.
    """
    began, loaded = time.monotonic(), list[int]()
    for number in range(_ROUNDS):
        with _round(number, steps):
            for idx in loaded if number else indices:
                try:
                    description = describe(dataset[idx], strides=False)
                except Exception as error:
                    if not number:  # the probe reports it
                        continue
                    description = _describe_failure(error)
                if not number:
                    loaded.append(idx)
                yield number, idx, description
                if not number and time.monotonic() - began > _SLOW_S:
                    break
        if number and time.monotonic() - began > _SLOW_S:
            return


def finish_parts(
    leaf: Any, plan: CutPlan, steps: Sequence[Any], parts: Mapping[int, tuple[int, Any]], rounds: int
) -> Iterator[tuple[int, int, Any]]:
    """Yield the same as `make_plain`, for samples whose cached parts were loaded elsewhere.

    Args:
        parts: by the index of the sample: its index in the leaf, and the part.
    """
    bound = BoundPlan(leaf, plan)
    for number in range(rounds):
        with _round(number, steps):
            for idx, (leaf_idx, part) in parts.items():
                try:
                    description = describe(bound.finish(leaf_idx, copy.deepcopy(part)), strides=False)
                except Exception as error:
                    description = _describe_failure(error)
                yield number, idx, description


def _describe_failure(error: Exception) -> Any:
    return "raised", type(error).__name__, str(error)


@contextlib.contextmanager
def _round(number: int, steps: Sequence[Any]) -> Iterator[None]:
    """Seed the generators. In every second round, random steps happen for certain."""
    seed_all([number] * len(GENERATORS))
    chances: list[tuple[dict[str, Any], str, float]] = []
    for _, part in parts_of(list(steps)) if number % 2 else ():
        attributes = getattr(part, "__dict__", {})
        chances += [(attributes, name, attributes[name]) for name in ("p", "prob") if isinstance(attributes.get(name), float)]
    for attributes, name, _ in chances:
        attributes[name] = 1.0
    try:
        yield
    finally:
        for attributes, name, chance in reversed(chances):  # a step may be met twice
            attributes[name] = chance


def record_programs(
    leaf: Any, plan: CutPlan, steps: Sequence[Any], examples: Sequence[Example], rounds: int
) -> Iterator[Program]:
    """Yield how samples are made in each round.

    Raises:
        CannotSplit: code needs the value of a deferred output.
    """
    bound = BoundPlan(leaf, plan)
    for number in range(rounds):
        with _round(number, steps):
            for _, leaf_idx in examples:
                try:
                    recorder, sample = bound.record(leaf_idx)
                except NeedsValue as error:
                    raise CannotSplit(str(error)) from None
                except Exception:
                    if not number:
                        raise
                    continue  # where a random step must not always happen
                yield recorder.plan(sample)


def load_parts(leaf: Any, plan: CutPlan, examples: Sequence[Example], allow_pickle: bool) -> Iterator[LoadedPart]:
    """Load the cached parts of samples.

    Raises:
        CannotSplit: they are not made as planned, or cannot be cached.
    """
    bound = BoundPlan(leaf, plan)
    for idx, leaf_idx in examples:
        before = Kept(own_generators(leaf))
        try:
            recorder, sample = bound.record(leaf_idx, plan.program)
            part = recorder.separate(sample)
            EncodedSample(part, allow_pickle=allow_pickle)
        except (Deviation, NeedsValue, SampleError) as error:
            raise CannotSplit(str(error)) from None
        yield LoadedPart(idx, pack_sample(part), describe(part, strides=False), before.drawn())


def load_with_old_split(old: Split, examples: Sequence[Example]) -> Iterator[LoadedPart]:
    """Load the cached parts of samples with the transforms that were split before."""
    old.restore()
    for idx, _ in examples:
        yield LoadedPart(idx, None, describe(old.load(idx), strides=False))


# ---------------------------------------------------------------------------------------------------- measuring


def measure_steps(leaf: Any, examples: Sequence[Example], encoded: bool, allow_pickle: bool) -> Iterator[MeasuredSample]:
    """Load samples, and yield the time and size of each step of their transforms."""
    pipelines, calls = open_pipelines(leaf, encoded), list[_MeteredCall]()
    meters = {site: _MeasuredTransform(site, pipeline, calls, allow_pickle) for site, pipeline in pipelines.items()}
    patched = patch(leaf, {site: StandIn(find_transform(leaf, site), meter) for site, meter in meters.items()})
    for _, leaf_idx in examples:
        calls.clear()
        began = time.perf_counter()
        sample = patched[leaf_idx]
        load_s = time.perf_counter() - began - sum(call.overhead_s for call in calls)
        decodes = any(type(value).__module__.startswith("PIL.") for value in (calls[0].args if calls else ()))
        measured = tuple(call.measured(_upstream(calls, number)) for number, call in enumerate(calls))
        yield MeasuredSample(_encoded_size(sample, allow_pickle) or 0, load_s, measured, decodes)


class _MeteredCall(NamedTuple):
    """A call of a transform, its result, and the measurements."""

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reading: Mapping[str, Any]
    overhead_s: float

    def measured(self, upstream: int | None) -> MeasuredCall:
        """Return the measurements without the values. ``upstream``: see `MeasuredCall`."""
        return MeasuredCall(self.site, (len(self.args), *sorted(self.kwargs)), upstream, **self.reading)


class _MeasuredTransform:
    """Runs a transform, with its deterministic beginning step by step, and notes times and sizes in ``calls``."""

    def __init__(self, site: Site, pipeline: Pipeline, calls: list[_MeteredCall], allow_pickle: bool) -> None:
        self._site, self._pipeline, self._calls, self._allow_pickle = site, pipeline, calls, allow_pickle
        self._overhead_s = 0.0  # of the call, spent on noting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began, self._overhead_s = time.perf_counter(), 0.0
        first, count = (args, kwargs), len(self._pipeline.steps)
        sizes, seconds, done, call_monitor = [self._size(args, kwargs)], [], 0, RngMonitor()
        result: Any = None
        while done < (0 if args and kwargs else self._pipeline.deterministic):
            monitor, step_began = RngMonitor(), time.perf_counter()
            result = self._pipeline.part(done, done + 1)(*args, **kwargs)
            step_s, done = time.perf_counter() - step_began, done + 1
            args, kwargs = next_arguments(result, args, kwargs)
            if monitor.changed():  # then the step is random, whatever its class
                break
            seconds.append(step_s)
            sizes.append(self._size(args, kwargs))
        if done < count:
            result = self._pipeline.part(done)(*args, **kwargs)
        total_s = time.perf_counter() - began - self._overhead_s
        reading = {"steps": count, "seconds": tuple(seconds), "sizes": tuple(sizes), "total_s": total_s}
        reading |= {"result_size": self._size((result,), {}) or 0, "draws": call_monitor.changed()}
        self._calls.append(_MeteredCall(self._site, *first, result, reading, self._overhead_s))
        return result

    def _size(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        began = time.perf_counter()
        size = _encoded_size([*args, *kwargs.values()], self._allow_pickle)
        self._overhead_s += time.perf_counter() - began
        return size


def _encoded_size(value: Any, allow_pickle: bool) -> int | None:
    try:
        data, integers = EncodedSample(value, allow_pickle=allow_pickle).pack()
    except SampleError:
        return None
    return len(data) + 4 * len(integers) + 16


def _upstream(calls: Sequence[_MeteredCall], number: int) -> int | None:
    """Return the number of the last call whose output is an input of a call."""
    call, upstream = calls[number], None
    inputs = [value for value in (*call.args, *call.kwargs.values()) if not isinstance(value, int | float | str | bytes | None)]
    for earlier in range(number):
        result = calls[earlier].result
        parts = result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else ()
        if any(value is output for value in inputs for output in (result, *parts)):
            upstream = earlier
    return upstream
