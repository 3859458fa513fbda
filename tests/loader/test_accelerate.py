"""Programs of accelerate resume at every step, with workers, several ranks, and each of its ways to resume."""

import pytest
import torch

import stocache
from stocache import CachedDataset
from tests.support.images import Images
from tests.support.ranks import Numbers, run_ranks

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.support.accelerate_fits import EPOCHS, SAMPLES, Program, check_all_steps, check_in_rank, reset_states  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # its loggers keep some

WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.fixture(autouse=True)
def _states_are_reset():
    reset_states()
    yield
    reset_states()


def test_a_prepared_loader_delivers_each_sample():
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 8, shuffle=True, **PERSISTENT)
        prepared = accelerate.Accelerator(cpu=True).prepare(loader)
        assert sorted(label for _, labels in prepared for label in labels.tolist()) == list(range(50))
        skipped = accelerate.skip_first_batches(prepared, 5)
        assert sum(len(labels) for _, labels in skipped) == 10
        del prepared, skipped


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("skipping", PERSISTENT),
        ("registered", {}),
        pytest.param("skipping", WORKERS, marks=pytest.mark.slow),
        pytest.param("registered", PERSISTENT, marks=pytest.mark.slow),
    ],
)
def test_each_step_resumes(kind, options, tmp_path):
    whole = check_all_steps(tmp_path, kind, options)
    for epoch in range(EPOCHS):
        assert sorted(label for at, labels in whole if at == epoch for label in labels) == list(range(SAMPLES))


@pytest.mark.parametrize("kind", ["skipping", "stateful"])
def test_batches_are_those_of_the_loader_of_torch(kind, tmp_path):
    if kind == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    theirs = Program(kind, Numbers(SAMPLES), 4, {}, loader_class=torch.utils.data.DataLoader).train(tmp_path / "theirs")
    with CachedDataset(Numbers(SAMPLES), 1) as dataset:
        assert Program(kind, dataset, 4, {}).train(tmp_path / "ours") == theirs
        assert dataset.cache.counts()[0] >= SAMPLES * (EPOCHS - 1)


def test_the_loader_of_torchdata_that_accelerate_makes_resumes_without_workers(tmp_path):
    """With workers it does not, over any dataset."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    check_all_steps(tmp_path, "stateful", {})


@pytest.mark.slow
def test_two_ranks_resume(tmp_path):
    split = {"split_batches": True}
    cases = [("skipping", WORKERS, {"batch_size": 2}), ("skipping", {}, split), ("registered", WORKERS, {"batch_size": 2})]
    run_ranks(check_in_rank, tmp_path, [*cases, ("skipping", {}, split | {"dispatch_batches": True})])
