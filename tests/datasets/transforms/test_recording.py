"""What a dataset does with the output of a random transform is done again after the cache: split, or uncached, never frozen."""

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stocache import CachedDataset
from stocache.system.describe import describe, difference

N, EPOCHS = 8, 3

Pair = namedtuple("Pair", "image label")


def flip(image):
    return image.flip(-1) if random.random() < 0.5 else image


def flip_array(image):
    return image[..., ::-1].copy() if random.random() < 0.5 else image


def flip_with_boxes(image, boxes):
    return {"image": flip(image), "boxes": [(7 - b, 7 - a) for a, b in boxes] if random.random() < 0.5 else boxes}


def flip_both(image, mask):
    return (image.flip(-1), mask.flip(-1)) if random.random() < 0.5 else (image, mask)


def crops(image):
    return [image[:, at : at + 4] for at in (random.randint(0, 4) for _ in range(3))]


def sometimes_nothing(image):
    return None if random.random() < 0.2 else image.flip(-1)


def some_crops(image):
    return [image] * random.randint(1, 3)


class Images(Dataset):
    """Images, arrays and boxes by index; `make` makes the sample with the transform."""

    def __init__(self, transform, make):
        self.transform, self.make, self.loads = transform, make, 0

    def __len__(self):
        return N

    def image(self, idx):
        self.loads += 1
        return torch.arange(192.0).reshape(3, 8, 8) + idx

    def array(self, idx):
        return self.image(idx).numpy()

    def boxes(self, idx):
        return [(1, 3), (4, 6), (2, 5)][: 1 + idx % 3]

    def __getitem__(self, idx):
        return self.make(self, self.transform, idx)


def paste(its, transform, idx):
    canvas = torch.zeros(3, 16, 16)
    canvas[:, 4:12, 4:12] = transform(its.image(idx))
    return canvas


def normalised(its, transform, idx):
    image = transform(its.image(idx))
    image -= image.mean()
    image /= image.std() + 1e-6
    return image, idx


def changed_dict(its, transform, idx):
    out = transform(its.image(idx), its.boxes(idx))
    out["idx"] = idx
    del out["boxes"]
    return out


def as_colours(its, transform, idx):
    image = transform(its.image(idx))
    return image if image.shape[0] == 3 else image.expand(3, 8, 8)


def parts_of_dict(its, transform, idx):
    out = transform(its.image(idx), its.boxes(idx))
    return out["image"], torch.tensor(out["boxes"])


def windowed(its, transform, idx):
    image = transform(its.image(idx))
    start = idx % 4
    return image[:, start : start + 4], start


SPLIT = {
    "dict": (flip_with_boxes, parts_of_dict),
    "dict as it is": (flip_with_boxes, lambda its, t, i: t(image=its.image(i), boxes=its.boxes(i))),
    "dict changed": (flip_with_boxes, changed_dict),
    "dict spread": (flip_with_boxes, lambda its, t, i: {"idx": i, **t(its.image(i), its.boxes(i))}),
    "dict items": (flip_with_boxes, lambda its, t, i: dict(t(its.image(i), its.boxes(i)).items())),
    "unpacked": (flip_both, lambda its, t, i: (lambda image, mask: Pair(image, mask[0]))(*t(its.image(i), its.image(i + 1)))),
    "index": (flip, lambda its, t, i: (t(its.image(i)[None])[0], i)),
    "method": (flip, lambda its, t, i: t(its.image(i)).permute(1, 2, 0).contiguous().half()),
    "operators": (flip, lambda its, t, i: {"image": (t(its.image(i)) / 255 - 0.5) * 2}),
    "reflected": (flip, lambda its, t, i: 1 - t(its.image(i))),
    "in place": (flip, normalised),
    "functions": (flip, lambda its, t, i: torch.nn.functional.pad(torch.stack([t(its.image(i)), its.image(i)]), (1, 1))),
    "concatenated": (flip, lambda its, t, i: torch.cat([t(its.image(i)), t(its.image(i))])),
    "from_numpy": (flip_array, lambda its, t, i: (torch.from_numpy(t(its.array(i))), i)),
    "as_tensor": (flip_array, lambda its, t, i: torch.as_tensor(t(its.array(i)), dtype=torch.float64)),
    "numpy functions": (flip_array, lambda its, t, i: np.transpose(np.ascontiguousarray(t(its.array(i))), (1, 2, 0)) + 1),
    "ufunc": (flip_array, lambda its, t, i: np.multiply(t(its.array(i)), its.array(i))),
    "array": (flip_array, lambda its, t, i: torch.tensor(np.array(t(its.array(i))).tolist())),
    "twice": (flip, lambda its, t, i: (lambda view: (view, view.mean()))(t(its.image(i)))),
    "of its output": (flip, lambda its, t, i: t(t(its.image(i)) * 2)),
    "with the input": (flip, lambda its, t, i: (lambda image: (image, t(image)))(its.image(i))),
    "pasted": (flip, paste),
    "number": (flip, lambda its, t, i: (t(its.image(i)), t(its.image(i)).sum().item())),
    "shape": (flip, lambda its, t, i: (lambda image: image.reshape(image.shape[0], -1))(t(its.image(i)))),
    "shape asked": (flip, as_colours),
    "number of a shape": (flip, lambda its, t, i: (lambda view: [view[c] for c in range(view.shape[0])])(t(its.image(i)))),
    "by index": (flip, windowed),
    "type asked": (flip, lambda its, t, i: (lambda view: isinstance(view, torch.Tensor) and view.mul(2))(t(its.image(i)))),
    "crops": (crops, lambda its, t, i: torch.stack([crop.mean(0) for crop in t(its.image(i))])),
    "length": (crops, lambda its, t, i: (lambda views: (views[0], len(views)))(t(its.image(i)))),
    "attributes": (flip, lambda its, t, i: t(its.image(i)).T if i < 0 else t(its.image(i)).mT),
    "nothing": (sometimes_nothing, lambda its, t, i: (lambda view: its.image(i) if view is None else view)(t(its.image(i)))),
}  # fmt: skip

UNCACHED = {
    "branch": (flip, lambda its, t, i: (lambda image: image if image[0, 0, 0] > image[0, 0, -1] else -image)(t(its.image(i)))),
    "number": (flip, lambda its, t, i: (t(its.image(i)), float(its.transform(its.image(i)).sum()))),
    "loop": (flip, lambda its, t, i: [t(its.image(i))] * int(t(its.image(i))[0, 0, 0] % 3)),
    "text": (flip, lambda its, t, i: f"{t(its.image(i))[0, 0, 0]}"),
    "drawn in code": (flip, lambda its, t, i: t(its.image(i)) * random.random()),
    "seeded in code": (flip, lambda its, t, i: (random.seed(i + int(its.loads)), t(its.image(i)))[1]),
    "length varies": (some_crops, lambda its, t, i: torch.stack([crop.mean(0) for crop in t(its.image(i))])),
    "key": (flip, lambda its, t, i: {t(its.image(i))[0, 0, 0].item(): 1}),
    "compared": (flip, lambda its, t, i: t(its.image(i))[0, 0, 0] in (0.0, 1.0, 7.0)),
    "by another method": (flip, lambda its, t, i: its.transform.__call__(its.image(i))),
}  # fmt: skip


def epochs(dataset):
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    samples = [describe([dataset[idx] for idx in random.sample(range(N), N)], strides=False) for _ in range(EPOCHS)]
    return samples, random.random(), torch.rand(()).item()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPLIT)
def test_what_is_done_with_the_output_is_done_again_in_each_epoch(name):
    with CachedDataset(dataset := Images(*SPLIT[name]), 1, audit=0) as cached:
        loads = dataset.loads
        assert difference(epochs(Images(*SPLIT[name])), epochs(cached)) is None
        fewest = N if name not in ("concatenated", "number", "attributes") else 2 * N
        assert name == "nothing" or dataset.loads - loads <= fewest  # in the first epoch
        assert cached.stats().total.filled == N


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNCACHED)
def test_where_the_value_is_needed_nothing_is_frozen(name, caplog):
    with CachedDataset(Images(*UNCACHED[name]), 1) as cached:
        assert difference(epochs(Images(*UNCACHED[name])), epochs(cached)) is None
    assert "are not split" in caplog.text or name == "by another method"


def test_another_length_than_planned_is_made_by_the_dataset_from_the_same_random_numbers():
    def rarely_shorter(image):
        return [image, image.flip(-1)][: 1 + (random.random() < 0.97)]

    def make(its, transform, idx):
        return torch.stack([view * 2 for view in transform(its.image(idx))])

    with CachedDataset(Images(rarely_shorter, make), 1) as cached:
        expected, found = epochs(Images(rarely_shorter, make)), epochs(cached)
        assert difference(expected, found) is None


def test_the_transform_in_place_has_what_the_original_has():
    seen = []

    def make(its, transform, idx):
        seen.append((len(transform), isinstance(transform, torch.nn.Sequential), bool(transform), transform[0].p))
        image = its.image(idx)
        for step in transform:
            image = step(image)
        return image

    transform = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Flatten())
    with CachedDataset(Images(transform, make), 1) as cached:
        assert difference(epochs(Images(transform, make)), epochs(cached)) is None
        assert cached.stats().total.filled == N
    assert set(seen) == {(2, True, True, 0.5)}
