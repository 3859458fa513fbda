"""Lightning takes the DataLoader for what it is: torch's; and resumes at every step."""

import gc
import warnings

import pytest
import torch
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.images import Images
from tests.support.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.utilities import data

    from tests.support.lightning_fits import EPOCHS, SAMPLES, check_all_positions, check_in_rank, samples_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaves_descriptors,  # its loggers, and multiprocessing's server
]

WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SETTINGS = {
    "validation": {"val_check_interval": 0.5},
    "limit": {"limit_train_batches": 2},
    "accumulate": {"accumulate_grad_batches": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
}
SETTINGS["all"] = {name: value for settings in SETTINGS.values() for name, value in settings.items()}


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("distributed", PERSISTENT, None),
        ("generator", {}, "validation"),
        ("block", {}, None),
        slow("block", WORKERS, "all"),
        slow("locality", {}, "validation"),
        slow("locality", PERSISTENT, "all"),
        slow("generator", PERSISTENT, "all"),
        *(slow("distributed", {}, name) for name in SETTINGS),
    ],
)
def test_lightning_resumes_at_every_step_and_epoch(kind, options, settings, tmp_path):
    settings = SETTINGS.get(settings, {})
    seen = check_all_positions(tmp_path, kind, options, **settings)
    if "limit_train_batches" not in settings and "block" not in kind:  # which drops the last batch
        assert all(samples_of(seen, epoch) == list(range(SAMPLES)) for epoch in range(EPOCHS))
    gc.collect()


@pytest.mark.slow
def test_lightning_resumes_two_ranks(tmp_path):
    cases = [("shuffled", {}, {}), ("locality", {}, {}), ("block", {}, {})]
    cases += [("shuffled", PERSISTENT, {}), ("distributed", {}, SETTINGS["all"]), ("distributed", {}, SETTINGS["validation"])]
    run_ranks(check_in_rank, tmp_path, cases)


def test_lightning_makes_it_again_with_another_sampler_and_all_other_arguments():
    with CachedDataset(Images(), 1) as dataset:
        options = PERSISTENT | {
            "prefetch_factor": 3,
            "timeout": 70,
            "snapshot_every_n_steps": 4,
            "generator": torch.Generator(),
        }
        loader = stocache.DataLoader(dataset, 8, shuffle=True, **options)
        first = data._update_dataloader(loader, DistributedSampler(dataset, 2, 0))
        again = data._update_dataloader(first, DistributedSampler(dataset, 2, 1))
        assert type(again) is stocache.DataLoader
        for name in ("batch_size", "collate_fn", *options):
            assert getattr(again, name) is getattr(loader, name), name
        labels = [label for part in (first, again) for _, labels in part for label in labels.tolist()]
        assert sorted(labels) == list(range(50))
        assert again.stats().ring == 4
        del loader, first, again
        gc.collect()
