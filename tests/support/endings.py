"""Loaders whose workers end, each in a forked process of its own: torch leaves queues and threads when a worker dies."""

import multiprocessing
import os  # noqa: F401  # these three are for the statements that end a worker
import signal
import sys  # noqa: F401
import time  # noqa: F401

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import stocache
from stocache.shm.ring.ring import Ring
from tests.support.images import Images
from tests.support.processes import in_child


class Ending(Images):
    """Images, one of which ends its worker by a statement, in "getitem", "collate", "init" or "iter"."""

    def __init__(self, place, ending, idx=20):
        super().__init__()
        self.place, self.ending, self.idx = place, ending, idx

    def end(self, place, idx):
        if place == self.place and idx == self.idx and get_worker_info() is not None:
            exec(self.ending)

    def __getitem__(self, idx):
        self.end("getitem", idx)
        return super().__getitem__(idx), idx

    def collate(self, samples):
        for _, idx in samples:
            self.end("collate", idx)
        return default_collate(samples)

    def init(self, _):
        self.end("init", self.idx)


class EndingStream(Ending, IterableDataset):
    def __iter__(self):
        for idx in range(len(self)):
            self.end("iter", idx)
            yield self[idx]


def _iterate(path, ending, place="getitem", kind="plain", idx=20, **options):
    # How often torch looks whether a worker has ended without a signal: by default every 5 seconds
    torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)
    dataset = (EndingStream if place == "iter" else Ending)(place, ending, idx)
    functions = {"collate_fn": dataset.collate} if place == "collate" else {"worker_init_fn": dataset.init}
    if kind == "no ring":
        Ring.works = property(lambda ring: False)
    loader = stocache.DataLoader(dataset, 8, **({"num_workers": 2} | functions | options))
    try:
        for _ in loader:
            if kind == "in a step":
                signal.pause()  # the end of the worker interrupts it
    except (stocache.WorkerError, KeyboardInterrupt) as error:
        path.write_text(f"{type(error).__name__} {error}")
    if options.get("persistent_workers"):  # others take their place
        dataset.place = ""
        assert len(list(loader)) == (14 if place == "iter" else 7)
    for worker in multiprocessing.active_children():
        worker.kill()


def said_at_the_end(path, *arguments, **options):
    """Iterate over a dataset whose workers end; return the error that is raised."""
    assert in_child(lambda: _iterate(path, *arguments, **options)) == 0
    return path.read_text()
