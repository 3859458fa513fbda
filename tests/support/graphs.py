"""Graphs of DataPipes for the tests of the reading services, with functions that pickle."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from stocache.reading import DataLoader2, InProcessReadingService, MultiProcessingReadingService, SequentialReadingService
from tests.support.epochs import seed

COUNT = 40
WARNINGS = [  # of torch: on machines with few cores; of functions that are not pickled here, if dill is not installed
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*function is not supported by pickle:UserWarning"),
]


def source(count=COUNT):
    return IterableWrapper(range(count))


def dispatched(count=COUNT):
    return source(count).shuffle().sharding_round_robin_dispatch()


def square(value):
    return value * value


def no_third(value):
    return value % 3 != 0


def twice(value):
    return [value, -value]


def noise(value):
    return value, random.random(), float(torch.rand(())), float(np.random.rand())


def tensor(value):
    return {"value": torch.full((3, 4), value), "name": str(value), "array": np.full(5, value, np.int16)}


def large(value):
    return torch.full((1 << 14,), float(value))


class HomemadeError(Exception):
    """An error of the user's."""


def fails(value):
    if value == 13:
        raise HomemadeError("thirteen")
    return value


def unpicklable(value):
    return threading.Lock() if value == 13 else value


def dies(value):
    if value == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def slow(value):
    time.sleep(0.002)
    return value


def fails_locally(value):
    class LocalError(Exception):
        pass

    raise LocalError("here")


def fails_at_once(datapipe, *_):
    raise HomemadeError("at once")


class Stateful:
    """A map with a generator of its own."""

    def __init__(self):
        self.numbers = random.Random(3)

    def __call__(self, value):
        return value, self.numbers.random()


class Counting:
    """Counts its calls, in all processes."""

    def __init__(self):
        self.calls = torch.zeros(4096, dtype=torch.int64).share_memory_()  # a place for each process: += is not atomic

    def __call__(self, value):
        self.calls[os.getpid() % 4096] += 1
        return value

    def taken(self):
        count = int(self.calls.sum())
        self.calls.zero_()
        return count


EXACT = {
    "shuffled": lambda: source().shuffle().sharding_filter().map(square),
    "filtered": lambda: source().shuffle(buffer_size=7).sharding_filter().map(square).filter(no_third),
    "prefetched": lambda: source().map(square).shuffle().sharding_filter().prefetch(3).map(square),
    "dispatched": lambda: dispatched().map(square),
    "dispatched, filtered": lambda: dispatched().map(square).filter(no_third),
    "both": lambda: source().shuffle().sharding_filter().zip(dispatched()),
    "both, branches of dispatched": lambda: source().shuffle().sharding_filter().zip(dispatched().zip(dispatched(30))),
}
"""Graphs whose order is the same for any number of workers."""

GRAPHS = EXACT | {
    "noisy": lambda: source().shuffle().sharding_filter().map(noise),
    "batched": lambda: source().shuffle().sharding_filter().map(square).batch(3).collate(),
    "noisy batches": lambda: source().shuffle().sharding_filter().map(noise).shuffle().batch(2),
    "one to many": lambda: source().map(square).shuffle().sharding_filter().map(twice).unbatch(),
    "dispatched, prefetched": lambda: source().sharding_round_robin_dispatch().filter(no_third).prefetch(3).map(square),
    "dispatched, noisy batches": lambda: source().map(tensor).sharding_round_robin_dispatch().map(noise).shuffle().batch(3),
}


def service(num_workers, *before, **options):
    """Return a service that runs graphs in some workers, behind others."""
    engine = MultiProcessingReadingService(num_workers, **options) if num_workers else InProcessReadingService()
    return SequentialReadingService(*before, engine) if before else engine


def loader(graph, num_workers, seed=5, *before, **options):
    dataloader = DataLoader2(graph, reading_service=service(num_workers, *before, **options))
    if seed is not None:
        dataloader.seed(seed)
    return dataloader


def elements(iterator):
    """Return the elements as something that can be compared."""
    return [*map(repr, iterator)]


numbers = seed  # puts the global generators where a seed puts them
