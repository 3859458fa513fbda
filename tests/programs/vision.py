"""The plain torchvision style: an ImageFolder for train and one for val, transforms inside. Val's is set late."""

import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset

from tests.programs.running import epochs
from tests.support import lookalikes as look
from tests.support.lookalikes import ImageFolder

NORMALIZE = look.Normalize([0.485, 0.456, 0.406], [0.2] * 3)


def jitter(image):
    """Change the brightness, with the generator of numpy, and flip, with the generator of Python."""
    image = image.mul(np.random.uniform(0.6, 1.4)).clamp_(0, 1)
    return image.flip(-1) if random.random() < 0.5 else image


RANDOM = [look.RandomResizedCrop(32), look.RandomHorizontalFlip()]
TRAIN = look.Compose([look.Resize(48), *RANDOM, look.ToTensor(), jitter, NORMALIZE])
VAL = look.Compose([look.Resize(48), look.CenterCrop(32), look.ToTensor(), NORMALIZE])


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def make(root):
    rng = np.random.default_rng(0)
    for number in range(48):
        (root / f"class{number % 4}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (150 + number % 5, 180, 3), dtype=np.uint8)  # as quick ones are not worth a cache
        Image.fromarray(pixels).save(root / f"class{number % 4}" / f"{number}.jpg")


def main(wrap, folder, num_workers=0, start_method="fork", **options):
    """Collect the batches of three epochs of training and of validation."""
    make(folder / "train")
    random.seed(0)
    np.random.seed(0)
    indices = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()
    train = wrap(Subset(ImageFolder(folder / "train", transform=TRAIN), indices[:36]), **options)
    val = wrap(ImageFolder(folder / "train"), **options)
    val.transform = VAL  # as timm's create_loader does
    workers = {"num_workers": num_workers, "start_method": start_method, "worker_init_fn": seed_worker}
    return [epochs(dataset, shuffle=dataset is train, **workers) for dataset in (train, val)]
