"""Split the transforms of a dataset: their beginning runs before the cache, the rest after it.

NOTE [ Splitting ]
    A transform draws no random number before its first random step. So the steps before it may run once, before the cache, and
    the other steps each time, after it. The samples stay the same, bit for bit, and so do the random numbers.

    The output of the other steps is deferred: the operations of the dataset on it are recorded and run again after the cache
    (recording.py). A patched dataset (patching.py) loads the part that is cached. Before that, some samples are made in both
    ways, with several seeds, and are compared (trials.py). If they differ, nothing is split.

    Every later load is checked as well. If a load differs from the plan, the dataset makes that sample itself each time, and
    the sample is not cached.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from stocache.datasets.transforms.dataset_tree import DatasetTree
from stocache.datasets.transforms.deferred import holds_deferred, recorded_conversions
from stocache.datasets.transforms.encoded import open_loader
from stocache.datasets.transforms.huggingface import ReadTransform, find_read_transform
from stocache.datasets.transforms.patching import Site, StandIn, find_holder, find_sites, find_transform, patch
from stocache.datasets.transforms.pipelines import Pipeline, open_pipeline, step_text
from stocache.datasets.transforms.recording import Deviation, Program, Recorder, Rest
from stocache.system.generators import Kept, in_worker_thread, own_generators

logger = logging.getLogger("stocache")


class CutPlan(NamedTuple):
    """How the transforms of one kind of dataset are split.

    Attributes:
        cuts: for each transform that is called, how many of its steps run before the cache.
        program: the steps that run after the cache.
        encoded: whether files are cached as they are, and decoded after the cache.
        reads: whether the dataset is one of Hugging Face that transforms samples when they are read.
    """

    cuts: dict[Site, int]
    program: Program = Program()
    encoded: bool = False
    reads: bool = False

    @property
    def has_rest(self) -> bool:
        """Whether anything runs after the cache."""
        return bool(self.program.steps) or self.reads


class UnplannedSample:
    """Takes the place of a sample that is not made as planned, and cannot be cached: the dataset makes it in `finish`."""

    def __reduce__(self) -> Any:
        raise TypeError("it was made in another way than those that were probed")


class BoundPlan:
    """A plan, applied to one dataset in one process.

    Args:
        dataset: makes the samples.
        plan: where its transforms are cut.
    """

    def __init__(self, dataset: Any, plan: CutPlan) -> None:
        self.dataset, self.plan = dataset, plan
        self._local, self._warned = threading.local(), False
        self._snapshot, self._own = _take_snapshot(dataset), own_generators(dataset)
        self.pipelines = open_pipelines(dataset, plan.encoded)
        self.before = {site: self.pipelines[site].steps[:cut] for site, cut in plan.cuts.items()}
        self._rests: dict[Rest, Callable[..., Any]] = {}
        self._patched = patch(dataset, {site: self._stand_in(site, pipeline) for site, pipeline in self.pipelines.items()})

    def _stand_in(self, site: Site, pipeline: Pipeline) -> StandIn:
        cut = self.plan.cuts.get(site, pipeline.deterministic)
        steps = {
            id(step): StandIn(step, partial(self._run_step, site, number) if number >= cut else step)
            for number, step in enumerate(pipeline.steps)
        }
        return StandIn(find_transform(self.dataset, site), partial(self._run, site, cut), steps)

    def _run(self, site: Site, cut: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run a transform up to where it is cut, and defer the rest."""
        pipeline = self.pipelines[site]
        if holds_deferred((args, kwargs)):
            cut = 0
        if cut:
            result = pipeline.part(0, cut)(*args, **kwargs)
            if cut == len(pipeline.steps):
                return result
            args, kwargs = next_arguments(result, args, kwargs)
        return self._local.recorder.record(Rest(site, cut), args, kwargs)

    def _run_step(self, site: Site, number: int, /, *args: Any, **kwargs: Any) -> Any:
        return self._local.recorder.record(Rest(site, number, number + 1), args, kwargs)

    def _open_rest(self, rest: Rest) -> Callable[..., Any]:
        if rest not in self._rests:
            pipeline = self.pipelines[rest.site]
            self._rests[rest] = pipeline.part(rest.begin) if rest.end is None else pipeline.steps[rest.begin]
        return self._rests[rest]

    def has_changed(self) -> bool:
        """Whether a transform of the dataset has been set or changed since this was made."""
        for attributes, name, value, items in self._snapshot:
            if attributes.get(name) is not value or (items is not None and _items(value) != items):
                return True
        return any(pipeline.has_changed() for pipeline in self.pipelines.values())

    def restore(self) -> None:
        """Put the transforms of the dataset back. Only for a child that then ends."""
        containers = [container for pipeline in self.pipelines.values() for container in pipeline.snapshot]
        for attributes, name, value, items in self._snapshot:
            attributes[name] = value
            if isinstance(value, dict) and items is not None:
                value.update(zip(value, items, strict=False))
            elif items is not None:
                containers.append((value, tuple(items)))
        for container, steps in containers:
            if isinstance(container, list):
                container[:] = steps

    def record(self, idx: int, program: Program | None = None) -> tuple[Recorder, Any]:
        """Return how sample ``idx`` is made, and the sample, in which outputs of transforms are deferred.

        Args:
            program: the plan. None runs the transforms as well, to plan.
        """
        recorder = self._local.recorder = Recorder(program, self._open_rest, self._own)
        try:
            with recorded_conversions:
                return recorder, self._patched[idx]
        finally:
            self._local.recorder = None  # it holds values

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        if not self.plan.program.steps:
            return self.dataset[idx]
        before = Kept(self._own, not in_worker_thread())
        try:
            recorder, sample = self.record(idx, self.plan.program)
            return recorder.separate(sample)
        except OSError:
            raise
        except Exception as error:  # the sample is made in another way; or loading fails, and will fail again
            reason = error
            before.restore()
        if not self._warned:
            self._warned = True
            logger.warning(
                "sample %d of %s does not call its transforms as the probed samples do (%s). It is not cached, and "
                "neither are others like it, without further warning.", idx, type(self.dataset).__name__, str(reason),
            )  # fmt: skip
        return UnplannedSample()

    def finish(self, idx: int, sample: Any) -> Any:
        """Return sample ``idx``, of which a part was cached, after the rest of its transforms."""
        program = self.plan.program
        if type(sample) is UnplannedSample:
            return self.dataset[idx]
        if not program.steps:
            return sample
        before = Kept(self._own, not in_worker_thread())
        try:
            return program.run(sample, self._open_rest)
        except Deviation:
            before.restore()
            return self.dataset[idx]


def next_arguments(result: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the next step, after the result of a step that was called with ``args`` and ``kwargs``."""
    if kwargs:
        return (), result
    return ((result,) if len(args) == 1 else tuple(result)), {}


def _take_snapshot(dataset: object) -> list[tuple[dict[str, Any], str, Any, list[Any] | None]]:
    """Return the attributes that hold a transform, or could: the ``__dict__``, the name, the value, and its items."""
    snapshot = {}
    for site in find_sites(dataset):
        attributes = vars(find_holder(dataset, site))
        value = attributes.get(site.name)
        snapshot[id(attributes), site.name] = attributes, site.name, value, None if site.key is None else _items(value)
    return list(snapshot.values())


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def open_pipelines(dataset: object, encoded: bool) -> dict[Site, Pipeline]:
    """Return the transforms of a dataset as pipelines; with its loader, where files are cached ``encoded``."""
    pipelines = {site: open_pipeline(transform) for site, transform in find_sites(dataset).items() if transform is not None}
    return pipelines | (open_loader(dataset) if encoded else {})


def _bind(leaf: object, plan: CutPlan) -> "BoundPlan | ReadTransform":
    read_transform = find_read_transform(leaf, plan.encoded) if plan.reads else None
    return BoundPlan(leaf, plan) if read_transform is None else read_transform


class Split:
    """How the samples of a dataset are made: a part that is cached, and the rest.

    Args:
        dataset: makes the samples.
        plans: for each kind of leaf, by the number of the first leaf of its kind.
        tree: the leaves of the dataset; None finds them.

    Attributes:
        has_rest: whether transforms run after the cache.

    It pickles as the dataset and the plans. It has slots to hide its attributes from libraries that walk through the attributes
    of a dataset and seed the objects that they find (MONAI).
    """

    __slots__ = ("_bound", "_dataset", "_plans", "_tree", "has_rest")
    _holds_dataset = True

    def __init__(self, dataset: Any, plans: Mapping[int, CutPlan], tree: DatasetTree | None = None) -> None:
        self._dataset, self._plans, self._tree = dataset, dict(plans), tree
        self._bound: list[BoundPlan | ReadTransform] = []  # one for each leaf
        self.has_rest = any(plan.has_rest for plan in self._plans.values())

    def __reduce__(self) -> Any:
        return Split, (self._dataset, self._plans)

    def bind(self) -> DatasetTree:
        """Find the transforms of the dataset now; else that is done when the first sample is made."""
        tree = self._tree
        if tree is None or not self._bound:
            tree = self._tree = tree or DatasetTree(self._dataset)
            self._bound = [_bind(leaf, self._plans[kind]) for leaf, kind in zip(tree.leaves, tree.kinds, strict=True)]
        return tree

    @property
    def before(self) -> dict[int, Mapping[Site, tuple[Any, ...]]]:
        """The steps of each transform that run before the cache, by the numbers of the leaves."""
        self.bind()
        return {number: bound.before for number, bound in enumerate(self._bound)}

    def has_changed(self, indices: Iterable[int] | None = None) -> bool:
        """Whether a transform has been set or changed: of the leaves that make the samples ``indices``, or of any leaf."""
        tree, bound = self.bind(), self._bound
        if len(bound) > 1 and indices is not None:
            bound = [bound[number] for number in {tree.locate(idx)[0] for idx in indices}]
        return any(its.has_changed() for its in bound)

    def restore(self) -> None:
        """Put the transforms of all leaves back. Only for a child that then ends."""
        for bound in self._bound:
            if isinstance(bound, BoundPlan):
                bound.restore()

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        number, leaf_idx = self.bind().locate(idx)
        return self._bound[number].load(leaf_idx)

    def finish(self, idx: int, sample: object) -> Any:
        """Return sample ``idx`` after the rest of its transforms."""
        number, leaf_idx = self.bind().locate(idx)
        return self._bound[number].finish(leaf_idx, sample)

    def load_many(self, indices: list[int]) -> Iterable[Any]:
        """Return, or yield, the parts of the samples ``indices`` that are cached."""
        batch = self._batch(indices)
        return map(self.load, indices) if batch is None else batch[0].load_many(batch[1])

    def finish_many(self, indices: Sequence[int], samples: Iterable[object]) -> Iterable[Any]:
        """Return, or yield, the samples ``indices`` after the rest of their transforms."""
        batch = self._batch(indices)
        return map(self.finish, indices, samples) if batch is None else batch[0].finish_many(list(samples))

    def _batch(self, indices: Sequence[int]) -> tuple[ReadTransform, list[int]] | None:
        """Return the leaf that makes a batch of samples, and their indices there; None where samples are made one by one."""
        tree, first = self.bind(), self._bound[0]
        if not isinstance(first, ReadTransform) or not tree.batches:
            return None
        return first, [tree.locate(idx)[1] for idx in indices]

    @property
    def takes_batches(self) -> bool:
        """Whether a transform gets whole batches."""
        tree, first = self.bind(), self._bound[0]
        return isinstance(first, ReadTransform) and first.takes_batches and tree.batches

    def before_text(self) -> str:
        """Return the steps that run before the cache as text, the same in every process."""
        tree = self.bind()
        if not self.has_rest:
            return ALL_BEFORE
        return steps_text({kind: self._bound[kind].before for kind in sorted(set(tree.kinds))})


ALL_BEFORE = ""
"""The text of `Split.before_text` where all transforms run before the cache."""


def steps_text(before: Mapping[int, Mapping[Site, tuple[object, ...]]]) -> str:
    """Return the steps of each transform as text; ``before`` has them by kind of leaf and by site."""
    return (
        "; ".join(
            f"{site}: {', '.join(map(step_text, steps)) or 'nothing'}" for its in before.values() for site, steps in its.items()
        )
        or "no transform"
    )
