"""The transforms of a dataset: which are deterministic, and where they are cut so that their beginning is cached."""
