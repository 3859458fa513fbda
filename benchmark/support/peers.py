"""The libraries that stocache is measured beside."""

import contextlib
import io
import os
import re
import sys
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType
from typing import Any

GIB = 1024**3


def stocaching(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> Any:
    """Return a cache of stocaching 0.2.1 (``pip install --no-deps stocaching==0.2.1``), without its output."""
    import stocaching

    with contextlib.redirect_stdout(io.StringIO()):
        return stocaching.SharedCache((limit_bytes + 0.5) / GIB, dataset_len, data_dims)


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
