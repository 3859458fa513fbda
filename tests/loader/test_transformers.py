"""A Trainer of transformers resumes at every step with a prepared loader of stocache, with the batches of its own."""

import warnings

import pytest
import torch

import stocache
from stocache import CachedDataset
from tests.support.ranks import numbers, reset_accelerate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # of their loggers

SAMPLES, STEPS, EPOCHS = 11, 3, 2  # three batches of four samples in an epoch


class Model(torch.nn.Module):
    """Records the samples of each batch that it is trained with."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, value, number):
        if self.training:
            self.seen.append(number.tolist())
        loss = self.layer(value).mean()
        return {"loss": loss, "logits": loss.expand(len(number), 1)}


class OwnLoader(Trainer):
    """Trains with a prepared loader of stocache, with the arguments that Trainer passes to its own."""

    def get_train_dataloader(self):
        args = self.args
        options = {"num_workers": args.dataloader_num_workers, "persistent_workers": args.dataloader_persistent_workers}
        options |= {"batch_size": args.per_device_train_batch_size, "shuffle": True, "collate_fn": self.data_collator}
        return self.accelerator.prepare(stocache.DataLoader(self.train_dataset, **options))


def collate(samples):
    values, numbers = zip(*samples, strict=True)
    return {"value": torch.stack(values), "number": torch.tensor(numbers)}


def fit(trainer_class, dataset, folder, checkpoint=None, **arguments):
    """Train, from a checkpoint if there is one, else saving each step; return the samples of each batch."""
    reset_accelerate()
    transformers.set_seed(0)
    model = Model()
    arguments |= {"save_strategy": "steps", "save_steps": 1} if checkpoint is None else {"save_strategy": "no"}
    arguments |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_strategy": "no", "seed": 0}
    arguments |= {"output_dir": folder, "num_train_epochs": EPOCHS, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(remove_unused_columns=False, label_names=[], **arguments)
    trainer = trainer_class(model, args, data_collator=collate, train_dataset=dataset, eval_dataset=dataset)
    trainer.train(resume_from_checkpoint=checkpoint)
    reset_accelerate()
    return model.seen


def test_each_step_resumes_with_the_batches_that_come_without_stocache(tmp_path):
    arguments = {"eval_strategy": "epoch", "dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    theirs = fit(Trainer, numbers(SAMPLES), tmp_path / "theirs", **arguments)
    assert sorted(label for labels in theirs for label in labels) == sorted([*range(SAMPLES)] * EPOCHS)
    with CachedDataset(numbers(SAMPLES), 0.1) as dataset:
        assert fit(OwnLoader, dataset, tmp_path / "ours", **arguments) == theirs
        for step in range(1, STEPS * EPOCHS):
            path = str(tmp_path / "ours" / f"checkpoint-{step}")
            assert fit(OwnLoader, dataset, tmp_path / "ours", path, **arguments) == theirs[step:], step
        assert dataset.cache.counts()[0] >= (EPOCHS - 1) * SAMPLES
