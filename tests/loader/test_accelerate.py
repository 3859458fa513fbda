"""Programs of accelerate resume at every step, with workers, several ranks, and each of its ways to resume."""

import multiprocessing
import socket

import pytest
import torch

import stocache
from stocache import CachedDataset
from tests.support.images import Images
from tests.support.processes import run_all

accelerate = pytest.importorskip("accelerate")

from tests.support.accelerate_fits import EPOCHS, SAMPLES, Numbers, Program, check_all_steps, check_in_rank, reset_states  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # its loggers keep some

WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.fixture(autouse=True)
def _states_are_reset():
    yield
    reset_states()


def test_a_prepared_loader_delivers_each_sample():
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 8, shuffle=True, num_workers=2, persistent_workers=True)
        prepared = accelerate.Accelerator(cpu=True).prepare(loader)
        assert sorted(label for _, labels in prepared for label in labels.tolist()) == list(range(50))
        skipped = accelerate.skip_first_batches(prepared, 5)
        assert sum(len(labels) for _, labels in skipped) == 10
        del prepared, skipped


@pytest.mark.parametrize(
    "options", [{}, pytest.param(WORKERS, marks=pytest.mark.slow), PERSISTENT], ids=["alone", "workers", "persistent"]
)
@pytest.mark.parametrize("kind", ["skipping", "registered"])
def test_each_step_resumes(kind, options, tmp_path):
    whole = check_all_steps(tmp_path, kind, options)
    for epoch in range(EPOCHS):
        assert sorted(label for at, labels in whole if at == epoch for label in labels) == list(range(SAMPLES))


@pytest.mark.parametrize("kind", ["skipping", "stateful"])
def test_batches_are_those_of_the_loader_of_torch(kind, tmp_path):
    theirs = Program(kind, Numbers(), 4, {}, loader_class=torch.utils.data.DataLoader).train(tmp_path / "theirs")
    with CachedDataset(Numbers(), 1) as dataset:
        assert Program(kind, dataset, 4, {}).train(tmp_path / "ours") == theirs


def test_the_loader_of_torchdata_that_accelerate_makes_resumes_without_workers(tmp_path):
    """With workers it does not, over any dataset."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    check_all_steps(tmp_path / "steps", "stateful", {})
    with CachedDataset(Numbers(), 1) as dataset:
        program = Program("stateful", dataset, 4, {})
        assert isinstance(program.loader, torchdata.StatefulDataLoader)
        program.train(tmp_path / "whole")
        assert dataset.cache.counts()[0] >= SAMPLES * (EPOCHS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, WORKERS | {"multiprocessing_context": "fork"}], ids=["alone", "workers"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("skipping", {"batch_size": 2}),
        ("skipping", {"split_batches": True}),
        ("skipping", {"split_batches": True, "dispatch_batches": True}),
        ("registered", {"batch_size": 2}),
    ],
    ids=["skipping", "split", "dispatched", "registered"],
)
def test_two_ranks_resume(kind, config, options, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_all(multiprocessing.get_context("spawn"), 2, check_in_rank, tmp_path, port, [(kind, options, config)], timeout_s=300)
