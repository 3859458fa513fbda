"""Transform parts of a sample, as in ``{"image": augment}`` and ``{0: augment}``; find and replace parts by their path."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from stocache.errors import DatasetError
from stocache.samples.pytree import DEEP


def as_transform(transform: Any) -> Callable[[Any], Any] | None:
    """Return a transform of whole samples, given a callable or a mapping from keys of parts to callables.

    Raises:
        DatasetError: ``transform`` is neither.
    """
    if transform is None or callable(transform):
        return transform  # type: ignore[no-any-return]
    if isinstance(transform, Mapping) and transform:
        return PartTransform(transform)
    raise DatasetError(
        f"transform={transform!r:.100} is not callable. Give a function of a sample, or of parts of it: "
        f"transform={{0: augment}}, transform={{'image': augment}}."
    )


class PartTransform:
    """Applies a function to each of some parts of a sample, and leaves the other parts as they are.

    Args:
        parts: a mapping to functions of a part. Its keys are keys of a mapping, positions in a tuple or list, or names of
            fields. A value may also be a mapping like this one, for parts of parts.

    It pickles if the functions do. The containers of a sample are copied, not changed.

    Raises:
        DatasetError: it is called with a sample that has no such part.
    """

    def __init__(self, parts: Mapping[Any, object]) -> None:
        self.parts = {key: as_transform(function) for key, function in parts.items()}
        if None in self.parts.values():
            raise DatasetError(f"transform={dict(parts)!r:.100} has a part without a function. Leave that part out.")

    def __call__(self, sample: object) -> Any:
        """Return the sample with its parts transformed."""
        for key, function in self.parts.items():
            assert function is not None
            sample = _apply(sample, key, function)
        return sample

    def check(self, sample: object) -> None:
        """Raise DatasetError unless the sample has all parts."""
        for key, function in self.parts.items():
            part = _find_part(sample, key)
            if isinstance(function, PartTransform):
                function.check(part)


def _find_part(sample: object, key: object) -> Any:
    try:
        return part_at(sample, (key,))
    except (LookupError, AttributeError, TypeError):
        shown = type(sample).__name__
        if isinstance(sample, Mapping):
            shown += f" with the keys {list(sample)!r:.200}"
        elif isinstance(sample, list | tuple):
            shown += f" of {len(sample)}"
        raise DatasetError(f"transform={{{key!r}: ...}}: the sample has no such part, it is a {shown}.") from None


def _is_field(sample: object, key: object) -> bool:
    return isinstance(key, str) and not isinstance(sample, Mapping)


def _apply(sample: object, key: object, function: Callable[[Any], object]) -> Any:
    if isinstance(sample, Tensor | np.ndarray):
        raise DatasetError(f"transform={{{key!r}: ...}}: the sample is a {type(sample).__name__}, which has no parts.")
    return _replace(sample, key, function(_find_part(sample, key)))


def _replace(sample: Any, key: Any, new: Any) -> Any:
    if isinstance(sample, tuple):
        parts: list[Any] = list(sample)
        parts[getattr(sample, "_fields", ()).index(key) if isinstance(key, str) else key] = new
        return sample._make(parts) if hasattr(sample, "_make") else type(sample)(parts)
    changed = copy.copy(sample)
    if _is_field(sample, key):
        object.__setattr__(changed, key, new)  # also of a frozen dataclass
    else:
        changed[key] = new
    return changed


Path: TypeAlias = tuple[Any, ...]
"""Keys, positions and names of fields that lead to a part of a sample; () for the sample itself."""

_MAX_PARTS = 256  # of a container are searched


def find_parts(sample: object, wanted: Callable[[Any], bool], depth: int = 0) -> Iterator[tuple[Path, Any]]:
    """Yield the paths to parts of a sample that are ``wanted``, and these parts."""
    if wanted(sample):
        yield (), sample
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(sample, Mapping):
        inner = sample.items()
    elif isinstance(sample, list | tuple):
        inner = enumerate(sample)
    elif type(sample) is slice:
        inner = ((name, getattr(sample, name)) for name in ("start", "stop", "step"))
    elif dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        inner = vars(sample).items() if hasattr(sample, "__dict__") else ()
    if depth < DEEP:
        for key, value in islice(inner, _MAX_PARTS):
            for path, part in find_parts(value, wanted, depth + 1):
                yield (key, *path), part


def part_at(sample: Any, path: Path) -> Any:
    """Return the part of a sample at a path."""
    for key in path:
        sample = getattr(sample, key) if _is_field(sample, key) else sample[key]
    return sample


def with_part(sample: object, path: Path, part: object) -> Any:
    """Return a copy of the sample with another part at a path; only the containers on the path are copied."""
    if not path:
        return part
    key = path[0]
    return _replace(sample, key, part if len(path) == 1 else with_part(part_at(sample, (key,)), path[1:], part))
