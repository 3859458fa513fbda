"""The libraries that stocache is measured beside."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

import stocache
from stocache import CachedDataset

GIB = 1024**3
PREFETCH = 2
"""Batches that each worker fetches ahead."""
KEPT: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": PREFETCH}


def stocaching(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> Any:
    """Return a cache of stocaching 0.2.1 (``pip install --no-deps stocaching==0.2.1``), without its output."""
    import stocaching

    with contextlib.redirect_stdout(io.StringIO()):
        return stocaching.SharedCache((limit_bytes + 0.5) / GIB, dataset_len, data_dims)


class OverSlots(Dataset[Any]):
    """Images, with labels or without, behind a cache with get_slot and set_slot, as the documentation of stocaching shows."""

    def __init__(self, source: Any, cache: Any, labels: bool) -> None:
        self.source, self.cache, self.labels = source, cache, labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int) -> Any:
        image = self.cache.get_slot(idx)
        if image is None:
            sample = self.source[idx]
            image = sample[0] if self.labels else sample
            self.cache.set_slot(idx, image)
        return (image, idx) if self.labels else image


def filled(source: Any) -> tuple[OverSlots, CachedDataset]:
    """Return caches of stocaching and of stocache over images, with all samples."""
    labels = isinstance(source[0], tuple)
    image = source[0][0] if labels else source[0]
    theirs = OverSlots(source, stocaching(2 * image.numel() * len(source), len(source), tuple(image.shape)), labels)
    cached = CachedDataset(source, 4)
    for idx in range(len(source)):
        theirs[idx]
    cached.warm(progress=False)
    return theirs, cached


def ours(dataset: Any, batch: int, workers: int, method: str, **options: Any) -> Any:
    """Return our loader, which shuffles and keeps its workers by default."""
    options = KEPT | {"shuffle": "sampler" not in options} | options
    return stocache.DataLoader(dataset, batch, num_workers=workers, worker_method=method, **options)


def in_torch(dataset: Any, batch: int, workers: int, **options: Any) -> Any:
    """Return torch's loader with the same options."""
    options = KEPT | {"shuffle": "sampler" not in options} | options
    return torch.utils.data.DataLoader(dataset, batch, num_workers=workers, **options)


def in_spdl(source: Any, function: Callable[[Any], Any], batch: int | None, workers: int) -> Any:
    """Return a loader of SPDL, whose threads call the function for each item, and collate if there is a batch size."""
    import spdl.dataloader  # not above: interpreters that measure other contenders shall not hold it

    return spdl.dataloader.DataLoader(
        source,
        preprocessor=function,
        batch_size=batch,
        aggregator=default_collate if batch else None,
        buffer_size=PREFETCH * workers,
        num_threads=workers,
        output_order="input",
    )


def in_grain(dataset: Any, batch: int, workers: int) -> Any:
    """Return a dataset of grain that makes each batch in a thread, as its documentation shows."""
    import grain

    batches = grain.MapDataset.source(dataset).shuffle(seed=0).batch(batch, batch_fn=default_collate)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=PREFETCH * workers))


def in_rust(dataset: Any, batch: int, workers: int, collate_fn: Any = None) -> Any:
    """Return a shuffling loader of dataloader-rs 0.2 (``pip install dataloader-rs``, from Python 3.13 on): threads, in Rust.

    Its batches are made by ``default_collate`` by default, and each worker prefetches two of them.
    """
    import dataloader_rs

    class Source(dataloader_rs.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, idx: int) -> Any:
            return dataset[idx]

    return dataloader_rs.PyDataloader(
        Source(), batch, PREFETCH * workers, shuffle=True, num_workers=workers, collate_fn=collate_fn or default_collate
    )


def mosaic() -> Any:
    """Return MosaicML's streaming, without its vision part: that needs a torchvision that fits torch, and is not used here."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming
    import streaming.base.util

    return streaming


def clean_mosaic() -> None:
    """Remove the shared memory that MosaicML's streaming has left, of all jobs of the machine. No such job may run."""
    mosaic().base.util.clean_stale_shared_memory()
    for name in os.listdir("/dev/shm"):
        if re.fullmatch(r"\d{6}_[a-z_]+", name):
            left = SharedMemory(name)
            left.close()
            left.unlink()
