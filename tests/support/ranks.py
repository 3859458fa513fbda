"""What programs of trainers train on, and two ranks to train in."""

import gc
import multiprocessing
import os
import warnings
from unittest import mock

import pytest
import torch

from tests.support.processes import leave_process_group, run_all


def numbers(n):
    """Pairs of a number and its index."""
    return [(torch.tensor([float(idx)]), idx) for idx in range(n)]


def run_ranks(target, *arguments):
    """Run ``target(rank, *arguments)`` in two spawned processes that torch can make a group of.

    They meet at a store of this process, so that no port has to be free later.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    known |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with mock.patch.dict(os.environ, known):
        run_all(multiprocessing.get_context("spawn"), 2, in_rank, target, *arguments, timeout_s=600)


def in_rank(rank, target, *arguments):
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # of workers: a spawned one imports all libraries for each epoch
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    target(rank, *arguments)
    leave_process_group()


def of_all_ranks(value):
    """Return the values of both ranks."""
    parts = [None, None]
    torch.distributed.all_gather_object(parts, value)
    return parts


def reset_accelerate():
    """Let accelerate forget its configuration, which it keeps in the process."""
    from accelerate.state import AcceleratorState, GradientState

    gc.collect()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def samples_of(seen, epoch):
    """Return the sorted samples of an epoch, from pairs of the epoch and the labels of a batch."""
    return sorted(label for at, labels in seen if at == epoch for label in labels)


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)
