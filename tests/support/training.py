"""A model, its data and a Trainer of Lightning."""

import warnings
from pathlib import Path

import torch

from stocache import DataPreparer, OnDiskBlockDataStorage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning

    from stocache.datamodule import DataModule

N = 240
LABELS = [0 if idx < 24 else 1 + idx % 3 for idx in range(N)]


class Preparer(DataPreparer):
    runs = 0

    def prepare_data(self):
        Preparer.runs += 1
        for idx in range(N):
            yield torch.full((3, 4, 4), idx, dtype=torch.uint8), idx

    def get_dataset_info(self):
        return {"labels": LABELS}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.validated, self.tested = torch.nn.Linear(48, 1), [], [], []

    def training_step(self, batch, number):
        images, labels = batch
        assert (images[:, 0, 0, 0] == labels).all()
        self.seen.append(labels.tolist())
        return self.layer(images.float().flatten(1)).mean()

    def validation_step(self, batch, number):
        self.validated += batch[1].tolist()

    def test_step(self, batch, number):
        self.tested += batch[1].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def module(folder, **options):
    options = {"batch_size": 8, "size_limit_gib": "10MB"} | options
    return DataModule(OnDiskBlockDataStorage(Path(folder, "data"), 10), Preparer(), **options)


def trainer(folder, **options):
    fixed = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(**{"default_root_dir": folder, "logger": False, "enable_checkpointing": False} | fixed | options)
