"""Hugging Face: texts of varying length; or images of varying size with ``set_transform``, which draws random crops."""

import datasets
import numpy as np
from PIL import Image

from tests.programs.running import epochs
from tests.support.lookalikes import training

CROP = training(24)


def transform(batch):
    return {"pixel_values": [CROP(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}


def images():
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)) for number in range(48)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({"image": images, "label": list(range(48))}, features=features)
    dataset.set_transform(transform)
    return dataset


def texts():
    dataset = datasets.Dataset.from_dict({"text": ["word " * (1 + idx % 7) for idx in range(48)], "label": list(range(48))})
    dataset = dataset.map(lambda rows: {"input_ids": [[7] * len(text) for text in rows["text"]]}, batched=True)
    return dataset.with_format("torch")


def main(wrap, folder, of="images", num_workers=0, start_method="fork", **options):
    """Collect the batches of three epochs."""
    datasets.disable_caching()
    dataset, collate_fn = (images(), None) if of == "images" else (texts(), list)
    loading = {"num_workers": num_workers, "start_method": start_method, "collate_fn": collate_fn}
    return epochs(wrap(dataset, **options), **loading)
