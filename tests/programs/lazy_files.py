"""Datasets that open their file at the first ``__getitem__``, so that each worker has a handle of its own, as tutorials say."""

import pickle
import sqlite3
import tarfile
import zipfile
from io import BytesIO

import h5py
import lmdb
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.programs.running import run

COUNT = 120


def picture(idx):
    return np.random.default_rng(idx).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def png(idx):
    buffer = BytesIO()
    Image.fromarray(picture(idx)).save(buffer, "PNG")
    return buffer.getvalue()


class H5Dataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.f = None
        with h5py.File(path, "r") as f:
            self.length = len(f["images"])

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.f is None:
            self.f = h5py.File(self.path, "r")
        return torch.from_numpy(self.f["images"][idx]), int(self.f["labels"][idx])

    @staticmethod
    def make(path, count=COUNT):
        with h5py.File(path, "w") as f:
            f.create_dataset("images", data=np.stack([picture(idx) for idx in range(count)]), chunks=(8, 16, 16, 3))
            f.create_dataset("labels", data=np.arange(count) % 10)


class LMDBDataset(Dataset):
    def __init__(self, path):
        self.path = str(path)
        self.env = None
        env = lmdb.open(self.path, subdir=False, readonly=True, lock=False)
        with env.begin() as txn:
            self.keys = pickle.loads(txn.get(b"__keys__"))
        env.close()

    def _init_db(self):
        self.env = lmdb.open(self.path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False)
        self.txn = self.env.begin()

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        if self.env is None:
            self._init_db()
        image = Image.open(BytesIO(self.txn.get(self.keys[index]))).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index % 10

    @staticmethod
    def make(path, count=COUNT):
        keys = [f"{idx:08d}".encode() for idx in range(count)]
        with lmdb.open(str(path), subdir=False, map_size=1 << 27) as env, env.begin(write=True) as txn:
            for idx, key in enumerate(keys):
                txn.put(key, png(idx))
            txn.put(b"__keys__", pickle.dumps(keys))


class LMDBSplit(LMDBDataset):
    """One of two datasets over one file."""

    def __init__(self, path, part):
        super().__init__(path)
        self.keys = self.keys[part::2]


class ZipDataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.archive = None
        with zipfile.ZipFile(path) as archive:
            self.names = sorted(archive.namelist())

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        with self.archive.open(self.names[idx]) as f:
            image = Image.open(f).convert("RGB")
        return np.asarray(image).transpose(2, 0, 1).copy(), idx

    @staticmethod
    def make(path, count=COUNT):
        with zipfile.ZipFile(path, "w") as archive:
            for idx in range(count):
                archive.writestr(f"{idx:04d}.png", png(idx))


class TarDataset(Dataset):
    """Keeps an open archive for each worker."""

    def __init__(self, archive):
        self.archive = archive
        self.tar_obj = {}
        with tarfile.open(archive) as tar:
            self.samples = sorted(member.name for member in tar.getmembers())

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        worker = get_worker_info()
        worker = worker.id if worker else None
        if worker not in self.tar_obj:
            self.tar_obj[worker] = tarfile.open(self.archive)  # noqa: SIM115
        image = Image.open(BytesIO(self.tar_obj[worker].extractfile(self.samples[index]).read()))
        return torch.from_numpy(np.array(image)), self.samples[index]

    @staticmethod
    def make(path, count=COUNT):
        with tarfile.open(path, "w") as tar:
            for idx in range(count):
                info = tarfile.TarInfo(f"{idx:04d}.png")
                info.size = len(data := png(idx))
                tar.addfile(info, BytesIO(data))


class RecordDataset(Dataset):
    """Records of one size in a file, found by seeking."""

    SIZE = 16 * 16 * 3

    def __init__(self, path):
        self.path = path
        self.file = None
        self.n = path.stat().st_size // self.SIZE

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(i * self.SIZE)
        record = self.file.read(self.SIZE)
        return torch.frombuffer(bytearray(record), dtype=torch.uint8).view(16, 16, 3).float() / 255

    @staticmethod
    def make(path, count=COUNT):
        path.write_bytes(b"".join(picture(idx).tobytes() for idx in range(count)))


class MemmapDataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.data = None
        self.length = len(np.load(path, mmap_mode="r"))

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.data is None:
            self.data = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(self.data[idx].astype(np.float32)), idx

    @staticmethod
    def make(path, count=COUNT):
        np.save(path, np.stack([picture(idx) for idx in range(count)]))


class MemmapRows(MemmapDataset):
    """Gives its rows as they are: numpy memmaps."""

    def __getitem__(self, idx):
        if self.data is None:
            self.data = np.load(self.path, mmap_mode="r")
        return self.data[idx]


class SQLiteDataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.conn = None
        conn = sqlite3.connect(path)
        (self.length,) = conn.execute("SELECT COUNT(*) FROM samples").fetchone()
        conn.close()

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.conn is None:
            self.conn = sqlite3.connect(self.path)
        cursor = self.conn.execute("SELECT image, label, name FROM samples WHERE id = ?", (idx,))
        image, label, name = cursor.fetchone()
        return {"image": torch.frombuffer(bytearray(image), dtype=torch.uint8), "label": label, "name": name}

    @staticmethod
    def make(path, count=COUNT):
        conn = sqlite3.connect(path)
        conn.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, image BLOB, label INTEGER, name TEXT)")
        rows = [(idx, picture(idx).tobytes(), idx % 10, "name" * (idx % 5)) for idx in range(count)]
        conn.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", rows)
        conn.commit()
        conn.close()


KINDS = {
    "h5py": (H5Dataset, "data.h5"),
    "lmdb": (LMDBDataset, "data.lmdb"),
    "zip": (ZipDataset, "data.zip"),
    "tar": (TarDataset, "data.tar"),
    "raw": (RecordDataset, "data.bin"),
    "memmap": (MemmapDataset, "data.npy"),
    "memmap rows": (MemmapRows, "data.npy"),
    "sqlite": (SQLiteDataset, "data.sqlite"),
}


def main(wrap, folder, kind, start_method="fork", workers=(0, 2, 4)):
    """Read a file with each number of workers, for three epochs."""
    cls, name = KINDS[kind]
    if not (folder / name).exists():
        cls.make(folder / name)
    batches = []
    for num_workers in workers:
        dataset = wrap(cls(folder / name))
        torch.manual_seed(0)
        loader = DataLoader(
            dataset,
            batch_size=16,
            shuffle=True,
            num_workers=num_workers,
            multiprocessing_context=start_method if num_workers else None,
            persistent_workers=start_method == "spawn",
        )
        batches += [list(loader) for epoch in range(3)]
        del loader, dataset
    return batches


def main_of_splits(wrap, folder, start_method="fork", num_workers=2):
    """Train and validate over one LMDB file, in turns."""
    path = folder / "data.lmdb"
    if not path.exists():
        LMDBDataset.make(path)
    train, val = wrap(LMDBSplit(path, 0)), wrap(LMDBSplit(path, 1))
    torch.manual_seed(0)
    options = {"batch_size": 8, "num_workers": num_workers, "multiprocessing_context": start_method, "persistent_workers": True}
    train_loader, val_loader = DataLoader(train, shuffle=True, **options), DataLoader(val, **options)
    return [list(loader) for epoch in range(3) for loader in (train_loader, val_loader)]


if __name__ == "__main__":
    run(lambda wrap, folder, splits=False, **options: (main_of_splits if splits else main)(wrap, folder, **options))
