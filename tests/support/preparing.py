"""Datasets and preparers to prepare, the folders that they become, and what happens to these."""

import json
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from stocache import DataPreparer, prepare

N, BLOCK = 100, 7


class Images:
    """Samples of varying size; ``seeded`` ones are drawn at random."""

    def __init__(self, length=N, seeded=False):
        self.length, self.seeded = length, seeded

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if not 0 <= idx < self.length:
            raise IndexError(idx)
        if self.seeded:
            return torch.rand(3), np.random.rand(2), random.random()
        return torch.full((3, 1 + idx % 4), idx % 256, dtype=torch.uint8), idx


class Preparer(DataPreparer):
    def __init__(self, length=N, offset=0, stop_at=None):
        self.length, self.offset, self.stop_at = length, offset, stop_at
        self.yielded = 0

    def prepare_data(self):
        for idx in range(self.length):
            if idx == self.stop_at:
                raise KeyboardInterrupt("by the user")
            self.yielded += 1
            yield torch.full((3, 1 + idx % 4), idx % 256, dtype=torch.uint8), idx + self.offset

    def get_dataset_info(self):
        return {"yielded": self.yielded}


class Locks(Preparer):
    """Its last sample cannot be stored."""

    def prepare_data(self):
        yield from super().prepare_data()
        yield threading.Lock()


class Faulty(Images):
    """A dataset of which ``broken`` samples raise a ValueError, and that writes to the file ``log`` which are loaded.

    ``at`` is a function of the dataset and an index, called before a sample is loaded.
    """

    def __init__(self, broken=(), log=None, length=N, seeded=False, at=None):
        super().__init__(length, seeded)
        self.broken, self.log, self.at = frozenset(broken), log, at

    def __getitem__(self, idx):
        if self.at is not None:
            self.at(self, idx)
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{idx}\n")  # at once, so that several processes can
        if idx in self.broken:
            raise ValueError(f"photo {idx} cannot\nbe read")
        return super().__getitem__(idx)

    def describe_sample(self, idx):
        return f"photos/{idx}.jpg"


class FaultyTogether(Faulty):
    """The same, many at a time."""

    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def prepare_quietly(source, folder, **options):
    return prepare(source, folder, **{"block_size": BLOCK, "progress": False} | options)


def prepared(source, folder, **options):
    """The content of a folder that is prepared."""
    prepare_quietly(source, folder, **options).close()
    return content(folder)


def labels(storage):
    return [storage.load_sample(idx)[1] for idx in range(len(storage))]


def names(*numbers):
    """The names of blocks."""
    return {f"{number:06}.safetensors" for number in numbers}


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def written(folder):
    """When each block was written, and to which file. An ended worker may leave a part under a different name."""
    blocks = (Path(folder) / "blocks").glob("*.safetensors")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in blocks}


def rewritten(folder, before):
    """Which blocks were written after `written` returned this."""
    return {name for name, time in written(folder).items() if before.get(name) != time}


def loaded(log):
    """The samples that are written down, which are then forgotten."""
    lines = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return Counter(map(int, lines))


def listed(folder, key="skipped"):
    """The samples that skipped.json lists."""
    return [record["index"] for record in json.loads((folder / "skipped.json").read_text()).get(key, ())]


def damage(folder, *names, at=-9):
    """Change one byte of each of some files."""
    for name in names:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 0x55
        (folder / name).write_bytes(data)
