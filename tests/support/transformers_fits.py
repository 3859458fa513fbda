"""Runs of a Trainer of transformers that save a checkpoint at every step, and runs that resume from each of them."""

import os
import warnings

import torch

import stocache
from stocache import CachedDataset
from tests.support.ranks import Numbers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

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
