"""Datasets whose samples depend on more than their index: on random numbers, an epoch, a setting, a file."""

import os
import random
import secrets
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

N = 32


class Images(Dataset):
    """Small images, each made by a function of `MAKERS`, which may draw."""

    def __init__(self, maker="image", **attributes):
        self.maker = maker
        vars(self).update(attributes)

    def __len__(self):
        return N

    def __getitem__(self, idx):
        return MAKERS[self.maker](self, idx)

    def image(self, idx):
        return torch.arange(idx * 12, idx * 12 + 12).reshape(3, 4)


class Object:
    """A sample that has to be pickled."""

    def __init__(self, value):
        self.value = value


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, image):
        return image * self.factor


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Flip:
    def __call__(self, image):
        return image.flip(-1) if torch.rand(1) < 0.5 else image


class Setting(Images):
    """Has a setting, and several ways to change it."""

    factor, epoch = 1, 0

    def __getitem__(self, idx):
        return self.image(idx) * self.factor + self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def set_factor(self, factor):
        self.factor = factor

    def train(self, mode):
        self.factor = 2 if mode else 1


class Transformed(Images):
    """Has a transform, under a name that says so or another."""

    def __init__(self, name="transform", transform=None, **attributes):
        super().__init__(**attributes)
        self.name = name
        setattr(self, name, transform)

    def __getitem__(self, idx):
        return getattr(self, self.name)(self.image(idx))

    def set_transform(self, transform):
        setattr(self, self.name, transform)


class Used(Images):
    """Does more with the output of its transform than to pass it on."""

    def __init__(self, use):
        super().__init__(use=use, transform=Flip())

    def __getitem__(self, idx):
        return USES[self.use](self.transform(self.image(idx)), idx)


USES = {
    "output indexed": lambda output, idx: (output[None][0], idx),
    "output converted": lambda output, idx: torch.from_numpy(output.numpy() * 2).float() / 255,
    "output used twice": lambda output, idx: {"image": output, "mean": output.float().mean()},
    "output branched on": lambda output, idx: output if output[0, 0] > output[0, -1] else -output,
}


class Buffered(Images):
    """Its transform mixes an image with one of those that loading has left behind."""

    def __init__(self):
        super().__init__(recent=[], transform=None)
        self.transform = self.mix

    def mix(self, image):
        return image + random.choice(self.recent)

    def __getitem__(self, idx):
        self.recent = [*self.recent[-3:], idx]
        return self.transform(self.image(idx))


class Files(Images):
    """Reads its images from files."""

    def __init__(self, folder):
        super().__init__(folder=folder)

    def __getitem__(self, idx):
        return torch.from_numpy(np.load(self.folder / f"{idx}.npy"))

    def write(self, factor):
        for idx in range(N):
            np.save(self.folder / f"{idx}.npy", (self.image(idx) * factor).numpy())


def flipped(dataset, idx, draw=lambda: torch.rand(()).item()):
    return dataset.image(idx).flip(-1) if draw() < 0.5 else dataset.image(idx)


def mosaic(dataset, idx):
    others = [random.randrange(N) for _ in range(3)]
    return torch.stack([dataset.image(each) for each in (idx, *others)])


def effect_free(dataset, idx):
    random.random(), np.random.rand(), torch.rand(1)
    return dataset.image(idx)


MAKERS = {
    "image": Images.image, "flip, torch": flipped, "mosaic": mosaic,
    "flip, random": lambda dataset, idx: flipped(dataset, idx, random.random),
    "flip, numpy": lambda dataset, idx: flipped(dataset, idx, np.random.rand),
    "one sample in 32 draws": lambda dataset, idx: dataset.image(idx) + (random.random() if idx == 13 else 0.0),
    "without effect": effect_free, "seed set in code": lambda dataset, idx: (random.seed(idx), flipped(dataset, idx))[1],
    "own Generator": lambda dataset, idx: flipped(dataset, idx, dataset.rng.random),
    "own RandomState": lambda dataset, idx: flipped(dataset, idx, dataset.rng.rand),
    "own torch.Generator": lambda dataset, idx: flipped(dataset, idx, lambda: torch.rand((), generator=dataset.rng).item()),
    "objects, own Generator": lambda dataset, idx: Object(dataset.rng.normal()),
    "new generator each time": lambda dataset, idx: dataset.image(idx) + np.random.default_rng().integers(1 << 30),
    "os.urandom": lambda dataset, idx: dataset.image(idx) + os.urandom(1)[0],
    "secrets": lambda dataset, idx: dataset.image(idx) + secrets.randbelow(1000),
    "time": lambda dataset, idx: (dataset.image(idx), time.time_ns()),
    "factors": lambda dataset, idx: dataset.image(idx) * dataset.factors[idx % len(dataset.factors)],
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of dataset.

    Attributes:
        make: returns a dataset; gets a folder for its files.
        change: called with the dataset that the user has, the dataset within, and the epoch, before each epoch; or None.
        repeats: whether the same samples come with the same seeds; False: they only must not be the same in each epoch; None:
            they come in another order, as what is cached draws no numbers.
        options: of the cache.
    """

    make: Any
    change: Any = None
    repeats: bool | None = True
    options: Any = ()


def drawing(maker, repeats=True, rng=None, **options):
    make = lambda folder: Images(maker) if rng is None else Images(maker, rng=rng())
    return Kind(make, repeats=repeats, options=tuple(options.items()))


def setting(change):
    return Kind(lambda folder: Setting(), change)


def transformed(change, name="transform", make=lambda: Compose(Scale(1), Flip())):
    return Kind(lambda folder: Transformed(name, make()), change)


def files(folder):
    made = Files(folder)
    made.write(1)
    return made


def scale_in_place(*path):
    """Return a function that sets the factor of a transform in place."""

    def change(dataset, inner, epoch):
        holder = dataset
        for step in path:
            holder = holder[step] if isinstance(step, int) else getattr(holder, step)
        holder.factor = epoch + 1

    return change


KINDS = {name: drawing(name) for name in [*MAKERS][1:8]} | {
    "own Generator": drawing("own Generator", rng=lambda: np.random.default_rng(0)),
    "own RandomState": drawing("own RandomState", rng=lambda: np.random.RandomState(0)),
    "own Random": drawing("own Generator", rng=lambda: random.Random(0)),
    "own torch.Generator": drawing("own torch.Generator", rng=lambda: torch.Generator().manual_seed(0)),
    "objects": drawing("objects, own Generator", rng=lambda: np.random.default_rng(0), allow_pickle=True),
    **{name: drawing(name, False) for name in ("new generator each time", "os.urandom", "secrets", "time")},
    "recent images": Kind(lambda folder: Buffered()),
    **{use: Kind(lambda folder, use=use: Used(use)) for use in USES},
    "seed set in code": drawing("seed set in code"),
    "set_epoch": setting(lambda dataset, inner, epoch: dataset.set_epoch(epoch)),
    "epoch set": setting(lambda dataset, inner, epoch: setattr(dataset, "epoch", epoch)),
    "epoch set within": setting(lambda dataset, inner, epoch: setattr(inner, "epoch", epoch)),
    "setter": setting(lambda dataset, inner, epoch: dataset.set_factor(epoch + 1)),
    "setter within": setting(lambda dataset, inner, epoch: inner.set_factor(epoch + 1)),
    "mode": setting(lambda dataset, inner, epoch: dataset.train(epoch == 1)),
    "transform in place": transformed(scale_in_place("transform", "transforms", 0)),
    "transform in place, unsplit": transformed(scale_in_place("crop"), "crop", lambda: Scale(1)),
    "steps in place": transformed(scale_in_place("steps", "transforms", 1), "steps", lambda: Compose(Scale(2), Scale(1))),
    "set_transform": transformed(lambda dataset, inner, epoch: dataset.set_transform(Scale(epoch)), "crop", lambda: Scale(0)),
    "set_transform, split": transformed(lambda dataset, inner, epoch: dataset.set_transform(Compose(Scale(epoch), Flip()))),
    "transform set": transformed(lambda dataset, inner, epoch: setattr(dataset, "transform", Compose(Scale(epoch), Flip()))),
    "files edited": Kind(files, lambda dataset, inner, epoch: inner.write(epoch + 1)),
    "table in place": Kind(
        lambda folder: Images("factors", factors=[1]), lambda dataset, inner, epoch: dataset.factors.__setitem__(0, epoch + 1)
    ),
    "array in place": Kind(
        lambda folder: Images("factors", factors=torch.ones(4)), lambda dataset, inner, epoch: dataset.factors.mul_(2)
    ),
}
