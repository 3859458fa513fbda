"""The one form of the states of loaders, samplers, streams and reading services: see `StateForm`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch

from stocache.errors import StateError

_FIELDS = ("what", "version", "identity", "position", "parts")


@dataclass(frozen=True)
class StateForm:
    """The form of the states of one class. It makes states, and checks the states that it reads.

    A state is a dict of strings, numbers, lists and dicts, so JSON can save it. Only the parts that belong to objects of the
    user may be anything else. Its fields:

    ``what``: the class that it belongs to.
    ``version``: the version of this form.
    ``identity``: values that must be equal in the object that loads the state, such as the number of samples.
    ``position``: the place in the order of samples at which the state was taken.
    ``parts``: states of random generators, samplers, datasets and workers.

    Attributes:
        what: see above.
        version: see above.
        position: the types that each field of ``position`` may have. An int must be at least 0, and less than ``limit``.
        parts: the types that each field of ``parts`` may have.
        optional: fields of ``identity`` that need not be equal if one of the two is None.
        mismatch: the error message if ``name``, a field of ``identity``, is ``saved`` in the state and not ``own``.
        limit: of ints in ``position`` and ``parts``.
    """

    what: str
    version: int
    position: Mapping[str, tuple[type, ...]]
    parts: Mapping[str, tuple[type, ...]]
    optional: tuple[str, ...] = ()
    mismatch: str = "the state belongs to a {what} with {name} {saved}; this one has {own}."
    limit: int = 1 << 62

    def make(self, identity: dict[str, Any], position: dict[str, Any], parts: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a state."""
        return dict(zip(_FIELDS, (self.what, self.version, identity, position, parts or {}), strict=True))

    def read(self, state: object, identity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the position and the parts of a state, both new dicts.

        Args:
            state: from anywhere. Nothing in it is called or imported.
            identity: of the object that loads it.

        Raises:
            StateError: it is not a state of this form and version, or belongs to something else.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise StateError(f"{state!r:.100} is not a state of a {self.what}.")
        version = state.get("version")
        if version != self.version:
            raise StateError(
                f"this {self.what} reads states of version {self.version}, and this state has version {version!r:.100}. "
                f"Load it with the release of stocache that saved it."
            )
        if state.get("what") != self.what or set(state) != set(_FIELDS):
            raise StateError(f"{state!r:.100} is not a state of a {self.what}.")
        self._compare(state["identity"], identity)
        return self._checked(state, "position", self.position), self._checked(state, "parts", self.parts)

    def _compare(self, saved: object, own: dict[str, Any]) -> None:
        if not isinstance(saved, dict) or set(saved) != set(own):
            raise StateError(f"the state of a {self.what} is damaged: its identity is {saved!r:.100}.")
        for name, value in own.items():
            unknown = name in self.optional and (saved[name] is None or value is None)
            if saved[name] != value and not unknown:
                values = {"saved": f"{saved[name]!r:.200}", "own": f"{value!r:.200}"}
                raise StateError(self.mismatch.format(what=self.what, name=name, **values))

    def _checked(self, state: dict[str, Any], field: str, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        values = state[field]
        if not isinstance(values, dict) or set(values) != set(types):
            raise StateError(f"the state of a {self.what} is damaged: its {field} is {values!r:.100}.")
        for name, allowed in types.items():
            value = values[name]
            if type(value) not in allowed or (type(value) is int and not 0 <= value < self.limit):
                raise StateError(f"the state of a {self.what} is damaged: {field} has {name}={value!r:.100}.")
        return dict(values)


STATE_TYPES = (dict, list, tuple, str, bytes, int, float, bool, NoneType)
"""The types of a part that is checked by the object it belongs to."""


def equal_states(a: Any, b: Any) -> bool:
    """Whether two states of an object are equal. Saving may have made a list of a tuple."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str | bytes):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return bool(a == b)
