"""The probe takes nothing from the program, and finds what else than the index samples depend on."""

import contextlib
import os
import queue
import random
import secrets
import sys
import tempfile
import uuid
from multiprocessing import Manager

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from stocache import CachedDataset
from tests.support.images import Made

N = 40
RECORDS = b"".join(b"%4d" % number for number in range(3 * N))


def streamed(open_stream, stack):
    """Return a dataset that returns the next record, whatever the index. ``stack`` closes what it opens."""
    dataset = Made(lambda its, idx: torch.tensor(int(its.next())), N)
    dataset.next = open_stream(dataset, stack)
    return dataset


def pipe(its, stack):
    its.fd, writer = os.pipe()
    stack.callback(os.close, its.fd)
    os.write(writer, RECORDS)
    os.close(writer)
    return lambda: os.read(its.fd, 4)


def items(its, stack):
    its.queue = queue.Queue()
    for number in range(3 * N):
        its.queue.put(number)
    return its.queue.get_nowait


def iterator(its, stack):
    its.numbers = iter([0] * 30 + [*range(3 * N)])  # so that the probe sees no difference
    return lambda: next(its.numbers)


@pytest.mark.parametrize("stream", [pipe, items, iterator], ids=lambda stream: stream.__name__)
def test_a_stream_gives_all_records_in_order(stream, caplog):
    with contextlib.ExitStack() as stack:
        plain, dataset = streamed(stream, stack), streamed(stream, stack)
        wanted = [torch.cat(list(DataLoader(plain, 8))).tolist() for _ in range(2)]
        wrapped = Subset(dataset, range(N)) if stream is iterator else dataset
        cached = stack.enter_context(CachedDataset(wrapped, 0.01))
        assert [torch.cat(list(DataLoader(cached, 8))).tolist() for _ in range(2)] == wanted
        assert len(caplog.records) == 1


def test_a_connection_that_a_child_makes_anew_is_no_reason_not_to_cache():
    with Manager() as manager:
        numbers = manager.list(range(N))
        with CachedDataset(Made(lambda its, idx: torch.tensor(numbers[idx]), N), 0.01) as cached:
            assert (cached.is_left, cached.stats().total.filled) == (False, 8)


def remember(its, idx):
    if idx not in its.kept:
        its.kept[idx] = torch.tensor(idx)
    return its.kept[idx]


def append(its, idx):
    its.kept.setdefault("all", []).append(torch.tensor(idx))
    return torch.tensor(idx)


@pytest.mark.parametrize("load", [remember, append])
def test_a_dataset_that_keeps_what_it_loads_has_all_of_it(load):
    plain, dataset = (Made(load, N, kept={}) for _ in range(2))
    with CachedDataset(dataset, 0.01) as cached:
        for _ in range(2):
            assert list(DataLoader(cached, 8))[-1].tolist() == list(DataLoader(plain, 8))[-1].tolist()
            assert repr(dataset.kept) == repr(plain.kept)
        assert cached.is_left == (load is append)


SEEDS = {
    "numpy": lambda: np.random.default_rng().random(), "a state of numpy": lambda: np.random.RandomState().rand(),
    "random": lambda: random.Random().random(), "secrets": lambda: secrets.randbelow(9), "bytes": lambda: os.urandom(2)[0],
    "torch": lambda: torch.Generator().seed(),
}  # fmt: skip
OTHERS = {
    "seeded": lambda: (np.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3)),
    "names": lambda: (uuid.uuid4(), os.rmdir(tempfile.mkdtemp())),
}


@pytest.mark.parametrize("source", [*SEEDS, *OTHERS])
def test_a_seed_of_the_system_is_noticed_without_an_effect(source, caplog):
    def load(its, idx):
        (SEEDS | OTHERS)[source]()
        return torch.tensor(idx)

    with CachedDataset(Made(load, N), 0.01) as cached:
        assert (cached.is_left or bool(cached.stats().cut)) == (source in SEEDS)
    assert not cached.is_left or f"that the system draws in {__file__}:" in caplog.text


def test_a_length_without_end_takes_no_memory(caplog):
    length = sys.maxsize
    with CachedDataset(Made(lambda its, idx: torch.tensor(idx % 7), length), 0.1) as cached:
        assert cached[length - 1].item() == (length - 1) % 7
        assert [each.item() for each in cached.__getitems__([3, length - 2])] == [3, (length - 2) % 7]
        assert (cached.is_left, cached.warm(progress=False).total.filled) == (True, 0)
    assert "has no room for a table of so many" in caplog.text
