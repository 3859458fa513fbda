"""Datasets with random transforms inside, as people write them: are the samples the same with the cache and without?

python -m benchmark pipelines FOLDER    a folder of photographs

Each pipeline runs three epochs without a cache and with one that holds nothing, half of the samples, and all of them; without
workers, and with two under fork and spawn. Batches are compared bit for bit. Pipelines of libraries that are not installed are
left out; in place of torchvision are classes with its names.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from stocache import CachedDataset
from stocache.system.describe import describe, difference
from tests.support import lookalikes

CLAIM = "Random transforms give the same samples with the cache and without; each sample is loaded once."
NEEDS = (
    ("PIL", '-e ".[test]"'),
    ("albumentations", '-e ".[test]"'),
    ("audiomentations", '-e ".[test]"'),
    ("datasets", '-e ".[test]"'),
    ("kornia", '-e ".[test]"'),
    ("monai", '-e ".[test]"'),
)

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network

COUNT, EPOCHS, BATCH = 32, 3, 8
WAYS = ((0, None), (2, "fork"), (2, "spawn"))

Pipelines = Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]


def paths_in(folder: str) -> list[tuple[str, int]]:
    """Return some photographs, with numbers for labels."""
    paths = sorted(str(path) for path in Path(folder).iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
    return [(path, number % 4) for number, path in enumerate(paths[:COUNT])]


class Volumes(Dataset[Any]):
    """Raw arrays, given to a transform in the way of its library."""

    def __init__(self, transform: Any, call: Callable[[Any, Any], Any]) -> None:
        self.transform, self.call = transform, call

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, idx: int) -> Any:
        image = np.random.default_rng(idx).integers(0, 256, (90 + idx, 100, 3), dtype=np.uint8)
        return self.call(self.transform, image), idx


def with_mask(transform: Any, image: Any) -> Any:
    """Call albumentations, on an image and its mask."""
    made = transform(image=image, mask=image[..., 0])
    return made["image"], made["mask"]


def as_tensor(transform: Any, image: Any) -> Any:
    """Call Kornia."""
    return transform(torch.from_numpy(image).permute(2, 0, 1).float().div(255))


def as_sound(transform: Any, image: Any) -> Any:
    """Call audiomentations."""
    return transform(samples=image.reshape(-1).astype(np.float32) / 255, sample_rate=16000)


def like_torchvision(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield pipelines of classes with the names of torchvision's."""
    look = lookalikes
    resized = look.Compose([look.Resize(96), look.CenterCrop(80), look.RandomCrop(64), look.ToTensor()])
    yield "torchvision-like: RandomResizedCrop", lambda: look.ImageFolder(transform=look.training(64), samples=samples), {}
    yield "the same, encoded", lambda: look.ImageFolder(transform=look.training(64), samples=samples), {"store": "encoded"}
    yield "torchvision-like: Resize, RandomCrop", lambda: look.ImageFolder(transform=resized, samples=samples), {}
    yield (
        "Subset of ConcatDataset of both",
        lambda: Subset(
            ConcatDataset([look.ImageFolder(transform=its, samples=samples) for its in (look.training(64), resized)]),
            range(0, 2 * COUNT, 2),
        ),
        {},
    )


def of_torchvision(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield pipelines of torchvision and timm."""
    import timm.data
    import torchvision.transforms as v1
    import torchvision.transforms.v2 as v2

    root = Path(samples[0][0]).parent.parent  # a folder of folders
    folder = sys.modules["torchvision"].datasets.ImageFolder
    first = v1.Compose([v1.RandomResizedCrop(64), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)])
    second = v2.Compose([v2.ToImage(), v2.Resize(96), v2.RandomCrop(64), v2.ToDtype(torch.float32, scale=True)])

    def subset(make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: Subset(make(), range(COUNT))

    def timm_dataset() -> Any:
        dataset = timm.data.create_dataset("", root=str(root))
        dataset.transform = timm.data.create_transform(64, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25)
        return dataset

    yield "torchvision v1", subset(lambda: folder(root, first)), {}
    yield "torchvision v1, encoded", subset(lambda: folder(root, first)), {"store": "encoded"}
    yield "torchvision v2", subset(lambda: folder(root, second)), {}
    yield "timm, RandAugment and RandomErasing", subset(timm_dataset), {}


def of_albumentations(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield a pipeline of albumentations."""
    import albumentations as alb

    steps = [alb.LongestMaxSize(80), alb.PadIfNeeded(80, 80), alb.RandomCrop(64, 64), alb.HorizontalFlip(), alb.ToTensorV2()]
    yield "albumentations, image and mask", lambda: Volumes(alb.Compose(steps, seed=3), with_mask), {}


def of_kornia(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield a pipeline of Kornia."""
    import kornia.augmentation as kor

    steps = [kor.Resize((80, 80)), kor.RandomCrop((64, 64)), kor.RandomHorizontalFlip()]
    yield "Kornia, in a Sequential", lambda: Volumes(torch.nn.Sequential(*steps), as_tensor), {}


def of_audiomentations(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield a pipeline of audiomentations."""
    import audiomentations as aud

    yield "audiomentations", lambda: Volumes(aud.Compose([aud.AddGaussianNoise(), aud.Gain()]), as_sound), {}


def of_monai(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield a pipeline of MONAI."""
    import monai
    from monai import transforms

    def make() -> Any:
        monai.utils.set_determinism(0)
        steps = [
            transforms.Lambda(lambda_of),
            transforms.ScaleIntensity(),
            transforms.RandSpatialCrop((64, 64), random_size=False),
            transforms.RandFlip(0.5),
            transforms.RandGaussianNoise(0.5),
            transforms.ToTensor(track_meta=False),  # traces have the id() of each transform, which differs in each run
        ]
        return monai.data.Dataset(list(range(COUNT)), steps)

    yield "MONAI's Dataset", make, {}


def lambda_of(number: int) -> Any:
    """Return the image of a number."""
    return np.random.default_rng(number).random((1, 90 + number, 100), dtype=np.float32)


def of_datasets(samples: list[tuple[str, int]]) -> Pipelines:
    """Yield pipelines of Hugging Face."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [path for path, _ in samples], "label": [label for _, label in samples]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    yield "Hugging Face, with_transform", lambda: rows.with_transform(crops), {}
    yield "the same, encoded", lambda: rows.with_transform(crops), {"store": "encoded"}


CROP = lookalikes.training(64)


def crops(batch: Any) -> Any:
    """Return random crops of images."""
    return {"pixels": [CROP(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}


def seed(worker: int | None = None) -> None:
    """Seed all generators, of a worker by what torch has given it."""
    number = 0 if worker is None else torch.initial_seed() % 2**32
    random.seed(number)
    np.random.seed(number)
    if worker is None:
        torch.manual_seed(0)


def batches(dataset: Any, workers: int, context: str | None) -> Any:
    """Return the batches of all epochs, described."""
    seed()
    loader: Any = DataLoader(
        *(dataset, BATCH, True), num_workers=workers, multiprocessing_context=context, worker_init_fn=seed, collate_fn=list
    )
    return describe([batch for _ in range(EPOCHS) for batch in loader])


def main(folder: str) -> None:
    """Print the table."""
    samples = paths_in(folder)
    print("| pipeline | runs | with a difference | loads of the source: half cached | all cached |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for library in (like_torchvision, of_torchvision, of_albumentations, of_kornia, of_audiomentations, of_monai, of_datasets):
        try:
            found = list(library(samples))
        except ImportError:
            continue
        for name, make, options in found:
            row(name, make, options)


def row(name: str, make: Callable[[], Any], options: dict[str, Any]) -> None:
    """Print a row of the table."""
    with CachedDataset(make(), 1, audit=0, **options) as cached:
        cached.warm(progress=False)
        size = cached.cache.stats().filled_bytes
    limits: dict[str, Any] = {"off": 0, "half": (size / 2 + 9 * COUNT + 4096) / 2**30, "all": 1}
    runs, different, loads = 0, 0, {"off": set(), "half": set(), "all": set()}
    for workers, context in WAYS:
        plain = batches(make(), workers, context)
        for share, limit in limits.items():
            own = {} if share == "off" else {"cut": "latest", **options}
            with CachedDataset(make(), limit, audit=0, **own) as cached:
                runs += 1
                different += difference(plain, batches(cached, workers, context)) is not None
                loads[share].add(cached.stats().total.misses)
    counts = [" or ".join(map(str, sorted(loads[share]))) for share in ("half", "all")]
    print(f"| {name} | {runs} | {different} | {counts[0]} | {counts[1]} of {len(make()) * EPOCHS} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
