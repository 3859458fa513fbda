"""A Trainer of transformers resumes at every step, with its own loader over a cached dataset and with that of stocache."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import Trainer

from tests.support.accelerate_fits import reset_states
from tests.support.ranks import Numbers
from tests.support.transformers_fits import EPOCHS, SAMPLES, OwnLoader, check_all_steps, fit

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # their loggers keep some

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
        (OwnLoader, ACCUMULATED | PERSISTENT | {"eval_strategy": "epoch"}),
        (Trainer, ACCUMULATED | AGAIN),
        slow(Trainer, PERSISTENT),
        slow(OwnLoader, AGAIN | PERSISTENT),
        slow(OwnLoader, {}),
    ],
)
def test_each_step_resumes_with_the_batches_that_come_without_stocache(trainer_class, arguments, tmp_path):
    whole = check_all_steps(tmp_path / "ours", trainer_class, **arguments)
    assert sorted(label for labels in whole for label in labels) == sorted([*range(SAMPLES)] * EPOCHS)
    theirs = fit(Trainer, Numbers(SAMPLES), tmp_path / "theirs", **{**arguments, "ignore_data_skip": False})
    assert whole == theirs
