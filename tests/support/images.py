"""Small datasets: images, and what a function makes."""

import torch
from torch.utils.data import Dataset

N = 50


def image(idx, size=(3, 8, 8)):
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(idx), dtype=torch.uint8)


def one_size(idx):
    return 3, 9, 7


def many_sizes(idx):
    return 3, 9 + idx % 5, 7


class Made(Dataset):
    """Samples that a function makes of the dataset and their index. The dataset holds some attributes."""

    def __init__(self, make, n=N, **attributes):
        self.make, self.n = make, n
        vars(self).update(attributes)

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        if not 0 <= idx < self.n:
            raise IndexError(idx)
        return self.make(self, idx)


class Images(Made):
    """Pairs of an image and its index; counts nothing, draws nothing."""

    def __init__(self, n=N):
        super().__init__(Images.sample, n)

    def sample(self, idx):
        return image(idx), idx


class Counted(Made):
    """Pairs of an image, whose size is given by ``size(idx)``, and its index; counts its reads, over all processes."""

    def __init__(self, n=N, size=one_size):
        super().__init__(Counted.read, n, size=size, reads=torch.zeros(n, dtype=torch.int64).share_memory_())

    def read(self, idx):
        self.reads[idx] += 1
        return self.sample(idx)

    def sample(self, idx):
        return image(idx, self.size(idx)), idx
