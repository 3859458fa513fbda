"""Base classes for your own reading services."""

from abc import ABC, abstractmethod

from stocache.reading.graph.graph import Adapt, DataPipe
from stocache.reading.graph.seeds import SeedGenerator


class ReadingServiceInterface(ABC):
    """A service that runs the graph of a `DataLoader2`. Derive your own services from it.

    A `DataLoader2` uses a copy of the service that it gets.
    """

    @abstractmethod
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Return the graph to iterate in place of the user's graph. Called once, before the first epoch."""

    def initialize_iteration(  # noqa: B027  # optional
        self, seed_generator: SeedGenerator, iter_reset_fn: Adapt | None = None
    ) -> Adapt | None:
        """Begin an epoch.

        Args:
            seed_generator: the only source of seeds, the same for all services of a loader.
            iter_reset_fn: the function that the previous service returned.

        Returns:
            A function that the next service, or the loader, applies to its graph; or None.
        """

    def finalize_iteration(self) -> None:  # noqa: B027
        """End an epoch: all its elements are delivered, or the loader is shut down."""

    def finalize(self) -> None:  # noqa: B027
        """End the service. Called when the loader is shut down, possibly more than once."""


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A reading service that can save its position and continue from it."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """Return the position of the service, after the delivered elements."""

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Return the graph to iterate, as `initialize` does, and continue from the position of a checkpoint."""
