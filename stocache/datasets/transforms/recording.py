"""Record the operations of a dataset on the output of a random transform, and run them again after the cache.

NOTE [ Deferred outputs ]
    While the cached part of a sample is loaded, the random steps of its transforms do not run. A `Deferred` takes the place of
    their output. Each operation on it, an index, an attribute, a call, an operator, a function of torch or numpy, is recorded
    as a *step*, whose result is `Deferred` again. So a sample is loaded as the values that these steps start from, their
    *inputs*, and the parts that are complete. Both are cached. After the cache, the steps run in the order in which they were
    recorded, so they draw the same random numbers.

    The steps are planned once, as a `Program`, from some samples whose steps were run at once. Each later load must take the
    same steps. A class, a length, the keys of a dict, a truth value and an integer (of a shape) are answered from the plan, and
    checked when the program runs. If one differs, the dataset makes the sample itself, from the same random numbers. If they
    differ among the samples that are planned with, or other values are needed (`NeedsValue`), no plan is possible.
"""

import copy
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from stocache.datasets.transforms.deferred import Deferred, holds_deferred
from stocache.datasets.transforms.part_transform import Path, find_parts, part_at, with_part
from stocache.datasets.transforms.patching import Site
from stocache.samples.flatten import flatten_one
from stocache.samples.pytree import DEEP, Container
from stocache.system.generators import Kept


class NeedsValue(Exception):
    """Code needs the value of an output that is deferred."""


class Deviation(Exception):
    """A sample is not made as planned."""


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step."""

    step: int


@dataclass(frozen=True)
class Input:
    """A value that is cached."""

    number: int


@dataclass(frozen=True)
class Constant:
    """A value that is the same in all samples."""

    value: Any


@dataclass(frozen=True)
class Node:
    """A container that holds results of steps."""

    container: Container
    children: "tuple[Template, ...]"


Template: TypeAlias = Ref | Input | Constant | Node


class Rest(NamedTuple):
    """The steps ``begin`` to ``end`` of a transform."""

    site: Site
    begin: int
    end: int | None = None


class Step(NamedTuple):
    """A call: of a function, or of the rest of a transform.

    Attributes:
        args, kwargs: its arguments.
        answer: a tuple of the result, where it must be this one; else None.
    """

    function: Callable[..., Any] | Rest
    args: tuple[Template, ...]
    kwargs: dict[str, Template]
    answer: tuple[Any] | None = None


@dataclass(frozen=True)
class Program:
    """The steps that run after the cache; see NOTE [ Deferred outputs ].

    Attributes:
        steps: in the order in which they run.
        places: where results of steps, or inputs, are in the sample.
        inputs: how many values are cached for it.
    """

    steps: tuple[Step, ...] = ()
    places: tuple[tuple[Path, Template], ...] = ()
    inputs: int = 0

    @property
    def _paths(self) -> list[Path]:
        return [path for path, _ in self.places]

    @functools.cached_property
    def homes(self) -> dict[Path, int]:
        """Where inputs are cached in the sample: in the places of the values that are made of them."""
        homes: dict[Path, int] = {}
        for path, template in self.places:
            number = _origin(template, self.steps)
            if number is not None and number not in homes.values():
                homes[path] = number
        return homes

    @functools.cached_property
    def _others(self) -> list[int]:
        """The inputs that have no place in the sample."""
        return sorted({*range(self.inputs)} - {*self.homes.values()})

    def separate(self, sample: object, inputs: Mapping[int, object]) -> Any:
        """Return the value to cache: a sample with inputs in their homes; in a tuple with the other inputs, if any."""
        for path in self._paths:
            sample = with_part(sample, path, inputs[self.homes[path]] if path in self.homes else None)
        return (sample, [inputs[number] for number in self._others]) if self._others else sample

    def merged(self, other: "Program") -> "Program":
        """Return one program for the samples of two: constants that differ become inputs.

        Raises:
            Deviation: the steps differ.
        """
        if list(map(_outline, self.steps)) != list(map(_outline, other.steps)) or self._paths != other._paths:
            raise Deviation
        count, aliases = self.inputs, dict[int, int]()

        def merge(mine: Template, theirs: Template) -> Template:
            nonlocal count
            if isinstance(mine, Node) and isinstance(theirs, Node) and mine.container == theirs.container:
                return Node(mine.container, tuple(map(merge, mine.children, theirs.children)))
            if isinstance(mine, Input) and isinstance(theirs, Input | Constant):
                if isinstance(theirs, Input) and aliases.setdefault(mine.number, theirs.number) != theirs.number:
                    raise Deviation  # one object there, two here
                return mine
            if isinstance(mine, Constant) and isinstance(theirs, Input | Constant):
                if isinstance(theirs, Constant) and _same(mine.value, theirs.value):
                    return mine
                count += 1
                return Input(count - 1)
            if mine != theirs:
                raise Deviation
            return mine

        steps = [
            mine._replace(
                args=tuple(map(merge, mine.args, theirs.args)),
                kwargs={key: merge(value, theirs.kwargs[key]) for key, value in mine.kwargs.items()},
            )
            for mine, theirs in zip(self.steps, other.steps, strict=True)
        ]
        places = tuple((path, merge(mine, theirs)) for (path, mine), (_, theirs) in zip(self.places, other.places, strict=True))
        return Program(tuple(steps), places, count)

    def run(self, cached: Any, open_rest: Callable[[Rest], Callable[..., object]]) -> Any:
        """Return a sample.

        Args:
            cached: the result of `separate`.
            open_rest: returns the callable for the rest of a transform.

        Raises:
            Deviation: an answer is not as planned.
        """
        sample, others = cached if self._others else (cached, [])
        inputs = dict(zip(self._others, others, strict=True))
        inputs |= {number: part_at(sample, path) for path, number in self.homes.items()}
        values: list[Any] = []
        for step in self.steps:
            function = open_rest(step.function) if isinstance(step.function, Rest) else step.function
            values.append(_checked(step, _call(function, step, values, inputs)))
        for path, template in self.places:
            sample = with_part(sample, path, _build(template, values, inputs))
        return sample


def _origin(template: Template, steps: tuple[Step, ...]) -> int | None:
    """Return the number of the input that a value is made of: the first argument of each step, or the item that is taken."""
    while isinstance(template, Ref):
        step = steps[template.step]
        source: Any = step.args[0] if step.args else None
        if step.function is operator.getitem and isinstance(source, Ref) and isinstance(step.args[1], Constant):
            maker, key = steps[source.step], step.args[1].value
            arguments = maker.kwargs if maker.kwargs else dict(enumerate(maker.args)) if len(maker.args) > 1 else {}
            source = arguments.get(key, source)
        template = source
    return template.number if isinstance(template, Input) else None


def _outline(step: Step) -> Any:
    return step.function, len(step.args), tuple(step.kwargs), step.answer


def _call(function: Callable[..., object], step: Step, values: list[Any], inputs: Any) -> Any:
    args = [_build(template, values, inputs) for template in step.args]
    return function(*args, **{key: _build(template, values, inputs) for key, template in step.kwargs.items()})


def _build(template: Template, values: list[Any], inputs: Any) -> Any:
    if isinstance(template, Ref):
        return values[template.step]
    if isinstance(template, Input):
        return inputs[template.number]
    if isinstance(template, Constant):
        return template.value
    return template.container.unflatten_fn()([_build(child, values, inputs) for child in template.children])


def _checked(step: Step, result: object) -> Any:
    if (result is None) if step.answer is None else not _same(result, step.answer[0]):
        raise Deviation
    return result


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and repr(one) == repr(other))


class Recorder:
    """Records one load of a sample.

    Args:
        program: the plan: each step must be the next one there. None makes a plan.
        open_rest: see `Program.run`. To make a plan, each step is run at once, with copies of its arguments.
        own: generators of the dataset. No step that is run at once draws from these, or from the global ones, in the end.
    """

    def __init__(
        self, program: Program | None, open_rest: Callable[[Rest], Callable[..., object]], own: Sequence[object] = ()
    ) -> None:
        self._program, self._open_rest, self._own = program, open_rest, own
        self._steps: list[Step] = []
        self._values: list[Any] = []  # of the steps, to make a plan
        self._captured: list[Any] = []  # concrete arguments
        self._copies: list[Any] = []  # of these, to make a plan: a step may change its arguments
        self._numbers: dict[int, int] = {}  # their positions, by id
        self._inputs: dict[int, Any] = {}  # of the program
        self._problem: str | None = None

    def need(self, what: str) -> NoReturn:
        """Raise NeedsValue, and remember it: the dataset may catch errors."""
        self._problem = self._problem or f"its code needs {what} of the output of a random transform"
        raise NeedsValue(self._problem)

    def record(
        self, function: Any, args: tuple[object, ...], kwargs: Mapping[str, object] = {}, *, answered: bool = False
    ) -> Any:
        """Record a step, and return its result: `Deferred`, or where it is ``answered``, the result itself."""
        step = Step(function, tuple(map(self._take, args)), {key: self._take(value) for key, value in kwargs.items()})
        number = len(self._steps)
        if self._program is None:
            run = self._open_rest(function) if isinstance(function, Rest) else function
            with Kept(self._own):
                value = _call(run, step, self._values, self._copies)
            step = step._replace(answer=(value,) if answered or value is None else None)
            self._values.append(value)
        else:
            planned = self._program.steps[number] if number < len(self._program.steps) else None
            if planned is None or _outline(planned)[:3] != _outline(step)[:3]:
                self._deviate()
            self._match_arguments(planned, step)
            step = planned
        self._steps.append(step)
        return Deferred(self, number) if step.answer is None else step.answer[0]

    def _deviate(self) -> NoReturn:
        self._problem = self._problem or "it does something else with the output of a random transform for each sample"
        raise Deviation(self._problem)

    def _take(self, value: object, depth: int = 0) -> Template:
        """Return the template of an argument."""
        if type(value) is Deferred:
            return Ref(value._step_)
        if _is_constant(value):
            return Constant(value)
        if depth < DEEP and holds_deferred(value):
            container, parts = flatten_one(value) or self.need("an unknown container")
            return Node(container, tuple(self._take(part, depth + 1) for part in parts))
        number = self._numbers.setdefault(id(value), len(self._captured))
        if number == len(self._captured):
            self._captured.append(value)
            if self._program is None:
                self._copies.append(copy.deepcopy(value))
        return Input(number)

    def _match_arguments(self, planned: Step, found: Step) -> None:
        for mine, its in zip(planned.args, found.args, strict=True):
            self._match(mine, its)
        for key, its in found.kwargs.items():
            self._match(planned.kwargs[key], its)

    def _match(self, planned: Template, found: Template) -> None:
        """Take the planned inputs from the arguments that were found."""
        if isinstance(planned, Input) and isinstance(found, Input | Constant):
            value = self._captured[found.number] if isinstance(found, Input) else found.value
            if self._inputs.setdefault(planned.number, value) is not value:
                self._deviate()
        elif isinstance(planned, Node) and isinstance(found, Node) and planned.container == found.container:
            for mine, its in zip(planned.children, found.children, strict=True):
                self._match(mine, its)
        elif isinstance(planned, Constant) and isinstance(found, Constant):
            if not _same(planned.value, found.value):
                self._deviate()
        elif planned != found:
            self._deviate()

    def _find_places(self, sample: object) -> tuple[tuple[Path, Template], ...]:
        wanted = lambda part: type(part) is Deferred or id(part) in self._numbers  # noqa: E731
        return tuple((path, self._take(part)) for path, part in find_parts(sample, wanted))

    def plan(self, sample: object) -> Program:
        """Return the program of a sample that was loaded.

        Raises:
            NeedsValue: code needed the value of a deferred output.
        """
        if self._problem is not None:
            raise NeedsValue(self._problem)
        return Program(tuple(self._steps), self._find_places(sample), len(self._captured))

    def separate(self, sample: object) -> Any:
        """Return the value to cache, for a sample that was loaded as planned.

        Raises:
            Deviation: it was not.
        """
        program, places = self._program, self._find_places(sample)
        assert program is not None
        if self._problem or len(self._steps) != len(program.steps) or len(places) != len(program.places):
            self._deviate()
        for (path, mine), (its_path, its) in zip(program.places, places, strict=True):
            if path != its_path:
                self._deviate()
            self._match(mine, its)
        return program.separate(sample, self._inputs)

    def separate_as(self, program: Program, sample: object) -> Any:
        """Return the value to cache, for a sample that was loaded to plan ``program``."""
        self._program = program
        for planned, found in zip(program.steps, self._steps, strict=True):
            self._match_arguments(planned, found)
        return self.separate(sample)


_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes, type(None), type(...))
_NAMES = (
    type, Enum, types.FunctionType, types.BuiltinFunctionType, np.dtype, np.ufunc, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def _is_constant(value: object) -> bool:
    """Whether a value may be a part of a program: it cannot change, and has a short repr."""
    if type(value) is tuple:
        return len(value) <= 16 and all(map(_is_constant, value))
    if type(value) is slice:
        return _is_constant((value.start, value.stop, value.step))
    return type(value) in _NUMBERS_AND_TEXTS or (type(value) is not Deferred and isinstance(value, _NAMES))
