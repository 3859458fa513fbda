"""Worker threads: their tasks, the dataset and the generators of each, and `get_worker_info` in them."""

METHODS = "multiprocessing", "thread", "auto"
"""What ``worker_method`` may be. It is here because this file imports nothing."""
