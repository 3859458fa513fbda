"""Keep old names of arguments and attributes working for one version, with a warning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed_arguments(**new_names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator for a function whose keyword arguments have new names, given as ``old="new"``.

    The decorated function raises TypeError when it gets both names of one argument.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
            for old in new_names.keys() & options.keys():
                new = new_names[old]
                warn_renamed(f"{old}=", f"{new}=", stacklevel=3)
                if new in options:
                    raise TypeError(f"{old}= is the old name of {new}=. Pass {new}= only.")
                options[new] = options.pop(old)
            return function(*arguments, **options)

        return call

    return decorate


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a caller uses an old name."""
    warnings.warn(f"{old} is now {new}. The old name goes with the next version.", DeprecationWarning, stacklevel=stacklevel)


def old_name(old: str, new: str) -> Any:
    """Return a property that is an attribute or a method under its old name."""

    def get(self: Any) -> Any:
        warn_renamed(old, new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated: use ``{new}``.")
