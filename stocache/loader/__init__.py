"""DataLoader: torch's own, whose batches are made in shared memory that is used again."""

from stocache.loader.dataloader import DataLoader, LoaderStats

__all__ = ["DataLoader", "LoaderStats"]
