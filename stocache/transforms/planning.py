"""Plan where the transforms of a dataset are cut, from measurements and trials before the user's own loop.

NOTE [ Where to cut ]
    A *cut* is the number of steps of a transform that run before the cache. A later cut saves more work, but may need more
    memory: a float tensor has four times the bytes of its image. The usual choice is the latest cut at which all samples fit,
    or if there is no such cut, the one with the smallest samples. If another cut saves more than twice as much, that is taken:
    the path of an image is smaller than the image, but caching it saves next to nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from stocache.errors import DatasetError
from stocache.loader.threads.loading import in_children_or_here
from stocache.samples.indices import spread
from stocache.samples.record_decoder import unpack_sample
from stocache.system.describe import difference
from stocache.system.figures import format_seconds
from stocache.system.limits import format_size
from stocache.system.walking import makers
from stocache.transforms.dataset_tree import DatasetTree
from stocache.transforms.encoded import open_loader
from stocache.transforms.huggingface import find_read_transform
from stocache.transforms.known import is_deterministic, is_known
from stocache.transforms.patching import Site, find_sites
from stocache.transforms.pipelines import Pipeline, same_step, step_name
from stocache.transforms.recording import Deviation, Program, Rest
from stocache.transforms.splitting import ALL_BEFORE, CutPlan, Split, open_pipelines, steps_text
from stocache.transforms.trials import (
    CannotSplit,
    Example,
    MeasuredCall,
    MeasuredSample,
    finish_parts,
    load_parts,
    load_with_old_split,
    make_plain,
    measure_steps,
    record_programs,
)

logger = logging.getLogger("stocache")

Cut: TypeAlias = Literal["latest", "smallest"] | None

_EXAMPLES = 3  # samples of each kind of leaf that are tried out
_SEARCHED = 4096  # samples whose leaves are searched for all kinds
_MAX_KINDS = 8  # of leaves
_PATIENCE_S = 120.0  # for one sample
_NEGLIGIBLE_S = 1e-4  # of saved time per sample

_DIFFERENT_CALLS = "it does not call its transforms in the same way for each sample"
_REFUSED = "Set it before CachedDataset, or make a new one."

_ENCODED = (
    "store='encoded' is for datasets that load each file by an attribute `loader`, called with its path, as torchvision's "
    "folders do; with {} it does not work: {}. Leave store= out; or have your dataset return the bytes of its files, and "
    "decode them in transform=."
)


class _CannotLoad(CannotSplit):
    """No sample can be loaded."""


def warn_of_random_steps(dataset: Any, reason: str) -> None:
    """Warn that the transforms of a dataset run before the cache, if there are random steps among them."""
    random = [step_name(step) for leaf in makers(dataset) for step in _random_steps(open_pipelines(leaf, False))]
    if random:
        logger.warning(
            "the transforms of %s are not split: %s. If a sample depends on the random numbers of %s, it is not cached (see "
            "on_change). Give the random part to CachedDataset(..., transform=...); split_transforms() cuts it off.",
            type(dataset).__name__, reason, ", ".join(dict.fromkeys(random)),
        )  # fmt: skip


def _random_steps(pipelines: Mapping[Site, Pipeline]) -> list[Any]:
    return [step for pipeline in pipelines.values() for step in pipeline.steps[pipeline.deterministic :]]


# ---------------------------------------------------------------------------------------------------- where to cut


class Option(NamedTuple):
    """A place to cut: the cut of each transform that is called, the bytes of a sample, and the seconds a cached one saves."""

    cuts: dict[Site, int]
    size: float
    saved_s: float


class _CallChain:
    """Transforms that are called one after another on one part of the samples, as one transform with all their steps.

    Args:
        calls: for each transform, its call in each example.
    """

    def __init__(self, calls: Sequence[Sequence[MeasuredCall]]) -> None:
        self.sites = tuple(transform_calls[0].site for transform_calls in calls)
        self.result_size = _mean([call.result_size for call in calls[-1]])
        self.options: list[tuple[dict[Site, int], float | None, float]] = []  # cuts, size, seconds; the earliest first
        cuts = dict.fromkeys(self.sites, 0)
        seconds = 0.0
        for transform_calls in calls:
            deterministic = min(len(call.seconds) for call in transform_calls)
            for cut in range(bool(self.options), deterministic + 1):
                cuts = {**cuts, transform_calls[0].site: cut}
                sizes = [call.sizes[cut] for call in transform_calls]
                size = None if None in sizes else _mean(sizes)
                seconds += _mean([call.seconds[cut - 1] for call in transform_calls]) if cut else 0.0
                self.options.append((cuts, size, seconds))
            if deterministic < transform_calls[0].steps:
                break

    def fixed_cuts(self, before: Mapping[Site, int]) -> dict[Site, int]:
        """Return the cuts that leave cached samples valid.

        Raises:
            DatasetError: there are no such cuts.
        """
        wanted = {site: before.get(site, 0) for site in self.sites}
        for cuts, _, _ in self.options:
            if cuts == wanted:
                return cuts
        raise DatasetError(
            f"{', '.join(map(str, self.sites))} cannot be set: the samples that are cached were made with other transforms, or "
            f"later ones. {_REFUSED}"
        )


def _mean(numbers: Sequence[Any]) -> float:
    return float(np.mean(numbers))


def _find_chains(samples: Sequence[MeasuredSample]) -> list[_CallChain]:
    structures = [[(call.site, call.style, call.upstream) for call in sample.calls] for sample in samples]
    if any(structure != structures[0] for structure in structures):
        raise CannotSplit(_DIFFERENT_CALLS)
    calls = [list(same_call) for same_call in zip(*(sample.calls for sample in samples), strict=True)]
    upstream = [number for _, _, number in structures[0]]
    chains = []
    for last in set(range(len(calls))) - set(upstream):
        chain: list[list[MeasuredCall]] = []
        at: int | None = last
        while at is not None:
            chain.insert(0, calls[at])
            at = upstream[at]
        chains.append(_CallChain(chain))
    return chains


def _find_options(samples: Sequence[MeasuredSample], chains: Sequence[_CallChain]) -> list[Option]:
    """Return where to cut, the latest first. All transforms but those of the largest part are cut as late as possible."""
    if not chains:
        return [Option({}, _mean([sample.size for sample in samples]), 0.0)]
    other_size = max(0.0, _mean([sample.size for sample in samples]) - sum(chain.result_size for chain in chains))
    own_times = [sample.load_s - sum(call.total_s for call in sample.calls) for sample in samples]
    own_s = max(0.0, float(np.median(own_times)))  # without the transforms
    possible = [[option for option in chain.options if option[1] is not None] for chain in chains]
    if not all(possible):
        raise CannotSplit("the input of its transforms cannot be cached")
    sizes: list[Any] = [options[-1][1] for options in possible]
    main = int(np.argmax(sizes))
    same = [number for number, chain in enumerate(chains) if chain.sites == chains[main].sites]  # one transform, several images
    options = []
    for position in range(len(possible[main]) - 1, -1, -1):
        cuts: dict[Site, int] = {}
        size, saved_s = other_size, own_s
        for number, choices in enumerate(possible):
            chain_cuts, chain_size, chain_s = choices[min(position, len(choices) - 1) if number in same else -1]
            cuts |= {site: min(cut, cuts.get(site, cut)) for site, cut in chain_cuts.items()}
            size, saved_s = size + (chain_size or 0), saved_s + chain_s
        options.append(Option(cuts, size, saved_s))
    return options


def choose_option(options: Sequence[Option], cut: Cut, share: Callable[[float], float]) -> Option:
    """Return the option to take; see NOTE [ Where to cut ].

    Args:
        options: the latest cut first.
        cut: the argument of the user.
        share: called with the bytes of a sample; returns the share of the samples that is cached.
    """
    if cut == "latest":
        return options[0]
    smallest = min(options, key=lambda option: option.size)  # of equal ones, the latest
    if cut == "smallest":
        return smallest

    def saved_s(option: Option) -> float:
        return share(option.size) * option.saved_s

    usual = next((option for option in options if share(option.size) == 1.0), smallest)
    best = max(options, key=saved_s)
    return best if saved_s(best) > 2 * saved_s(usual) and saved_s(best) - saved_s(usual) > _NEGLIGIBLE_S else usual


# ---------------------------------------------------------------------------------------------------- planning


def plan_split(
    dataset: Any,
    length: int,
    limit: int,
    cut: Cut,
    encoded: bool,
    allow_pickle: bool,
    wanted: str | None = None,
    old: Split | None = None,
) -> Split | None:
    """Return how to split the transforms of a dataset; None where they cannot be split, or there can be no transforms.

    Args:
        length: samples of the dataset.
        limit: bytes of the cache.
        cut: where to cut; None decides.
        encoded: whether to cache files as they are.
        allow_pickle: whether parts of samples may be cached as pickles.
        wanted: the `Split.before_text` to reach if possible: that of a cache which exists already.
        old: how cached samples were made. The new split leaves them valid.

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
        return _Planner(dataset, tree, length, encoded, allow_pickle, old).plan(limit, cut, wanted)
    except DatasetError:
        raise
    except Exception as error:  # whatever the dataset does when it is patched, or in a child process
        reason = str(error) if isinstance(error, CannotSplit) else f"{type(error).__name__}: {error}"
        if encoded:
            raise DatasetError(_ENCODED.format(name, reason)) from error
        if old is not None:
            raise DatasetError(
                f"the transforms of {name} cannot be set while samples are cached: {reason}. {_REFUSED}"
            ) from error
        if not isinstance(error, _CannotLoad):  # the probe reports that
            warn_of_random_steps(dataset, reason)
        return None


class _Kind(NamedTuple):
    """One kind of leaf: those with the same class and transforms.

    Attributes:
        leaf: the first of them.
        pipelines: its transforms.
        examples: samples to try.
        share: the share of all samples that leaves of this kind make.
        options: where to cut.
        decodes: whether the input of its transforms is an image.
        rest: names of the steps that run after the cache without being an attribute.
        load_s: seconds to load a sample.
        undrawn_s: for transforms that are not wholly deterministic but drew no random numbers: seconds after their last
            deterministic step.
    """

    leaf: Any
    pipelines: Mapping[Site, Pipeline]
    examples: Sequence[Example]
    share: float
    options: Sequence[Option] = ()
    decodes: bool = False
    rest: tuple[str, ...] = ()
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
        self, dataset: Any, tree: DatasetTree, length: int, encoded: bool, allow_pickle: bool, old: Split | None
    ) -> None:
        self._dataset, self._tree, self._encoded, self._old, self._length = dataset, tree, encoded, old, length
        self._allow_pickle = allow_pickle
        examples = _choose_examples(tree, length)
        if len(set(tree.kinds)) > _MAX_KINDS:
            raise CannotSplit(f"there are {len(set(tree.kinds))} kinds of datasets within it")
        if set(examples) != set(tree.kinds):
            raise CannotSplit("some datasets within it have no samples here")
        self._plain: dict[tuple[int, int], Any] = {}  # samples as the dataset makes them, by the round and the index
        self._kinds: dict[int, _Kind] = {}
        for number, (share, kind_examples) in examples.items():
            leaf = tree.leaves[number]
            at_reading = find_read_transform(leaf, encoded)
            pipelines = {} if at_reading else open_pipelines(leaf, encoded)
            wanted = [idx for idx, _ in kind_examples]
            for found in self._in_child(partial(make_plain, dataset, _random_steps(pipelines), wanted)):
                self._plain[found[:2]] = found[2]
            loaded = [example for example in kind_examples if (0, example[0]) in self._plain]
            if not loaded:
                raise _CannotLoad("its samples cannot be loaded")
            kind = _Kind(leaf, pipelines, loaded, share, rest=tuple(at_reading.rest) if at_reading else ())
            self._kinds[number] = self._measured(number, kind)

    def _in_child(self, job: Callable[[], Iterator[Any]]) -> list[Any]:
        return list(in_children_or_here(self._dataset, [job], patience_s=_PATIENCE_S))

    def _measured(self, number: int, kind: _Kind) -> _Kind:
        if not kind.pipelines:
            self._fixed_steps(number, {})
            return kind._replace(options=[Option({}, 0.0, 0.0)])
        samples = self._in_child(partial(measure_steps, kind.leaf, kind.examples, self._encoded, self._allow_pickle))
        chains = _find_chains(samples)
        called = {site for chain in chains for site in chain.sites}
        if self._encoded and not any(site.name == "loader" for site in called):
            raise CannotSplit("it does not call its loader")
        fixed = self._fixed_steps(number, kind.pipelines)
        if fixed is None:
            options: list[Option] = _find_options(samples, chains)
        else:
            cuts = {site: cut for chain in chains for site, cut in chain.fixed_cuts(fixed).items()}
            options = [Option(cuts, _mean([sample.size for sample in samples]), 0.0)]
        load_s = float(np.median([sample.load_s for sample in samples]))
        calls = [call for sample in samples for call in sample.calls]
        drawing = {call.site for call in calls if call.draws or len(call.seconds) == call.steps}
        undrawn_s = {site: float(np.median([call.rest_s for call in calls if call.site == site])) for site in called - drawing}
        return kind._replace(options=options, decodes=samples[0].decodes, load_s=load_s, undrawn_s=undrawn_s)

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
                        f"with these. {_REFUSED}"
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
                split = Split(self._dataset, self._try_out(attempt), self._tree)
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

    def _try_out(self, attempt: _Attempt) -> dict[int, CutPlan]:
        """Return the plans of an attempt.

        Raises:
            CannotSplit: samples would differ from those of the dataset.
        """
        return {number: self._tried_out(kind, attempt[number].cuts) for number, kind in self._kinds.items()}

    def _tried_out(self, kind: _Kind, cuts: dict[Site, int]) -> CutPlan:
        plan = CutPlan(cuts, encoded=self._encoded, reads=bool(kind.rest))
        rounds = 1 + max(at for at, idx in self._plain if idx == kind.examples[0][0])
        if any(cuts.get(site, 0) < len(pipeline.steps) for site, pipeline in kind.pipelines.items()):
            plan = self._with_program(kind, plan, rounds)
            if not plan.program.steps and _random_steps(kind.pipelines):
                raise CannotSplit(f"{type(kind.leaf).__name__} does not call its {', '.join(map(str, kind.pipelines))}")
        if plan.reads or not (plan.program.steps or self._old):
            return plan
        parts = self._load_parts(kind, plan)
        finish = partial(finish_parts, kind.leaf, plan, _random_steps(kind.pipelines), parts, rounds)
        for at, idx, description in self._in_child(finish):
            if (place := difference(self._plain[at, idx], description)) is not None:
                raise CannotSplit(f"sample {idx} would not be the same ({place:.200})")
        return plan

    def _with_program(self, kind: _Kind, plan: CutPlan, rounds: int) -> CutPlan:
        """Return a plan with the program that runs after the cache. A transform of another's output has no steps before it."""
        steps = _random_steps(kind.pipelines)
        programs: list[Program] = self._in_child(partial(record_programs, kind.leaf, plan, steps, kind.examples, rounds))
        try:
            program = reduce(Program.merged, programs)
        except Deviation:
            raise CannotSplit(_DIFFERENT_CALLS) from None
        rests = [step.function for step in program.steps if isinstance(step.function, Rest)]
        begins = {rest.site: rest.begin for rest in reversed(rests)}  # where the first begins
        return plan._replace(cuts=plan.cuts | begins, program=program)

    def _load_parts(self, kind: _Kind, plan: CutPlan) -> dict[int, tuple[int, Any]]:
        """Load the cached parts of the examples in two processes, in opposite orders; return them by the index of the sample.

        Raises:
            CannotSplit: they differ from each other or from the parts that are cached already, or random numbers were drawn.
        """
        load = partial(load_parts, kind.leaf, plan, allow_pickle=self._allow_pickle)
        jobs: list[Any] = [partial(load, examples=kind.examples), partial(load, examples=kind.examples[::-1])]
        if self._old is not None:
            jobs.append(partial(load_with_old_split, self._old, kind.examples))
        found: dict[int, Any] = {}
        records: dict[int, bytes] = {}
        for part in in_children_or_here(self._dataset, jobs, patience_s=_PATIENCE_S):
            if part.drawn:
                raise CannotSplit("it draws or seeds random numbers outside of its transforms")
            if found.setdefault(part.idx, part.description) != part.description:
                reason = f"the loaded part of sample {part.idx} depends on the samples that were loaded before it"
                reason = reason if self._old is None else "other parts of samples would have to be cached"
                raise CannotSplit(reason)
            if part.record is not None:
                records[part.idx] = part.record
        return {idx: (leaf_idx, unpack_sample(records[idx])) for idx, leaf_idx in kind.examples}

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
            if unknown and self._old is None and rest_s > max(_NEGLIGIBLE_S, kind.load_s / 2):
                logger.warning(
                    "%s is not known to be deterministic, so it runs after the cache, in each epoch: %.3g of the %.3g ms of a "
                    "sample. If it gives the same each time and draws nothing random, mark it: stocache.deterministic(%s).",
                    step_name(step), rest_s * 1e3, kind.load_s * 1e3, step_name(step),
                )  # fmt: skip


def _begins_with(steps: Sequence[Any], beginning: Sequence[Any]) -> bool:
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


def _choose_examples(tree: DatasetTree, length: int) -> dict[int, tuple[float, list[Example]]]:
    """Return for each kind of leaf its share of the samples, and some of these samples."""
    searched = spread(length, _SEARCHED)
    found: dict[int, list[Example]] = {}
    for idx in sorted({*searched, *(start for start in tree.starts if start < length)}):
        number, leaf_idx = tree.locate(idx)
        found.setdefault(tree.kinds[number], []).append((idx, leaf_idx))
    positions = np.linspace(0, 1, _EXAMPLES)
    return {
        kind: (len(samples) / len(searched), [samples[at] for at in sorted({round(p * (len(samples) - 1)) for p in positions})])
        for kind, samples in found.items()
    }
