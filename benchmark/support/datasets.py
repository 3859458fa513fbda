"""Datasets whose samples are made by a function of their index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from stocache.storage.preparation.sources import load_jpeg

PHOTO = 256
"""The side of a decoded photograph."""


@dataclass
class Made(Dataset[Any]):
    """As many samples as asked for, each made by a function of its index at each access."""

    count: int
    make: Callable[[int], Any]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return self.make(idx)


def random_image(dims: tuple[int, ...], idx: int) -> torch.Tensor:
    """Return the image of an index, of random bytes."""
    return torch.randint(0, 256, dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(idx))


def labelled_image(dims: tuple[int, ...], idx: int) -> Any:
    """Return the same, and its index."""
    return random_image(dims, idx), idx


def images(count: int, dims: tuple[int, ...], labels: bool = True) -> Made:
    """Return random images of uint8, with labels or without."""
    return Made(count, partial(labelled_image if labels else random_image, dims))


def _photo(paths: Sequence[Path], idx: int) -> Any:
    return load_jpeg(paths[idx % len(paths)], PHOTO), idx % 1000


def photos(count: int, paths: Sequence[Path]) -> Made:
    """Return photographs, decoded and resized, with labels; each file several times, if there are fewer."""
    return Made(count, partial(_photo, paths))
