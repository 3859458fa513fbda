"""A text of numbered rows for `StreamLoader`, and what it reads and delivers of it."""

import bz2
import gzip
import json
import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stocache import CsvFormat, StreamLoader
from stocache.text import lines, open_file
from stocache.tools.cli import listing
from tests.support.processes import run_all

N = 437  # rows of the text
SKIP = CsvFormat("\t", on_error="skip")
COMPRESSIONS = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress, "zst": lambda data: zstd().compress(data)}


def zstd():
    return pytest.importorskip("zstandard", reason="zstd files need zstandard")


def rows(begin=0, end=N):
    return b"".join(b"%d\t%s\t%d\n" % (n, b"0" * (n * 7 % 13) + b"%d" % n, n) for n in range(begin, end))


def numbers(loader):
    """The rows of an epoch by their numbers; checks that features and labels belong together."""
    found = []
    for x, y in loader:
        assert x.dtype == torch.float32
        assert torch.equal(x, torch.stack([y, y], 1).float())
        found += y.tolist()
    return found


def in_workers(stream, count=2, method="fork"):
    return DataLoader(stream, batch_size=None, num_workers=count, multiprocessing_context=method)


def epochs(path, count=2, **options):
    """The rows of some epochs by their numbers."""
    with StreamLoader(path, **{"batch_size": 10, "buffer_size": 20} | options) as loader:
        return [numbers(loader) for _ in range(count)]


def _rank(rank, path, folder, options):
    with StreamLoader(path, 10, 20, rank=rank, **options) as loader:
        (folder / f"{rank}.json").write_text(json.dumps([numbers(loader), numbers(loader), len(loader)]))


def run_ranks(path, folder, count, **options):
    """The rows of two epochs of each rank by their numbers, and its length; each rank is a process."""
    run_all(multiprocessing.get_context("fork"), count, _rank, path, folder, options | {"world_size": count})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def parse(found):
    firsts = [int(row.split("\t")[0]) for row in found]
    return {"tokens": torch.tensor([[n, n + 1, n + 2] for n in firsts]), "length": np.array([len(row) for row in found])}


class Watch:
    """Counts rows that are parsed, and bytes that are read, in this process."""

    def __init__(self, monkeypatch):
        self.rows = self.bytes = 0
        read_at = open_file.OpenFile.read_at

        def reading(file, offset, nbytes):
            data = read_at(file, offset, nbytes)
            self.bytes += len(data)
            return data

        monkeypatch.setattr(open_file.OpenFile, "read_at", reading)
        monkeypatch.setattr(lines, "_HEAD", 64)

    def parse(self, found):
        self.rows += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])


def ours():
    """Paths of named caches that are not of another program, which may come and go at any moment."""
    return {cache.path for cache in listing.find() if cache.name.startswith(("rows-", "texts"))}
