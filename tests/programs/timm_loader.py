"""timm's idiom in miniature: ``create_dataset``, and ``create_loader``, which sets ``dataset.transform``.

The classes and functions up to `create_loader` are those of timm.data, shortened. The one line comes in between.
"""

import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.programs.running import run
from tests.support.lookalikes import CenterCrop, Compose, RandomHorizontalFlip, Resize

IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ReaderImageFolder:
    def __init__(self, root):
        classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        self.samples = [(path, self.class_to_idx[path.parent.name]) for path in sorted(root.glob("*/*.png"))]

    def __getitem__(self, index):
        path, target = self.samples[index]
        return open(path, "rb"), target

    def __len__(self):
        return len(self.samples)


class ImageDataset(Dataset):
    def __init__(self, root, input_img_mode="RGB", transform=None, target_transform=None):
        self.reader = ReaderImageFolder(root)
        self.input_img_mode = input_img_mode
        self.transform = transform
        self.target_transform = target_transform
        self._consecutive_errors = 0

    def __getitem__(self, index):
        img, target = self.reader[index]
        with img:
            img = Image.open(img)
            img.load()
        self._consecutive_errors = 0
        if self.input_img_mode:
            img = img.convert(self.input_img_mode)
        if self.transform is not None:
            img = self.transform(img)
        if target is None:
            target = -1
        elif self.target_transform is not None:
            target = self.target_transform(target)
        return img, target

    def __len__(self):
        return len(self.reader)


def create_dataset(name, root, split="train", **kwargs):
    assert not name
    return ImageDataset(root / split, **kwargs)


class ToNumpy:
    def __call__(self, pil_img):
        np_img = np.array(pil_img, dtype=np.uint8)
        if np_img.ndim < 3:
            np_img = np.expand_dims(np_img, axis=-1)
        return np.rollaxis(np_img, 2)  # HWC to CHW


def create_transform(input_size, is_training=False, hflip=0.5):
    flips = [RandomHorizontalFlip(hflip)] if is_training else []
    return Compose([Resize(input_size), CenterCrop(input_size), *flips, ToNumpy()])


def fast_collate(batch):
    assert isinstance(batch[0], tuple)
    assert isinstance(batch[0][0], np.ndarray)
    targets = torch.tensor([b[1] for b in batch], dtype=torch.int64)
    tensor = torch.zeros((len(batch), *batch[0][0].shape), dtype=torch.uint8)
    for i in range(len(batch)):
        tensor[i] += torch.from_numpy(batch[i][0])
    return tensor, targets


class PrefetchLoader:
    def __init__(self, loader, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD, device="cpu"):
        self.loader = loader
        self.device = torch.device(device)
        self.mean = torch.tensor([x * 255 for x in mean], device=device).view(1, 3, 1, 1)
        self.std = torch.tensor([x * 255 for x in std], device=device).view(1, 3, 1, 1)

    def __iter__(self):
        first = True
        input = target = None
        for next_input, next_target in self.loader:
            next_input = next_input.to(device=self.device, non_blocking=True)
            next_target = next_target.to(device=self.device, non_blocking=True)
            next_input = next_input.to(torch.float32).sub_(self.mean).div_(self.std)
            if not first:
                yield input, target
            else:
                first = False
            input, target = next_input, next_target
        yield input, target

    def __len__(self):
        return len(self.loader)

    @property
    def sampler(self):
        return self.loader.sampler

    @property
    def dataset(self):
        return self.loader.dataset


def _worker_init(worker_id):
    worker_info = torch.utils.data.get_worker_info()
    assert worker_info.id == worker_id
    random.seed(worker_info.seed)
    torch.manual_seed(worker_info.seed)
    np.random.seed(worker_info.seed % (2**32 - 1))


def _make_loader(dataset, batch_size, is_training, num_workers, persistent_workers, context):
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=is_training,
        num_workers=num_workers,
        collate_fn=fast_collate,
        drop_last=is_training,
        worker_init_fn=_worker_init,
        persistent_workers=persistent_workers and num_workers > 0,
        multiprocessing_context=context if num_workers else None,
    )
    return PrefetchLoader(loader)


def create_loader(dataset, input_size, batch_size, is_training=False, num_workers=1, persistent_workers=True, context="fork"):
    dataset.transform = create_transform(input_size, is_training=is_training)
    return _make_loader(dataset, batch_size, is_training, num_workers, persistent_workers, context)


# ---------------------------------------------------------------------------------------------------- the program


def make(root):
    rng = np.random.default_rng(0)
    for number in range(48):
        folder = root / ["train", "val"][number % 3 == 0] / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 256, (24 + number % 5, 30, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{number}.png")


def main(wrap, folder, num_workers=0, start_method="fork"):
    """Collect the batches of three epochs of training and validation."""
    if not (folder / "train").exists():
        make(folder)
    random.seed(0)
    torch.manual_seed(0)
    dataset_train = wrap(create_dataset("", root=folder, split="train"))
    dataset_eval = wrap(create_dataset("", root=folder, split="val"))
    loader_train = create_loader(dataset_train, 16, 8, True, num_workers, context=start_method)
    loader_eval = create_loader(dataset_eval, 16, 8, False, num_workers, context=start_method)
    return [list(loader) for epoch in range(3) for loader in (loader_train, loader_eval)]


if __name__ == "__main__":
    run(main)
