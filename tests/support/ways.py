"""The ways in which a loader makes its batches."""

WAYS = {"alone": {}, "processes": {"num_workers": 2}, "threads": {"num_workers": 2, "worker_method": "thread"}}
