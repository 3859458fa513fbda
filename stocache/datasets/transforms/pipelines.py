"""Open a transform into a sequence of steps, which can be cut: `split_transforms`; mark a step with `deterministic`.

These are opened: the ``Compose`` of torchvision, MONAI and albumentations, ``nn.Sequential``, and plain lists. Any other
transform is one step. So is a ``Compose`` whose steps may not all run by themselves: of MONAI with lazy resampling, of
albumentations with boxes or keypoints, which it filters at its end.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stocache.datasets.transforms.known import DETERMINISTIC_ATTRIBUTE, is_deterministic, mark_value
from stocache.errors import DatasetError
from stocache.system.hashing import callable_text

_Transform = TypeVar("_Transform")


class Chain:
    """Calls transforms one after another. An empty chain returns its input.

    Args:
        transforms: callables. When called with several arguments, each returns a tuple of as many. When called with named
            ones, each returns them in a dict, as the pipelines of albumentations do.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]] = ()) -> None:
        self.transforms = list(transforms)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the last transform."""
        if named or len(inputs) != 1:
            for transform in self.transforms:
                inputs, named = next_arguments(transform(*inputs, **named), inputs, named)
            return named or inputs
        (value,) = inputs
        for transform in self.transforms:
            value = transform(value)
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.transforms))}])"


def next_arguments(result: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the next step, after the result of a step that was called with ``args`` and ``kwargs``."""
    if kwargs:
        return (), result
    return ((result,) if len(args) == 1 else tuple(result)), {}


@dataclass(frozen=True)
class Pipeline:
    """A transform and its steps.

    Attributes:
        whole: the transform.
        steps: the callables that it calls, one after another; ``(whole,)`` if it cannot be taken apart.
        kind: how it holds its steps.
        snapshot: the containers of the steps, each with the items it had: to notice a change.
    """

    whole: Any
    steps: tuple[Any, ...]
    kind: str | None = None
    snapshot: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    @property
    def deterministic(self) -> int:
        """How many steps at the beginning are known to be deterministic."""
        return next((number for number, step in enumerate(self.steps) if not is_deterministic(step)), len(self.steps))

    def part(self, begin: int, end: int | None = None) -> Any:
        """Return a callable of the steps from ``begin`` to ``end``; the transform itself if these are all its steps."""
        steps = self.steps[begin:end]
        if len(steps) == len(self.steps) and callable(self.whole):
            return self.whole
        # albumentations draws before the first step, also if no step does
        if steps and (self.kind == "monai" or (self.kind == "named" and steps[-1] is self.steps[-1])):
            part = copy.copy(self.whole)
            part.transforms = type(self.whole.transforms)(steps)
            return part
        return Chain(steps)

    def has_changed(self) -> bool:
        """Whether steps have been added, removed or replaced since the transform was opened."""
        return any(tuple(container) != items for container, items in self.snapshot)


def open_pipeline(transform: Any) -> Pipeline:
    """Return a transform with its steps; None has no steps."""
    if transform is None:
        return Pipeline(Chain(), ())
    kind, snapshot = _kind(transform), list[Any]()
    return Pipeline(transform, tuple(_steps_of(transform, kind, snapshot)), kind, tuple(snapshot))


def _kind(transform: Any) -> str | None:
    """Return how a transform holds its steps: as a "chain", or in a way of its library; None if it is one step."""
    cls = type(transform)
    module, name = cls.__module__, cls.__name__
    if cls in (list, tuple, Chain):
        return "chain"
    if getattr(transform, "_forward_hooks", None) or getattr(transform, "_forward_pre_hooks", None):
        return None
    if cls is torch.nn.Sequential or (name == "Compose" and f"{module}.".startswith("torchvision.transforms.")):
        return "chain"
    if name == "Compose" and module.startswith("monai.transforms."):
        lazy = transform.lazy or any(getattr(step, "lazy", False) for step in transform.transforms)
        return "monai" if not lazy and not transform.unpack_items and not transform.overrides else None
    if name == "Compose" and module.startswith("albumentations."):
        simple = transform.p >= 1 and not transform.processors and not getattr(transform, "save_applied_params", False)
        return "named" if simple else None
    return None


def _steps_of(transform: Any, kind: str | None, snapshot: list[Any]) -> Iterator[Any]:
    """Yield the steps of a transform, with the steps of nested transforms in their place; ``snapshot`` gets the containers."""
    if kind is None or _kind(transform) != kind:
        yield transform
        return
    container = getattr(transform, "transforms", transform)
    snapshot.append((container, tuple(container)))
    for step in container:
        nested = kind == "chain" or (kind == "monai" and getattr(step, "map_items", None) == transform.map_items)
        yield from _steps_of(step, kind if nested else None, snapshot)


def split_transforms(transform: object) -> tuple[Any, Any]:
    """Split a transform in two: its deterministic beginning, and the rest from the first step on that may be random.

    `CachedDataset` does this by itself for datasets that have their transform as an attribute.

    Args:
        transform: a ``Compose`` of torchvision (v1 and v2), MONAI or albumentations, an ``nn.Sequential``, a list of
            transforms, or one transform. A step that is not known to be deterministic, such as your own function, counts as
            random; `deterministic` marks it.

    Returns:
        Two callables with the arguments and results of the transform; ``after(before(x))`` does the same as the transform. The
        first draws no random numbers. Either may have no steps; then it returns its input.

    Raises:
        DatasetError: ``transform`` is not a transform.

    Examples:
        >>> halve = deterministic(lambda image: image / 2)
        >>> before, after = split_transforms([halve, torch.nn.Dropout()])
        >>> halved = [(before(torch.full((1000,), 2.0)), label) for label in range(3)]
        >>> with CachedDataset(halved, "1MB", transform={0: after}) as dataset:
        ...     image, label = dataset[1]
        >>> halved[1][0].unique(), image.unique(), label
        (tensor([1.]), tensor([0., 2.]), 1)
    """
    steps = transform if isinstance(transform, list | tuple) else [transform]
    for step in steps:
        if not callable(step):
            raise DatasetError(f"{step!r:.100} is not a transform: it is not callable. Give a transform, or a list of them.")
    pipeline = open_pipeline(transform)
    cut = pipeline.deterministic
    return pipeline.part(0, cut), pipeline.part(cut)


def deterministic(transform: _Transform) -> _Transform:
    """Mark your own transform as deterministic: same input, same output, no random numbers. It may then run before the cache.

    Can be used as a decorator.

    Args:
        transform: a function, an object or a class. A class marks its objects, but not the objects of its subclasses.

    Returns:
        The same transform; or an object that calls it, if it takes no attributes.

    Raises:
        DatasetError: ``transform`` is not callable.

    Examples:
        >>> def decode(path):
        ...     return torch.full((2,), len(path))
        >>> before, after = split_transforms([decode, torch.nn.Dropout()])
        >>> before("1.jpg")  # decode may be random, so it is left to the second part
        '1.jpg'
        >>> before, after = split_transforms([deterministic(decode), torch.nn.Dropout()])
        >>> before("1.jpg")
        tensor([5, 5])
    """
    if not callable(transform):
        raise DatasetError(f"{transform!r:.100} is not a transform: it is not callable.")
    try:
        setattr(transform, DETERMINISTIC_ATTRIBUTE, mark_value(transform))
    except (AttributeError, TypeError):  # a built-in function, a method, an object with slots
        return deterministic(functools.partial(transform))  # type: ignore[return-value]
    return transform


def step_name(step: object) -> str:
    """Return the name of a step: of its class, or of the function."""
    if type(step) is functools.partial:
        return step_name(step.func)
    return str(step.__name__) if isinstance(step, type) or inspect.isroutine(step) else type(step).__name__


def step_text(step: object) -> str:
    """Return a step as text, the same in every process; with its options, if its repr has them."""
    text = " ".join(repr(step).split())
    if len(text) < 1000 and not re.search(r"0x[0-9a-f]+|<|\{", text):
        return text
    if inspect.isroutine(step) or type(step) is functools.partial:
        return callable_text(step)
    return f"{type(step).__module__}.{step_name(step)}"
