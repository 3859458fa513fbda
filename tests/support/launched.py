"""A program of ranks: reads all samples through a cache without a name, and writes what each rank has found as JSON.

Its arguments are a file in which reads are noted, and how many ranks to start: 0 where a launcher has started it as a rank.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset, DistributedSampler

from stocache import CachedDataset, DataLoader

N = 96


class Photos(Dataset):
    """Samples that note each read."""

    def __init__(self, log):
        self.log = log

    def __len__(self):
        return N

    def __getitem__(self, idx):
        with open(self.log, "a") as file:
            file.write(f"{idx}\n")
        return torch.full((3, 8, 8), idx, dtype=torch.uint8), idx


def read(rank, ranks, log, dataset=None):
    """Read three epochs as one of some ranks, write what was found into a file beside the log, and wait for all others."""
    dataset = dataset or CachedDataset(Photos(log), "1MB", audit=0)
    sampler, wrong = DistributedSampler(dataset, ranks, rank), 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, indices in DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1):
            wrong += int((images[:, 0, 0, 0] != indices).sum())
    found = {"wrong": wrong, "inode": os.fstat(dataset.cache._segment.fd).st_ino}
    Path(f"{log}-{rank}").write_text(json.dumps(found))
    while len(list(Path(log).parent.iterdir())) <= ranks:  # others may be slower
        time.sleep(0.01)


def as_lightning(log, ranks):
    """Make the dataset before Lightning starts the other ranks, as most programs do."""
    import lightning

    dataset = CachedDataset(Photos(log), "1MB", audit=0)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, number):
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_end(self):
            read(self.global_rank, ranks, log, dataset)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(dataset, 8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    log, number = sys.argv[1], int(sys.argv[2])
    if sys.argv[3:] == ["lightning"]:
        as_lightning(log, number)
    elif number:
        torch.multiprocessing.spawn(read, (number, log), nprocs=number)
    else:
        read(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), log)
