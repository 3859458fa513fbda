"""Run the two halves of a program that is divided: with the functions and pipelines that its objects have now."""

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from stocache.datasets.cut.division import RETURNED, STATE_ARGUMENT, Division, Given, Halves, Head, halves_of
from stocache.datasets.cut.source import CannotCut, source_of
from stocache.datasets.transforms.encoded import Decode, ReadFile
from stocache.datasets.transforms.known import is_known
from stocache.datasets.transforms.pipelines import Pipeline, open_pipeline, step_text
from stocache.system.hashing import digest
from stocache.system.objects import static_attribute


def maker_of(dataset: object) -> Any:
    """Return the function that makes the samples of a dataset."""
    return static_attribute(type(dataset), "__getitem__")


def resolve(called: Any, is_item: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the function in Python behind what is called, and the object that it gets first; None if there is none.

    ``is_item``: an item of it is taken.
    """
    owner: tuple[Any, ...] = (called,)
    if is_item:
        function = maker_of(called)
    elif isinstance(called, MethodType):
        function, owner = called.__func__, (called.__self__,)
    elif isinstance(called, FunctionType):
        function, owner = called, ()
    else:
        module = isinstance(called, torch.nn.Module) and not called._forward_hooks and not called._forward_pre_hooks
        function = static_attribute(type(called), "forward" if module else "__call__")
    return (function if isinstance(function, FunctionType) else None), owner


def steps_of(called: Any, arguments: tuple[Any, ...], encoded: bool = False) -> Pipeline | None:
    """Return the steps of a transform that a program calls, itself or by MONAI's ``apply_transform``; None for other calls.

    ``encoded``: what is called is a loader of files, of which the first step reads the bytes.
    """
    if encoded:
        return Pipeline(called, (ReadFile(), Decode(called)))
    transform = arguments[0] if applies(called) and arguments else called
    if isinstance(transform, FunctionType | MethodType | type) or not callable(transform):
        return None
    pipeline = open_pipeline(transform)
    return pipeline if len(pipeline.steps) > 1 or is_known(type(transform)) or pipeline.deterministic else None


def applies(called: Any) -> bool:
    """Whether a function is MONAI's, which calls a transform: its first argument."""
    return getattr(called, "__name__", "") == "apply_transform" and called.__module__.startswith("monai.")


class Program:
    """A function that is divided, with those that it calls.

    Args:
        division: where.
        encoded: whether loaders of files are divided.
    """

    def __init__(self, division: Division, encoded: bool = False) -> None:
        self.division, self._encoded = division, encoded
        self._halves: dict[Any, Halves] = {}
        self.inner: dict[int, _Entry] = {}

    def halves(self, function: Any, given: frozenset[str] | None = None) -> Halves:
        """Return the halves of a function.

        Raises:
            CannotCut: it is another function than the one that was divided.
        """
        found = self._halves.get(function)
        if found is None:
            source = source_of(function)
            if source.identity != self.division.function:
                raise CannotCut(f"{source.name} is called")
            found = self._halves[function] = halves_of(source, self.division, self._enter, given)
        return found

    @property
    def parts(self) -> Iterator[tuple[Any, Halves]]:
        """The functions that have been called, and their halves; those within them follow."""
        yield from list(self._halves.items())
        for entry in self.inner.values():
            if entry.program is not None:
                yield from entry.program.parts

    @property
    def heads(self) -> Iterator[tuple[Head, Pipeline]]:
        """The pipelines that have been called, and how many of their steps run before the cache."""
        for entry in self.inner.values():
            if entry.program is not None:
                yield from entry.program.heads
            elif entry.pipeline is not None:
                yield entry.its, entry.pipeline

    @property
    def works(self) -> bool:
        """Whether the first halves call something."""
        return any(halves.works for _, halves in self.parts) or any(head.steps for head, _ in self.heads)

    @property
    def identity(self) -> str:
        """A text that is equal if the same part of the samples is cached."""
        return digest([*(halves.text for _, halves in self.parts), *(head for head, _ in self.heads)])

    def _enter(self, number: int, given: Given) -> tuple[Callable[..., Any], Callable[..., Any]]:
        its = self.division.inner[number]
        entry = self.inner[number] = _Entry(its, given, self._encoded)
        return (entry.begin_pipeline, entry.end_pipeline) if isinstance(its, Head) else (entry.enter, entry.leave)


class _Entry:
    """A call in a program, of which the first half runs before the cache."""

    def __init__(self, its: Any, given: Given, encoded: bool) -> None:
        self.its, self._given, self._encoded = its, given, encoded
        self.program = Program(its, encoded) if isinstance(its, Division) else None
        self._opened: dict[int, tuple[Pipeline, Any, Any]] = {}  # pipelines, and their steps before and after the cut
        self.pipeline: Pipeline | None = None  # the first

    def _halves(self, called: Any) -> tuple[Halves, tuple[Any, ...]]:
        function, owner = resolve(called, self._given.is_item)
        if function is None:
            raise CannotCut(f"{called!r:.80} is called")
        assert self.program is not None
        return self.program.halves(function, self._given.parameters(source_of(function), len(owner))), owner

    def enter(self, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        halves, owner = self._halves(called)
        return halves.first(*owner, *args, **kwargs)

    def leave(self, called: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        if RETURNED in state:
            return state[RETURNED]
        halves, owner = self._halves(called)
        return halves.second(*owner, *args, **kwargs, **{STATE_ARGUMENT: state})

    def _open(self, called: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return the steps of the pipeline that is called: those before the cut, and the others.

        Raises:
            CannotCut: its first steps are not those that run before the cache.
        """
        transform, count = args[0] if applies(called) else called, len(self.its.steps)
        opened = self._opened.get(id(transform))
        if opened is None or opened[0].has_changed():
            pipeline = steps_of(called, args, self._encoded) or open_pipeline(transform)
            steps = tuple(map(step_text, pipeline.steps[:count]))
            if steps != self.its.steps:
                raise CannotCut(f"the cached samples end with {', '.join(self.its.steps)}, not {', '.join(steps) or 'nothing'}")
            opened = pipeline, pipeline.part(0, count), pipeline.part(count)
            self._opened = {**self._opened, id(transform): opened}
            self.pipeline = self.pipeline or pipeline
        return opened[1:]

    def begin_pipeline(self, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        first, _ = self._open(called, args)
        if applies(called):
            args, kwargs = (called(first, *args[1:], **kwargs) if self.its.steps else args[1],), {}
        elif self.its.steps:
            args, kwargs = next_arguments(first(*args, **kwargs), args, kwargs)
        return {"args": args, "kwargs": kwargs}

    def end_pipeline(self, called: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        _, rest = self._open(called, args)
        if applies(called):
            return called(rest, *state["args"], *args[2:], **kwargs)
        return rest(*state["args"], **state["kwargs"])


def next_arguments(result: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the next step, after the result of a step that was called with ``args`` and ``kwargs``."""
    if kwargs:
        return (), result
    return ((result,) if len(args) == 1 else tuple(result)), {}
