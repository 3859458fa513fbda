"""Worker threads: what they run, what each of them has, and what `get_worker_info` answers in them."""
