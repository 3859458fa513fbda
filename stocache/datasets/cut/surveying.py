"""Load a few samples of a dataset in child processes, to see where its program can be cut, and whether a cut is right.

NOTE [ Trials ]
    A sample that is tried is loaded with marks and by the dataset itself, with the same seeds: both must be equal, and so must
    the states of the generators. A second process, which loads the samples in the opposite order, makes the parts to cache;
    that is the probe. A third process, which has loaded nothing, finishes the parts, with several seeds, and reads no attribute
    that the first part sets. All samples and generators must come out equal: then what is before the cut is not random, and
    does not depend on the samples that were loaded before.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from stocache.datasets.cut.division import RETURNED, Division, earlier, halves_of
from stocache.datasets.cut.program import Program
from stocache.datasets.cut.source import PREFIX, CannotCut
from stocache.datasets.cut.split import CutPlan, Split
from stocache.datasets.cut.tracing import Trace
from stocache.datasets.cut.tree import DatasetTree
from stocache.errors import SampleError
from stocache.samples.record_decoder import Records
from stocache.samples.record_encoder import EncodedSample
from stocache.system.describe import describe, difference
from stocache.system.generators import GENERATORS, Kept, seed_all
from stocache.system.hashing import digest
from stocache.system.loading.code import attributes_in, own_generators, running_codes
from stocache.system.objects import vars_of
from stocache.system.walking import is_own_or_dataset, parts_of

_SLOW_S = 10.0  # after which no further sample is begun, once there are some
_FEW = 2  # samples of each kind that are loaded in any case
_OPTIONS = 3  # that are looked for: the latest may be wrong
_QUICK_S = 0.05  # for a sample that may be loaded with a look at each call
_UNUSUAL = 735_291  # a seed that a program does not set itself: then nothing would change
_WORTH = 0.05  # the share of a sample that a cut saves at least
_NOTHING = "nothing that takes time comes before that"


class Example(NamedTuple):
    """A sample to try.

    Attributes:
        idx: in the dataset.
        turn: how many samples of leaves of its kind come before it; the seed of its random numbers.
    """

    idx: int
    turn: int

    @contextlib.contextmanager
    def seeded(self, leaf: object, again: int = 0) -> Iterator[None]:
        """Seed the generators, by the turn and the number ``again``. In half of the cases all random steps happen."""
        seed_all([_UNUSUAL + self.turn + 1000 * again] * len(GENERATORS))
        holders = [vars_of(part) for _, part in parts_of(leaf)] if (self.turn + again) % 2 else []
        values = [(each, name, each.get(name)) for each in holders for name in ("p", "prob")]
        chances = [(each, name, chance) for each, name, chance in values if isinstance(chance, float) and 0 < chance < 1]
        for attributes, name, _ in chances:
            attributes[name] = 1.0
        try:
            yield
        finally:
            for attributes, name, chance in reversed(chances):  # a part may be met twice
                attributes[name] = chance


class Option(NamedTuple):
    """A place to cut.

    Attributes:
        plan: the cut.
        attributes: of the dataset and of objects in it that are read, and those that are set, to make the part that is cached.
        size: bytes of that part of a sample.
        saved_s: seconds to make that part, less those to read it from a cache.
        before, after: what runs before the cache and after it, for the user.
    """

    plan: CutPlan
    attributes: tuple[set[str], set[str]]
    size: float
    saved_s: float
    before: str
    after: str


class Survey(NamedTuple):
    """Where the program of one kind of dataset can be cut.

    Attributes:
        kind: the number of the first leaf of the kind.
        options: the latest first.
        problem: why there is none.
    """

    kind: int
    options: list[Option]
    problem: str | None


class Loaded(NamedTuple):
    """Samples as the dataset makes them, with the generators as it leaves them: one description for each seed."""

    example: Example
    descriptions: tuple[Any, ...]


def survey(
    tree: DatasetTree, kind: int, examples: Sequence[Example], forced: str | None, hoists: bool, room: float, every: bool
) -> Iterator[Loaded | Survey]:
    """Load samples of one kind, and yield their descriptions; then where the kind can be cut.

    Args:
        forced: see `Trace`.
        room: bytes for a sample; as long as an option needs more, earlier ones are looked for.
        every: look for all options.
    """
    number, _ = tree.locate(examples[0].idx)
    try:
        surveyor = _Surveyor(tree.leaves[number], forced)
    except CannotCut as error:
        yield Survey(kind, [], str(error))
        return
    places = [(example, *tree.locate(example.idx)) for example in examples]
    yield from surveyor.load((example, idx) for example, its, idx in places if its == number)  # marks are for one object
    options = list(surveyor.options(hoists, room, every))
    yield Survey(kind, options, None if options else surveyor.problem)


class _Surveyor:
    def __init__(self, leaf: Any, forced: str | None) -> None:
        self._leaf, self._forced, self._trace = leaf, forced, Trace(leaf, forced)
        self._problem: str | None = None
        self._tried: list[tuple[Example, int]] = []
        self._seconds: list[float] = []

    def load(self, examples: Iterable[tuple[Example, int]]) -> Iterator[Loaded]:
        """Load samples with marks and without, and yield their descriptions, until there is a problem."""
        began = time.monotonic()
        for example, idx in examples:
            if self._problem is not None or (example.turn >= _FEW and time.monotonic() - began > _SLOW_S):
                return
            try:
                yield Loaded(example, self._load(example, idx))
            except CannotCut as error:
                self._problem = str(error)
            except Exception as error:  # if a random step must not always happen; the probe reports others
                if example.turn % 2 == 0 and not self._tried:
                    self._problem = f"it raises {type(error).__name__}: {error}"

    def _load(self, example: Example, idx: int) -> tuple[Any, ...]:
        leaf, own, descriptions = self._leaf, own_generators(self._leaf), list[Any]()
        with Kept(own), example.seeded(leaf):
            marked = _described(self._trace.run(idx, watch_seeds=self._is_quick or not self._seconds), leaf)
        division = self._trace.division()
        if (
            division is not None
            and not division.inner
            and not halves_of(self._trace.sources[division.function], division).works
        ):
            raise CannotCut(_NOTHING)
        for again in range(3 if self._is_quick else 1):
            with Kept(own), example.seeded(leaf, again):
                began = time.perf_counter()
                sample = leaf[idx]
                self._seconds.append(time.perf_counter() - began)
                descriptions.append(_described(sample, leaf))
        self._tried.append((example, idx))
        if (place := difference(marked, descriptions[0])) is not None:
            self._problem = f"sample {example.idx} was different when it was loaded again ({place:.200})"
        return tuple(descriptions)

    @property
    def _is_quick(self) -> bool:
        return bool(self._seconds) and self._seconds[-1] < _QUICK_S

    @property
    def problem(self) -> str | None:
        """Why there is no option; None if nothing draws."""
        place = self._trace.place()
        problem = self._problem or (None if place is None and not self._forced else _NOTHING)
        return f"in {place}; {problem}" if problem and place else problem

    def options(self, hoists: bool, room: float, every: bool) -> Iterator[Option]:
        """Yield where the kind can be cut, the latest place first."""
        division = None if self._problem is not None else self._trace.division()
        if division is None:
            return
        latest, seen = division if hoists else division.straight(), set[str]()
        least_s = -math.inf if self._forced == "loader" else _WORTH * min(self._seconds)
        for each in chain([latest, division.straight()], earlier(self._trace.sources, latest)):
            option = self._measure(each)
            if option is not None and option.saved_s < least_s:
                self._problem = self._problem or "what comes before that takes hardly longer than a read of the cache"
            elif option is not None:
                if option.plan.identity not in seen:
                    yield option
                seen.add(option.plan.identity)
                if option.size <= room and not every and len(seen) >= (_OPTIONS if self._is_quick else 2):
                    return

    def _measure(self, division: Division) -> Option | None:
        """Return a place to cut with its figures; None if a cache cannot hold what is before it."""
        try:
            for example, idx in self._tried:
                with example.seeded(self._leaf):
                    division, program, state, attributes = self._run_first(division, idx)
                    times = list[float]()
                    for _ in range(2 if self._is_quick else 1):
                        began = time.perf_counter()
                        program.first(self._leaf, idx)
                        times.append(time.perf_counter() - began)
                if RETURNED not in state:
                    break
            data, integers = EncodedSample(state).pack()
        except Exception as error:  # a cache cannot hold what is before it, or that does not run by itself
            self._problem = self._problem or f"what comes before that cannot be cached: {error}"
            return None
        if not program.works:
            return None
        size = len(data) + 4 * len(integers) + 16
        plan, saved_s = CutPlan(division, program.identity), min(times) - seconds_of_hit(state)
        return Option(plan, attributes, size, saved_s, *map(", ".join, program.texts))

    def _run_first(self, division: Division, idx: int) -> tuple[Division, Program, Any, tuple[set[str], set[str]]]:
        """Return a division after which a cache can hold the state; the program, the state, and `Option.attributes`.

        Raises:
            CannotCut: there is none.
        """
        before = Kept(own_generators(self._leaf))
        while True:
            program = Program(division)
            state = program.first(self._leaf, idx)
            with running_codes() as codes:
                held = _holdable(division, state, program.first(self._leaf, idx))
            if before.drawn():  # by a step that is said to be deterministic
                raise CannotCut("it draws random numbers")
            if _shares(state):
                raise CannotCut("two variables share an object or memory")
            if held == division:
                return division, program, state, _attributes(codes, self._leaf)
            division = held


def seconds_of_hit(state: object) -> float:
    """Return about how long it takes to find a part of a sample in a cache, read it and begin the rest of the program."""
    records, times = Records(allow_pickle=True), list[float]()
    data = b"".join(records.encode(state, "state"))
    for _ in range(4):  # the layout is read once
        began = time.perf_counter()
        records.decode(bytearray(data), len(data))
        times.append(time.perf_counter() - began)
    return 5e-5 + 3 * min(times)


def _described(sample: object, leaf: object) -> Any:
    return describe(sample, strides=False), digest(Kept(own_generators(leaf)).now())


def _holdable(division: Division, state: Mapping[str, Any], other: Mapping[str, Any]) -> Division:
    """Return the division, with variables made again that a cache cannot hold: of other classes, held by the dataset, or part
    of a different variable.

    Raises:
        CannotCut: the argument of a pipeline is one of these.
    """
    if RETURNED in state:
        return division
    again, inner = set[str](), dict(division.inner)
    for name, value in state.items():
        number = name.removeprefix(f"{PREFIX}inner")
        if number != name:
            its = inner[int(number)]
            if isinstance(its, Division):
                inner[int(number)] = _holdable(its, value, other[name])
            elif not _is_plain(value):
                raise CannotCut("an argument of a transform")
        elif not _is_plain(value) or (_may_change(value) and (value is other.get(name) or _is_part(value, name, state))):
            again.add(name)
    return replace(division, again=division.again | again, inner=inner)


def _is_part(value: object, name: str, state: Mapping[str, Any]) -> bool:
    """Whether the value of a variable is part of the value of a different one, or is that of an earlier one."""
    others = (part for key, its in state.items() if key != name for part in _parts(its)[key > name :])
    return _is_mutable(value) and any(part is value for part in others)


def _shares(state: Mapping[str, Any]) -> bool:
    """Whether a change of one value in a state is a change of a different one: an object is there twice, or arrays overlap."""
    found = _parts(state)
    mutable = [id(part) for part in found if _may_change(part) and _is_mutable(part)]
    tensors = [part.detach().numpy() for part in found if type(part) is torch.Tensor and part.dtype != torch.bfloat16]
    arrays = [*tensors, *(part for part in found if isinstance(part, np.ndarray))]
    overlap = any(np.may_share_memory(one, other) for one, other in combinations(arrays, 2))
    return overlap or len({*mutable}) < len(mutable)


def _parts(value: object) -> list[Any]:
    """Return a value, and the values in its dicts, lists and tuples."""
    found: list[Any] = [value]
    for part in found:
        found += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return found


def _is_mutable(value: object) -> bool:
    return isinstance(value, torch.Tensor) or type(value).__hash__ in (None, object.__hash__)


def _is_plain(value: object) -> bool:
    with contextlib.suppress(SampleError):
        EncodedSample(value)
        return True
    return False


def _may_change(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return not isinstance(value, int | float | complex | str | bytes | bool | type(None) | slice | np.generic | torch.dtype)


def _attributes(codes: Iterable[Any], leaf: object) -> tuple[set[str], set[str]]:
    reads, sets = attributes_in(codes)
    held = {name for _, part in parts_of(leaf, follow=is_own_or_dataset) for name in vars_of(part)}
    return reads & held, sets & held


def finish_parts(
    split: Split, parts: Iterable[tuple[Example, Any]], counts: Mapping[Example, int]
) -> Iterator[tuple[Example, int, Any, tuple[set[str], set[str]]]]:
    """Finish samples whose cached parts were made elsewhere, for as many seeds as they were loaded with.

    Yield their descriptions, and the attributes that were read, and those that were set; see `Option.attributes`.
    """
    tree = split.bind()
    for example, part in parts:
        leaf = tree.leaves[tree.locate(example.idx)[0]]
        for again in range(counts[example]):
            with Kept(own_generators(leaf)), example.seeded(leaf, again), running_codes() as codes:
                try:
                    description = _described(split.finish(example.idx, part()), leaf)
                except Exception as error:
                    description = f"raised {type(error).__name__}: {error}"
            yield example, again, description, _attributes(codes, leaf)
