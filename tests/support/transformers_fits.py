"""Runs of a Trainer of transformers that save a checkpoint at every step, and runs that resume from each of them."""

import multiprocessing
import os
import warnings

import torch
from torch.utils.data import Dataset

import stocache
from stocache import CachedDataset
from tests.support.processes import leave_process_group

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

SAMPLES, STEPS, EPOCHS = 11, 3, 3  # three batches of four samples in an epoch


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, idx):
        return {"value": torch.tensor([float(idx)]), "number": idx}


class Model(torch.nn.Module):
    """Records the samples of each batch that it is trained with, by epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.epochs = torch.nn.Linear(1, 1), []

    def forward(self, value, number):
        if self.training:
            self.epochs[-1].append(number.tolist())
        loss = self.layer(value).mean()
        return {"loss": loss, "logits": loss.expand(len(number), 1)}


class Epochs(transformers.TrainerCallback):
    """Begins the record of an epoch."""

    def __init__(self, model):
        self.model = model

    def on_epoch_begin(self, *args, **kwargs):
        self.model.epochs.append([])


class OwnLoader(transformers.Trainer):
    """Trains with a prepared loader of stocache, with the arguments that Trainer gives its own."""

    def get_train_dataloader(self):
        args = self.args
        options = {"num_workers": args.dataloader_num_workers, "persistent_workers": args.dataloader_persistent_workers}
        loader = stocache.DataLoader(self.train_dataset, args.per_device_train_batch_size, shuffle=True, **options)
        return self.accelerator.prepare(loader)


def fit(trainer_class, dataset, folder, batch_size=4, checkpoint=None, **arguments):
    """Train, from a checkpoint if there is one, else saving each step; return the samples of each batch, by epoch."""
    transformers.set_seed(0)
    model = Model()
    arguments |= {"save_strategy": "steps", "save_steps": 1} if checkpoint is None else {"save_strategy": "no"}
    fixed = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_strategy": "no", "seed": 0}
    args = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=batch_size,
        remove_unused_columns=False,
        label_names=[],
        **fixed,
        **arguments,
    )
    trainer = trainer_class(model, args, train_dataset=dataset, eval_dataset=dataset, callbacks=[Epochs(model)])
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.epochs


def check_all_steps(folder, trainer_class, ignore_data_skip=False, **arguments):
    """Check that each step resumes with the samples that the uninterrupted run saw after it; return those of that run.

    With ``ignore_data_skip`` a Trainer begins again with the epoch, and ends as many steps before the end of the last one.
    """
    accumulated = arguments.get("gradient_accumulation_steps", 1)
    updates = -(-STEPS // accumulated)  # in an epoch
    with CachedDataset(Numbers(), 1) as dataset:
        whole = fit(trainer_class, dataset, folder, **arguments)
        assert [len(batches) for batches in whole] == [STEPS] * EPOCHS
        for update in range(1, updates * EPOCHS):
            epoch, done = divmod(update, updates)
            path = os.path.join(folder, f"checkpoint-{update}")
            came = fit(trainer_class, dataset, folder, checkpoint=path, ignore_data_skip=ignore_data_skip, **arguments)
            expected = [list(batches) for batches in whole[epoch:]]
            if ignore_data_skip:
                del expected[-1][(updates - done) * accumulated :]
            else:
                del expected[0][: done * accumulated]
            assert came == expected, update
    return whole


def check_in_rank(rank, folder, port, trainer_class, arguments):
    """Check one rank of two; together the ranks see each sample in each epoch."""
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # of workers: a spawned one imports all libraries for each epoch
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    whole = check_all_steps(folder, trainer_class, batch_size=2, ddp_backend="gloo", **arguments)
    parts = [None, None]
    torch.distributed.all_gather_object(parts, whole)
    for epochs in zip(*parts, strict=True):
        seen = [label for batches in epochs for labels in batches for label in labels]
        assert set(seen) == set(range(SAMPLES))
        assert len(seen) == STEPS * 4  # accelerate fills up the last batches
    leave_process_group()
