"""A Trainer of transformers resumes at every step, with its own loader over a cached dataset and with that of stocache."""

import pytest

from stocache import CachedDataset
from tests.support.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import Trainer

from tests.support.accelerate_fits import reset_states
from tests.support.transformers_fits import EPOCHS, SAMPLES, Numbers, OwnLoader, check_all_steps, check_in_rank, fit

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # their loggers keep some

WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
AGAIN = {"ignore_data_skip": True}


@pytest.fixture(autouse=True)
def _states_are_reset():
    reset_states()
    yield
    reset_states()


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("trainer_class", "arguments"),
    [
        (Trainer, ACCUMULATED | AGAIN),
        (OwnLoader, ACCUMULATED | PERSISTENT | {"eval_strategy": "epoch"}),
        slow(Trainer, PERSISTENT),
        slow(OwnLoader, AGAIN | PERSISTENT),
        slow(OwnLoader, {}),
    ],
)
def test_each_step_resumes(trainer_class, arguments, tmp_path):
    whole = check_all_steps(tmp_path, trainer_class, **arguments)
    assert sorted(label for labels in whole for label in labels) == sorted([*range(SAMPLES)] * EPOCHS)


def test_batches_are_those_without_stocache(tmp_path):
    theirs = fit(Trainer, Numbers(SAMPLES), tmp_path / "theirs")
    for trainer_class in (Trainer, OwnLoader):
        with CachedDataset(Numbers(SAMPLES), 1) as dataset:
            assert fit(trainer_class, dataset, tmp_path / trainer_class.__name__) == theirs
            assert dataset.cache.counts()[0] >= (EPOCHS - 1) * SAMPLES


@pytest.mark.slow
def test_two_ranks_of_a_trainer_resume(tmp_path):
    run_ranks(check_in_rank, tmp_path, OwnLoader, ACCUMULATED | WORKERS)
