"""A transform as a sequence of steps, which can be cut: `split_transforms`, and `deterministic` for steps of one's own.

What is opened are the ``Compose`` of torchvision, MONAI and albumentations, ``nn.Sequential``, the pair of transforms that
torchvision's datasets make, and plain lists. All else is one step. So are a ``Compose`` of which not every step may be run by
itself: MONAI's with lazy resampling, albumentations' with boxes or keypoints, which it filters at its end.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stocache.errors import DatasetError
from stocache.system.function_hash import callable_text
from stocache.transforms.known import MARK, is_deterministic, mark_of

_Transform = TypeVar("_Transform")


class Chain:
    """Transforms that are called one after another; no transforms return what they are given.

    Args:
        transforms: callables. With several arguments, each returns a tuple of as many.
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]] = ()) -> None:
        self.transforms = list(transforms)

    def __call__(self, *inputs: Any) -> Any:
        """Return the output of the last transform."""
        if len(inputs) != 1:
            for transform in self.transforms:
                inputs = transform(*inputs)
            return inputs
        value = inputs[0]
        for transform in self.transforms:
            value = transform(value)
        return value

    def __len__(self) -> int:
        return len(self.transforms)

    def __bool__(self) -> bool:
        return True  # datasets ask "if self.transform:"

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.transforms))}])"


class NamedChain(Chain):
    """A `Chain` that is called with named arguments, and returns a dict of these, as albumentations does."""

    def __call__(self, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the output of the last transform."""
        for transform in self.transforms:
            named = transform(**named)
        return named


class OnPart:
    """A transform of one of several arguments.

    Args:
        position: of the argument.
        transform: called with it.
    """

    def __init__(self, position: int, transform: Callable[[Any], Any]) -> None:
        self.position, self.transform = position, transform

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Return all arguments, one of them transformed."""
        return *inputs[: self.position], self.transform(inputs[self.position]), *inputs[self.position + 1 :]

    def __repr__(self) -> str:
        return repr(self.transform)


@dataclass(frozen=True)
class Pipeline:
    """A transform and its steps.

    Attributes:
        whole: the transform.
        steps: what it calls, one after another; ``(whole,)`` where it cannot be taken apart.
        join: makes a callable of some of the steps.
        named: whether it takes named arguments, and returns a dict of them.
        held: the objects that hold the steps, with what they held: to notice a change.
    """

    whole: Any
    steps: tuple[Any, ...]
    join: Callable[[Sequence[Any]], Any] = Chain
    named: bool = False
    held: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    @property
    def deterministic(self) -> int:
        """How many steps at the beginning are known to be deterministic."""
        return next((number for number, step in enumerate(self.steps) if not _runs_before(step)), len(self.steps))

    def part(self, begin: int, end: int | None = None) -> Any:
        """Return a callable of the steps from ``begin`` to ``end``; the transform itself where these are all."""
        end = len(self.steps) if end is None else end
        return self.whole if (begin, end) == (0, len(self.steps)) and callable(self.whole) else self.join(self.steps[begin:end])

    def has_changed(self) -> bool:
        """Whether steps were added, removed or replaced since it was opened."""
        return any(tuple(holder) != steps for holder, steps in self.held)


def _runs_before(step: Any) -> bool:
    return is_deterministic(step.transform if isinstance(step, OnPart) else step)


def open_pipeline(transform: Any) -> Pipeline:
    """Return the steps of a transform; of None, no steps."""
    if transform is None:
        return Pipeline(Chain(), ())
    kind = _kind(transform)
    if kind == "named":
        return Pipeline(
            transform, tuple(transform.transforms), _rejoin(transform, NamedChain), True, _held(transform.transforms)
        )
    if kind == "monai":
        steps, held = _flat(transform, kind)
        return Pipeline(transform, tuple(steps), _rejoin(transform), held=tuple(held))
    if kind == "pair":
        steps, held = [], []
        for position, part in enumerate((transform.transform, transform.target_transform)):
            inner, its = _flat(part, "chain") if callable(part) else ([], [])
            steps += [OnPart(position, step) for step in inner]
            held += its
        return Pipeline(transform, tuple(steps), held=tuple(held))
    steps, held = _flat(transform, "chain")
    return Pipeline(transform, tuple(steps), held=tuple(held))


def _kind(transform: Any) -> str | None:
    """Return how a transform holds others: one after another ("chain"), or in a way of its library; None if it is one step."""
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


def _flat(transform: Any, kind: str) -> tuple[list[Any], list[Any]]:
    """Return the steps of a transform, those of the ones it holds in their place; and who holds them."""
    own = _kind(transform)
    if own != kind:
        return [transform], []
    holder = transform if own == "chain" and not hasattr(transform, "transforms") else transform.transforms
    steps, held = [], list(_held(holder))
    for step in holder:
        alike = kind == "chain" or getattr(step, "map_items", None) == transform.map_items
        inner, its = _flat(step, kind) if alike else ([step], [])
        steps += inner
        held += its
    return steps, held


def _held(holder: Any) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    return ((holder, tuple(holder)),)


def _rejoin(compose: Any, chain: type[Chain] | None = None) -> Callable[[Sequence[Any]], Any]:
    """Return what makes a ``Compose`` with the same options of some of its steps.

    ``chain`` takes its place for steps that do not include the last: they draw nothing, so nor must what calls them.
    """

    def join(steps: Sequence[Any]) -> Any:
        if chain is not None and (not steps or steps[-1] is not compose.transforms[-1]):
            return chain(steps)
        part = copy.copy(compose)
        part.transforms = type(compose.transforms)(steps)
        return part

    return join


# ---------------------------------------------------------------------------------------------------- for users


def split_transforms(transform: Any) -> tuple[Any, Any]:
    """Return a transform in two parts: the deterministic beginning, and the rest, from the first step on that may be random.

    Args:
        transform: a ``Compose`` of torchvision (v1 and v2), MONAI or albumentations, an ``nn.Sequential``, a list of
            transforms, or one transform. What is not known to be deterministic, as your own functions, counts as random;
            `deterministic` marks them.

    Returns:
        Two callables that take and return what the transform does, and together do the same: ``after(before(x))``. The first
        draws no random numbers. Either may have no steps; then it returns what it is given.

    Raises:
        DatasetError: it is not a transform.

        before, after = split_transforms(transform)
        dataset = CachedDataset(MyDataset(transform=before), transform={0: after})

    `CachedDataset` does this by itself for datasets that have their transform as an attribute.
    """
    steps = transform if isinstance(transform, list | tuple) else [transform]
    for step in steps:
        if not callable(step):
            raise DatasetError(f"{step!r:.100} is not a transform: it is not callable. Give a transform, or a list of them.")
    pipeline = open_pipeline(transform)
    cut = pipeline.deterministic
    return pipeline.part(0, cut), pipeline.part(cut)


def deterministic(transform: _Transform) -> _Transform:
    """Mark a transform of your own that gives the same each time and draws no random numbers: it may run before the cache.

    Args:
        transform: a function, an object, or a class, whose objects are then marked (but not those of its subclasses). Also
            used as a decorator.

    Returns:
        The same transform, or, where it takes no attributes, an object that calls it.

    Raises:
        DatasetError: it is not callable.
    """
    if not callable(transform):
        raise DatasetError(f"{transform!r:.100} is not a transform: it is not callable.")
    try:
        setattr(transform, MARK, mark_of(transform))
    except (AttributeError, TypeError):  # a built-in function, a method, an object with slots
        return deterministic(Called(transform))  # type: ignore[return-value]
    return transform


class Called:
    """Calls a transform that takes no attributes."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transform."""
        return self.transform(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.transform)


# ---------------------------------------------------------------------------------------------------- what steps are


def name_of_step(step: Any) -> str:
    """Return what to call a step: the name of its class, or of the function."""
    while isinstance(step, OnPart | Called):
        step = step.transform
    inner = getattr(step, "func", None) if type(step).__name__ == "partial" else None
    if inner is not None:
        return name_of_step(inner)
    return str(step.__name__) if isinstance(step, type) or inspect.isroutine(step) else type(step).__name__


def told_step(step: Any) -> str:
    """Return a step in words that are the same in every process: with its options, if it shows them."""
    while isinstance(step, OnPart | Called):
        step = step.transform
    shown = " ".join(repr(step).split())
    shows = not re.search(r"0x[0-9a-f]+|<|\{", shown) and len(shown) < 1000
    if shows:
        return shown
    if inspect.isroutine(step) or type(step) is functools.partial:
        return callable_text(step)
    return f"{type(step).__module__}.{name_of_step(step)}"


_HEAP_TYPE = 1 << 9  # of the flags of a type: whether it is a class of Python's own making, whose state is in __dict__


def same_step(one: Any, other: Any) -> bool:
    """Whether two steps do the same, as far as can be told: one object, or of one class with equal attributes."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, OnPart):
        return one.position == other.position and same_step(one.transform, other.transform)
    cls = type(one)
    hides = cls.__flags__ & _HEAP_TYPE == 0 or any(vars(base).get("__slots__") for base in cls.__mro__)  # some of its state
    return not hides and _same_state(one, other)


def _same_state(one: Any, other: Any) -> bool:
    mine, theirs = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    return mine.keys() == theirs.keys() and all(_same_value(mine[key], theirs[key]) for key in mine)


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    try:
        return bool(one == other) or ("0x" not in repr(one) and repr(one) == repr(other))
    except (ValueError, RuntimeError):  # of arrays, which compare element by element
        return repr(one) == repr(other)
