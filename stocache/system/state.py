"""The one form of the states of loaders, samplers, streams and reading services: see `StateForm`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from stocache.errors import StateError

_FIELDS = ("what", "version", "identity", "position", "parts")


@dataclass(frozen=True)
class StateForm:
    """The form of the states of one class. It makes states, and checks those that it reads.

    A state is a dict of strings, numbers, lists and dicts, so JSON can save it. Only the parts that belong to objects of the
    user may be anything else. Its fields:

    ``what``: the class that it belongs to.
    ``version``: the version of this form.
    ``identity``: what must be equal where the state is loaded, such as the number of samples. None stands for "unknown".
    ``position``: where the order of samples was left.
    ``parts``: states of random generators, samplers, datasets and workers.

    Attributes:
        what: see above.
        version: see above.
        position: the types that each field of ``position`` may have. An int must not be negative.
        parts: the types that each field of ``parts`` may have.
    """

    what: str
    version: int
    position: Mapping[str, tuple[type, ...]]
    parts: Mapping[str, tuple[type, ...]]

    def make(self, identity: dict[str, Any], position: dict[str, Any], parts: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a state."""
        return dict(zip(_FIELDS, (self.what, self.version, identity, position, parts or {}), strict=True))

    def read(self, state: Any, identity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the position and the parts of a state, both new dicts.

        Args:
            state: from anywhere. Nothing in it is called or imported.
            identity: of the object that loads it.

        Raises:
            StateError: it is not a state of this form and version, or belongs to something else.
        """
        if not isinstance(state, dict):
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

    def _compare(self, saved: Any, own: dict[str, Any]) -> None:
        if not isinstance(saved, dict) or set(saved) != set(own):
            raise StateError(f"the state of a {self.what} is damaged: its identity is {saved!r:.100}.")
        for name, value in own.items():
            if saved[name] != value and None not in (saved[name], value):
                raise StateError(
                    f"the state belongs to a {self.what} with {name} {saved[name]!r:.200}; this one has {value!r:.200}."
                )

    def _checked(self, state: dict[str, Any], field: str, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
        values = state[field]
        if not isinstance(values, dict) or set(values) != set(types):
            raise StateError(f"the state of a {self.what} is damaged: its {field} is {values!r:.100}.")
        for name, allowed in types.items():
            value = values[name]
            if type(value) not in allowed or (type(value) is int and value < 0):
                raise StateError(f"the state of a {self.what} is damaged: {field} has {name}={value!r:.100}.")
        return dict(values)


ANYTHING = (dict, list, tuple, str, bytes, int, float, bool, NoneType)
"""The types of a part that is checked by the object it belongs to."""
