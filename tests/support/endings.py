"""Loaders whose workers end, each to be run in a process of its own: torch leaves queues and threads when a worker dies."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import stocache
from stocache import WorkerError
from stocache.ring.ring import Ring
from tests.support.equality import same
from tests.support.images import Images

# How often torch looks whether a worker has ended without a signal: by default every 5 seconds
torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)


class Deadly(Images):
    how = signal.SIGKILL

    def __getitem__(self, idx):
        if idx == 20:
            time.sleep(1)  # until the parent waits for this batch: a death elsewhere in its code is torch's to raise
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), self.how)
        return super().__getitem__(idx)


class Exiting(Deadly):
    how = "exit"


class Crashing(Deadly):
    how = signal.SIGABRT


def until_death(name):
    """Iterate over a dataset whose workers die; print the error that is raised."""
    loader = stocache.DataLoader(globals()[name](), 8, num_workers=2)
    batches = iter(loader)
    came = []
    try:
        while True:
            came.append(next(batches))
    except RuntimeError as error:
        sys.stdout.write(f"{type(error).__name__} {error}\n")
    assert len(came) <= 2
    assert same(came, [default_collate([Images()[idx] for idx in range(start, start + 8)]) for start in (0, 8)][: len(came)])


class Ending(Images):
    """Images, one of which ends its worker.

    Args:
        place: where: "getitem", "collate", "init" or "iter".
        ending: the statement that ends it.
        idx: the image.
    """

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


def until_the_end(place, ending, kind="plain", idx=20, epochs=1, **options):
    """Iterate over a dataset whose workers end; print the error that is raised."""
    dataset = (EndingStream if place == "iter" else Ending)(place, ending, idx)
    functions = {"collate_fn": dataset.collate} if place == "collate" else {"worker_init_fn": dataset.init}
    source = stocache.CachedDataset(dataset, 0.01) if kind == "cached" else dataset
    if kind == "no ring":
        Ring.works = property(lambda ring: False)
    loader = stocache.DataLoader(source, 8, **({"num_workers": 2} | functions | options))
    try:
        for _ in range(epochs):
            for _ in loader:
                pass
    except WorkerError as error:
        sys.stdout.write(f"{error}\n")
    if options.get("persistent_workers"):  # others take their place
        dataset.place = source.place = ""
        assert len(list(loader)) == (2 if place == "iter" else 1) * -(-len(dataset) // 8)
        sys.stdout.write("again\n")
    sys.stdout.flush()
    os._exit(0)  # torch's processes and threads may take seconds to end


def until_a_death_in_a_step():
    try:
        for _ in stocache.DataLoader(Ending("getitem", "os._exit(7)"), 8, num_workers=2):
            time.sleep(20)  # until the signal
    except WorkerError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        os._exit(0)
