"""Runs of a Lightning Trainer that save checkpoints at every step, and runs that resume from each of them."""

import os
import warnings

import torch
from torch.utils.data import Dataset, DistributedSampler

import stocache
from stocache import BlockSampler, CachedDataset, LocalityDistributedSampler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning

SAMPLES, EPOCHS = 11, 4  # three batches of four samples in an epoch


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, idx):
        return torch.tensor([float(idx)]), idx


class Model(lightning.LightningModule):
    """Records the samples of each step, and saves a checkpoint after each step and each epoch but those of the last epoch."""

    def __init__(self, folder=None):
        super().__init__()
        self.layer, self.seen, self.folder, self.saved = torch.nn.Linear(1, 1), [], folder, []

    def training_step(self, batch, number):
        values, labels = batch
        self.seen.append((self.trainer.current_epoch, labels.tolist()))
        return self.layer(values).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def save(self, when):
        if self.folder is not None and self.trainer.current_epoch < EPOCHS - 1:
            path = os.path.join(self.folder, f"{len(self.seen)}-{when}.ckpt")
            self.trainer.save_checkpoint(path)
            self.saved.append((path, len(self.seen)))

    def on_train_batch_end(self, *args):
        self.save("step")

    def on_train_epoch_end(self):
        self.save("epoch")


def sampler_of(kind, dataset, rank, ranks):
    """Return the arguments of a loader that give it a sampler."""
    if kind == "distributed":
        return {"sampler": DistributedSampler(dataset, ranks, rank, seed=5)}
    if kind == "locality":
        return {"sampler": LocalityDistributedSampler(dataset, 4 // ranks, num_replicas=ranks, rank=rank, num_nodes=1)}
    if kind == "block":
        return {"sampler": BlockSampler(range(SAMPLES), 2, True, window=3, rank=rank, world_size=ranks, drop_last=True)}
    return {"shuffle": True}  # in several ranks, Lightning replaces it by a DistributedSampler


class Preparer(stocache.DataPreparer):
    def prepare_data(self):
        yield from (Numbers()[idx] for idx in range(SAMPLES))

    def get_dataset_info(self):
        return None


def module(folder, blocks, batch_size, options):
    """Return a DataModule that trains on all samples, which it prepares in a file or in blocks."""
    from stocache.datamodule import DataModule

    storage_of = (lambda path: stocache.OnDiskBlockDataStorage(path, 2)) if blocks else stocache.InMemoryDataStorage
    storage = storage_of(os.path.join(folder, "prepared"))
    return DataModule(storage, Preparer(), batch_size=batch_size, split={"train": 1.0}, size_limit_gib=0.01, **options)


def fit(loader, ranks, folder=None, checkpoint=None):
    """Train, from a checkpoint if there is one, and return the model."""
    model = Model(folder)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {"devices": 1}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=folder, **strategy, **options)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    if hasattr(loader, "close"):
        loader.close()
    return model


def check_all_positions(folder, kind, options, rank=0, ranks=1):
    """Check that each checkpoint resumes with the samples that the uninterrupted run saw after it."""
    with CachedDataset(Numbers(), 1) as dataset:

        def loader():
            if kind.startswith("module"):
                return module(folder, kind == "module, blocks", 4 // ranks, options)
            return stocache.DataLoader(dataset, 4 // ranks, **options, **sampler_of(kind, dataset, rank, ranks))

        whole = fit(loader(), ranks, folder)
        assert len(whole.seen) == 3 * EPOCHS
        assert len(whole.saved) == 4 * (EPOCHS - 1)
        for path, steps in whole.saved:
            assert fit(loader(), ranks, checkpoint=path).seen == whole.seen[steps:], path


def check_in_rank(rank, folder, port, cases):
    """Check cases in one rank of two."""
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for kind, options in cases:
        check_all_positions(folder, kind, options, rank, 2)
