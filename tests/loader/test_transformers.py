"""A Trainer of transformers resumes at every step, with its own loader over a cached dataset and with that of stocache."""

import multiprocessing
import socket

import pytest

from stocache import CachedDataset
from tests.support.processes import run_all

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from tests.support.accelerate_fits import reset_states
from tests.support.transformers_fits import SAMPLES, Numbers, OwnLoader, check_all_steps, check_in_rank, fit

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # their loggers keep some

WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}


@pytest.fixture(autouse=True)
def _states_are_reset():
    yield
    reset_states()


@pytest.mark.parametrize("trainer_class", [Trainer, OwnLoader])
@pytest.mark.parametrize(
    "arguments",
    [
        ACCUMULATED,
        ACCUMULATED | PERSISTENT | {"eval_strategy": "epoch"},
        {"ignore_data_skip": True, **ACCUMULATED},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(WORKERS, marks=pytest.mark.slow),
        pytest.param(PERSISTENT, marks=pytest.mark.slow),
        pytest.param({"ignore_data_skip": True, **PERSISTENT}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "accumulated-persistent", "accumulated-again", "alone", "workers", "persistent", "persistent-again"],
)
def test_each_step_resumes(trainer_class, arguments, tmp_path):
    for batches in check_all_steps(tmp_path, trainer_class, **arguments):
        assert sorted(label for labels in batches for label in labels) == list(range(SAMPLES))


@pytest.mark.parametrize("trainer_class", [Trainer, OwnLoader])
def test_batches_are_those_without_stocache(trainer_class, tmp_path):
    theirs = fit(Trainer, Numbers(), tmp_path / "theirs")
    with CachedDataset(Numbers(), 1) as dataset:
        assert fit(trainer_class, dataset, tmp_path / "ours") == theirs
        assert dataset.cache.counts()[0] >= 2 * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [Trainer, OwnLoader])
@pytest.mark.parametrize("arguments", [ACCUMULATED, ACCUMULATED | WORKERS], ids=["alone", "workers"])
def test_two_ranks_of_a_trainer_resume(trainer_class, arguments, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_all(multiprocessing.get_context("spawn"), 2, check_in_rank, tmp_path, port, trainer_class, arguments, timeout_s=300)
