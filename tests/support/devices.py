"""Images for a GPU, and a GPU that is played: what is called of CUDA, recorded, over the memory of the host."""

import contextlib
import threading
from functools import partial

import numpy as np
import torch

from stocache import CachedDataset


class Images(torch.utils.data.Dataset):
    """Samples with a large and a small column, and one that no word of 8 bytes divides; others by ``change(sample, idx)``."""

    def __init__(self, length, change=None):
        self.length, self.change = length, change

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        rng = np.random.default_rng(idx)
        image = torch.from_numpy(rng.integers(0, 255, (3, 64, 64), np.uint8))
        sample = {"image": image, "label": idx, "mask": torch.from_numpy(rng.integers(0, 255, 1501, np.uint8))}
        return sample if self.change is None else self.change(sample, idx)


def cached(source, share=1, warm=False):
    """A cache with room for a share of the images; for all samples of a different dataset."""
    is_plain = isinstance(source, Images) and source.change is None
    limit = f"{int(share * len(source) * (12288 + 8 + 1501 + 64))}B" if is_plain else 1
    dataset = CachedDataset(source, limit, share_ranks=False)
    if warm:
        dataset.warm(progress=False)
    return dataset


def registered(loader):
    """Wait until the memory that is reserved by now has been registered."""
    stage = loader._stocache._stage
    if stage is not None and stage.gatherer is not None:
        stage.gatherer.wait()


class PlayedRuntime:
    """What is called of torch.cuda.cudart() and to wait for a GPU."""

    def __init__(self):
        self.registered, self.calls, self.error, self.most = {}, [], 0, None
        self.copies_done = threading.Event()
        self.copies_done.set()

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append("register")
        if self.most is not None and len(self.registered) >= self.most:
            return 2
        if not self.error:
            assert address not in self.registered
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        del self.registered[address]
        return 0

    def synchronize(self, device):
        assert self.copies_done.wait(60)
        self.calls.append(f"synchronize {device}")

    def play(self, monkeypatch):
        """Take the place of CUDA's runtime."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr("stocache.shm.ring.pinned._clear_error", lambda: self.calls.append("clear"))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * (device == 1))
        return self


class PlayedEvent:
    """The end of copies. It has come once the device that recorded it was `finish`ed."""

    def __init__(self, done):
        self.done = done

    def query(self):
        return self.done


class PlayedDevice:
    """Takes the place of `Cuda`.

    Attributes:
        reads_host_memory: whether it may read the cache itself.
        handed: the numbers of tensors of each batch that was handed over.
        full: raises in place of that many batches that are begun.
    """

    reads_host_memory, full = True, 0

    def __init__(self, device):
        self.device, self.handed, self.begun, self.waited, self.events = torch.device("cpu"), [], 0, 0, []
        self.asynchronous = False

    def copying(self):
        self.begun += 1
        if self.full:
            type(self).full -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return contextlib.nullcontext()

    def on_step(self):
        return contextlib.nullcontext()

    def mark(self):
        self.events.append(PlayedEvent(not self.asynchronous))
        return self.events[-1]

    def hand_over(self, event, tensors):
        assert event in self.events
        self.handed.append(len(tensors))

    def wait(self):
        self.waited += 1

    def as_current(self):
        return contextlib.nullcontext()

    def view(self, rows):
        return rows


def play_device(monkeypatch, **attributes):
    """Have loaders deliver their batches on a played device. Return its class and the runtime."""
    kind = type("PlayedHere", (PlayedDevice,), attributes)
    monkeypatch.setattr("stocache.loader.device.batches.Cuda", kind)
    monkeypatch.setattr("stocache.loader.device.cuda.as_device", torch.device)
    pinned = partial(torch.empty, dtype=torch.uint8)
    for module in ("shm.pool", "loader.device.cuda", "loader.device.gathering"):
        monkeypatch.setattr(f"stocache.{module}.pinned_memory", pinned)
    return kind, PlayedRuntime().play(monkeypatch)
