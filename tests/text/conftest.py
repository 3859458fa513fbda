"""A file of numbered rows, and caches removed."""

import contextlib
import os

import pytest

from stocache.shm import named
from tests.support.texts import ours, rows


@pytest.fixture
def numbered(tmp_path):
    (path := tmp_path / "numbered.tsv").write_bytes(rows())
    return path


@pytest.fixture
def _removed():
    others = ours()
    yield
    for path in ours() - others:
        named.remove(path)
    with contextlib.suppress(OSError):  # there may be none, or another program has a cache in it
        os.rmdir(f"/dev/shm/stocache-{os.getuid()}")
