"""Make and read the states of reading services: JSON, or text for the checkpoints of services that are not stocache's."""

import base64
import json
from abc import abstractmethod
from typing import Any

from stocache.errors import StateError
from stocache.reading.graph.graph import DataPipe
from stocache.reading.interfaces import CheckpointableReadingServiceInterface


class StatefulService(CheckpointableReadingServiceInterface):
    """A reading service whose state is JSON, and whose checkpoint is this JSON as bytes."""

    @abstractmethod
    def json_state(self) -> dict[str, Any]:
        """Return the position of the service, after the delivered elements."""

    @abstractmethod
    def restore_json(self, datapipe: DataPipe, state: object) -> DataPipe:
        """Return the graph to iterate, as `initialize` does, and continue from a state.

        Raises:
            StateError: the state is damaged, or belongs to something else.
        """

    def checkpoint(self) -> bytes:
        """Return the position of the service, after the delivered elements."""
        return json.dumps(self.json_state()).encode()

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Return the graph to iterate, as `initialize` does, and continue from the position of a checkpoint.

        Raises:
            StateError: the checkpoint is damaged, or belongs to something else.
        """
        try:
            state = json.loads(serialized_state)
        except (TypeError, ValueError, RecursionError) as error:
            raise StateError(f"the checkpoint of a {type(self).__name__} is damaged: {error}") from error
        return self.restore_json(datapipe, state)


def is_checkpointable(service: object) -> bool:
    """Whether a service has ``checkpoint`` and ``restore``."""
    return callable(getattr(service, "checkpoint", None)) and callable(getattr(service, "restore", None))


def service_state(service: Any) -> dict[str, Any] | str | None:
    """Return the state of a service: text if the service is not stocache's, None if it keeps no position."""
    if _has_json(service):
        return service.json_state()  # type: ignore[no-any-return]
    return to_text(service.checkpoint()) if is_checkpointable(service) else None


def initialized(service: Any, datapipe: DataPipe, state: Any) -> DataPipe:
    """Return the graph of a service that begins, or continues from a state that is not None.

    Raises:
        StateError: the state is damaged, or belongs to a different service.
    """
    if state is None:
        return service.initialize(datapipe)  # type: ignore[no-any-return]
    if _has_json(service):
        return service.restore_json(datapipe, state)  # type: ignore[no-any-return]
    if not is_checkpointable(service):
        raise StateError(f"the state belongs to another reading service: {type(service).__name__} keeps no position.")
    return service.restore(datapipe, from_text(state))  # type: ignore[no-any-return]


def _has_json(service: object) -> bool:
    """Whether a service is stocache's, and not of a class that makes other checkpoints."""
    return all(getattr(type(service), name, None) is getattr(StatefulService, name) for name in ("checkpoint", "restore"))


def to_text(data: bytes) -> str:
    """Return bytes as text that JSON can save."""
    return base64.b64encode(data).decode()


def from_text(text: Any) -> bytes:
    """Return the bytes that `to_text` was given.

    Raises:
        StateError: the text is damaged.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {text!r:.100} is not bytes as text.") from error
