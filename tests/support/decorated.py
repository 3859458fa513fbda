"""A module with cached functions, which spawned processes import again."""

import os
import time

import torch
from torch.utils.data import Dataset

import stocache


def note(what):
    with open(os.environ["TEST_LOG"], "a") as log:
        log.write(f"{what}\n")
    time.sleep(0.001)


@stocache.cached("4MB", audit=1e-9)  # each process compares one result
def frame(video, number):
    note(f"{video} {number}")
    return torch.full((3, 8), number, dtype=torch.uint8)


class Windows(Dataset):
    """Overlapping windows of frames, from a cached function and from a method."""

    def __init__(self, frames=40, size=5):
        self.frames, self.size = frames, size

    def __len__(self):
        return self.frames - self.size + 1

    def __getitem__(self, idx):
        return torch.stack([frame("v", number) for number in range(idx, idx + self.size)])


class Mosaics(Dataset):
    """Each sample is made of four images, which a method loads."""

    def __init__(self, count=32):
        self.paths, self.scale = [f"{number}.png" for number in range(count)], 2

    def load_image(self, index):
        note(self.paths[index])
        return torch.full((2, 2), index * self.scale, dtype=torch.uint8)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        return torch.cat([self.load_image((idx + step) % len(self)) for step in (0, 3, 11, 17)])
