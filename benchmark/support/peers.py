"""The libraries that stocache is measured beside."""

import contextlib
import io
import os
import re
import sys
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType
from typing import Any

from torch.utils.data import default_collate

GIB = 1024**3


def stocaching(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> Any:
    """Return a cache of stocaching 0.2.1 (``pip install --no-deps stocaching==0.2.1``), without its output."""
    import stocaching

    with contextlib.redirect_stdout(io.StringIO()):
        return stocaching.SharedCache((limit_bytes + 0.5) / GIB, dataset_len, data_dims)


def in_rust(dataset: Any, batch: int, workers: int, collate_fn: Any = None, prefetch: int = 2) -> Any:
    """Return a shuffling loader of dataloader-rs 0.2 (``pip install dataloader-rs``, from Python 3.13 on): threads, in Rust.

    Its batches are those of ``default_collate`` by default, and each worker prefetches ``prefetch`` of them.
    """
    import dataloader_rs

    class Source(dataloader_rs.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, idx: int) -> Any:
            return dataset[idx]

    return dataloader_rs.PyDataloader(
        Source(), batch, prefetch * workers, shuffle=True, num_workers=workers, collate_fn=collate_fn or default_collate
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
