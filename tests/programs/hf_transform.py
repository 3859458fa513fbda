"""Hugging Face: images of varying size with ``set_transform``, which draws random crops when a batch is read."""

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.programs.running import run
from tests.support.lookalikes import training

CROP = training(24)


def transform(batch):
    return {"pixel_values": [CROP(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}


def make():
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)) for number in range(48)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": images, "label": list(range(48))}, features=features)


def main(wrap, folder, num_workers=0, start_method="fork", **options):
    """Collect the batches of three epochs."""
    dataset = make()
    dataset.set_transform(transform)
    dataset = wrap(dataset, **options)
    torch.manual_seed(0)
    context = start_method if num_workers else None
    options = {"num_workers": num_workers, "multiprocessing_context": context, "persistent_workers": context == "spawn"}
    loader = DataLoader(dataset, 8, shuffle=True, **options)
    return [list(loader) for epoch in range(3)]


if __name__ == "__main__":
    run(main)
