"""Samples whose transforms are cut: their beginning runs before the cache, the rest after it.

NOTE [ Splitting ]
    A transform draws nothing before its first random step. So the steps before that may run once, before the cache, and the
    others each time, after it: the samples are the same, bit for bit, and so are the random numbers.

    Which part of a sample a transform made is found by identity. A twin of the dataset (twins.py) runs only the beginning of
    each transform; the object that comes out of it is looked for in the sample. What the dataset does to that object on the
    way, if anything, would be lost: so some samples are made in both ways, by processes that begin with the same random
    numbers, and compared (cutting.py). If they differ, nothing is split.

    Every later load is checked as well: unless each transform was called as planned, and what it returned is in the places
    planned, the sample is made by the dataset as it is, each time, and not cached.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stocache.transforms.encoded import encoded_pipeline
from stocache.transforms.huggingface import ReadTransform, read_transform_of
from stocache.transforms.parts import Path, part_at, with_part
from stocache.transforms.pipelines import Pipeline, open_pipeline, told_step
from stocache.transforms.routes import Route
from stocache.transforms.twins import Call, Calls, Site, Tap, find_sites, holder_of, transform_at, twin_of

logger = logging.getLogger("stocache")


class PlannedCall(NamedTuple):
    """A call of a transform that is cut.

    Attributes:
        cut: how many of its steps run before the cache.
        style: how it is called: "value" with one argument, "args", "kwargs", or "mixed".
        parts: where in the sample the output of its beginning is: as a whole (None), or by position or name.
    """

    site: Site
    cut: int
    style: str
    parts: tuple[tuple[Any, tuple[Path, ...]], ...]


class CutPlan(NamedTuple):
    """How one kind of dataset is split.

    Attributes:
        cuts: for each transform that is called, how many of its steps run before the cache.
        calls: of those that are cut, in order.
        encoded: whether files are cached as they are, and decoded after the cache.
        reads: whether it is one of Hugging Face that transforms samples when they are read.
        repeated: places in a sample of what is in another place, too, and cached only there: several views of one image.
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
    """In place of a sample that a dataset makes in another way than planned. It cannot be cached.

    Args:
        idx: of the sample, in the dataset that makes it. It is loaded when it is finished: random numbers are drawn in turn.
    """

    def __init__(self, idx: int) -> None:
        self.idx = idx

    def __reduce__(self) -> Any:
        raise TypeError("it was made in another way than those that were probed")


# ---------------------------------------------------------------------------------------------------- at run time


class BoundPlan:
    """A plan with the dataset it is for, in one process.

    Args:
        dataset: what makes the samples.
    """

    def __init__(self, dataset: Any, plan: CutPlan) -> None:
        self.dataset, self.plan = dataset, plan
        self._calls, self._warned = Calls(), False
        self._watched = _watched(dataset)
        self.pipelines = pipelines_of(dataset, plan.encoded)
        self.before = {site: self.pipelines[site].steps[:cut] for site, cut in plan.cuts.items()}
        cut = {call.site: call.cut for call in plan.calls}
        taps = {site: _tap(dataset, site, self.pipelines[site], cut[site], self._calls) for site in cut}
        self._twin = twin_of(dataset, taps) if taps else dataset
        self._after = [(call, carrying(self.pipelines[call.site].part(call.cut), call.style)) for call in plan.calls]

    def has_changed(self) -> bool:
        """Whether a transform of the dataset was set or changed since."""
        for held, name, value, items in self._watched:
            if held.get(name) is not value or (items is not None and _items(value) != items):
                return True
        return any(pipeline.has_changed() for pipeline in self.pipelines.values())

    def load(self, idx: int) -> Any:
        """Return what is cached of a sample."""
        made = self._calls.made
        made.clear()
        try:
            sample = self._twin[idx]
            if self._is_as_planned(sample, made):
                for place, _ in self.plan.repeated:
                    sample = with_part(sample, place, None)
                return sample
        except Exception as error:  # the dataset expects something else of its transform; or it fails, and will again
            if isinstance(error, OSError) or not self.plan.calls:
                raise
        finally:
            made.clear()
        if not self._warned:
            self._warned = True
            logger.warning(
                "sample %d of %s calls its transforms in another way than those that were probed. It is made anew each time; "
                "so will others like it be, unmentioned.", idx, type(self.dataset).__name__,
            )  # fmt: skip
        return UnplannedSample(idx)

    def load_with_calls(self, idx: int) -> tuple[Any, list[Call]]:
        """Return a sample, and the calls of those transforms that are cut."""
        self._calls.made.clear()
        return self._twin[idx], list(self._calls.made)

    def _is_as_planned(self, sample: Any, made: list[Call]) -> bool:
        if len(made) != len(self.plan.calls):
            return False
        try:
            for call, planned in zip(made, self.plan.calls, strict=True):
                if call.site != planned.site or style_of(call.args, call.kwargs) != planned.style:
                    return False
                for key, paths in planned.parts:
                    its = call.result if key is None else call.result[key]
                    if any(part_at(sample, path) is not its for path in paths):
                        return False
            if any(part_at(sample, place) is not part_at(sample, first) for place, first in self.plan.repeated):
                return False
        except (LookupError, AttributeError, TypeError):
            return False
        return True

    def finish(self, sample: Any) -> Any:
        """Return a sample with the rest of its transforms."""
        if type(sample) is UnplannedSample:
            return self.dataset[sample.idx]
        for place, first in self.plan.repeated:
            sample = with_part(sample, place, part_at(sample, first))
        for call, after in self._after:
            sample = finished(sample, call, after)
        return sample


def finished(sample: Any, call: PlannedCall, after: Callable[[Any], Any]) -> Any:
    """Return a sample with ``after`` of what a transform's beginning has put into it."""
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


def style_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return how a transform is called; see `PlannedCall`."""
    if not kwargs:
        return "value" if len(args) == 1 else "args"
    return "mixed" if args else "kwargs"


def carried(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as one value, as `carrying` takes it."""
    return {"value": args[0] if args else None, "args": args, "kwargs": kwargs, "mixed": (args, kwargs)}[style_of(args, kwargs)]


def carrying(function: Callable[..., Any], style: str) -> Callable[[Any], Any]:
    """Return a function of one value that calls ``function`` in its style."""
    if style == "value":
        return function
    if style == "args":
        return lambda args: function(*args)
    if style == "kwargs":
        return lambda kwargs: function(**kwargs)
    return lambda both: function(*both[0], **both[1])


def _tap(dataset: Any, site: Site, pipeline: Pipeline, cut: int, calls: Calls) -> Tap:
    beginning = pipeline.part(0, cut)

    def run(*args: Any, **kwargs: Any) -> Any:
        return beginning(*args, **kwargs) if cut else carried(args, kwargs)

    return Tap(site, transform_at(dataset, site), run, calls)


def _watched(dataset: Any) -> list[tuple[dict[str, Any], str, Any, list[Any] | None]]:
    """Return where transforms are, or might be: the attributes of a dataset, a name, what is there, and what that holds."""
    watched = {}
    for site in find_sites(dataset):
        held = vars(holder_of(dataset, site))
        value = held.get(site.name)
        watched[id(held), site.name] = held, site.name, value, None if site.key is None else _items(value)
    return list(watched.values())


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def pipelines_of(dataset: Any, encoded: bool) -> dict[Site, Pipeline]:
    """Return the transforms of a dataset, opened."""
    pipelines = {site: open_pipeline(transform) for site, transform in find_sites(dataset).items() if transform is not None}
    return pipelines | (encoded_pipeline(dataset) if encoded else {})


def _bound(leaf: Any, plan: CutPlan) -> "BoundPlan | ReadTransform":
    reads = read_transform_of(leaf, plan.encoded) if plan.reads else None
    return BoundPlan(leaf, plan) if reads is None else reads


class Split:
    """How the samples of a dataset are made: their beginning, which is cached, and the rest.

    Args:
        dataset: what makes the samples.
        plans: for each kind of dataset within, by the number of the first one of its kind.

    It pickles as its plans and the dataset. Its attributes are hidden from libraries that walk through those of a dataset and
    seed what they find (MONAI).
    """

    __slots__ = ("_bound", "_dataset", "_plans", "_route", "has_rest")

    def __init__(self, dataset: Any, plans: Mapping[int, CutPlan]) -> None:
        self._dataset, self._plans = dataset, dict(plans)
        self._bound: list[BoundPlan | ReadTransform] = []  # by the numbers of the datasets within
        self._route: Route | None = None
        self.has_rest = any(plan.has_rest for plan in self._plans.values())

    def __reduce__(self) -> Any:
        return Split, (self._dataset, self._plans)

    def _bind(self) -> Route:
        if self._route is None:
            route = Route(self._dataset)
            self._bound = [_bound(leaf, self._plans[kind]) for leaf, kind in zip(route.leaves, route.kinds, strict=True)]
            self._route = route
        return self._route

    @property
    def before(self) -> dict[int, Mapping[Site, tuple[Any, ...]]]:
        """The steps before the cache of each transform, by the numbers of the datasets within."""
        self._bind()
        return {number: its.before for number, its in enumerate(self._bound)}

    def has_changed(self, indices: Iterable[int] | None = None) -> bool:
        """Whether a transform was set or changed since; of the datasets that make the samples ``indices``, or any."""
        route, bound = self._bind(), self._bound
        if len(bound) > 1 and indices is not None:
            bound = [bound[number] for number in {route(idx)[0] for idx in indices}]
        return any(its.has_changed() for its in bound)

    def load(self, idx: int) -> Any:
        """Return what is cached of sample ``idx``."""
        number, at = self._bind()(idx)
        return self._bound[number].load(at)

    def finish(self, idx: int, sample: Any) -> Any:
        """Return sample ``idx`` with the rest of its transforms."""
        return self._bound[self._bind()(idx)[0]].finish(sample)

    def load_many(self, indices: list[int]) -> Iterable[Any]:
        """Return, or yield, what is cached of several samples."""
        together = self._together(indices)
        return map(self.load, indices) if together is None else together[0].load_many(together[1])

    def finish_many(self, indices: Sequence[int], samples: Iterable[Any]) -> Iterable[Any]:
        """Return, or yield, the samples ``indices`` with the rest of their transforms."""
        together = self._together(indices)
        return map(self.finish, indices, samples) if together is None else together[0].finish_many(list(samples))

    def _together(self, indices: Sequence[int]) -> tuple[ReadTransform, list[int]] | None:
        """Return what makes batches of samples, and the indices there; None where samples are made one by one."""
        route, first = self._bind(), self._bound[0]
        if not isinstance(first, ReadTransform) or not route.batches:
            return None
        return first, [route(idx)[1] for idx in indices]

    def told_before(self) -> str:
        """Return what runs before the cache, in words that are the same in every process."""
        route = self._bind()
        return told_before({kind: self._bound[kind].before for kind in sorted(set(route.kinds))}) if self.has_rest else ALL


ALL = ""
"""What `told_before` says where all transforms run before the cache."""


def told_before(before: Mapping[int, Mapping[Site, tuple[Any, ...]]]) -> str:
    """Return the steps before the cache of each transform, in words."""
    return (
        "; ".join(
            f"{site}: {', '.join(map(told_step, steps)) or 'nothing'}" for its in before.values() for site, steps in its.items()
        )
        or "no transform"
    )
