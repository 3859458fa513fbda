"""Lightning: a small classifier on two processes of DDP, each of which finds the cache by its name."""

import os

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.processes import leave_process_group


class Digits(Dataset):
    """Pictures of 8x8, made when they are asked for."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, idx):
        label = (self.first + idx) % 10
        return torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(self.first + idx)) + label / 10, label


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        self.seen.append((y.tolist(), loss.item()))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(wrap, folder, num_workers, name):
    """Train for three epochs; return the rank's losses, the logged metrics and the weights."""
    lightning.seed_everything(0, verbose=False)
    train = wrap(Digits(0, 64), name=f"{name}-train", fingerprint="v1")
    val = wrap(Digits(1000, 16), name=f"{name}-val", fingerprint="v1")
    loaders = [DataLoader(each, batch_size=8, shuffle=each is train, num_workers=num_workers) for each in (train, val)]
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "default_root_dir": folder}
    trainer = lightning.Trainer(max_epochs=3, **options, **dict.fromkeys(names, False))
    model = Classifier()
    trainer.fit(model, *loaders)
    leave_process_group()
    metrics = {key: value.cpu() for key, value in trainer.callback_metrics.items()}
    return os.environ.get("LOCAL_RANK", "0"), model.seen, metrics, dict(model.state_dict())
