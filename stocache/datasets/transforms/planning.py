"""Plan where the transforms of a dataset are cut, from measurements and trials before the user's own loop.

NOTE [ Where to cut ]
    A *cut* is the number of steps of a transform that run before the cache. A later cut saves more work, but may need more
    memory: a float tensor has four times the bytes of its image. The usual choice is the latest cut at which all samples fit,
    or if there is no such cut, the one with the smallest samples. If another cut saves more than twice as much, that is taken:
    the path of an image is smaller than the image, but caching it saves next to nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stocache.datasets.transforms.cuts import (
    NEGLIGIBLE_S,
    SET_EARLIER,
    Cut,
    Option,
    _mean,
    choose_option,
    find_chains,
    find_options,
    fixed_option,
)
from stocache.datasets.transforms.dataset_tree import DatasetTree
from stocache.datasets.transforms.encoded import open_loader
from stocache.datasets.transforms.huggingface import find_read_transform
from stocache.datasets.transforms.known import is_deterministic, is_known
from stocache.datasets.transforms.patching import Site, find_sites
from stocache.datasets.transforms.pipelines import Pipeline, same_step, step_name
from stocache.datasets.transforms.recording import Program, Rest
from stocache.datasets.transforms.splitting import ALL_BEFORE, CutPlan, Split, open_pipelines, steps_text
from stocache.datasets.transforms.trials import (
    CannotSplit,
    Example,
    SecondLoads,
    finish_parts,
    load_examples,
    load_with_old_split,
    random_steps,
    record_examples,
)
from stocache.errors import DatasetError
from stocache.samples.indices import spread
from stocache.system.describe import difference
from stocache.system.figures import format_seconds
from stocache.system.limits import format_size
from stocache.system.loading.fallback import in_children_or_here
from stocache.system.walking import makers

logger = logging.getLogger("stocache")


_EXAMPLES = 3  # samples of each kind of leaf that are tried out, at least


_SEARCHED = 4096  # samples whose leaves are searched for all kinds


_MAX_KINDS = 8  # of leaves


_PATIENCE_S = 120.0  # for one sample


_ENCODED = (
    "store='encoded' is for datasets that load each file by an attribute `loader`, called with its path, as torchvision's "
    "folders do; with {} it does not work: {}. Leave store= out; or have your dataset return the bytes of its files, and "
    "decode them in transform=."
)


class _CannotLoad(CannotSplit):
    """No sample can be loaded."""


def warn_of_random_steps(dataset: object, reason: str) -> None:
    """Warn that the transforms of a dataset run before the cache, if there are random steps among them."""
    random = [step_name(step) for leaf in makers(dataset) for step in random_steps(open_pipelines(leaf, False))]
    if random:
        logger.warning(
            "the transforms of %s are not split: %s. If a sample depends on the random numbers of %s, it is not cached (see "
            "on_change). Give the random part to CachedDataset(..., transform=...); split_transforms() cuts it off.",
            type(dataset).__name__, reason, ", ".join(dict.fromkeys(random)),
        )  # fmt: skip


def plan_split(
    dataset: object,
    length: int,
    limit: int,
    cut: Cut,
    encoded: bool,
    allow_pickle: bool,
    wanted: str | None = None,
    old: Split | None = None,
    probe: int = _EXAMPLES,
) -> Split | None:
    """Return how to split the transforms of a dataset; None where they cannot be split, or there can be no transforms.

    Each sample that is tried is loaded twice; see NOTE [ Two loads ] in trials.py.

    Args:
        length: samples of the dataset.
        limit: bytes of the cache.
        cut: where to cut; None decides.
        encoded: whether to cache files as they are.
        allow_pickle: whether parts of samples may be cached as pickles.
        wanted: the `Split.before_text` to reach if possible: that of a cache which exists already.
        old: how cached samples were made. The new split leaves them valid.
        probe: how many samples to load.

    Raises:
        DatasetError: cached samples would not stay valid; or ``encoded`` is set, and the dataset does not call a ``loader``.
    """
    name = type(dataset).__name__
    tree = DatasetTree(dataset)
    transformed_at_reading = any(find_read_transform(leaf, encoded) for leaf in tree.leaves)
    if encoded and not transformed_at_reading and not any(map(open_loader, tree.leaves)):
        raise DatasetError(_ENCODED.format(name, "it has no loader"))
    if not encoded and not transformed_at_reading:
        if not any(map(find_sites, tree.leaves)):
            return None
        cached = old is not None and any(steps for leaf_steps in old.before.values() for steps in leaf_steps.values())
        if not cached and not any(open_pipelines(leaf, False) for leaf in tree.leaves):
            return Split(dataset, dict.fromkeys(tree.kinds, CutPlan({})), tree)
    try:
        return _Planner(dataset, tree, length, encoded, allow_pickle, old, probe).plan(limit, cut, wanted)
    except DatasetError:
        raise
    except Exception as error:  # whatever the dataset does when it is patched, or in a child process
        reason = str(error) if isinstance(error, CannotSplit) else f"{type(error).__name__}: {error}"
        if encoded:
            raise DatasetError(_ENCODED.format(name, reason)) from error
        if old is not None:
            raise DatasetError(
                f"the transforms of {name} cannot be set while samples are cached: {reason}. {SET_EARLIER}"
            ) from error
        if not isinstance(error, _CannotLoad):  # the probe reports that
            warn_of_random_steps(dataset, reason)
        return None


class _Kind(NamedTuple):
    """One kind of leaf: those with the same class and transforms.

    Attributes:
        leaf: the first of them.
        pipelines: its transforms.
        share: the share of all samples that leaves of this kind make.
        rest: names of the steps that run after the cache without being an attribute.
        options: where to cut.
        decodes: whether the input of its transforms is an image.
        load_s: seconds to load a sample.
        undrawn_s: for transforms that are not wholly deterministic but drew no random numbers: seconds after their last
            deterministic step.
    """

    leaf: Any
    pipelines: Mapping[Site, Pipeline]
    share: float
    rest: tuple[str, ...] = ()
    options: Sequence[Option] = (Option({}, 0.0, 0.0),)
    decodes: bool = False
    load_s: float = 0.0
    undrawn_s: Mapping[Site, float] = {}

    def steps_before(self, option: Option) -> list[str]:
        """Return the names of the steps that run before the cache."""
        return [step_name(step) for site, cut in option.cuts.items() for step in self.pipelines[site].steps[:cut]]

    def steps_after(self, option: Option) -> list[str]:
        """Return the names of the steps that run after the cache."""
        steps = [step_name(step) for site, cut in option.cuts.items() for step in self.pipelines[site].steps[cut:]]
        return [*self.rest, *steps]


_Attempt: TypeAlias = Mapping[int, Option]  # an option for each kind of leaf


class _Planner:
    """Measures, decides and tries out; see NOTE [ Where to cut ], and NOTE [ Splitting ] in splitting.py."""

    def __init__(
        self,
        dataset: object,
        tree: DatasetTree,
        length: int,
        encoded: bool,
        allow_pickle: bool,
        old: Split | None,
        probe: int,
    ) -> None:
        self._dataset, self._tree, self._encoded, self._old, self._length = dataset, tree, encoded, old, length
        self._allow_pickle = allow_pickle
        shares, examples = _choose_examples(tree, length, probe)
        if len(set(tree.kinds)) > _MAX_KINDS:
            raise CannotSplit(f"there are {len(set(tree.kinds))} kinds of datasets within it")
        if set(shares) != set(tree.kinds):
            raise CannotSplit("some datasets within it have no samples here")
        self._kinds: dict[int, _Kind] = {}
        for number, share in shares.items():
            at_reading = find_read_transform(tree.leaves[number], encoded)
            pipelines = {} if at_reading else open_pipelines(tree.leaves[number], encoded)
            rest = tuple(at_reading.rest) if at_reading else ()
            self._kinds[number] = _Kind(tree.leaves[number], pipelines, share, rest)
        tried = [example for example in examples if self._kinds[self._kind_of(example)].pipelines]
        job = partial(load_examples, dataset, tree, tried, encoded, allow_pickle)
        loads: list[Any] = list(in_children_or_here(dataset, [job], patience_s=_PATIENCE_S)) if tried else []
        self._first = {example: description for example, description, _ in loads}
        self._measured = [(self._kind_of(example), measured) for example, _, measured in loads if measured is not None]
        for number, kind in self._kinds.items():
            self._kinds[number] = self._with_options(number, kind)

    def _kind_of(self, example: Example) -> int:
        return self._tree.kinds[self._tree.locate(example.idx)[0]]

    def _with_options(self, number: int, kind: _Kind) -> _Kind:
        fixed = self._fixed_steps(number, kind.pipelines)
        if not kind.pipelines:
            return kind
        samples = [measured for own, measured in self._measured if own == number]
        if not samples:
            raise _CannotLoad("its samples cannot be loaded")
        chains, calls = find_chains(samples), [call for sample in samples for call in sample.calls]
        called = {call.site for call in calls}
        if self._encoded and not any(site.name == "loader" for site in called):
            raise CannotSplit("it does not call its loader")
        if fixed is None:
            options = find_options(samples, chains)
        else:
            options = [fixed_option(chains, fixed, _mean([sample.size for sample in samples]))]
        load_s = float(np.median([sample.load_s for sample in samples]))
        drawing = {call.site for call in calls if call.draws or len(call.seconds) == call.steps}
        undrawn_s = {site: float(np.median([call.rest_s for call in calls if call.site == site])) for site in called - drawing}
        decodes = any(call.decodes for call in samples[0].calls[:1])
        return kind._replace(options=options, decodes=decodes, load_s=load_s, undrawn_s=undrawn_s)

    def _fixed_steps(self, number: int, pipelines: Mapping[Site, Pipeline]) -> dict[Site, int] | None:
        """Return how many steps of each transform must run before the cache; None where they may be chosen."""
        if self._old is None:
            return {site: 1 for site in pipelines if site.name == "loader"} if self._encoded else None
        befores = [self._old.before.get(leaf, {}) for leaf, kind in enumerate(self._tree.kinds) if kind == number]
        fixed: dict[Site, int] = {}
        for before in befores:
            for site in {*befores[0], *before}:
                steps = before.get(site, ())
                now = pipelines[site].steps if site in pipelines else ()
                if len(steps) != len(befores[0].get(site, ())) or not _begins_with(now, steps):
                    names = ", ".join(map(step_name, steps)) or "other steps"
                    raise DatasetError(
                        f"{site} cannot be set: samples are cached as they are after {names}, but the new one does not begin "
                        f"with these. {SET_EARLIER}"
                    )
                fixed[site] = len(steps)
        return fixed

    def plan(self, limit: int, cut: Cut, wanted: str | None) -> Split:
        """Return the ``wanted`` split, if it is possible; else the best one that gives the same samples."""
        attempts = self._attempts(limit, cut)
        if wanted is not None:
            positions = range(max(len(kind.options) for kind in self._kinds.values()))
            attempts = [attempt for attempt in map(self._at, positions) if self._before_text(attempt) == wanted] or attempts
        problems = []
        for attempt in attempts:
            try:
                split = self._try_out(attempt)
            except Exception as error:  # whatever the dataset raises for an unexpected output of its transform
                problems.append(error)
            else:
                self._report(attempt)
                return split
        raise problems[0]

    def _attempts(self, limit: int, cut: Cut) -> list[_Attempt]:
        """Return the best attempt; and one with all after the cache, in case a beginning cannot run by itself."""
        positions = range(max(len(kind.options) for kind in self._kinds.values()))

        def share(size: float) -> float:
            return min(1.0, limit / max(1.0, size * self._length * 1.02))

        if cut is None:  # for all kinds together
            means = [self._mean_option(self._at(position)) for position in positions]
            best = self._at(means.index(choose_option(means, None, share)))
        else:
            best = {number: choose_option(kind.options, cut, share) for number, kind in self._kinds.items()}
        last = self._at(-1)
        return [best] + [last] * (last != best)

    def _at(self, position: int) -> _Attempt:
        return {number: kind.options[min(position, len(kind.options) - 1)] for number, kind in self._kinds.items()}

    def _mean_option(self, attempt: _Attempt) -> Option:
        """Return the mean size and saved time over all samples."""
        weighted = [(self._kinds[number].share, option) for number, option in attempt.items()]
        size = sum(share * option.size for share, option in weighted)
        return Option({}, size, sum(share * option.saved_s for share, option in weighted))

    def _before_text(self, attempt: _Attempt) -> str:
        """Return the `Split.before_text` of an attempt."""
        if all(not kind.steps_after(attempt[number]) for number, kind in self._kinds.items()):
            return ALL_BEFORE
        return steps_text(
            {
                number: {site: self._kinds[number].pipelines[site].steps[:cut] for site, cut in attempt[number].cuts.items()}
                for number in sorted(self._kinds)
            }
        )

    def _try_out(self, attempt: _Attempt) -> Split:
        """Return the split of an attempt; see NOTE [ Two loads ] in trials.py.

        Raises:
            CannotSplit: samples would differ from those of the dataset.
        """
        plans = {
            number: CutPlan(attempt[number].cuts, encoded=self._encoded, reads=bool(kind.rest))
            for number, kind in self._kinds.items()
        }
        if not self._first:
            return Split(self._dataset, plans, self._tree)
        tried = {number: plan for number, plan in plans.items() if self._kinds[number].pipelines}
        jobs: list[Any] = [partial(record_examples, self._tree, [*self._first], tried, self._allow_pickle)]
        if self._old is not None:
            jobs.append(partial(load_with_old_split, self._old, [*self._first]))
        items = [item for item in in_children_or_here(self._dataset, jobs, patience_s=_PATIENCE_S) if item is not None]
        (second,) = (item for item in items if isinstance(item, SecondLoads))
        tried = {number: self._with_program(number, plan, second.programs[number]) for number, plan in tried.items()}
        problems = dict(second.problems)
        for example, description in (item for item in items if item is not second):
            if example in second.parts and second.parts[example][1] != description:
                problems.setdefault(example, "other parts of samples would have to be cached")
        sound = [example for example in self._first if example in second.parts and example not in problems]
        finish = partial(finish_parts, self._tree, {example: second.parts[example][0] for example in sound}, tried)
        for example, description in in_children_or_here(self._dataset, [finish], patience_s=_PATIENCE_S):
            if (place := difference(self._first[example], description)) is not None:
                problems[example] = f"sample {example.idx} would not be the same ({place:.200})"
        for example, problem in problems.items():
            if self._old is not None or tried[self._kind_of(example)].program.steps:
                raise CannotSplit(problem)
        return Split(self._dataset, plans | tried, self._tree)

    def _with_program(self, number: int, plan: CutPlan, program: Program) -> CutPlan:
        """Return a plan with the program that runs after the cache. A transform of another's output has no steps before it."""
        kind = self._kinds[number]
        unfinished = any(plan.cuts.get(site, 0) < len(pipeline.steps) for site, pipeline in kind.pipelines.items())
        if unfinished and not program.steps and random_steps(kind.pipelines):
            raise CannotSplit(f"{type(kind.leaf).__name__} does not call its {', '.join(map(str, kind.pipelines))}")
        rests = [step.function for step in program.steps if isinstance(step.function, Rest)]
        begins = {rest.site: rest.begin for rest in reversed(rests)}  # where the first begins
        return plan._replace(cuts=plan.cuts | begins, program=program)

    def _report(self, attempt: _Attempt) -> None:
        for number, kind in self._kinds.items():
            option = attempt[number]
            logger.info(
                "before the cache: %s; after it: %s%s",
                ", ".join(["decode" if kind.decodes else "load", *kind.steps_before(option)]),
                ", ".join(kind.steps_after(option)) or "nothing", _figures(option, kind.options),
            )  # fmt: skip
            self._warn_of_unknown(kind, option)

    def _warn_of_unknown(self, kind: _Kind, option: Option) -> None:
        """Warn where most of the time goes into a step that counts as random only because it is not known."""
        for site, rest_s in () if self._encoded else kind.undrawn_s.items():
            step = kind.pipelines[site].steps[option.cuts[site]]
            unknown = not is_known(type(step)) and not is_deterministic(step)
            if unknown and self._old is None and rest_s > max(NEGLIGIBLE_S, kind.load_s / 2):
                logger.warning(
                    "%s is not known to be deterministic, so it runs after the cache, in each epoch: %.3g of the %.3g ms of a "
                    "sample. If it gives the same each time and draws nothing random, mark it: stocache.deterministic(%s).",
                    step_name(step), rest_s * 1e3, kind.load_s * 1e3, step_name(step),
                )  # fmt: skip


def _begins_with(steps: Sequence[object], beginning: Sequence[object]) -> bool:
    return len(steps) >= len(beginning) and all(map(same_step, beginning, steps))


def _figures(option: Option, options: Sequence[Option]) -> str:
    """Return the bytes and times of an option as text, with those of the options that were not taken."""
    if len(options) < 2:
        return ""
    named = {"this": option, "the latest": options[0], "the smallest": min(options, key=lambda other: other.size)}
    figures = [
        f"{name} cut caches {format_size(other.size)} a sample and saves {format_seconds(other.saved_s)}"
        for name, other in named.items()
        if name == "this" or other != option
    ]
    return f" ({'; '.join(figures)})"


def _choose_examples(tree: DatasetTree, length: int, count: int) -> tuple[dict[int, float], list[Example]]:
    """Return for each kind of leaf its share of the samples; and the samples to try: ``count``, and more of rare kinds."""
    searched, probed = {*spread(length, _SEARCHED)}, {*spread(length, count)}
    found: dict[int, list[int]] = {}
    for idx in sorted({*searched, *probed, *(start for start in tree.starts if start < length)}):
        found.setdefault(tree.kinds[tree.locate(idx)[0]], []).append(idx)
    examples: list[Example] = []
    for samples in found.values():
        chosen = probed & {*samples}
        if len(chosen) < _EXAMPLES:
            chosen |= {samples[at] for at in spread(len(samples), _EXAMPLES)}
        examples += [Example(idx, turn) for turn, idx in enumerate(sorted(chosen))]
    shares = {kind: len(searched.intersection(samples)) / len(searched) for kind, samples in found.items()}
    return shares, sorted(examples, key=lambda example: example.turn)
