"""Load a few samples of a dataset in child processes, to measure its transforms and to try out where to cut them.

NOTE [ Two loads ]
    A sample that is tried is loaded twice, in two processes that load the samples in opposite orders. The first load runs
    the transforms, half of the time step by step, to measure them. The second one records how the sample is made, for the cut
    that was chosen, and keeps the part to cache. A third process, which has loaded nothing, finishes the parts, each from the
    random numbers of its first load. All samples must come out equal: then what is before the cut is not random, and does not
    depend on the samples that were loaded before.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from stocache.datasets.transforms.dataset_tree import DatasetTree
from stocache.datasets.transforms.patching import Site, StandIn, find_transform, patch
from stocache.datasets.transforms.pipelines import Pipeline
from stocache.datasets.transforms.recording import Deviation, NeedsValue, Program, Recorder
from stocache.datasets.transforms.splitting import BoundPlan, CutPlan, Split, next_arguments, open_pipelines
from stocache.errors import SampleError
from stocache.samples.record_decoder import pack_sample, unpack_sample
from stocache.samples.record_encoder import EncodedSample
from stocache.system.describe import describe
from stocache.system.generators import GENERATORS, Kept, own_generators, parts_of, seed_all
from stocache.system.rng import RngMonitor

_SLOW_S = 10.0  # after which no further sample is begun, once there are some
_FEW = 2  # samples of each kind that are loaded in any case
DIFFERENT_CALLS = "it does not call its transforms in the same way for each sample"


class CannotSplit(Exception):
    """The reason why transforms cannot be split. Never raised to users."""


class Example(NamedTuple):
    """A sample to try.

    Attributes:
        idx: in the dataset.
        turn: how many samples of leaves of its kind come before it; the seed of its random numbers.
    """

    idx: int
    turn: int

    @property
    def is_measured(self) -> bool:
        """Whether its transforms are run step by step when it is loaded first."""
        return self.turn % 4 in (0, 3)

    @contextlib.contextmanager
    def seeded(self, leaf: object, encoded: bool) -> Iterator[None]:
        """Seed the generators. In every second turn, the random steps of the leaf happen for certain."""
        seed_all([self.turn] * len(GENERATORS))
        chances: list[tuple[dict[str, Any], str, float]] = []
        for _, part in parts_of(random_steps(open_pipelines(leaf, encoded))) if self.turn % 2 else ():
            attributes = getattr(part, "__dict__", {})
            names = [name for name in ("p", "prob") if isinstance(attributes.get(name), float)]
            chances += [(attributes, name, attributes[name]) for name in names]
        for attributes, name, _ in chances:
            attributes[name] = 1.0
        try:
            yield
        finally:
            for attributes, name, chance in reversed(chances):  # a step may be met twice
                attributes[name] = chance


def random_steps(pipelines: Mapping[Site, Pipeline]) -> list[Any]:
    """Return the steps of transforms that may be random."""
    return [step for pipeline in pipelines.values() for step in pipeline.steps[pipeline.deterministic :]]


class MeasuredCall(NamedTuple):
    """A measured call of a transform.

    Attributes:
        site: where the dataset holds the transform.
        style: how many arguments it is called with, and the names of others.
        upstream: the number of the call whose output is its input, or None.
        decodes: whether its input is an image.
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
    decodes: bool
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
    """A measured load of a sample: its bytes, as the dataset returns it, the seconds, and the calls of transforms, in order."""

    size: int
    load_s: float
    calls: tuple[MeasuredCall, ...]


class SecondLoads(NamedTuple):
    """The second loads of samples.

    Attributes:
        programs: how samples are made after the cache, by the kind of their leaf.
        parts: the parts to cache, and their descriptions; see `describe`.
        problems: why a sample has no such part.
    """

    programs: dict[int, Program]
    parts: dict[Example, tuple[bytes, Any]]
    problems: dict[Example, str]


def load_examples(
    dataset: Any, tree: DatasetTree, examples: Sequence[Example], encoded: bool, allow_pickle: bool
) -> Iterator[tuple[Example, Any, MeasuredSample | None]]:
    """Load samples first, as the dataset makes them, and yield their descriptions and measurements.

    Those that fail are left out. So are the last ones, when loading is slow.
    """
    meters: dict[int, _Meter] = {}
    began = time.monotonic()
    for example in examples:
        if example.turn >= _FEW and time.monotonic() - began > _SLOW_S:
            return
        number, leaf_idx = tree.locate(example.idx)
        leaf, measured = tree.leaves[number], None
        if example.is_measured and number not in meters:
            meters[number] = _Meter(leaf, encoded, allow_pickle)
        with contextlib.suppress(Exception), example.seeded(leaf, encoded):  # the probe reports it
            if example.is_measured:
                sample, measured = meters[number].load(leaf_idx)
            else:
                sample = dataset[example.idx]
            yield example, describe(sample, strides=False), measured


def record_examples(
    tree: DatasetTree, examples: Sequence[Example], plans: Mapping[int, CutPlan], allow_pickle: bool
) -> Iterator[SecondLoads | None]:
    """Load samples for the second time. Yield None after each load, and at the end the results.

    Raises:
        CannotSplit: code needs the value of a deferred output; or samples are not all made in the same way.
    """
    bounds: dict[int, BoundPlan] = {}
    made: list[tuple[Example, int, Recorder, Any]] = []
    loads = SecondLoads({}, {}, {})
    for example in reversed(examples):
        bound, kind, leaf_idx = _bound(bounds, tree, example, plans)
        with example.seeded(bound.dataset, bound.plan.encoded):
            kept = Kept(own_generators(bound.dataset))
            try:
                made.append((example, kind, *bound.record(leaf_idx)))
            except NeedsValue as error:
                raise CannotSplit(str(error)) from None
            except Exception:
                if example.turn % 2 == 0:
                    raise
                continue  # where a random step must not always happen
            if kept.drawn():
                loads.problems[example] = "it draws or seeds random numbers outside of its transforms"
        yield None
    try:
        for _, kind, recorder, sample in reversed(made):
            program = recorder.plan(sample)
            loads.programs[kind] = loads.programs[kind].merged(program) if kind in loads.programs else program
        for example, kind, recorder, sample in made:
            part = recorder.separate_as(loads.programs[kind], sample)
            try:
                EncodedSample(part, allow_pickle=allow_pickle)
                loads.parts[example] = pack_sample(part), describe(part, strides=False)
            except SampleError as error:
                loads.problems.setdefault(example, str(error))
    except Deviation:
        raise CannotSplit(DIFFERENT_CALLS) from None
    except NeedsValue as error:
        raise CannotSplit(str(error)) from None
    yield loads


def load_with_old_split(old: Split, examples: Sequence[Example]) -> Iterator[tuple[Example, Any]]:
    """Yield the descriptions of the parts of samples that are cached with the split of before."""
    old.restore()
    for example in examples:
        yield example, describe(old.load(example.idx), strides=False)


def finish_parts(
    tree: DatasetTree, parts: Mapping[Example, bytes], plans: Mapping[int, CutPlan]
) -> Iterator[tuple[Example, Any]]:
    """Yield the descriptions of samples whose cached parts were loaded elsewhere, in the order of their first loads."""
    bounds: dict[int, BoundPlan] = {}
    for example, part in parts.items():
        bound, _, leaf_idx = _bound(bounds, tree, example, plans)
        with example.seeded(bound.dataset, bound.plan.encoded):
            try:
                yield example, describe(bound.finish(leaf_idx, unpack_sample(part)), strides=False)
            except Exception as error:
                yield example, f"raised {type(error).__name__}: {error}"


def _bound(
    bounds: dict[int, BoundPlan], tree: DatasetTree, example: Example, plans: Mapping[int, CutPlan]
) -> tuple[BoundPlan, int, int]:
    """Return the plan of the leaf that makes a sample, applied; its kind; and the index of the sample there."""
    number, leaf_idx = tree.locate(example.idx)
    kind = tree.kinds[number]
    if number not in bounds:
        bounds[number] = BoundPlan(tree.leaves[number], plans[kind])
    return bounds[number], kind, leaf_idx


class _Meter:
    """Loads samples of a leaf, and measures each step of the deterministic beginnings of their transforms."""

    def __init__(self, leaf: object, encoded: bool, allow_pickle: bool) -> None:
        self._allow_pickle, self._overhead_s = allow_pickle, 0.0
        self._calls: list[tuple[MeasuredCall, Any]] = []  # with their results
        pipelines = open_pipelines(leaf, encoded)
        self._patched = patch(
            leaf,
            {site: StandIn(find_transform(leaf, site), partial(self._run, site, its)) for site, its in pipelines.items()},
        )

    def load(self, leaf_idx: int) -> tuple[Any, MeasuredSample]:
        """Return a sample, and the measurements."""
        self._calls, self._overhead_s = [], 0.0
        began = time.perf_counter()
        sample = self._patched[leaf_idx]
        load_s = time.perf_counter() - began - self._overhead_s
        return sample, MeasuredSample(self._size(sample) or 0, load_s, tuple(call for call, _ in self._calls))

    def _run(self, site: Site, pipeline: Pipeline, /, *args: Any, **kwargs: Any) -> Any:
        began, overhead_s, count = time.perf_counter(), self._overhead_s, len(pipeline.steps)
        inputs = [*args, *kwargs.values()]
        style, upstream = (len(args), *sorted(kwargs)), self._upstream(inputs)
        decodes = any(type(value).__module__.startswith("PIL.") for value in args)
        sizes, seconds, done, call_monitor = [self._size(inputs)], list[float](), 0, RngMonitor()
        result: Any = None
        while done < (0 if args and kwargs else pipeline.deterministic):
            monitor, step_began = RngMonitor(), time.perf_counter()
            result = pipeline.part(done, done + 1)(*args, **kwargs)
            step_s, done = time.perf_counter() - step_began, done + 1
            args, kwargs = next_arguments(result, args, kwargs)
            if monitor.changed():  # then the step is random, whatever its class
                break
            seconds.append(step_s)
            sizes.append(self._size([*args, *kwargs.values()]))
        if done < count:
            result = pipeline.part(done)(*args, **kwargs)
        total_s, draws = time.perf_counter() - began - (self._overhead_s - overhead_s), call_monitor.changed()
        measured = tuple(seconds), tuple(sizes), self._size([result]) or 0, total_s, draws
        self._calls.append((MeasuredCall(site, style, upstream, decodes, count, *measured), result))
        return result

    def _upstream(self, inputs: Sequence[object]) -> int | None:
        """Return the number of the last call whose output is one of the inputs."""
        inputs = [value for value in inputs if not isinstance(value, int | float | str | bytes | None)]
        upstream = None
        for number, (_, result) in enumerate(self._calls):
            parts = result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else ()
            if any(value is output for value in inputs for output in (result, *parts)):
                upstream = number
        return upstream

    def _size(self, value: object) -> int | None:
        began = time.perf_counter()
        try:
            data, integers = EncodedSample(value, allow_pickle=self._allow_pickle).pack()
        except SampleError:
            return None
        finally:
            self._overhead_s += time.perf_counter() - began
        return len(data) + 4 * len(integers) + 16
