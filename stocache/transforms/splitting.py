"""Split the transforms of a dataset: their beginning runs before the cache, the rest after it.

NOTE [ Splitting ]
    A transform draws no random number before its first random step. So the steps before it may run once, before the cache, and
    the other steps each time, after it. The samples stay the same, bit for bit, and so do the random numbers.

    The part of a sample that a transform made is found by identity. A patched dataset (patching.py) runs only the beginning of
    each transform, and the object that this returns is searched for in the sample. If the dataset changes that object on the
    way, the change would be lost. So some samples are made in both ways, by processes that begin with the same random numbers,
    and are compared (planning.py). If they differ, nothing is split.

    Every later load is checked as well. When a transform is not called as planned, or its result is not in the planned places,
    the original dataset makes the sample each time, and it is not cached.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stocache.transforms.dataset_tree import DatasetTree
from stocache.transforms.encoded import open_loader
from stocache.transforms.huggingface import ReadTransform, find_read_transform
from stocache.transforms.part_transform import Path, part_at, with_part
from stocache.transforms.patching import (
    Call,
    CallLog,
    LoggedTransform,
    Site,
    find_holder,
    find_sites,
    find_transform,
    patch,
)
from stocache.transforms.pipelines import Pipeline, open_pipeline, step_text

logger = logging.getLogger("stocache")


class PlannedCall(NamedTuple):
    """A call of a transform that is cut.

    Attributes:
        cut: how many of its steps run before the cache.
        style: how it is called: "value" with one argument, "args", "kwargs", or "mixed".
        parts: where the output of its beginning is in the sample: of the whole output (None), or by position or name.
    """

    site: Site
    cut: int
    style: str
    parts: tuple[tuple[Any, tuple[Path, ...]], ...]


class CutPlan(NamedTuple):
    """How the transforms of one kind of dataset are split.

    Attributes:
        cuts: for each transform that is called, how many of its steps run before the cache.
        calls: the calls of transforms that are cut, in order.
        encoded: whether files are cached as they are, and decoded after the cache.
        reads: whether the dataset is one of Hugging Face that transforms samples when they are read.
        repeated: pairs of paths to one and the same part of a sample, which is cached only at the second: several views of one
            image.
    """

    cuts: dict[Site, int]
    calls: tuple[PlannedCall, ...] = ()
    encoded: bool = False
    reads: bool = False
    repeated: tuple[tuple[Path, Path], ...] = ()

    @property
    def has_rest(self) -> bool:
        """Whether anything runs after the cache."""
        return bool(self.calls) or self.reads


class UnplannedSample:
    """Stands for a sample that a dataset does not make as planned. It cannot be cached.

    Args:
        idx: index of the sample in the dataset that makes it. The sample is loaded when it is finished, so that random numbers
            are drawn in the usual order.
    """

    def __init__(self, idx: int) -> None:
        self.idx = idx

    def __reduce__(self) -> Any:
        raise TypeError("it was made in another way than those that were probed")


# ---------------------------------------------------------------------------------------------------- at run time


class BoundPlan:
    """A plan, applied to one dataset in one process.

    Args:
        dataset: makes the samples.
        plan: where its transforms are cut.
    """

    def __init__(self, dataset: Any, plan: CutPlan) -> None:
        self.dataset, self.plan = dataset, plan
        self._log, self._warned = CallLog(), False
        self._snapshot = _take_snapshot(dataset)
        self.pipelines = open_pipelines(dataset, plan.encoded)
        self.before = {site: self.pipelines[site].steps[:cut] for site, cut in plan.cuts.items()}
        cuts = {call.site: call.cut for call in plan.calls}
        beginnings = {site: self._log_beginning(site, cut) for site, cut in cuts.items()}
        self._patched = patch(dataset, beginnings) if beginnings else dataset
        self._after = [(call, accept_packed(self.pipelines[call.site].part(call.cut), call.style)) for call in plan.calls]

    def _log_beginning(self, site: Site, cut: int) -> LoggedTransform:
        beginning = self.pipelines[site].part(0, cut)

        def run(*args: Any, **kwargs: Any) -> Any:
            return beginning(*args, **kwargs) if cut else pack_arguments(args, kwargs)

        return LoggedTransform(site, find_transform(self.dataset, site), run, self._log)

    def has_changed(self) -> bool:
        """Whether a transform of the dataset has been set or changed since this was made."""
        for attributes, name, value, items in self._snapshot:
            if attributes.get(name) is not value or (items is not None and _items(value) != items):
                return True
        return any(pipeline.has_changed() for pipeline in self.pipelines.values())

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        calls = self._log.calls
        calls.clear()
        try:
            sample = self._patched[idx]
            if self._is_as_planned(sample, calls):
                for place, _ in self.plan.repeated:
                    sample = with_part(sample, place, None)
                return sample
        except Exception as error:  # the dataset expects another output of its transform; or it fails, and will fail again
            if isinstance(error, OSError) or not self.plan.calls:
                raise
        finally:
            calls.clear()
        if not self._warned:
            self._warned = True
            logger.warning(
                "sample %d of %s does not call its transforms as the probed samples do. It is made anew each time, and so are "
                "others like it, without further warning.", idx, type(self.dataset).__name__,
            )  # fmt: skip
        return UnplannedSample(idx)

    def load_with_calls(self, idx: int) -> tuple[Any, list[Call]]:
        """Return the part of sample ``idx`` that is cached, and the calls of the transforms that are cut."""
        self._log.calls.clear()
        return self._patched[idx], list(self._log.calls)

    def _is_as_planned(self, sample: Any, calls: list[Call]) -> bool:
        if len(calls) != len(self.plan.calls):
            return False
        try:
            for call, planned in zip(calls, self.plan.calls, strict=True):
                if call.site != planned.site or call_style(call.args, call.kwargs) != planned.style:
                    return False
                for key, paths in planned.parts:
                    result = call.result if key is None else call.result[key]
                    if any(part_at(sample, path) is not result for path in paths):
                        return False
            if any(part_at(sample, place) is not part_at(sample, first) for place, first in self.plan.repeated):
                return False
        except (LookupError, AttributeError, TypeError):
            return False
        return True

    def finish(self, sample: Any) -> Any:
        """Return a cached sample after the rest of its transforms."""
        if type(sample) is UnplannedSample:
            return self.dataset[sample.idx]
        for place, first in self.plan.repeated:
            sample = with_part(sample, place, part_at(sample, first))
        for call, after in self._after:
            sample = finish_call(sample, call, after)
        return sample


def finish_call(sample: Any, call: PlannedCall, after: Callable[[Any], Any]) -> Any:
    """Return a sample with the rest of one transform, ``after``, applied to the output of its beginning."""
    found = {key: part_at(sample, paths[0]) for key, paths in call.parts}
    if None in found:
        results: dict[Any, Any] = {None: after(found[None])}
    elif call.style == "args":
        results = dict(enumerate(after(tuple(found[key] for key in sorted(found)))))
    else:
        results = after(found)
    for key, paths in call.parts:
        for path in paths:
            sample = with_part(sample, path, results[key])
    return sample


def call_style(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return how a transform is called; see `PlannedCall`."""
    if not kwargs:
        return "value" if len(args) == 1 else "args"
    return "mixed" if args else "kwargs"


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as one value, which `accept_packed` unpacks."""
    packed = {"value": args[0] if args else None, "args": args, "kwargs": kwargs, "mixed": (args, kwargs)}
    return packed[call_style(args, kwargs)]


def accept_packed(function: Callable[..., Any], style: str) -> Callable[[Any], Any]:
    """Return a function of one value, the packed arguments, that calls ``function`` in a style."""
    if style == "value":
        return function
    if style == "args":
        return lambda args: function(*args)
    if style == "kwargs":
        return lambda kwargs: function(**kwargs)
    return lambda both: function(*both[0], **both[1])


def _take_snapshot(dataset: Any) -> list[tuple[dict[str, Any], str, Any, list[Any] | None]]:
    """Return the attributes that hold a transform, or could: the ``__dict__``, the name, the value, and its items."""
    snapshot = {}
    for site in find_sites(dataset):
        attributes = vars(find_holder(dataset, site))
        value = attributes.get(site.name)
        snapshot[id(attributes), site.name] = attributes, site.name, value, None if site.key is None else _items(value)
    return list(snapshot.values())


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def open_pipelines(dataset: Any, encoded: bool) -> dict[Site, Pipeline]:
    """Return the transforms of a dataset as pipelines; with its loader, where files are cached ``encoded``."""
    pipelines = {site: open_pipeline(transform) for site, transform in find_sites(dataset).items() if transform is not None}
    return pipelines | (open_loader(dataset) if encoded else {})


def _bind(leaf: Any, plan: CutPlan) -> "BoundPlan | ReadTransform":
    read_transform = find_read_transform(leaf, plan.encoded) if plan.reads else None
    return BoundPlan(leaf, plan) if read_transform is None else read_transform


class Split:
    """How the samples of a dataset are made: a part that is cached, and the rest.

    Args:
        dataset: makes the samples.
        plans: for each kind of leaf, by the number of the first leaf of its kind.
        tree: the leaves of the dataset; None finds them.

    It pickles as the dataset and the plans. It has slots to hide its attributes from libraries that walk through the attributes
    of a dataset and seed what they find (MONAI).
    """

    __slots__ = ("_bound", "_dataset", "_plans", "_tree", "has_rest")
    _holds_dataset = True

    def __init__(self, dataset: Any, plans: Mapping[int, CutPlan], tree: DatasetTree | None = None) -> None:
        self._dataset, self._plans, self._tree = dataset, dict(plans), tree
        self._bound: list[BoundPlan | ReadTransform] = []  # one for each leaf
        self.has_rest = any(plan.has_rest for plan in self._plans.values())

    def __reduce__(self) -> Any:
        return Split, (self._dataset, self._plans)

    def _bind(self) -> DatasetTree:
        tree = self._tree
        if tree is None or not self._bound:
            tree = self._tree = tree or DatasetTree(self._dataset)
            self._bound = [_bind(leaf, self._plans[kind]) for leaf, kind in zip(tree.leaves, tree.kinds, strict=True)]
        return tree

    @property
    def before(self) -> dict[int, Mapping[Site, tuple[Any, ...]]]:
        """The steps of each transform that run before the cache, by the numbers of the leaves."""
        self._bind()
        return {number: bound.before for number, bound in enumerate(self._bound)}

    def has_changed(self, indices: Iterable[int] | None = None) -> bool:
        """Whether a transform has been set or changed: of the leaves that make the samples ``indices``, or of any leaf."""
        tree, bound = self._bind(), self._bound
        if len(bound) > 1 and indices is not None:
            bound = [bound[number] for number in {tree.locate(idx)[0] for idx in indices}]
        return any(its.has_changed() for its in bound)

    def load(self, idx: int) -> Any:
        """Return the part of sample ``idx`` that is cached."""
        number, leaf_idx = self._bind().locate(idx)
        return self._bound[number].load(leaf_idx)

    def finish(self, idx: int, sample: Any) -> Any:
        """Return sample ``idx`` after the rest of its transforms."""
        number, _ = self._bind().locate(idx)
        return self._bound[number].finish(sample)

    def load_many(self, indices: list[int]) -> Iterable[Any]:
        """Return, or yield, the parts of the samples ``indices`` that are cached."""
        batch = self._batch(indices)
        return map(self.load, indices) if batch is None else batch[0].load_many(batch[1])

    def finish_many(self, indices: Sequence[int], samples: Iterable[Any]) -> Iterable[Any]:
        """Return, or yield, the samples ``indices`` after the rest of their transforms."""
        batch = self._batch(indices)
        return map(self.finish, indices, samples) if batch is None else batch[0].finish_many(list(samples))

    def _batch(self, indices: Sequence[int]) -> tuple[ReadTransform, list[int]] | None:
        """Return the leaf that makes a batch of samples, and their indices there; None where samples are made one by one."""
        tree, first = self._bind(), self._bound[0]
        if not isinstance(first, ReadTransform) or not tree.batches:
            return None
        return first, [tree.locate(idx)[1] for idx in indices]

    def before_text(self) -> str:
        """Return the steps that run before the cache as text, the same in every process."""
        tree = self._bind()
        if not self.has_rest:
            return ALL_BEFORE
        return steps_text({kind: self._bound[kind].before for kind in sorted(set(tree.kinds))})


ALL_BEFORE = ""
"""The text of `Split.before_text` where all transforms run before the cache."""


def steps_text(before: Mapping[int, Mapping[Site, tuple[Any, ...]]]) -> str:
    """Return the steps of each transform as text; ``before`` has them by kind of leaf and by site."""
    return (
        "; ".join(
            f"{site}: {', '.join(map(step_text, steps)) or 'nothing'}" for its in before.values() for site, steps in its.items()
        )
        or "no transform"
    )
