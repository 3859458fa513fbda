"""Batches on a real GPU. With a device that is played by the CPU: test_device.py."""

import gc

import pytest
import torch
from torch.utils.data import TensorDataset

from stocache import DataLoader
from stocache.loader.device import gathering, kernels
from stocache.loader.device.mapping import _mapped
from tests.support.devices import Images, cached, registered
from tests.support.equality import identical
from tests.support.processes import wait_until
from tests.support.ways import WAYS

pytestmark = [
    pytest.mark.gpu, pytest.mark.leaves_descriptors, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]  # fmt: skip

LENGTH, BATCH = 600, 32


SOURCE = Images(LENGTH)


@pytest.fixture(autouse=True)
def released():
    yield
    assert wait_until(lambda: gc.collect() is not None and not list(_mapped.values()))  # a thread may still make a batch


def batches_of(loader, epochs=3):
    found = []
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        found.append([{name: part.cpu() for name, part in batch.items()} for batch in loader])
        registered(loader)
    return found


@pytest.mark.parametrize("workers", WAYS)
@pytest.mark.parametrize("share", [0.5, 1])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_batches_are_those_of_the_cpu(workers, share, has_kernel, monkeypatch):
    if has_kernel:
        assert kernels._kernel() is not None
        monkeypatch.setattr(kernels, "_LARGE", 0)
        monkeypatch.setattr(kernels, "_WIDE", 0)
        monkeypatch.setattr(gathering, "_TOGETHER", 1)
    options = {"batch_size": BATCH, "shuffle": True} | WAYS[workers]
    with cached(SOURCE, share) as dataset:
        expected = batches_of(DataLoader(dataset, **options))
    with cached(SOURCE, share) as dataset:
        loader = DataLoader(dataset, device="cuda", **options)
        assert identical(batches_of(loader), expected)
        stats = loader.stats().device
        assert stats.from_cache > 0
        assert stats.from_cache + stats.from_host == 3 * LENGTH
        for part in next(iter(loader)).values():
            assert part.device == torch.device("cuda", torch.cuda.current_device())
            assert part.is_contiguous()
        del loader, part


def test_a_batch_that_is_held_does_not_change():
    with cached(SOURCE, warm=True) as dataset:
        for options in WAYS.values():
            loader, held = DataLoader(dataset, BATCH, shuffle=True, device="cuda", **options), []
            for _ in range(4):
                for batch in loader:
                    held.append((batch, batch["image"].double().sum((1, 2, 3)), batch["label"].cpu().tolist()))
            for batch, sums, labels in held:
                assert torch.equal(batch["image"].double().sum((1, 2, 3)), sums)
                assert torch.equal(batch["image"].cpu(), torch.stack([SOURCE[idx]["image"] for idx in labels]))
            del loader, held, batch


def test_memory_that_the_user_frees_is_not_used_again_before_the_step_has_ended():
    rows = torch.arange(64 * 1_000_000, dtype=torch.int32).view(64, -1)
    loader, totals = DataLoader(TensorDataset(rows), 4, device="cuda"), []
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for (batch,) in loader:
            for _ in range(10):
                torch.mm(work, work)  # the step is far behind the CPU
            totals.append(batch.double().sum(1))
            del batch
    expected = rows.double().sum(1).view(-1, 4)
    for number, total in enumerate(totals):
        assert torch.equal(total.cpu(), expected[number % 16])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_start_beside_a_cuda_that_is_in_use(method):
    torch.zeros(1, device="cuda")
    with cached(SOURCE, 0.5) as dataset:  # its probe is a child
        dataset.warm(num_workers=2, progress=False)
        for options in ({"pin_memory": True}, {"device": "cuda"}):
            loader = DataLoader(dataset, BATCH, num_workers=2, multiprocessing_context=method, **options)
            labels = [batch["label"].cpu() for batch in loader]
            assert torch.cat(labels).tolist() == list(range(LENGTH))
            assert loader.stats().ring == len(labels)
            del loader


def test_threads_pin_without_a_copy():
    with cached(SOURCE, warm=True) as dataset:
        for options in ({}, {"num_workers": 2, "worker_method": "thread"}):
            loader = DataLoader(dataset, BATCH, pin_memory=True, **options)
            for batch in loader:
                assert all(part.is_pinned() for part in batch.values())
                there = batch["image"].to("cuda", non_blocking=True)
                assert torch.equal(there.cpu(), batch["image"])
            del loader, batch
