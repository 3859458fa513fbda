"""A dataset that only a DataLoader's workers make ready, in their ``worker_init_fn``: nothing can be loaded before."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.programs.running import run

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
    path.write_bytes(np.random.default_rng(0).integers(0, 256, COUNT * SIZE, dtype=np.uint8).tobytes())
    if options.pop("example", False):
        options["example"] = (torch.zeros(SIZE, dtype=torch.uint8), 0)
    torch.manual_seed(0)
    dataset = wrap(Records(path), **options)
    loader = DataLoader(
        dataset,
        batch_size=16,
        shuffle=True,
        num_workers=2,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=start_method,
    )
    return [list(loader) for epoch in range(3)]


if __name__ == "__main__":
    run(main)
