"""Open a transform into a sequence of steps, which can be cut: `split_transforms`; mark a step with `deterministic`.

These are opened: the ``Compose`` of torchvision, MONAI and albumentations, ``nn.Sequential``, the pair of transforms that
torchvision's datasets make, and plain lists. Any other transform is one step. So is a ``Compose`` whose steps may not all run
by themselves: of MONAI with lazy resampling, of albumentations with boxes or keypoints, which it filters at its end.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
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
            ones, each returns them in a dict, as those of albumentations do.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]] = ()) -> None:
        self.transforms = list(transforms)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the last transform."""
        if named:
            for transform in self.transforms:
                named = transform(**named)
            return named
        if len(inputs) != 1:
            for transform in self.transforms:
                inputs = transform(*inputs)
            return inputs
        value = inputs[0]
        for transform in self.transforms:
            value = transform(value)
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.transforms))}])"


class ArgumentTransform:
    """Transforms one of several arguments.

    Args:
        position: of the argument.
        transform: called with it.
    """

    def __init__(self, position: int, transform: Callable[[Any], Any]) -> None:
        self.position, self.transform = position, transform

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Return all arguments, with one of them transformed."""
        return *inputs[: self.position], self.transform(inputs[self.position]), *inputs[self.position + 1 :]

    def __repr__(self) -> str:
        return repr(self.transform)


@dataclass(frozen=True)
class Pipeline:
    """A transform and its steps.

    Attributes:
        whole: the transform.
        steps: the callables that it calls, one after another; ``(whole,)`` where it cannot be taken apart.
        join: makes one callable of some of the steps.
        snapshot: the containers of the steps, each with the items it had: to notice a change.
    """

    whole: Any
    steps: tuple[Any, ...]
    join: Callable[[Sequence[Any]], Any] = Chain
    snapshot: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    @property
    def deterministic(self) -> int:
        """How many steps at the beginning are known to be deterministic."""
        return next((number for number, step in enumerate(self.steps) if not is_deterministic(_inner(step))), len(self.steps))

    def part(self, begin: int, end: int | None = None) -> Any:
        """Return a callable of the steps from ``begin`` to ``end``; the transform itself where these are all its steps."""
        steps = self.steps[begin:end]
        if len(steps) == len(self.steps) and callable(self.whole):
            return self.whole
        return self.join(steps) if steps else Chain()

    def has_changed(self) -> bool:
        """Whether steps have been added, removed or replaced since the transform was opened."""
        return any(tuple(container) != items for container, items in self.snapshot)


def _inner(step: Any) -> Any:
    return step.transform if isinstance(step, ArgumentTransform) else step


def open_pipeline(transform: Any) -> Pipeline:
    """Return a transform with its steps; None has no steps."""
    if transform is None:
        return Pipeline(Chain(), ())
    kind = _kind(transform)
    if kind in ("named", "monai"):
        steps, snapshot = _flatten(transform, kind)
        return Pipeline(transform, tuple(steps), _rejoin(transform, chains=kind == "named"), tuple(snapshot))
    if kind == "pair":
        steps, snapshot = [], []
        for position, part in enumerate((transform.transform, transform.target_transform)):
            part_steps, part_snapshot = _flatten(part, "chain") if callable(part) else ([], [])
            steps += [ArgumentTransform(position, step) for step in part_steps]
            snapshot += part_snapshot
    else:
        steps, snapshot = _flatten(transform, "chain")
    return Pipeline(transform, tuple(steps), snapshot=tuple(snapshot))


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
    if name == "StandardTransform" and module.startswith("torchvision.datasets."):
        return "pair"
    if name == "Compose" and module.startswith("monai.transforms."):
        lazy = transform.lazy or any(getattr(step, "lazy", False) for step in transform.transforms)
        return "monai" if not lazy and not transform.unpack_items and not transform.overrides else None
    if name == "Compose" and module.startswith("albumentations."):
        simple = transform.p >= 1 and not transform.processors and not getattr(transform, "save_applied_params", False)
        return "named" if simple else None
    return None


def _flatten(transform: Any, kind: str) -> tuple[list[Any], list[Any]]:
    """Return the steps of a transform, with those of nested transforms in their place; and the snapshot of all containers."""
    own_kind = _kind(transform)
    if own_kind != kind:
        return [transform], []
    container = transform if own_kind == "chain" and not hasattr(transform, "transforms") else transform.transforms
    steps, snapshot = [], [(container, tuple(container))]
    for step in container:
        nested = kind == "chain" or (kind == "monai" and getattr(step, "map_items", None) == transform.map_items)
        inner_steps, inner_snapshot = _flatten(step, kind) if nested else ([step], [])
        steps += inner_steps
        snapshot += inner_snapshot
    return steps, snapshot


def _rejoin(compose: Any, chains: bool) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a ``Compose`` of some steps of ``compose``, with the same options.

    ``chains``: steps without the last one become a `Chain`: they draw no random numbers, so their caller must not either.
    """

    def join(steps: Sequence[Any]) -> Any:
        if chains and (not steps or steps[-1] is not compose.transforms[-1]):
            return Chain(steps)
        part = copy.copy(compose)
        part.transforms = type(compose.transforms)(steps)
        return part

    return join


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
        transform: a function, an object or a class. A class marks its objects, but not those of its subclasses.

    Returns:
        The same transform; or an object that calls it, where it takes no attributes.

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
    step = _inner(step)
    if type(step) is functools.partial:
        return step_name(step.func)
    return str(step.__name__) if isinstance(step, type) or inspect.isroutine(step) else type(step).__name__


def step_text(step: object) -> str:
    """Return a step as text, the same in every process; with its options, if its repr has them."""
    step = _inner(step)
    text = " ".join(repr(step).split())
    if len(text) < 1000 and not re.search(r"0x[0-9a-f]+|<|\{", text):
        return text
    if inspect.isroutine(step) or type(step) is functools.partial:
        return callable_text(step)
    return f"{type(step).__module__}.{step_name(step)}"
