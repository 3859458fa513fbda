"""A dataset that only a DataLoader's workers make ready, in their ``worker_init_fn``: nothing can be loaded before."""

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from tests.programs.running import epochs

COUNT, SIZE = 100, 48


class Records(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None

    def open(self):
        self.file = open(self.path, "rb")  # noqa: SIM115

    def __len__(self):
        return COUNT

    def __getitem__(self, idx):
        self.file.seek(idx * SIZE)  # AttributeError where nobody has opened it
        return torch.frombuffer(bytearray(self.file.read(SIZE)), dtype=torch.uint8), idx


def worker_init_fn(worker_id):
    get_worker_info().dataset.open()


def main(wrap, folder, start_method="fork", **options):
    """Collect the batches of three epochs; ``options`` are of the cache."""
    path = folder / "records.bin"
    path.write_bytes(np.random.default_rng(0).bytes(COUNT * SIZE))
    if options.pop("example", False):
        options["example"] = (torch.zeros(SIZE, dtype=torch.uint8), 0)
    return epochs(wrap(Records(path), **options), 16, 2, start_method, worker_init_fn=worker_init_fn)
