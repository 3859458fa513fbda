"""Split the transforms of a dataset, so that their deterministic beginning runs before the cache."""
