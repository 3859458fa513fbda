"""Where the transforms of a dataset are cut: measured and tried out in child processes, before the user's own loop.

NOTE [ Where to cut ]
    A later cut saves more work, an earlier one may need less memory: a float tensor has four times the bytes of the image.
    While everything fits, the latest cut is the best; else the latest at which everything fits, or where samples are smallest.
    But not where that saves next to nothing: a path is smaller than its image.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from stocache.errors import DatasetError, SampleError
from stocache.samples.indices import spread
from stocache.samples.record_encoder import PackedRecord, Record, pack_sample
from stocache.system.children import in_children
from stocache.system.limits import format_size
from stocache.system.rng import RngMonitor, disturb, fingerprint
from stocache.transforms.encoded import encoded_pipeline
from stocache.transforms.huggingface import read_transform_of
from stocache.transforms.known import is_deterministic, is_known
from stocache.transforms.parts import Path, paths_to
from stocache.transforms.pipelines import Pipeline, name_of_step, same_step
from stocache.transforms.routes import Route, leaves_of
from stocache.transforms.splitting import (
    ALL,
    BoundPlan,
    CutPlan,
    PlannedCall,
    Split,
    carried,
    carrying,
    finished,
    pipelines_of,
    style_of,
    told_before,
)
from stocache.transforms.twins import Call, Calls, Site, Tap, find_sites, twin_of

logger = logging.getLogger("stocache")

Cut: TypeAlias = Literal["latest", "smallest"] | None
_Example: TypeAlias = tuple[int, int]  # an index, and that in the dataset within

_EXAMPLES = 3  # samples of each kind of dataset that are tried out
_SLOW_S = 2.0  # after which no further one is begun
_SEEN = 4096  # samples that are looked at for the kinds of datasets that make them
_KINDS = 8  # of datasets within one
_PATIENCE_S = 120.0  # for one sample
_LITTLE_S = 1e-4  # per sample; not worth a larger one

_REFUSED = "Set it before CachedDataset, or make a new one."

_ENCODED = (
    "store='encoded' is for datasets that load each file by an attribute `loader`, called with its path, as torchvision's "
    "folders do; with {} it does not work: {}. Leave store= out; or have your dataset return the bytes of its files, and "
    "decode them in transform=."
)


class _Unsplit(Exception):
    """Why transforms cannot be split. Never raised to users."""


class _Unloadable(_Unsplit):
    """Not one sample can be loaded."""


def warn_of_random_parts(dataset: Any, reason: str) -> None:
    """Say that what is random in a dataset's transforms is not run anew in each epoch, if anything is."""
    random = [name_of_step(step) for leaf in leaves_of(dataset) for step in _random_steps(pipelines_of(leaf, False))]
    if random:
        logger.warning(
            "the transforms of %s are not split: %s. They run before the cache, and every epoch will see the first outcome of "
            "%s. Give the random part to CachedDataset(..., transform=...); split_transforms() cuts it off.",
            type(dataset).__name__, reason, ", ".join(dict.fromkeys(random)),
        )  # fmt: skip


def _random_steps(pipelines: Mapping[Site, Pipeline]) -> list[Any]:
    return [step for pipeline in pipelines.values() for step in pipeline.steps[pipeline.deterministic :]]


# ---------------------------------------------------------------------------------------------------- in child processes


class _Measured(NamedTuple):
    """A call of a transform as it was measured.

    Attributes:
        upstream: the number of the call whose output it got, or None.
        steps: how many it has.
        seconds: of each of the deterministic ones at its beginning.
        sizes: bytes of what is carried before and after each of these; None where it cannot be cached.
        result_size: bytes of its output.
        total_s: of the call.
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


class _Look(NamedTuple):
    """What was measured of a sample.

    Attributes:
        size: bytes, as the dataset returns it.
        load_s: seconds to load it.
        calls: of transforms, in order.
        decodes: whether its transforms are given an image.
    """

    size: int
    load_s: float
    calls: tuple[_Measured, ...]
    decodes: bool


class _Trial(NamedTuple):
    """A sample that was made with a cut.

    Attributes:
        calls: where the output of each cut transform is in it.
        seeded: whether the dataset sets the seed of random numbers while it loads a sample.
        repeated: see `CutPlan`.
    """

    idx: int
    record: PackedRecord
    calls: tuple[PlannedCall, ...]
    seeded: bool
    repeated: tuple[tuple[Path, Path], ...]


def _bytes_of(value: Any) -> int | None:
    try:
        data, integers = Record(value).pack()
    except SampleError:
        return None
    return len(data) + 4 * len(integers) + 16


def _load_plainly(dataset: Any, indices: Sequence[int]) -> Iterator[tuple[int, PackedRecord]]:
    began = time.monotonic()
    for idx in indices:
        try:
            sample = dataset[idx]
        except Exception:  # of this sample; the probe tells
            continue
        yield idx, pack_sample(sample)
        if time.monotonic() - began > _SLOW_S:
            return


def _measure(leaf: Any, examples: Sequence[_Example], encoded: bool) -> Iterator[_Look]:
    pipelines, calls = pipelines_of(leaf, encoded), Calls()
    meters = {site: _Meter(pipeline) for site, pipeline in pipelines.items()}
    twin = twin_of(leaf, {site: Tap(site, pipelines[site].whole, meter, calls) for site, meter in meters.items()})
    for _, at in examples:
        calls.made.clear()
        began = time.perf_counter()
        sample = twin[at]
        load_s = time.perf_counter() - began
        looks = {site: iter(meter.taken()) for site, meter in meters.items()}
        measured = tuple(_measured(calls.made, number, next(looks[call.site])) for number, call in enumerate(calls.made))
        given = calls.made[0].args if calls.made else ()
        aside_s = sum(meter.aside_s for meter in meters.values())
        decodes = any(type(value).__module__.startswith("PIL.") for value in given)
        yield _Look(_bytes_of(sample) or 0, load_s - aside_s, measured, decodes)


class _Meter:
    """Runs a transform, its deterministic beginning step by step, and notes times and sizes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._looks: list[dict[str, Any]] = []
        self.aside_s = 0.0  # spent on noting, since the last `taken`

    def taken(self) -> list[dict[str, Any]]:
        """Return what was noted of each call since the last time."""
        looks, self._looks = self._looks, []
        return looks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._looks:
            self.aside_s = 0.0
        style, value = style_of(args, kwargs), carried(args, kwargs)
        began, aside_s = time.perf_counter(), self.aside_s
        sizes, seconds, done, whole = [self._size(value)], [], 0, RngMonitor()
        while done < (0 if style == "mixed" else self._pipeline.deterministic):
            watch, at = RngMonitor(), time.perf_counter()
            value = carrying(self._pipeline.part(done, done + 1), style)(value)
            took_s, done = time.perf_counter() - at, done + 1
            if watch.drawn():  # so it is random, whatever it is called
                break
            seconds.append(took_s)
            sizes.append(self._size(value))
        if done < len(self._pipeline.steps):
            value = carrying(self._pipeline.part(done), style)(value)
        total_s = time.perf_counter() - began - (self.aside_s - aside_s)
        look = {"steps": len(self._pipeline.steps), "seconds": tuple(seconds), "sizes": tuple(sizes), "total_s": total_s}
        self._looks.append(look | {"result_size": self._size(value) or 0, "draws": whole.drawn()})
        return value

    def _size(self, value: Any) -> int | None:
        began = time.perf_counter()
        size = _bytes_of(value)
        self.aside_s += time.perf_counter() - began
        return size


def _measured(calls: Sequence[Call], number: int, look: Mapping[str, Any]) -> _Measured:
    call, upstream = calls[number], None
    given = [value for value in (*call.args, *call.kwargs.values()) if not isinstance(value, int | float | str | bytes | None)]
    for earlier in range(number):
        result = calls[earlier].result
        parts = result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else ()
        if any(value is made for value in given for made in (result, *parts)):
            upstream = earlier
    return _Measured(call.site, style_of(call.args, call.kwargs), upstream, **look)


def _try_out(leaf: Any, plan: CutPlan, examples: Sequence[_Example]) -> Iterator[_Trial]:
    """Load samples with a cut, and finish each at once: random numbers are drawn as they are without a cut."""
    bound = BoundPlan(leaf, plan)
    for idx, at in examples:
        before = fingerprint()
        sample, made = bound.load_with_calls(at)
        after = fingerprint()
        calls, repeated = _apart(made, [_located(call, plan.cuts[call.site], sample) for call in made])
        for call in calls:
            sample = finished(sample, call, carrying(bound.pipelines[call.site].part(call.cut), call.style))
        record, seeded = pack_sample(sample), False
        if idx == examples[-1][0] and before != after:  # it draws numbers itself; or sets the seed for its transforms
            disturb()
            bound.load_with_calls(at)
            seeded = any(one == other != old for one, other, old in zip(after, fingerprint(), before, strict=True))
        yield _Trial(idx, record, calls, seeded, repeated)


def _apart(
    made: Sequence[Call], located: Sequence[PlannedCall]
) -> tuple[tuple[PlannedCall, ...], tuple[tuple[Path, Path], ...]]:
    """Return calls with one place each where several had the same output, an image of which several views are made."""
    calls, repeated = list(located), []
    for number, call in enumerate(made):
        alike = [other for other, its in enumerate(made) if its.result is call.result]
        paths = located[number].parts[0][1]
        if len(alike) > 1 and len(alike) == len(paths):
            place = paths[alike.index(number)]
            calls[number] = located[number]._replace(parts=((None, (place,)),))
            repeated += [(place, paths[0])] * (place != paths[0])
    return tuple(calls), tuple(repeated)


def _located(call: Call, cut: int, sample: Any) -> PlannedCall:
    """Return a call with the places in the sample where its output is.

    Raises:
        _Unsplit: it is not there.
    """
    style, result = style_of(call.args, call.kwargs), call.result
    paths = paths_to(sample, result)
    parts: tuple[tuple[Any, tuple[Path, ...]], ...] = ((None, paths),)
    if not paths and style == "args" and isinstance(result, tuple):
        parts = tuple((key, paths_to(sample, value)) for key, value in enumerate(result))
    elif not paths and style == "kwargs" and isinstance(result, dict):
        parts = tuple((key, paths_to(sample, value)) for key, value in result.items())
    if not all(its for _, its in parts):
        raise _Unsplit(f"what its {call.site} returns is not in the sample as it is")
    return PlannedCall(call.site, cut, style, parts)


# ---------------------------------------------------------------------------------------------------- where to cut


class Option(NamedTuple):
    """A place to cut: the cut of each transform that is called, the bytes of a sample, and the seconds a cached one saves."""

    cuts: dict[Site, int]
    size: float
    saved_s: float


class _Chain:
    """Transforms that are called one after another on one part of the samples: as one transform with all their steps.

    Args:
        calls: of each transform, its call in each example.
    """

    def __init__(self, calls: Sequence[Sequence[_Measured]]) -> None:
        self._calls = calls
        self.sites = tuple(its[0].site for its in calls)
        self.result_size = _mean([call.result_size for call in calls[-1]])
        self.options: list[tuple[dict[Site, int], float | None, float]] = []  # cuts, size, seconds; the earliest first
        cuts = dict.fromkeys(self.sites, 0)
        seconds = 0.0
        for its in calls:
            deterministic = min(len(call.seconds) for call in its)
            for cut in range(bool(self.options), deterministic + 1):
                cuts = {**cuts, its[0].site: cut}
                sizes = [call.sizes[cut] for call in its]
                size = None if None in sizes else _mean(sizes)
                seconds += _mean([call.seconds[cut - 1] for call in its]) if cut else 0.0
                self.options.append((cuts, size, seconds))
            if deterministic < its[0].steps:
                break

    def fixed(self, before: Mapping[Site, int]) -> dict[Site, int]:
        """Return the cuts that leave cached samples as they are.

        Raises:
            DatasetError: there are not any.
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


def _chains(looks: Sequence[_Look]) -> list[_Chain]:
    structures = [[(call.site, call.style, call.upstream) for call in look.calls] for look in looks]
    if any(structure != structures[0] for structure in structures):
        raise _Unsplit("it does not call its transforms in the same way for each sample")
    calls = [list(its) for its in zip(*(look.calls for look in looks), strict=True)]
    upstream = [above for _, _, above in structures[0]]
    chains = []
    for number in set(range(len(calls))) - set(upstream):
        chain: list[list[_Measured]] = []
        at: int | None = number
        while at is not None:
            chain.insert(0, calls[at])
            at = upstream[at]
        chains.append(_Chain(chain))
    return chains


def _options(looks: Sequence[_Look], chains: Sequence[_Chain]) -> list[Option]:
    """Return where to cut, the latest first. All transforms but those of the largest part are cut as late as possible."""
    if not chains:
        return [Option({}, _mean([look.size for look in looks]), 0.0)]
    rest = max(0.0, _mean([look.size for look in looks]) - sum(chain.result_size for chain in chains))
    own_s = max(0.0, float(np.median([look.load_s - sum(call.total_s for call in look.calls) for look in looks])))
    possible = [[option for option in chain.options if option[1] is not None] for chain in chains]
    if not all(possible):
        raise _Unsplit("what its transforms are given cannot be cached")
    sizes: list[Any] = [options[-1][1] for options in possible]
    main = int(np.argmax(sizes))
    same = [number for number, chain in enumerate(chains) if chain.sites == chains[main].sites]  # one transform, several images
    options = []
    for position in range(len(possible[main]) - 1, -1, -1):
        cuts: dict[Site, int] = {}
        size, saved_s = rest, own_s
        for number, its in enumerate(possible):
            its_cuts, its_size, its_s = its[min(position, len(its) - 1) if number in same else -1]
            cuts |= {site: min(cut, cuts.get(site, cut)) for site, cut in its_cuts.items()}
            size, saved_s = size + (its_size or 0), saved_s + its_s
        options.append(Option(cuts, size, saved_s))
    return options


def chosen(options: Sequence[Option], cut: Cut, share: Callable[[float], float]) -> Option:
    """Return the option to take; see NOTE [ Where to cut ].

    Args:
        options: the latest cut first.
        share: what share of the samples is cached if each has so many bytes.
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
    return best if saved_s(best) > 2 * saved_s(usual) and saved_s(best) - saved_s(usual) > _LITTLE_S else usual


# ---------------------------------------------------------------------------------------------------- planning


class _Kind(NamedTuple):
    """One kind of dataset within a dataset.

    Attributes:
        leaf: the first of them.
        pipelines: its transforms.
        examples: samples to try.
        share: of all samples that are theirs.
        options: where to cut.
        decodes: whether its transforms are given images.
        rest: what runs after the cache without being an attribute.
        load_s: seconds to load a sample.
        undrawn_s: of transforms that are not wholly deterministic but drew no random numbers: seconds after the last such step.
    """

    leaf: Any
    pipelines: Mapping[Site, Pipeline]
    examples: Sequence[_Example]
    share: float
    options: Sequence[Option] = ()
    decodes: bool = False
    rest: tuple[str, ...] = ()
    load_s: float = 0.0
    undrawn_s: Mapping[Site, float] = {}


def plan_split(
    dataset: Any, length: int, limit: int, cut: Cut, encoded: bool, wanted: str | None = None, old: Split | None = None
) -> Split | None:
    """Return how the samples of a dataset are to be made; None where its transforms cannot be split, or it can have none.

    Args:
        length: samples of the dataset.
        limit: bytes of the cache.
        cut: where to cut; None decides.
        encoded: whether to cache files as they are.
        wanted: what `Split.told_before` should be, where that is possible: that of a cache which is there already.
        old: how cached samples were made; the new plan leaves them as they are.

    Raises:
        DatasetError: it cannot leave them so; or ``encoded``, and the dataset does not load files by a ``loader``.
    """
    name = type(dataset).__name__
    route = Route(dataset)
    read_late = any(read_transform_of(leaf, encoded) for leaf in route.leaves)
    if encoded and not read_late and not any(map(encoded_pipeline, route.leaves)):
        raise DatasetError(_ENCODED.format(name, "it has no loader"))
    if not encoded and not read_late:
        if not any(map(find_sites, route.leaves)):
            return None
        cached = old is not None and any(steps for its in old.before.values() for steps in its.values())
        if not cached and not any(pipelines_of(leaf, False) for leaf in route.leaves):
            return Split(dataset, dict.fromkeys(route.kinds, CutPlan({})))
    try:
        return _Planner(dataset, route, length, encoded, old).plan(limit, cut, wanted)
    except DatasetError:
        raise
    except Exception as error:  # whatever the dataset does with a twin, or a child process
        reason = str(error) if isinstance(error, _Unsplit) else f"{type(error).__name__}: {error}"
        if encoded:
            raise DatasetError(_ENCODED.format(name, reason)) from error
        if old is not None:
            raise DatasetError(
                f"the transforms of {name} cannot be set while samples are cached: {reason}. {_REFUSED}"
            ) from error
        if not isinstance(error, _Unloadable):  # of which the probe tells
            warn_of_random_parts(dataset, reason)
        return None


class _Planner:
    """Measures, decides, and tries out; see NOTE [ Where to cut ], and NOTE [ Splitting ] in splitting.py."""

    def __init__(self, dataset: Any, route: Route, length: int, encoded: bool, old: Split | None) -> None:
        self._dataset, self._route, self._encoded, self._old, self._length = dataset, route, encoded, old, length
        examples = _examples(route, length)
        if len(set(route.kinds)) > _KINDS:
            raise _Unsplit(f"there are {len(set(route.kinds))} kinds of datasets within it")
        if set(examples) != set(route.kinds):
            raise _Unsplit("some datasets within it have no samples here")
        self._plain: dict[int, PackedRecord] = {}
        self._kinds: dict[int, _Kind] = {}
        for kind, (share, its) in examples.items():
            self._plain |= dict(self._in_child(partial(_load_plainly, dataset, [idx for idx, _ in its])))
            loaded = [example for example in its if example[0] in self._plain]
            if not loaded:
                raise _Unloadable("its samples cannot be loaded")
            leaf = route.leaves[kind]
            reads = read_transform_of(leaf, encoded)
            found = _Kind(
                leaf, {} if reads else pipelines_of(leaf, encoded), loaded, share, rest=tuple(reads.rest) if reads else ()
            )
            self._kinds[kind] = self._measured(kind, found)

    def _in_child(self, job: Callable[[], Iterator[Any]]) -> list[Any]:
        return list(in_children([job], self._dataset, _PATIENCE_S))

    def _measured(self, number: int, kind: _Kind) -> _Kind:
        if not kind.pipelines:
            self._before(number, {})
            return kind._replace(options=[Option({}, 0.0, 0.0)])
        looks = self._in_child(partial(_measure, kind.leaf, kind.examples, self._encoded))
        chains = _chains(looks)
        called = {site for chain in chains for site in chain.sites}
        idle = [str(site) for site in kind.pipelines if site not in called]
        if self._encoded and not any(site.name == "loader" for site in called):
            raise _Unsplit("it does not call its loader")
        if not called and self._old is None and _random_steps(kind.pipelines):
            raise _Unsplit(f"{type(kind.leaf).__name__} does not call its {', '.join(idle)}")
        before = self._before(number, kind.pipelines)
        if before is None:
            options: list[Option] = _options(looks, chains)
        else:
            cuts = {site: cut for chain in chains for site, cut in chain.fixed(before).items()}
            options = [Option(cuts, _mean([look.size for look in looks]), 0.0)]
        load_s = float(np.median([look.load_s for look in looks]))
        calls = [call for look in looks for call in look.calls]
        drawn = {call.site for call in calls if call.draws or len(call.seconds) == call.steps}
        undrawn_s = {site: float(np.median([call.rest_s for call in calls if call.site == site])) for site in called - drawn}
        return kind._replace(options=options, decodes=looks[0].decodes, load_s=load_s, undrawn_s=undrawn_s)

    def _before(self, number: int, pipelines: Mapping[Site, Pipeline]) -> dict[Site, int] | None:
        """Return how many steps of each transform must run before the cache; None where that is free."""
        if self._old is None:
            return {site: 1 for site in pipelines if site.name == "loader"} if self._encoded else None
        befores = [self._old.before.get(leaf, {}) for leaf, kind in enumerate(self._route.kinds) if kind == number]
        fixed: dict[Site, int] = {}
        for before in befores:
            for site in {*befores[0], *before}:
                steps = before.get(site, ())
                now = pipelines[site].steps if site in pipelines else ()
                if len(steps) != len(befores[0].get(site, ())) or not _begins_with(now, steps):
                    names = ", ".join(map(name_of_step, steps)) or "other steps"
                    raise DatasetError(
                        f"{site} cannot be set: samples are cached as they are after {names}, with which the new one does not "
                        f"begin. {_REFUSED}"
                    )
                fixed[site] = len(steps)
        return fixed

    def plan(self, limit: int, cut: Cut, wanted: str | None) -> Split:
        """Return the plan: the one that is ``wanted``, if it can be had, or the best that gives the same samples."""
        attempts = self._attempts(limit, cut)
        if wanted is not None:
            several = range(max(len(kind.options) for kind in self._kinds.values()))
            attempts = [at for at in map(self._at, several) if self._told(at) == wanted] or attempts
        problems = []
        for attempt in attempts:
            try:
                split = Split(self._dataset, self._tried(attempt))
            except Exception as error:  # whatever the dataset raises that is given what it does not expect
                problems.append(error)
            else:
                self._tell(attempt)
                return split
        raise problems[0]

    def _attempts(self, limit: int, cut: Cut) -> list[dict[int, Option]]:
        """Return what to try: the best; and in case a transform's beginning cannot be run by itself, all after the cache."""
        several = range(max(len(kind.options) for kind in self._kinds.values()))

        def share(size: float) -> float:
            return min(1.0, limit / max(1.0, size * self._length * 1.02))

        if cut is None:  # for all kinds together
            together = [self._together(self._at(at)) for at in several]
            best = self._at(together.index(chosen(together, None, share)))
        else:
            best = {number: chosen(kind.options, cut, share) for number, kind in self._kinds.items()}
        last = self._at(-1)
        return [best] + [last] * (last != best)

    def _at(self, position: int) -> dict[int, Option]:
        return {number: kind.options[min(position, len(kind.options) - 1)] for number, kind in self._kinds.items()}

    def _together(self, attempt: Mapping[int, Option]) -> Option:
        """Return the mean over all samples."""
        kinds = [(self._kinds[number].share, option) for number, option in attempt.items()]
        return Option({}, sum(share * its.size for share, its in kinds), sum(share * its.saved_s for share, its in kinds))

    def _told(self, attempt: Mapping[int, Option]) -> str:
        if all(not self._rest(number, attempt[number]) for number in self._kinds):
            return ALL
        return told_before(
            {
                number: {site: self._kinds[number].pipelines[site].steps[:cut] for site, cut in attempt[number].cuts.items()}
                for number in sorted(self._kinds)
            }
        )

    def _rest(self, number: int, option: Option) -> list[str]:
        kind = self._kinds[number]
        return [
            *kind.rest,
            *(name_of_step(step) for site, cut in option.cuts.items() for step in kind.pipelines[site].steps[cut:]),
        ]

    def _tried(self, attempt: Mapping[int, Option]) -> dict[int, CutPlan]:
        """Return plans with which samples are those of the dataset.

        Raises:
            _Unsplit: they are not.
        """
        plans = {}
        for number, kind in self._kinds.items():
            cuts = attempt[number].cuts
            calls = tuple(PlannedCall(site, cut, "", ()) for site, cut in cuts.items() if cut < len(kind.pipelines[site].steps))
            plan = CutPlan(cuts, calls, self._encoded, bool(kind.rest))
            plans[number] = self._compared(kind, plan) if calls else plan
        return plans

    def _compared(self, kind: _Kind, plan: CutPlan) -> CutPlan:
        """Return a plan with the places in the samples."""
        trials = self._in_child(partial(_try_out, kind.leaf, plan, kind.examples))
        for trial in trials:
            if trial.seeded:
                raise _Unsplit("it sets the seed of random numbers for each sample")
            plain = self._plain[trial.idx]
            if trial.record.treedef != plain.treedef or (not plain.has_pickles and trial.record != plain):
                raise _Unsplit(f"sample {trial.idx} would not be the same")
        repeated = trials[0].repeated
        if any(trial.repeated != repeated for trial in trials):
            raise _Unsplit("it does not call its transforms in the same way for each sample")
        return plan._replace(calls=_in_common([trial.calls for trial in trials]), repeated=repeated)

    def _tell(self, attempt: Mapping[int, Option]) -> None:
        for number, kind in self._kinds.items():
            option = attempt[number]
            before = [name_of_step(step) for site, cut in option.cuts.items() for step in kind.pipelines[site].steps[:cut]]
            after = self._rest(number, option)
            logger.info(
                "before the cache: %s; after it: %s%s",
                ", ".join(["decode" if kind.decodes else "load", *before]), ", ".join(after) or "nothing",
                _figures(option, kind.options),
            )  # fmt: skip
            self._warn_of_unknown(number, option)

    def _warn_of_unknown(self, number: int, option: Option) -> None:
        """Say so where most of the time goes into a step that is only taken for random as it is not known."""
        kind = self._kinds[number]
        for site, rest_s in () if self._encoded else kind.undrawn_s.items():
            step = kind.pipelines[site].steps[option.cuts[site]]
            unknown = not is_known(type(step)) and not is_deterministic(step)
            if unknown and self._old is None and rest_s > max(_LITTLE_S, kind.load_s / 2):
                logger.warning(
                    "%s is not known to be deterministic, so it runs after the cache, in each epoch: %.3g of the %.3g ms of a "
                    "sample. If it gives the same each time and draws nothing random, mark it: stocache.deterministic(%s).",
                    name_of_step(step), rest_s * 1e3, kind.load_s * 1e3, name_of_step(step),
                )  # fmt: skip


def _begins_with(steps: Sequence[Any], beginning: Sequence[Any]) -> bool:
    return len(steps) >= len(beginning) and all(map(same_step, beginning, steps))


def _figures(option: Option, options: Sequence[Option]) -> str:
    """Return the bytes and times of an option in words, with those of what could have been taken instead."""
    if len(options) < 2:
        return ""
    told = {"this": option, "the latest": options[0], "the smallest": min(options, key=lambda its: its.size)}
    shown = [
        f"{name} cut caches {format_size(its.size)} a sample and saves {its.saved_s * 1e3:.3g} ms"
        for name, its in told.items()
        if name == "this" or its != option
    ]
    return f" ({'; '.join(shown)})"


def _in_common(calls: Sequence[tuple[PlannedCall, ...]]) -> tuple[PlannedCall, ...]:
    """Return the calls with the places that all samples have in common: a small number is found in other places, too."""
    if len({tuple((call.site, call.style, tuple(key for key, _ in call.parts)) for call in its) for its in calls}) != 1:
        raise _Unsplit("it does not call its transforms in the same way for each sample")
    common = []
    for its in zip(*calls, strict=True):
        parts = []
        for number, (key, paths) in enumerate(its[0].parts):
            places = tuple(path for path in paths if all(path in call.parts[number][1] for call in its))
            if not places:
                raise _Unsplit(f"what its {its[0].site} returns is in another place of each sample")
            parts.append((key, places))
        common.append(its[0]._replace(parts=tuple(parts)))
    return tuple(common)


def _examples(route: Route, length: int) -> dict[int, tuple[float, list[_Example]]]:
    """Return for each kind of dataset within: its share of the samples, and some of these."""
    seen = spread(length, _SEEN)
    found: dict[int, list[_Example]] = {}
    for idx in sorted({*seen, *(start for start in route.starts if start < length)}):
        number, at = route(idx)
        found.setdefault(route.kinds[number], []).append((idx, at))
    several = np.linspace(0, 1, _EXAMPLES)
    return {
        kind: (len(its) / len(seen), [its[at] for at in sorted({round(share * (len(its) - 1)) for share in several})])
        for kind, its in found.items()
    }
