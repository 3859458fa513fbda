"""Small datasets with the shapes of programs that people publish: where they read, where they draw.

`SHAPES` says what becomes of each. Each has `N` samples. Files are pictures of 24 x 24, arrays,
waves and texts.
"""

import contextlib
import copy
import functools
import os
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from stocache.datasets.cut.program import Program
from stocache.errors import SampleError
from stocache.samples.record_decoder import pack_sample

N, SIDE = 12, 24
scale = 1
"""How many times as large pictures and arrays are; set it before they are written."""


def random_of(number, *shape, dtype=np.uint8):
    return np.random.RandomState(number).randint(0, 256, shape).astype(dtype)


def files(folder, name, ending, write):
    """Write files by a function of a path and a seed, and return their paths."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number:02}.{ending}" for number in range(N)]
    for number, path in enumerate(paths):
        write(path, number + len(name))
    return list(map(str, paths))


def pictures(folder, name="pictures", mode="RGB", side=SIDE):
    make = lambda seed: Image.fromarray(random_of(seed, side * scale, side * scale, 3)).convert(mode)
    return files(folder, name, "png", lambda path, seed: make(seed).save(path))


masks = functools.partial(pictures, name="masks", mode="L")
small = functools.partial(pictures, name="small", side=SIDE // 2)


def arrays(folder):
    make = lambda seed: random_of(seed, SIDE * scale, SIDE * scale, dtype=np.float32)
    return files(folder, "arrays", "npy", lambda path, seed: np.save(path, make(seed)))


def read(path):
    return np.asarray(Image.open(path)).copy()


def to_tensor(picture):
    pixels = np.asarray(picture)
    return torch.from_numpy(np.ascontiguousarray(pixels[..., None] if pixels.ndim == 2 else pixels)).permute(2, 0, 1) / 255


def resized(picture, side=16):
    return np.asarray(Image.fromarray(picture).resize((side, side)))


def flipped(picture):
    return np.asarray(picture)[:, ::-1].copy() if random.random() < 0.5 else picture


class Shape(NamedTuple):
    """A shape of programs.

    Attributes:
        make: writes files into a folder, and returns the dataset.
        expected: "cut", "cut, hoisted" (statements after the first that draws are cached as well), "cached" or "uncached".
        again: how many files each sample opens after the first draw, at most.
    """

    make: Any
    expected: str = "cut"
    again: int = 0


SHAPES: dict[str, Shape] = {}


def shape(name, expected="cut", again=0, **attributes):
    """Have `SHAPES` hold a class. Attributes that are functions get the folder."""

    def hold(cls):
        def make(folder):
            made = {key: value(folder) if callable(value) else copy.deepcopy(value) for key, value in attributes.items()}
            return cls(**made)

        SHAPES[name] = Shape(make, expected, again)
        return cls

    return hold


class Base(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return N


@shape("paired super-resolution", high=pictures, low=small, readers=[read], reader=None)
class Paired(Base):
    def __getitem__(self, index):
        if self.reader is None:
            self.reader = self.readers.pop()
        high_path = self.high[index]
        high = self.reader(high_path).astype(np.float32) / 255
        low = self.reader(self.low[index]).astype(np.float32) / 255
        top, left = random.randint(0, 12 - 6), random.randint(0, 12 - 6)
        low = low[top : top + 6, left : left + 6, ...]
        high = high[top * 2 : top * 2 + 12, left * 2 : left * 2 + 12, ...]
        high, low = to_tensor(high), to_tensor(low)
        low.sub_(0.5).div_(0.5)
        return {"low": low, "high": high, "path": high_path}


@shape("flip and affine of a drawn scale", "cut, hoisted", paths=pictures, rng=lambda _: np.random.RandomState(3))
class Affine(Base):
    def __getitem__(self, index):
        scale = np.random.choice(np.arange(0.6, 1.4, 0.1))
        picture = read(self.paths[index])
        if np.random.random() < 0.5:
            picture = picture[:, ::-1, :]
        pixels = picture.astype(np.float32) * np.float32(scale) + self.rng.normal(scale=0.1, size=(3,)).astype(np.float32)
        return {"input": pixels.transpose(2, 0, 1), "scale": scale}


@shape("some samples return early", "cut, hoisted", paths=pictures, labels=masks, mapping={1: 0, 2: 1, 3: 255})
class Early(Base):
    def __getitem__(self, index):
        picture = read(self.paths[index])
        if index % 3 == 0:
            return picture.transpose((2, 0, 1)).copy(), index
        label = read(self.labels[index])
        for key, value in self.mapping.items():
            label[label == key] = value
        top = random.randint(0, SIDE - 16)
        picture, label = picture[top : top + 16], label[top : top + 16]
        step = np.random.choice(2) * 2 - 1
        return picture[:, ::step].transpose((2, 0, 1)).copy(), label[:, ::step].copy(), os.path.basename(self.paths[index])


@shape("with, around the draw", "uncached", paths=pictures)
class Within(Base):
    def __getitem__(self, idx):
        with Image.open(self.paths[idx]) as picture:
            start = random.randrange(8)
            window = np.asarray(picture)[start : start + 16]
        return window


@shape("a segment of a wave", "cut, hoisted", paths=arrays)
class Segment(Base):
    def __getitem__(self, index):
        audio = torch.FloatTensor(np.load(self.paths[index]).ravel() / 256)
        start = random.randint(0, len(audio) - 100)
        return audio[start : start + 100], self.paths[index]


@shape("a crop is drawn, then files are read", "cut, hoisted", paths=pictures, labels=masks)
class Drawn(Base):
    def __getitem__(self, idx):
        top, left = random.randint(0, SIDE - 16), random.randint(0, SIDE - 16)
        picture = read(self.paths[idx])
        label = read(self.labels[idx]).astype(np.int64) - 1
        picture, label = picture[top : top + 16, left : left + 16], label[top : top + 16, left : left + 16]
        return to_tensor(picture), torch.from_numpy(label.copy())


@shape("a random partner", "cut, hoisted", 1, ones=pictures, others=small, step=lambda _: flipped)
class Unaligned(Base):
    def __getitem__(self, index):
        one_path = self.ones[index % len(self.ones)]
        other_index = random.randint(0, len(self.others) - 1)
        one_picture = Image.open(one_path).convert("RGB")
        other_picture = Image.open(self.others[other_index]).convert("RGB")
        return {"one": to_tensor(self.step(one_picture)), "other": to_tensor(self.step(other_picture)), "path": one_path}


def apply_seeded(sample, transform):
    seed = np.random.randint(2147483647)
    for part in ("picture", "mask"):
        random.seed(seed)
        torch.random.manual_seed(seed)
        sample[part] = transform(sample[part])
    return sample


@shape("seeds that are drawn", paths=pictures, labels=masks, augment=lambda _: flipped)
class Seeds(Base):
    def __getitem__(self, idx):
        sample = {"idx": idx}
        sample["picture"] = read(self.paths[idx])[:, :, 0] / 255
        sample["mask"] = read(self.labels[idx])
        return apply_seeded(sample, self.augment)


class Mosaic(Base):
    def load_mosaic(self, index):
        tiles = [resized(read(self.paths[number])) for number in (index, *random.choices(range(N), k=3))]
        return np.vstack((np.hstack(tiles[:2]), np.hstack(tiles[2:])))

    def __getitem__(self, index):
        if mosaic := self.mosaic and random.random() < self.mosaic:
            picture = self.load_mosaic(index)
        else:
            picture = resized(read(self.paths[index]))
        picture = picture * np.float32(random.uniform(0.9, 1.1))
        return to_tensor(picture), self.paths[index], mosaic


shape("a mosaic", "uncached", 4, paths=pictures, mosaic=0.5)(Mosaic)
shape("a mosaic that is off", "cut, hoisted", paths=pictures, mosaic=0.0)(Mosaic)


@shape("an attribute that a method sets and the rest reads", "uncached", paths=pictures)
class Rarely(Base):
    def load(self, idx):
        self.bright = idx == 7
        return read(self.paths[idx])

    def __getitem__(self, idx):
        picture = self.load(idx)
        shift = random.randrange(8)
        return np.roll(picture, shift, 0) if self.bright else picture


@shape("no draw", "cached", paths=pictures)
class Plain(Base):
    def __getitem__(self, idx):
        return to_tensor(resized(read(self.paths[idx]))), idx


@shape("parts that share memory", paths=arrays)
class Shared(Base):
    def __getitem__(self, idx):
        target = np.load(self.paths[idx])
        boxes, kinds = target[:, :4], target[:, 4]
        if random.random() < 0.5:
            boxes *= random.random()
            kinds += 1
        return target


def outcome(cached):
    """Return what becomes of a cached dataset, in the words of `Shape.expected`."""
    if cached.is_left or cached._split is None:
        return "uncached" if cached.is_left else "cached"
    (plan,) = cached._split.plans.values()
    straight = Program(plan.division.straight())
    with contextlib.suppress(SampleError):
        pack_sample(straight.first(cached.dataset, 0))  # which closes its pictures
    return "cut" if straight.identity == plan.identity else "cut, hoisted"
