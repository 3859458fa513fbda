"""A small dataset of images for loaders."""

import torch
from torch.utils.data import Dataset

N = 50


def image(idx):
    return torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(idx)).to(torch.uint8)


class Counted(Dataset):
    """Pairs of an image, whose size is that of ``size(idx)``, and its index; counts its reads, over all processes."""

    def __init__(self, n):
        self.n, self.reads = n, torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        if not 0 <= idx < self.n:
            raise IndexError(idx)
        self.reads[idx] += 1
        return self.sample(idx)

    def sample(self, idx):
        generator = torch.Generator().manual_seed(idx)
        return torch.randint(0, 256, self.size(idx), generator=generator, dtype=torch.uint8), idx


class Images(Dataset):
    """Pairs of an image and its index; counts nothing, draws nothing."""

    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        if not 0 <= idx < self.n:
            raise IndexError(idx)
        return image(idx), idx
