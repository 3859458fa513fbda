"""MONAI: volumes and masks from .npy and .nii files, as dicts of MetaTensors, through its transforms and collate functions."""

import monai
import nibabel
import numpy as np
from monai.data import DataLoader, Dataset, decollate_batch, list_data_collate
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandFlipd, RandGaussianNoised, ScaleIntensityd

from tests.programs.running import EPOCHS

KEYS = ["img", "seg"]


def make(folder, suffix, count):
    rng = np.random.default_rng(0)
    for number in range(count):
        image = rng.random((8, 8, 6)).astype(np.float32)
        for name, volume in {"img": image, "seg": (image > 0.5).astype(np.uint8)}.items():
            path = folder / f"{name}{number:05d}{suffix}"
            if suffix == ".npy":
                np.save(path, volume)
            else:
                nibabel.save(nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, 2.5, 1.0])), path)


def make_dataset(folder, suffix, count=24, random=()):
    if not list(folder.glob(f"*{suffix}")):
        make(folder, suffix, count)
    images, segs = sorted(folder.glob(f"img*{suffix}")), sorted(folder.glob(f"seg*{suffix}"))
    files = [{"img": str(img), "seg": str(seg)} for img, seg in zip(images, segs, strict=True)]
    steps = [LoadImaged(KEYS), EnsureChannelFirstd(KEYS, channel_dim="no_channel"), ScaleIntensityd(keys="img"), *random]
    return Dataset(data=files, transform=Compose(steps))


def main(wrap, folder, suffix=".npy", num_workers=0, start_method="fork", augment=False):
    """Collect the batches of three epochs, and take them apart again."""
    monai.utils.set_determinism(seed=0)
    random = [RandFlipd(KEYS, prob=0.5, spatial_axis=0), RandGaussianNoised(keys="img", prob=0.5)]
    dataset = wrap(make_dataset(folder, suffix, random=random if augment else ()))
    context = start_method if num_workers else None
    workers = {"num_workers": num_workers, "multiprocessing_context": context, "persistent_workers": num_workers > 0}
    loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=list_data_collate, **workers)
    results = []
    for _epoch in range(EPOCHS):
        for batch in loader:
            if augment:  # its traces have the id() of each random transform, which is different in each run
                results.append((batch["img"].as_tensor(), batch["seg"].as_tensor(), batch["img"].meta))
            else:
                results.append((batch["img"], batch["seg"], batch["img"].meta, decollate_batch(batch)))
    return results
