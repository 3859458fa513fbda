"""A storage that a user might write, and samples to fill any storage with."""

from pathlib import Path

import numpy as np
import torch

from stocache import DataStorage
from tests.support.containers import Box

N = 50


class FilePerSample(DataStorage):
    """A storage that a user might write: each sample in a file of its own."""

    def __init__(self, folder):
        self.folder, self.count = Path(folder), None

    def is_prepared(self):
        return (self.folder / "info").exists()

    def start_preparation(self):
        self.folder.mkdir()
        self.count = 0

    def save_sample(self, sample):
        if self.count is None:
            raise RuntimeError("call start_preparation first")
        torch.save(sample, self.folder / str(self.count))
        self.count += 1

    def finish_preparation(self, info):
        torch.save(info, self.folder / "info")

    def load_dataset_info(self):
        return torch.load(self.folder / "info", weights_only=False)

    def load_sample(self, idx):
        return torch.load(self.folder / str(idx), weights_only=False)


def sample(idx):
    return {
        "image": torch.full((3, 4), idx, dtype=torch.uint8),
        "box": Box(np.arange(idx % 3), idx),
        "text": "ab" * (idx % 4),
        "tags": [str(n) for n in range(idx % 3)],
        "maybe": None if idx % 5 else 0.5,
    }


def save(storage, count=N, info=None):
    storage.start_preparation()
    for idx in range(count):
        storage.save_sample(sample(idx))
    storage.finish_preparation(info)
    return storage


def files_of(storage):
    return sorted(path for path in Path(storage.base_folder).rglob("*") if path.is_file())
