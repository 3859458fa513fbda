"""The lists, dicts and tables of a dataset, as one read-only copy for all processes."""
