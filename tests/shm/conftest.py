"""What tests of shared memory begin and end with."""

import contextlib
import gc
from pathlib import Path

import pytest

from stocache.shm import registry


@pytest.fixture(autouse=True)
def remove_left():
    """Remove the named caches of tests that were left, at once if called, and at the end of the test."""

    def remove():
        for path in Path(registry.directory_of()).glob("test-*"):
            path.unlink()
        with contextlib.suppress(OSError):
            Path(registry.directory_of()).rmdir()

    yield remove
    gc.collect()
    registry._timed_out.clear()
    remove()
