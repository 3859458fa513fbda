"""Datasets whose samples depend on more than their index: on random numbers, an epoch, a setting, a file."""

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
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


class Labelled(NamedTuple):
    path: Path
    label: int


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
    """Has a setting, which is an attribute and has a method."""

    epoch = 0

    def __getitem__(self, idx):
        return self.image(idx) + self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


class Transformed(Images):
    """Has a transform, under a name that says so or a different one."""

    def __init__(self, name="transform", transform=None, **attributes):
        super().__init__(**attributes)
        self.name = name
        setattr(self, name, transform)

    def __getitem__(self, idx):
        return getattr(self, self.name)(self.image(idx))

    def set_transform(self, transform):
        setattr(self, self.name, transform)


class Files(Images):
    """Reads its images from files."""

    def __init__(self, folder):
        super().__init__(folder=folder)

    def __getitem__(self, idx):
        return torch.from_numpy(np.load(self.folder / f"{idx}.npy"))

    def write(self, factor):
        for idx in range(N):
            np.save(self.folder / f"{idx}.npy", (self.image(idx) * factor).numpy())


class Shaken:
    """Holds its generator in a slot, and one of all in its class."""

    __slots__ = ("rng",)
    of_class = np.random.default_rng(0)

    def __init__(self):
        self.rng = np.random.default_rng(0)


def shake(image, rng=np.random.default_rng(0)):  # noqa: B008  # as programs have it
    return image + (rng.random() < 0.1)


def mosaic(dataset, idx):
    others = [random.randrange(N) for _ in range(3)]
    return torch.stack([dataset.image(each) for each in (idx, *others)])


OF_MODULE, LEVELS, SHAKEN = SimpleNamespace(mode=0), [0], Shaken()
MAKERS = {
    "image": Images.image, "mosaic": mosaic,
    "one sample in 32 draws": lambda dataset, idx: dataset.image(idx) + (random.random() if idx == 13 else 0.0),
    "own Generator": lambda dataset, idx: dataset.image(idx) + dataset.rng.random(),
    "own torch.Generator": lambda dataset, idx: dataset.image(idx) + torch.rand((), generator=dataset.rng).item(),
    "a Generator of the module": lambda dataset, idx: dataset.image(idx) + OF_MODULE.rng.random(),
    "a Generator of a class": lambda dataset, idx: dataset.image(idx) + (dataset.rng.of_class.random() < 0.1),
    "a Generator in a slot": lambda dataset, idx: dataset.image(idx) + (dataset.rng.rng.random() < 0.1),
    "a Generator in an object of the module": lambda dataset, idx: dataset.image(idx) + (SHAKEN.rng.random() < 0.1),
    "a default Generator": lambda dataset, idx: shake(dataset.image(idx)),
    "a label": lambda dataset, idx: (dataset.image(idx), *dataset.rng[idx]),
    "a size": lambda dataset, idx: dataset.image(idx)[: dataset.rng.sizes[0] if idx == 13 else 1],
    "os.urandom": lambda dataset, idx: dataset.image(idx) + os.urandom(1)[0],
    "one sample by a level": lambda dataset, idx: dataset.image(idx) + (LEVELS[0] if idx == 13 else 0),
    "one sample by a mode": lambda dataset, idx: dataset.image(idx) + (OF_MODULE.mode if idx == 13 else 0),
    "one sample by an attribute": lambda dataset, idx: dataset.image(idx) + (dataset.rng.mode if idx == 13 else 0),
    "time": lambda dataset, idx: (dataset.image(idx), time.time_ns()),
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of dataset.

    Attributes:
        make: returns a dataset; gets a folder for its files.
        change: called with the dataset that the user has, the dataset within, and the epoch, before each epoch; or None.
        repeats: whether the same samples come with the same seeds; else they only must not be the same in each epoch.
    """

    make: Any
    change: Any = None
    repeats: bool = True


def drawing(maker, repeats=True, rng=lambda: None):
    return Kind(lambda folder: Images(maker, rng=rng()), repeats=repeats)


def new_of_module():
    OF_MODULE.rng = np.random.default_rng(0)


def seeded_again(maker):
    """Return a kind whose generators, which datasets share, begin anew with each dataset."""

    def make(_):
        for rng in (Shaken.of_class, SHAKEN.rng, shake.__defaults__[0]):
            rng.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return Images(maker, rng=Shaken())

    return Kind(make)


def labelled(make):
    """Return a kind whose label of one sample is set in each epoch."""
    change = lambda dataset, inner, epoch: inner.rng.__setitem__(13, make(13, epoch))
    return Kind(lambda _: Images("a label", rng=[make(idx, 0) for idx in range(N)]), change)


def setting(change):
    return Kind(lambda folder: type("OwnSetting", (Setting,), {})(), change)  # whose attributes the change may set


def transformed(change, name="transform", make=lambda: Compose(Scale(1), Flip())):
    return Kind(lambda folder: Transformed(name, make()), change)


def files(folder):
    made = Files(folder)
    made.write(1)
    return made


SHARED = "a Generator of a class", "a Generator in a slot", "a Generator in an object of the module", "a default Generator"
KINDS = {
    **{name: drawing(name) for name in ("mosaic", "one sample in 32 draws")},
    "own Generator": drawing("own Generator", rng=lambda: np.random.default_rng(0)),
    "a Generator of the module": drawing("a Generator of the module", rng=new_of_module),
    "own torch.Generator": drawing("own torch.Generator", rng=lambda: torch.Generator().manual_seed(0)),
    **{name: seeded_again(name) for name in SHARED},
    "labels of paths": labelled(lambda idx, label: (Path(str(idx)), label)),
    "labels in tensors": labelled(lambda idx, label: (torch.tensor(idx), torch.tensor(label))),
    "labels in records": labelled(lambda idx, label: Labelled(Path(str(idx)), label)),
    "a number of numpy": drawing("one sample by an attribute", rng=lambda: SimpleNamespace(mode=np.int64(0)))._replace(
        change=lambda dataset, inner, epoch: setattr(inner.rng, "mode", np.int64(epoch))
    ),
    "a size in a tuple": drawing("a size", rng=lambda: SimpleNamespace(sizes=(1, 1)))._replace(
        change=lambda dataset, inner, epoch: setattr(inner.rng, "sizes", (epoch + 1, 1))
    ),
    **{name: drawing(name, False) for name in ("os.urandom", "time")},
    "set_epoch": setting(lambda dataset, inner, epoch: dataset.set_epoch(epoch)),
    "epoch set within": setting(lambda dataset, inner, epoch: setattr(inner, "epoch", epoch)),
    "attribute of the class": setting(lambda dataset, inner, epoch: setattr(type(inner), "epoch", epoch)),
    "one sample by a level": Kind(lambda _: Images("one sample by a level"), lambda *its: LEVELS.__setitem__(0, its[-1])),
    "one sample by a mode": Kind(lambda _: Images("one sample by a mode"), lambda *its: setattr(OF_MODULE, "mode", its[-1])),
    "one sample by an attribute": drawing("one sample by an attribute", rng=lambda: SimpleNamespace(mode=0))._replace(
        change=lambda dataset, inner, epoch: setattr(inner.rng, "mode", epoch)
    ),
    "transform in place": transformed(lambda dataset, _, epoch: setattr(dataset.transform.transforms[0], "factor", epoch + 1)),
    "set_transform": transformed(lambda dataset, inner, epoch: dataset.set_transform(Scale(epoch)), "crop", lambda: Scale(0)),
    "set_transform, split": transformed(lambda dataset, inner, epoch: dataset.set_transform(Compose(Scale(epoch), Flip()))),
    "files edited": Kind(files, lambda dataset, inner, epoch: inner.write(epoch + 1)),
}
