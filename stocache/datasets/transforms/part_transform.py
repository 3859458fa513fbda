"""Transform parts of a sample, as in ``{"image": augment}`` and ``{0: augment}``; find and replace parts by their path."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from stocache.errors import DatasetError


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
    """Applies a function to each of some parts of a sample, and leaves the other parts unchanged.

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
            if isinstance(sample, Tensor | np.ndarray):
                raise DatasetError(f"transform={{{key!r}: ...}}: the sample is a {type(sample).__name__}, which has no parts.")
            sample = _replace(sample, key, function(_find_part(sample, key)))
        return sample

    def check(self, sample: object) -> None:
        """Raise DatasetError unless the sample has all parts."""
        for key, function in self.parts.items():
            part = _find_part(sample, key)
            if isinstance(function, PartTransform):
                function.check(part)


def _find_part(sample: Any, key: Any) -> Any:
    try:
        return getattr(sample, key) if _is_field(sample, key) else sample[key]
    except (LookupError, AttributeError, TypeError):
        shown = type(sample).__name__
        if isinstance(sample, Mapping):
            shown += f" with the keys {list(sample)!r:.200}"
        elif isinstance(sample, list | tuple):
            shown += f" of {len(sample)}"
        raise DatasetError(f"transform={{{key!r}: ...}}: the sample has no such part, it is a {shown}.") from None


def _is_field(sample: object, key: object) -> bool:
    return isinstance(key, str) and not isinstance(sample, Mapping)


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
