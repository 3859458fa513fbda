"""Datasets that open their file at the first ``__getitem__``, so that each worker has a handle of its own, as tutorials say."""

import contextlib
import sqlite3
import zipfile
from io import BytesIO

import h5py
import lmdb
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.programs.running import EPOCHS, epochs

COUNT = 96


def picture(idx):
    return np.random.default_rng(idx).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def png(idx):
    buffer = BytesIO()
    Image.fromarray(picture(idx)).save(buffer, "PNG")
    return buffer.getvalue()


def pictures(count):
    return np.stack([picture(idx) for idx in range(count)])


def decode(data):
    return np.array(Image.open(BytesIO(data)).convert("RGB"))


class Lazy(Dataset):
    """Opens its file for the first sample; and before, to look for ``keys``, the names of the samples there or of a part."""

    def __init__(self, path, part=slice(None)):
        self.path, self.file = path, None
        file = self.open()
        self.keys = self.find_keys(file)[part]
        if hasattr(file, "close"):
            file.close()

    def find_keys(self, file):
        return range(len(file))

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, idx):
        if self.file is None:
            self.file = self.open()
        return self.read(self.keys[idx])


class H5Dataset(Lazy):
    def open(self):
        return h5py.File(self.path, "r")

    def find_keys(self, file):
        return range(len(file["images"]))

    def read(self, key):
        return torch.from_numpy(self.file["images"][key]), int(self.file["labels"][key])

    @staticmethod
    def make(path, count=COUNT):
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=pictures(count), chunks=(8, 16, 16, 3))
            file.create_dataset("labels", data=np.arange(count) % 10)


class LMDBDataset(Lazy):
    def open(self):
        return lmdb.open(str(self.path), subdir=False, readonly=True, lock=False, readahead=False, meminit=False)

    def find_keys(self, file):
        with file.begin() as transaction:
            return [key for key, _ in transaction.cursor()]

    def read(self, key):
        with self.file.begin() as transaction:
            return torch.from_numpy(decode(transaction.get(key))).permute(2, 0, 1), int(key) % 10

    @staticmethod
    def make(path, count=COUNT):
        with lmdb.open(str(path), subdir=False, map_size=1 << 27) as file, file.begin(write=True) as transaction:
            for idx in range(count):
                transaction.put(f"{idx:08d}".encode(), png(idx))


class ZipDataset(Lazy):
    def open(self):
        return zipfile.ZipFile(self.path)

    def find_keys(self, file):
        return sorted(file.namelist())

    def read(self, key):
        return decode(self.file.read(key)).transpose(2, 0, 1).copy(), key

    @staticmethod
    def make(path, count=COUNT):
        with zipfile.ZipFile(path, "w") as file:
            for idx in range(count):
                file.writestr(f"{idx:04d}.png", png(idx))


class MemmapRows(Lazy):
    """Returns its rows unchanged: numpy memmaps."""

    def open(self):
        return np.load(self.path, mmap_mode="r")

    def read(self, key):
        return self.file[key]

    @staticmethod
    def make(path, count=COUNT):
        np.save(path, pictures(count))


class SQLiteDataset(Lazy):
    def open(self):
        return sqlite3.connect(self.path)

    def find_keys(self, file):
        return range(file.execute("SELECT COUNT(*) FROM samples").fetchone()[0])

    def read(self, key):
        image, name = self.file.execute("SELECT image, name FROM samples WHERE id = ?", (key,)).fetchone()
        return {"image": torch.frombuffer(bytearray(image), dtype=torch.uint8), "name": name}

    @staticmethod
    def make(path, count=COUNT):
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, image BLOB, name TEXT)")
            rows = [(idx, picture(idx).tobytes(), "name" * (idx % 5)) for idx in range(count)]
            file.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)


KINDS = {
    "h5py": (H5Dataset, "data.h5"), "lmdb": (LMDBDataset, "data.lmdb"), "zip": (ZipDataset, "data.zip"),
    "sqlite": (SQLiteDataset, "data.sqlite"), "memmap rows": (MemmapRows, "data.npy"),
}  # fmt: skip


def main(wrap, folder, kind="lmdb", start_method="fork", splits=False):
    """Read a file for three epochs, without and with workers; with ``splits``, train and validate over one file, in turns."""
    cls, name = KINDS[kind]
    path = folder / name
    cls.make(path)
    if not splits:
        workers = (0, 2) if start_method == "fork" else (2,)
        return [epochs(wrap(cls(path)), 16, num_workers, start_method) for num_workers in workers]
    train, val = (wrap(cls(path, slice(begin, None, 2))) for begin in (0, 1))
    torch.manual_seed(0)
    options = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": start_method, "persistent_workers": True}
    loaders = DataLoader(train, shuffle=True, **options), DataLoader(val, **options)
    return [list(loader) for _epoch in range(EPOCHS) for loader in loaders]
