"""torch's DataLoader with batches in reusable shared memory."""

from stocache.loader.dataloader import DataLoader, LoaderStats

__all__ = ["DataLoader", "LoaderStats"]
