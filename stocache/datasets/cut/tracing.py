"""Run a program with a mark before each statement, to find the statements that draw random numbers: `Trace`.

NOTE [ Marks ]
    A mark compares the states of the generators with those at the mark before: Python's, numpy's and torch's, the generators
    that the dataset and the modules of the user hold. A seed that is taken from the system counts as well. Names decide
    nothing: a draw in a handler that never runs does not count.

    If a statement that draws calls a function in Python, or takes an item of a dataset, the sample is loaded again with marks
    in that function. Of libraries, only the methods of datasets, and torchvision's pair of transforms, are looked into. A loop,
    a ``with`` or a ``try`` is one statement.
"""

import ast
import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any

from stocache.datasets.cut.division import Division, Head
from stocache.datasets.cut.program import maker_of, resolve, steps_of
from stocache.datasets.cut.source import (
    PREFIX,
    CannotCut,
    SourceCode,
    build,
    is_call,
    number_of,
    parts_of_call,
    position_of,
    source_of,
)  # fmt: skip
from stocache.datasets.transforms.pipelines import Pipeline, step_text
from stocache.system.generators import Kept, LineOfSeed
from stocache.system.loading.code import own_generators
from stocache.system.objects import attribute_of, is_of_library

_MOST_LEVELS = 4

_Path = tuple[int, ...]
"""The numbers of the statements whose calls lead to a function; () for the statement of the dataset."""


class Trace:
    """Finds the statements of a dataset's program that draw.

    Args:
        dataset: makes the samples.
        forced: "loader" to divide at the loader of files; "pipelines" at the first known transforms, whether or not they draw.

    Raises:
        CannotCut: the program cannot be followed.
    """

    def __init__(self, dataset: object, forced: str | None = None) -> None:
        self._dataset, self._forced = dataset, forced
        function, _ = resolve(dataset, is_item=True)
        if function is None:
            raise CannotCut(f"{type(dataset).__name__} is not written in Python")
        self._sources: dict[_Path, SourceCode] = {(): source_of(function)}
        self._marked: dict[_Path, Any] = {}
        self._drew: dict[_Path, set[int]] = {}
        self._calls: dict[_Path, tuple[Any, tuple[Any, ...] | None, bool]] = {}  # what the statement at a path calls, and how
        self._heads: dict[_Path, Head] = {}  # the deterministic steps at the beginning of pipelines
        self._looked: set[_Path] = set()  # calls that were looked at
        self._generators = own_generators(dataset)
        self._stack: list[list[Any]] = []  # of the functions that run: the path, and the statement that runs

    def run(self, idx: int, watch_seeds: bool = False) -> Any:
        """Return sample ``idx``, and note which statements draw to make it."""
        while True:
            self._kept, self._seeds, self._stack = Kept(self._generators), LineOfSeed(), []
            self._before = self._kept.now()
            with self._seeds if watch_seeds else contextlib.nullcontext():
                sample = self._call((), self._dataset, idx)
            if not self._look_into():
                return sample
            self._kept.restore()

    def _call(self, path: _Path, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function at a path with marks."""
        function, owner = resolve(called, is_item=not path or self._calls[path][2])
        source = source_of(function)
        if self._sources.setdefault(path, source) is not source:
            return function(*owner, *args, **kwargs)  # of a different object than in the samples before
        if path not in self._marked:
            values = {f"{PREFIX}mark": partial(self._mark, path), f"{PREFIX}call": partial(self._observe, path)}
            self._marked[path] = build(source, _with_marks(source.tree.body), values)
        self._stack.append([path, None])
        try:
            return self._marked[path](*owner, *args, **kwargs)
        finally:
            self._mark(path, None)
            self._stack.pop()

    def _mark(self, path: _Path, number: int | None) -> None:
        now = self._kept.now()
        if now != self._before or self._seeds.text is not None:
            self._before, self._seeds.text = now, None
            self._note_draw()
        self._stack[-1][1] = number

    def _note_draw(self) -> None:
        for path, number in self._stack:
            if number is not None:
                self._drew.setdefault(path, set()).add(number)

    def _observe(self, outer: _Path, number: int, is_item: bool, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call of a statement."""
        path = (*outer, number)
        self._calls[path] = called, None if is_item or (args and kwargs) else args, is_item
        if self._forced and path not in self._looked:
            if self._pipeline_at(path) is not None:
                self._note_draw()
            self._look_at(path)
        if path in self._sources:
            return self._call(path, called, *args, **kwargs)
        return called[args[0]] if is_item else called(*args, **kwargs)

    def _pipeline_at(self, path: _Path) -> Pipeline | None:
        """Return the pipeline that a statement calls."""
        called, args, _ = self._calls[path]
        encoded = self._forced == "loader"
        if args is None or (encoded and called is not attribute_of(self._dataset, "loader")):
            return None
        return steps_of(called, args, encoded)

    def _look_into(self) -> bool:
        """Look into what the first statements that draw call. Return whether the sample must be loaded again."""
        again = False
        for path in list(self._sources):
            for statement in first_of(self._sources[path].tree.body, self._drew.get(path, set())):
                again = self._look_at((*path, number_of(statement))) or again
        return again

    def _look_at(self, path: _Path) -> bool:
        """Look into what a statement calls. Return whether that changes how it is called."""
        if path in self._looked or path not in self._calls:
            return False
        self._looked.add(path)
        if (pipeline := self._pipeline_at(path)) is not None:
            self._heads[path] = Head(tuple(map(step_text, pipeline.steps[: pipeline.deterministic])))
            return False
        called, _, is_item = self._calls[path]
        function, owner = resolve(called, is_item)
        if function is not None and len(path) <= _MOST_LEVELS and _is_followed(function, owner):
            with contextlib.suppress(CannotCut):
                self._sources[path] = source_of(function)
        return path in self._sources

    def division(self, path: _Path = ()) -> Division | None:
        """Return where to divide; None if nothing draws, or there is nothing before it."""
        source, drew = self._sources[path], self._drew.get(path, set())
        inner: dict[int, Division | Head] = {}
        firsts = [number_of(statement) for statement in first_of(source.tree.body, drew)]
        for number in sorted(drew):
            its = (*path, number)
            if its in self._heads:
                inner[number] = self._heads[its]
            elif its in self._sources and number in firsts and (found := self.division(its)) is not None:
                inner[number] = found
        return Division(source.identity, frozenset(drew), inner) if firsts else None

    @property
    def sources(self) -> dict[str, SourceCode]:
        """The functions by their `SourceCode.identity`."""
        return {source.identity: source for source in self._sources.values()}

    def place(self) -> str | None:
        """Return the first line that draws, as text; None if none does."""
        for path in sorted(self._drew, key=len, reverse=True)[:1]:
            source = self._sources[path]
            return f"line {next(first_of(source.tree.body, self._drew[path])).lineno} of {source.name}"
        return None


def _is_followed(function: FunctionType, owner: tuple[Any, ...]) -> bool:
    """Whether a function is looked into: of a library, only methods of datasets, and of torchvision's pair of transforms."""
    of_library = is_of_library(function.__code__.co_filename)
    return not of_library or any(maker_of(each) is not None or type(each).__name__ == "StandardTransform" for each in owner)


def first_of(body: Sequence[Any], numbers: set[int]) -> Any:
    """Yield the first statement of a body among ``numbers``, or has one within it; of an ``if``, the first of each branch."""
    for statement in body[position_of(body, numbers) :][:1]:
        if isinstance(statement, ast.If) and number_of(statement) not in numbers:
            yield from first_of(statement.body, numbers)
            yield from first_of(statement.orelse, numbers)
        else:
            yield statement


def _with_marks(body: Sequence[Any]) -> list[Any]:
    marked: list[Any] = []
    for original in body:
        statement: Any = copy.deepcopy(original)
        if isinstance(statement, ast.If):
            statement.body, statement.orelse = _with_marks(original.body), _with_marks(original.orelse)
        value: Any = getattr(statement, "value", None)
        item = isinstance(value, ast.Subscript)
        slices = item and isinstance(value.slice, ast.Slice | ast.Tuple)
        if isinstance(value, ast.AST) and is_call(value) and not slices:
            called, args, keywords = parts_of_call(value)
            constants = [ast.Constant(number_of(statement)), ast.Constant(item)]
            call = ast.Call(ast.Name(f"{PREFIX}call", ast.Load()), [*constants, called, *args], keywords)
            statement.value = ast.copy_location(call, value)
        mark = ast.Expr(ast.Call(ast.Name(f"{PREFIX}mark", ast.Load()), [ast.Constant(number_of(statement))], []))
        marked += [ast.fix_missing_locations(ast.copy_location(mark, statement)), ast.fix_missing_locations(statement)]
    return marked
