"""Every random transform of six libraries that can be made with simple options, in a dataset that uses it as is usual.

A sample is wrong if it differs from the sample of the dataset without a cache, with the same seeds, in three epochs of torch's
loader; the states of the generators after an epoch count as a sample. "split": the transform runs after the cache; "uncached":
the dataset makes each sample itself; "cached": the transform has no random steps.
"""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmark.support.faults import differing
from benchmark.support.harness import Run, experiment, is_missing
from stocache import CachedDataset
from tests.support.epochs import epochs

CLAIM = "Random transforms of six libraries run in each epoch, and keep their cache."

N, SIDE, RATE = 8, 24, 16000
OPTIONS: dict[str, Any] = {  # of required arguments, by their names
    "height": 16, "width": 16, "size": (16, 16), "keys": "image", "label_key": "label", "spatial_size": (16, 16, 16),
    "roi_size": 16, "num_samples": 2, "prob": 1.0, "p": 1.0, "max_size": 20, "patch_size": 16, "degrees": 20.0,
    "scale": (0.5, 0.9), "translate": (0.1, 0.1), "sigma": 0.1, "std": 0.1, "kernel_size": (3, 3), "num_cells": 3,
    "magnitude_range": (0.0, 0.1), "holes": 2, "max_k": 2, "axis": 0, "spatial_axis": 0, "alpha": 0.1, "num": 4,
    "num_nodes": 4, "num_hops": 1, "padding": 2, "shear": 10.0, "max_rank": 2, "gamma": (0.5, 1.5), "contrast": (0.5, 1.5),
    "factors": 0.2, "offsets": 0.2, "sides": "lr", "loc": (1.0, 1.0), "k_intensity": (0.1, 1.0), "num_control_points": 5,
    "noise_params": (0.1, 0.2), "drop_rate": 0.2, "scales": (0.5, 0.9), "walk_length": 3, "k": 2, "sigma_range": (2, 3),
    "spacing": (8, 8), "roi_scale": 0.6, "rand_size": (4, 4, 4), "def_range": 1.0, "cmap": "image", "angle": 20.0,
    "direction": 0.5, "times": (1, 3), "duration_samples": 2000, "num_classes": 2, "w_key": "label",
}  # fmt: skip


class Library(NamedTuple):
    """How a library is used.

    Attributes:
        modules: where its transforms are.
        is_random: whether a class is one of its random transforms.
        sample: returns sample ``idx``, with the transform.
        options: of the cache.
    """

    modules: tuple[str, ...]
    is_random: Callable[[type], bool]
    sample: Callable[[Any, int], Any]
    options: tuple[tuple[str, Any], ...] = ()


def image(idx: int, *shape: int) -> np.ndarray[Any, Any]:
    """Return an image of uint8, the same for each index; some 1 ms, as if a small file were decoded."""
    return np.random.RandomState(idx).randint(0, 256, (64, *(shape or (SIDE, SIDE, 3))))[0].astype(np.uint8)


def albumentations_sample(transform: Any, idx: int) -> Any:
    """Use names, of the result as well."""
    out = transform(image=image(idx), mask=image(idx, SIDE, SIDE) // 128)
    return torch.from_numpy(out["image"]).permute(2, 0, 1).float() / 255, torch.as_tensor(out["mask"])


def kornia_sample(transform: Any, idx: int) -> Any:
    """Give a batch of one, and take it."""
    return transform(torch.from_numpy(image(idx, 1, 3, SIDE, SIDE)).float() / 255)[0], idx


def audio_sample(transform: Any, idx: int) -> Any:
    """Give a wave and its rate."""
    wave = np.random.RandomState(idx).uniform(-0.5, 0.5, RATE // 8).astype(np.float32)
    return torch.from_numpy(transform(samples=wave, sample_rate=RATE)), idx


def monai_sample(transform: Any, idx: int) -> Any:
    """Give an image, or a dict of it and its labels."""
    from monai.transforms import MapTransform, Rand2DElastic, Rand2DElasticd

    shape = (SIDE,) * (2 if isinstance(transform, Rand2DElastic | Rand2DElasticd) else 3)
    pixels = torch.from_numpy(image(idx, 1, *shape)).float() / 255
    return transform({"image": pixels, "label": pixels > 0.5} if isinstance(transform, MapTransform) else pixels)


def torchio_sample(transform: Any, idx: int) -> Any:
    """Give a subject."""
    import torchio

    scan = torchio.ScalarImage(tensor=torch.from_numpy(image(idx, 1, SIDE, SIDE, SIDE)).float())
    return transform(torchio.Subject(scan=scan, age=idx))


def graph_sample(transform: Any, idx: int) -> Any:
    """Give a graph."""
    from torch_geometric.data import Data

    rng = np.random.RandomState(idx)
    edges = torch.from_numpy(rng.randint(0, 10, (2, 40)))
    numbers = torch.from_numpy(rng.rand(10, 4)).float()
    return transform(Data(x=numbers, edge_index=edges, edge_attr=torch.ones(40), pos=numbers[:, :3], y=torch.tensor([idx])))


def _monai_random(cls: type) -> bool:
    monai = importlib.import_module("monai.transforms")
    name = cls.__name__
    return issubclass(cls, monai.RandomizableTrait) and not name.endswith(("D", "Dict")) and name.startswith("Rand")


LIBRARIES = {
    "albumentations": Library(
        ("albumentations",),
        lambda cls: hasattr(cls, "get_params") and cls.__module__.startswith("albumentations.augmentations"),
        albumentations_sample,
    ),
    "kornia": Library(("kornia.augmentation",), lambda cls: cls.__name__.startswith(("Random", "Color")), kornia_sample),
    "audiomentations": Library(("audiomentations",), lambda cls: hasattr(cls, "randomize_parameters"), audio_sample),
    "monai": Library(("monai.transforms",), _monai_random, monai_sample),
    "torchio": Library(("torchio",), lambda cls: cls.__name__.startswith("Random"), torchio_sample, (("allow_pickle", True),)),
    "torch_geometric": Library(
        ("torch_geometric.transforms",),
        lambda cls: cls.__name__.startswith(("Random", "Add", "Drop", "Sample", "Fixed")),
        graph_sample,
        (("allow_pickle", True),),
    ),
}


class Images(Dataset[Any]):
    """A dataset with a transform."""

    def __init__(self, transform: Any, sample: Callable[[Any, int], Any]) -> None:
        self.transform, self.sample = transform, sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, idx: int) -> Any:
        return self.sample(self.transform, idx)


def made(cls: Any) -> Any:
    """Return a transform with simple options; fixed seeds if it has generators of its own."""
    parameters = inspect.signature(cls).parameters.values()
    needed = {
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    chosen = {each.name for each in parameters if each.name in ("p", "prob")} | needed
    transform = cls(**{name: OPTIONS[name] for name in chosen})
    seed = getattr(transform, "set_random_seed", None) or getattr(transform, "set_random_state", None)
    if seed is not None:
        seed(0)
    return transform


def random_transforms(library: Library) -> Iterator[type]:
    """Yield the random transforms of a library."""
    for module in map(importlib.import_module, library.modules):
        for name, cls in sorted(vars(module).items()):
            if inspect.isclass(cls) and not inspect.isabstract(cls) and name == cls.__name__ and library.is_random(cls):
                yield cls


def outcome(cls: Any, library: Library) -> tuple[str, int]:
    """Return what becomes of a transform, and how many samples were wrong."""
    try:
        expected, again = (epochs(Images(made(cls), library.sample), "torch") for _ in range(2))
    except Exception as error:
        return f"not made ({type(error).__name__})", 0
    if differing(expected, again):
        return "not reproducible", 0
    with CachedDataset(Images(made(cls), library.sample), 1, **dict(library.options)) as cached:
        found = epochs(cached, "torch")
        kept = cached.stats().total.filled and not cached._audit.changed
        way = "uncached" if not kept else "split" if cached._split else "cached"
    return way, differing(found, expected)


@experiment()
def transforms(run: Run) -> None:
    """What becomes of each random transform, by library."""
    table, wrong = run.table("library", "transforms", "split", "cached", "uncached", "not made", "wrong samples"), 0
    for name, library in run.chosen(LIBRARIES).items():
        if is_missing(name):
            table.row(name, "not installed")
            continue
        counts, of_library = Counter[str](), 0
        for cls in list(random_transforms(library))[: run.size(None, 5)]:
            way, differ = outcome(cls, library)
            counts[way.partition(" (")[0]] += 1
            of_library += differ
        left_out = counts["not made"] + counts["not reproducible"]
        ways = (counts[way] for way in ("split", "cached", "uncached"))
        table.row(name, counts.total(), *ways, left_out, of_library)
        wrong += of_library
    run.claim("no sample is wrong", wrong == 0)
