"""Lightning takes the DataLoader for what it is: torch's; and resumes at every step."""

import gc
import os
import warnings

import pytest
import torch
from torch.utils.data import DistributedSampler

import stocache
from stocache import CachedDataset
from tests.support.ranks import numbers, of_all_ranks, run_ranks, samples_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

pytestmark = [  # of loggers, multiprocessing's server
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors
]  # fmt: skip

SAMPLES, EPOCHS = 11, 3  # three batches of four samples in an epoch
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SETTINGS = {"validation": {"val_check_interval": 0.5}}
SETTINGS["all"] = SETTINGS["validation"] | {"limit_train_batches": 2, "accumulate_grad_batches": 2}
SETTINGS["all"] |= {"reload_dataloaders_every_n_epochs": 1}


class Model(lightning.LightningModule):
    """Records the samples of each step, and saves after each step, validation and epoch, but for those of the last epoch."""

    def __init__(self, folder=None):
        super().__init__()
        self.layer, self.seen, self.folder, self.saved = torch.nn.Linear(1, 1), [], folder, []

    def training_step(self, batch, number):
        values, labels = batch
        self.seen.append((self.trainer.current_epoch, labels.tolist()))
        return self.layer(values).mean()

    def validation_step(self, batch, number):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def save(self, when):
        if self.folder is not None and self.trainer.current_epoch < EPOCHS - 1:
            path = os.path.join(self.folder, f"{len(self.seen)}-{when}.ckpt")
            self.trainer.save_checkpoint(path)
            self.saved.append((path, len(self.seen)))

    on_train_batch_end = lambda self, *args: self.save("step")
    on_validation_end = lambda self: self.save("validation")
    on_train_epoch_end = lambda self: self.save("epoch")


class Loaders(lightning.LightningDataModule):
    """Makes a loader whenever Lightning asks for one."""

    def __init__(self, make):
        super().__init__()
        self.train_dataloader = make

    def val_dataloader(self):
        return torch.utils.data.DataLoader(numbers(SAMPLES), 4)


def sampler_of(kind, dataset, rank, ranks):
    """Return the arguments of a loader that give it a sampler."""
    if kind == "distributed":
        return {"sampler": DistributedSampler(dataset, ranks, rank, seed=5)}
    if kind == "generator":
        return {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return {"shuffle": True}  # in several ranks, Lightning replaces it by a DistributedSampler


def fit(source, ranks=1, folder=None, checkpoint=None, **settings):
    """Train, from a checkpoint if there is one, and return the model."""
    model = Model(folder)
    settings |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"strategy": "ddp", "devices": ranks} if ranks > 1 else {"devices": 1}
    settings |= {"max_epochs": EPOCHS, "accelerator": "cpu", "num_sanity_val_steps": 0, "default_root_dir": folder}
    trainer = lightning.Trainer(**settings, limit_val_batches=1.0 if "val_check_interval" in settings else 0.0)
    trainer.fit(model, source, ckpt_path=checkpoint)
    return model


def check_all_positions(folder, kind, options, rank=0, ranks=1, **settings):
    """Check that each checkpoint resumes with the samples that the uninterrupted run saw after it; return those of that run.

    In several ranks, whose runs take longer, those of the second epoch. Lightning does not restore a loader without
    ``set_epoch`` that has come to the end of an epoch, but after a validation.
    """
    steps = settings.get("limit_train_batches", 3)
    with CachedDataset(numbers(SAMPLES), 0.1) as dataset:
        loader = lambda: stocache.DataLoader(dataset, 4 // ranks, **options, **sampler_of(kind, dataset, rank, ranks))
        whole = fit(Loaders(loader), ranks, folder, **settings)
        assert len(whole.seen) == steps * EPOCHS
        assert len(whole.saved) >= (steps + 1) * (EPOCHS - 1)
        for path, done in whole.saved:
            if ranks > 1 and not steps < done <= 2 * steps:
                continue
            if kind != "generator" or done % steps or path.endswith("validation.ckpt"):
                assert fit(Loaders(loader), ranks, checkpoint=path, **settings).seen == whole.seen[done:], path
    return whole.seen


@pytest.mark.parametrize(("kind", "options", "settings"), [
    ("distributed", PERSISTENT, None), ("generator", {}, "validation"), ("distributed", {"num_workers": 2}, "all"),
])  # fmt: skip
def test_lightning_resumes_at_every_step_and_epoch(kind, options, settings, tmp_path):
    settings = SETTINGS.get(settings, {})
    seen = check_all_positions(tmp_path, kind, options, **settings)
    if "limit_train_batches" not in settings:
        assert all(samples_of(seen, epoch) == list(range(SAMPLES)) for epoch in range(EPOCHS))
    gc.collect()


def check_in_rank(rank, folder, cases):
    """Check cases in one rank of two; together the ranks see each sample in each epoch, if it is not cut short."""
    for number, (kind, options, settings) in enumerate(cases):
        path = os.path.join(folder, str(number))
        first, second = of_all_ranks(check_all_positions(path, kind, options, rank, 2, **settings))
        for epoch in range(EPOCHS):
            samples = samples_of(first + second, epoch)
            assert len(samples) - len(set(samples)) <= 1  # the samplers fill up the last batch
            assert "limit_train_batches" in settings or set(samples) == set(range(SAMPLES))


def test_lightning_resumes_two_ranks(tmp_path):
    cases = [("shuffled", {}, {}), ("distributed", PERSISTENT, SETTINGS["all"])]
    run_ranks(check_in_rank, tmp_path, cases)
