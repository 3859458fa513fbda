"""Measure the transforms of a dataset, and try out where to cut them: the functions here run in child processes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from stocache.errors import SampleError
from stocache.samples.record_encoder import PackedRecord, Record, pack_sample
from stocache.system.rng import RngMonitor, disturb, fingerprint
from stocache.transforms.part_transform import Path, find_paths
from stocache.transforms.patching import Call, CallLog, LoggedTransform, Site, patch
from stocache.transforms.pipelines import Pipeline
from stocache.transforms.splitting import (
    BoundPlan,
    CutPlan,
    PlannedCall,
    accept_packed,
    call_style,
    finish_call,
    open_pipelines,
    pack_arguments,
)

Example: TypeAlias = tuple[int, int]
"""The index of a sample in the dataset, and in the leaf that makes it."""

_SLOW_S = 2.0  # after which no further sample is begun


class CannotSplit(Exception):
    """The reason why transforms cannot be split. Never raised to users."""


class MeasuredCall(NamedTuple):
    """A measured call of a transform.

    Attributes:
        site: where the dataset holds the transform.
        style: how it is called; see `PlannedCall`.
        upstream: the number of the call whose output is its input, or None.
        steps: how many steps the transform has.
        seconds: of each step of its deterministic beginning.
        sizes: bytes of the value before and after each of these steps; None where it cannot be cached.
        result_size: bytes of its output.
        total_s: seconds of the call.
        draws: whether it drew random numbers.
    """

    site: Site
    style: str
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


class Trial(NamedTuple):
    """A sample that was made with a cut.

    Attributes:
        calls: of the transforms that are cut, with the paths to their output in the sample.
        seeded: whether the dataset sets the seed of random numbers while it loads a sample.
        repeated: see `CutPlan`.
    """

    idx: int
    record: PackedRecord
    calls: tuple[PlannedCall, ...]
    seeded: bool
    repeated: tuple[tuple[Path, Path], ...]


def load_samples(dataset: Any, indices: Sequence[int]) -> Iterator[tuple[int, PackedRecord]]:
    """Yield indices and samples as the dataset makes them. Leaves out samples that fail; stops when loading is slow."""
    began = time.monotonic()
    for idx in indices:
        try:
            sample = dataset[idx]
        except Exception:  # the probe reports it
            continue
        yield idx, pack_sample(sample)
        if time.monotonic() - began > _SLOW_S:
            return


# ---------------------------------------------------------------------------------------------------- measuring


def measure(leaf: Any, examples: Sequence[Example], encoded: bool) -> Iterator[MeasuredSample]:
    """Load samples, and yield the time and size of each step of their transforms."""
    pipelines, log = open_pipelines(leaf, encoded), CallLog()
    meters = {site: _Meter(pipeline) for site, pipeline in pipelines.items()}
    patched = patch(leaf, {site: LoggedTransform(site, pipelines[site].whole, meter, log) for site, meter in meters.items()})
    for _, leaf_idx in examples:
        log.calls.clear()
        began = time.perf_counter()
        sample = patched[leaf_idx]
        load_s = time.perf_counter() - began
        readings = {site: iter(meter.take_readings()) for site, meter in meters.items()}
        measured = tuple(_measured(log.calls, number, next(readings[call.site])) for number, call in enumerate(log.calls))
        inputs = log.calls[0].args if log.calls else ()
        overhead_s = sum(meter.overhead_s for meter in meters.values())
        decodes = any(type(value).__module__.startswith("PIL.") for value in inputs)
        yield MeasuredSample(_encoded_size(sample) or 0, load_s - overhead_s, measured, decodes)


class _Meter:
    """Runs a transform, with its deterministic beginning step by step, and notes times and sizes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._readings: list[dict[str, Any]] = []
        self.overhead_s = 0.0  # spent on noting, for the readings that are not yet taken

    def take_readings(self) -> list[dict[str, Any]]:
        """Return the readings of the calls since the last time."""
        readings, self._readings = self._readings, []
        return readings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._readings:
            self.overhead_s = 0.0
        style, value = call_style(args, kwargs), pack_arguments(args, kwargs)
        began, overhead_s = time.perf_counter(), self.overhead_s
        sizes, seconds, done, call_monitor = [self._size(value)], [], 0, RngMonitor()
        while done < (0 if style == "mixed" else self._pipeline.deterministic):
            monitor, step_began = RngMonitor(), time.perf_counter()
            value = accept_packed(self._pipeline.part(done, done + 1), style)(value)
            step_s, done = time.perf_counter() - step_began, done + 1
            if monitor.changed():  # then the step is random, whatever its class
                break
            seconds.append(step_s)
            sizes.append(self._size(value))
        if done < len(self._pipeline.steps):
            value = accept_packed(self._pipeline.part(done), style)(value)
        total_s = time.perf_counter() - began - (self.overhead_s - overhead_s)
        reading = {"steps": len(self._pipeline.steps), "seconds": tuple(seconds), "sizes": tuple(sizes), "total_s": total_s}
        self._readings.append(reading | {"result_size": self._size(value) or 0, "draws": call_monitor.changed()})
        return value

    def _size(self, value: Any) -> int | None:
        began = time.perf_counter()
        size = _encoded_size(value)
        self.overhead_s += time.perf_counter() - began
        return size


def _encoded_size(value: Any) -> int | None:
    try:
        data, integers = Record(value).pack()
    except SampleError:
        return None
    return len(data) + 4 * len(integers) + 16


def _measured(calls: Sequence[Call], number: int, reading: Mapping[str, Any]) -> MeasuredCall:
    call, upstream = calls[number], None
    inputs = [value for value in (*call.args, *call.kwargs.values()) if not isinstance(value, int | float | str | bytes | None)]
    for earlier in range(number):
        result = calls[earlier].result
        parts = result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else ()
        if any(value is output for value in inputs for output in (result, *parts)):
            upstream = earlier
    return MeasuredCall(call.site, call_style(call.args, call.kwargs), upstream, **reading)


# ---------------------------------------------------------------------------------------------------- trying out


def try_out(leaf: Any, plan: CutPlan, examples: Sequence[Example]) -> Iterator[Trial]:
    """Load samples with a cut and finish each at once, so that random numbers are drawn as without a cut.

    Raises:
        CannotSplit: the output of a transform is not in the sample.
    """
    bound = BoundPlan(leaf, plan)
    for idx, leaf_idx in examples:
        before = fingerprint()
        sample, calls = bound.load_with_calls(leaf_idx)
        after = fingerprint()
        planned, repeated = _separate(calls, [_find_output(call, plan.cuts[call.site], sample) for call in calls])
        for call in planned:
            sample = finish_call(sample, call, accept_packed(bound.pipelines[call.site].part(call.cut), call.style))
        record, seeded = pack_sample(sample), False
        if idx == examples[-1][0] and before != after:  # it draws numbers itself; or sets the seed for its transforms
            disturb()
            bound.load_with_calls(leaf_idx)
            seeded = any(first == second != old for first, second, old in zip(after, fingerprint(), before, strict=True))
        yield Trial(idx, record, planned, seeded, repeated)


def _separate(
    calls: Sequence[Call], planned: Sequence[PlannedCall]
) -> tuple[tuple[PlannedCall, ...], tuple[tuple[Path, Path], ...]]:
    """Give calls with one and the same output one path each: an image of which several views are made.

    Returns:
        The planned calls, and `CutPlan.repeated`.
    """
    separated, repeated = list(planned), []
    for number, call in enumerate(calls):
        same_output = [other for other, other_call in enumerate(calls) if other_call.result is call.result]
        paths = planned[number].parts[0][1]
        if len(same_output) > 1 and len(same_output) == len(paths):
            path = paths[same_output.index(number)]
            separated[number] = planned[number]._replace(parts=((None, (path,)),))
            repeated += [(path, paths[0])] * (path != paths[0])
    return tuple(separated), tuple(repeated)


def _find_output(call: Call, cut: int, sample: Any) -> PlannedCall:
    """Return a call with the paths to its output in the sample.

    Raises:
        CannotSplit: the output is not in the sample.
    """
    style, result = call_style(call.args, call.kwargs), call.result
    paths = find_paths(sample, result)
    parts: tuple[tuple[Any, tuple[Path, ...]], ...] = ((None, paths),)
    if not paths and style == "args" and isinstance(result, tuple):
        parts = tuple((key, find_paths(sample, value)) for key, value in enumerate(result))
    elif not paths and style == "kwargs" and isinstance(result, dict):
        parts = tuple((key, find_paths(sample, value)) for key, value in result.items())
    if not all(part_paths for _, part_paths in parts):
        raise CannotSplit(f"the output of its {call.site} is not in the sample as it is")
    return PlannedCall(call.site, cut, style, parts)
