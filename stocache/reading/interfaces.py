"""The interfaces of reading services, for your own."""

from abc import ABC, abstractmethod

from stocache.reading.graph.graph import Adapt, DataPipe
from stocache.reading.graph.seeds import SeedGenerator


class ReadingServiceInterface(ABC):
    """What a reading service is. Derive your own from it.

    A `DataLoader2` works with a copy of the service it is given.
    """

    @abstractmethod
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Return the graph to iterate instead of the user's; called once, before the first epoch."""

    def initialize_iteration(  # noqa: B027  # which a service may leave out
        self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None
    ) -> Adapt | None:
        """Begin an epoch.

        Args:
            seed_generator: the one source of random numbers; the same in all services of a loader.
            iter_reset_fn: what the service before has returned.

        Returns:
            What the next service, or the loader, is to do to its graph; None for nothing.
        """

    def finalize_iteration(self) -> None:  # noqa: B027
        """End an epoch: its elements are all delivered, or the loader is shut down."""

    def finalize(self) -> None:  # noqa: B027
        """End the service; called when the loader is shut down, perhaps more than once."""


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A reading service that can tell where it is, and go on there."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """Return where the service stands, after the elements that were delivered."""

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Return the graph to iterate instead of the user's, as `initialize` does, to go on where a checkpoint was."""
