"""A small dataset of images for loaders."""

import torch
from torch.utils.data import Dataset

N = 50


def image(idx):
    return torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(idx)).to(torch.uint8)


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
