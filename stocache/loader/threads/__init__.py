"""Worker threads: their tasks, the dataset and the generators of each, and `get_worker_info` in them."""
