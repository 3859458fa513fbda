"""A Trainer of transformers resumes at every step, with its own loader over a cached dataset and with that of stocache."""

import os
import warnings

import pytest
import torch

import stocache
from stocache import CachedDataset
from tests.support.ranks import Numbers, reset_accelerate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import Trainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.leaves_descriptors]  # their loggers keep some

SAMPLES, STEPS, EPOCHS = 11, 3, 2  # three batches of four samples in an epoch
PERSISTENT = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
AGAIN = {"ignore_data_skip": True}


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


class OwnLoader(transformers.Trainer):
    """Trains with a prepared loader of stocache, with the arguments that Trainer gives its own."""

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
    transformers.set_seed(0)
    model = Model()
    arguments |= {"save_strategy": "steps", "save_steps": 1} if checkpoint is None else {"save_strategy": "no"}
    arguments |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_strategy": "no", "seed": 0}
    arguments |= {"output_dir": folder, "num_train_epochs": EPOCHS, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(remove_unused_columns=False, label_names=[], **arguments)
    trainer = trainer_class(model, args, data_collator=collate, train_dataset=dataset, eval_dataset=dataset)
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.seen


def check_all_steps(folder, trainer_class, ignore_data_skip=False, **arguments):
    """Check that each step resumes with the samples that the uninterrupted run saw after it; return those of that run.

    With ``ignore_data_skip`` a Trainer begins again with the epoch, and ends as many steps before the end of the last one.
    """
    accumulated = arguments.get("gradient_accumulation_steps", 1)
    updates = -(-STEPS // accumulated)  # in an epoch
    with CachedDataset(Numbers(SAMPLES), 1) as dataset:
        whole = fit(trainer_class, dataset, folder, **arguments)
        for update in range(1, updates * EPOCHS):
            epoch, done = divmod(update, updates)
            expected = whole[epoch * STEPS + done * accumulated :]
            if ignore_data_skip:
                expected = whole[epoch * STEPS : STEPS * (EPOCHS - 1) + (updates - done) * accumulated]
            path = os.path.join(folder, f"checkpoint-{update}")
            came = fit(trainer_class, dataset, folder, path, ignore_data_skip=ignore_data_skip, **arguments)
            assert came == expected, update
        assert dataset.cache.counts()[0] >= (EPOCHS - 1) * SAMPLES
    return whole


@pytest.fixture(autouse=True)
def _states_are_reset():
    reset_accelerate()
    yield
    reset_accelerate()


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
