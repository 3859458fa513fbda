"""Run the two halves of a program that is divided: with the functions and pipelines that its objects have now."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from stocache.datasets.cut.division import RETURNED, STATE_ARGUMENT, Division, Given, Halves, Head, halves_of
from stocache.datasets.cut.source import CannotCut, source_of
from stocache.datasets.transforms.encoded import Decode, ReadFile
from stocache.datasets.transforms.known import is_known
from stocache.datasets.transforms.pipelines import Pipeline, next_arguments, open_pipeline, step_name, step_text
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
    """A function that is divided, with the functions that it calls.

    Args:
        division: where.
        given: which arguments it gets again; None for the ``__getitem__`` of a dataset, which gets all.
    """

    def __init__(self, division: Division, given: Given | None = None) -> None:
        self._division, self._given = division, given or Given((), {}, is_item=True)
        self._halves: dict[Any, Halves] = {}
        self._inner: dict[int, Program | _PipelineCall] = {}

    def first(self, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the first half. Return the state: what a cache holds.

        Raises:
            CannotCut: a different function is called than the one that was divided.
        """
        halves, owner = self._halves_of(called)
        return halves.first(*owner, *args, **kwargs)

    def second(self, called: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the second half. Raises as `first`."""
        if RETURNED in state:
            return state[RETURNED]
        halves, owner = self._halves_of(called)
        return halves.second(*owner, *args, **kwargs, **{STATE_ARGUMENT: state})

    def _halves_of(self, called: Any) -> tuple[Halves, tuple[Any, ...]]:
        function, owner = resolve(called, self._given.is_item)
        found = self._halves.get(function)
        if found is None:
            source = None if function is None else source_of(function)
            if source is None or source.identity != self._division.function:
                raise CannotCut(f"{called!r:.80} is called" if source is None else f"{source.name} is called")
            given = self._given.parameters(source, len(owner))
            found = self._halves[function] = halves_of(source, self._division, self._enter, given)
        return found, owner

    def _enter(self, number: int, given: Given) -> tuple[Callable[..., Any], Callable[..., Any]]:
        its = self._division.inner[number]
        call = self._inner[number] = _PipelineCall(its) if isinstance(its, Head) else Program(its, given)
        return call.first, call.second

    @property
    def works(self) -> bool:
        """Whether the first halves call something."""
        return any(each.works for each in (*self._halves.values(), *self._inner.values()))

    @property
    def identity(self) -> str:
        """A text that is equal if the same part of the samples is cached."""
        return digest([*(each.text for each in self._halves.values()), *(each.identity for each in self._inner.values())])

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """What runs before the cache and after it: lines of functions, and steps of pipelines."""
        found: tuple[list[str], list[str]] = [], []
        for function, halves in self._halves.items():
            for texts, lines in zip(found, (halves.before, halves.after), strict=True):
                if lines:
                    shown = f"lines {lines[0]} to {lines[-1]}" if len({*lines}) > 1 else f"line {lines[0]}"
                    texts.append(f"{shown} of {source_of(function).name}")
        for call in self._inner.values():
            for texts, more in zip(found, call.texts, strict=True):
                texts += more
        return found


class _PipelineCall:
    """A call of a pipeline, of which the first steps run before the cache; as `Program`."""

    def __init__(self, head: Head) -> None:
        self.identity, self.works, self._count = head, bool(head.steps), len(head.steps)
        self._opened: dict[int, tuple[Pipeline, Any, Any]] = {}  # pipelines, and their steps before and after the cut

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        steps = [step_name(step) for pipeline, _, _ in [*self._opened.values()][:1] for step in pipeline.steps]
        return steps[: self._count], steps[self._count :]

    def _open(self, called: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return the steps of the pipeline that is called: those before the cut, and the others.

        Raises:
            CannotCut: its first steps are not the steps that run before the cache.
        """
        transform = args[0] if applies(called) else called
        opened = self._opened.get(id(transform))
        if opened is None or opened[0].has_changed():
            expected = self.identity.steps
            pipeline = steps_of(called, args, encoded=expected[:1] == (step_text(ReadFile()),)) or open_pipeline(transform)
            steps = tuple(map(step_text, pipeline.steps[: self._count]))
            if steps != expected:
                raise CannotCut(f"the cached samples end with {', '.join(expected)}, not {', '.join(steps) or 'nothing'}")
            opened = pipeline, pipeline.part(0, self._count), pipeline.part(self._count)
            self._opened = {**self._opened, id(transform): opened}
        return opened[1:]

    def first(self, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        steps, _ = self._open(called, args)
        if applies(called):
            return {"args": (called(steps, *args[1:], **kwargs),), "kwargs": {}}
        args, kwargs = next_arguments(steps(*args, **kwargs), args, kwargs)
        return {"args": args, "kwargs": kwargs}

    def second(self, called: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
        _, rest = self._open(called, args)
        if applies(called):
            return called(rest, *state["args"], *args[2:], **kwargs)
        return rest(*state["args"], **state["kwargs"])
