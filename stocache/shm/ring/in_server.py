"""What multiprocessing's fork server runs when it has imported the modules of workers; see `preload`. Only it imports this.

The server forks each process with the random generators of numpy and torch as they are in the server. Processes that import
them draw different numbers, so each gets a seed of its own here.
"""

import os

import numpy as np
import torch

_server = os.getpid()


def _seed() -> None:
    if os.getppid() == _server:  # not in what the process forks itself
        np.random.seed()
        torch.default_generator.seed()


os.register_at_fork(after_in_child=_seed)
