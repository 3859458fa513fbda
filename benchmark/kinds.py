"""Kinds of datasets, as people write them, through a cache: wrong samples of three epochs, and changes by wrapping.

    python -m benchmark kinds [--kinds TensorDataset h5py] [--samples 4000] [--spawned 200]

Each kind is read by the process itself, and by 2 and 4 workers that are forked, spawned or come from a forkserver, in another
random order each epoch. A sample is wrong if it differs in type, structure, dtype, shape or bytes from that of a fresh dataset
in a process of its own. The dataset is unchanged if wrapping has changed none of its attributes, compared deeply: no file is
opened. Files and datasets are those of tests/programs.
"""

import argparse
import collections
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stocache import CachedDataset
from stocache.system.describe import describe, difference

CLAIM = "Samples of all kinds of datasets come back exactly, and wrapping a dataset changes nothing in it."
NEEDS = (
    ("PIL", '-e ".[test]"'),
    ("datasets", '-e ".[test]"'),
    ("h5py", '-e ".[test]"'),
    ("lmdb", '-e ".[test]"'),
    ("monai", '-e ".[test]"'),
    ("nibabel", '-e ".[test]"'),
    ("pandas", '-e ".[test]"'),
)

EPOCHS, BATCH_SIZE, WORKERS = 3, 40, (0, 2, 4)
START_METHODS = ("fork", "spawn", "forkserver")


# ---------------------------------------------------------------------------------------------------- kinds


def tensors(folder: Path, count: int) -> Any:
    """Return a TensorDataset."""
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(count))


def samples(folder: Path, count: int) -> Any:
    """Return a list of tuples."""
    return [(torch.full((3, 8, 8), idx, dtype=torch.int32), idx, f"name {idx}") for idx in range(count)]


class Columns(Dataset[Any]):
    """A dict of lists."""

    def __init__(self, data: dict[str, list[Any]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["label"])

    def __getitem__(self, idx: int) -> Any:
        return {name: values[idx] for name, values in self.data.items()}


def columns(folder: Path, count: int) -> Any:
    """Return a dict of lists."""
    return Columns({"text": ["word " * (idx % 7) for idx in range(count)], "label": [idx % 10 for idx in range(count)]})


class Frame(Dataset[Any]):
    """A data frame of pandas, row by row."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, idx: int) -> Any:
        row = self.frame.iloc[idx]
        return torch.tensor([row["x"], row["y"]], dtype=torch.float32), row["name"]


def frame(folder: Path, count: int) -> Any:
    """Return a data frame's rows."""
    import pandas as pd

    return Frame(pd.DataFrame({"x": range(count), "y": np.linspace(0, 1, count), "name": [f"n{idx}" for idx in range(count)]}))


def to_tensor(image: Any) -> torch.Tensor:
    """Return an image as people do without torchvision: a permuted view."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def image_folder(folder: Path, count: int) -> Any:
    """Return a folder of images, with a folder for each class."""
    from tests.programs import lazy_files, vision

    for idx in range(count):
        path = folder / f"class{idx % 10}" / f"{idx}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(lazy_files.png(idx))
    return vision.ImageFolder(folder, transform=to_tensor)


def hugging_face(folder: Path, count: int) -> Any:
    """Return a dataset of Hugging Face, of texts and tokens of varying length."""
    import datasets

    tokens = [list(range(idx % 9)) for idx in range(count)]
    return datasets.Dataset.from_dict({"text": ["word " * (idx % 7) for idx in range(count)], "input_ids": tokens})


def hugging_face_torch(folder: Path, count: int) -> Any:
    """Return the same in torch's format."""
    return hugging_face(folder, count).with_format("torch")


def lazy(name: str) -> Callable[[Path, int], Any]:
    """Return the kind that opens its file at the first sample."""

    def open_lazily(folder: Path, count: int) -> Any:
        from benchmark.support import lazy_files

        cls, file = lazy_files.KINDS[name]
        if not (folder / file).exists():
            cls.make(folder / file, count)
        return cls(folder / file)

    return open_lazily


class Mapped(Dataset[Any]):
    """An array that is mapped at once."""

    def __init__(self, path: Path) -> None:
        self.data = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: int) -> Any:
        return torch.from_numpy(np.array(self.data[idx])), idx


def mapped(folder: Path, count: int) -> Any:
    """Return an array that is mapped at once."""
    lazy("memmap")(folder, count)
    return Mapped(folder / "data.npy")


def monai_dicts(folder: Path, count: int) -> Any:
    """Return MONAI's Dataset of dicts, of MetaTensors."""
    from tests.programs import monai_dicts

    return monai_dicts.make_dataset(folder, ".npy", count)


def detection(folder: Path, count: int) -> Any:
    """Return images of varying size, with boxes and masks that are subclasses of tensors."""
    from tests.programs import detection

    if not (folder / "PNGImages").exists():
        detection.make(folder, count)
    return detection.PennFudanDataset(folder)


class Shards(Dataset[Any]):
    """Files of several samples, loaded when they are needed and then kept."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.loaded = folder, count, {}

    @functools.cached_property
    def names(self) -> list[str]:
        """The files."""
        return sorted(os.listdir(self.folder))

    @functools.lru_cache(maxsize=8)  # noqa: B019  as people do
    def shard(self, number: int) -> Any:
        """Return a file's samples."""
        self.loaded[number] = True
        return np.load(self.folder / self.names[number])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> Any:
        return self.shard(idx // 100)[idx % 100].copy(), idx


def shards(folder: Path, count: int) -> Any:
    """Return files that are loaded when they are needed."""
    for number in range(-(-count // 100)):
        path = folder / f"{number:05d}.npy"
        if not path.exists():
            np.save(path, np.random.default_rng(number).random((100, 4, 4), dtype=np.float32))
    return Shards(folder, count)


class PerProcess(Dataset[Any]):
    """A handle for each process, found by its number."""

    def __init__(self, path: Path) -> None:
        self.path, self.handles = path, {}

    def __len__(self) -> int:
        return self.path.stat().st_size // 64

    def __getitem__(self, idx: int) -> Any:
        if os.getpid() not in self.handles:
            self.handles[os.getpid()] = open(self.path, "rb")  # noqa: SIM115
        handle = self.handles[os.getpid()]
        handle.seek(64 * idx)
        return np.frombuffer(handle.read(64), dtype=np.float32), idx


def per_process(folder: Path, count: int) -> Any:
    """Return a file that each process opens."""
    path = folder / "data.bin"
    if not path.exists():
        path.write_bytes(np.random.default_rng(0).random((count, 16), dtype=np.float32).tobytes())
    return PerProcess(path)


KINDS: dict[str, Callable[[Path, int], Any]] = {
    "TensorDataset": tensors,
    "list": samples,
    "dict of lists": columns,
    "pandas": frame,
    "ImageFolder": image_folder,
    "datasets": hugging_face,
    "datasets, torch format": hugging_face_torch,
    "h5py, lazy": lazy("h5py"),
    "LMDB, lazy": lazy("lmdb"),
    "zip, lazy": lazy("zip"),
    "tar, lazy": lazy("tar"),
    "raw file, lazy": lazy("raw"),
    "np.memmap, lazy": lazy("memmap"),
    "np.memmap rows, lazy": lazy("memmap rows"),
    "np.memmap": mapped,
    "SQLite, lazy": lazy("sqlite"),
    "MONAI dicts": monai_dicts,
    "detection": detection,
    "lru_cache": shards,
    "handle per process": per_process,
}
COSTLY = {"MONAI dicts": 10, "detection": 10}  # samples are divided by this


# ---------------------------------------------------------------------------------------------------- the experiment


def expected(kind: str, folder: Path, count: int, strides: bool) -> list[Any]:
    """Return descriptions of all samples of a fresh dataset."""
    dataset = KINDS[kind](folder, count)
    return [describe(dataset[idx], strides=strides) for idx in range(len(dataset))]


def read(kind: str, folder: Path, count: int, start_method: str, num_workers: int, right: list[list[Any]]) -> dict[str, Any]:
    """Read three epochs through a cache, and return the faults."""
    dataset = KINDS[kind](folder, count)
    before = describe(dataset)
    generator = torch.Generator().manual_seed(num_workers)
    with CachedDataset(dataset, size_limit_gib=0.25) as cached:
        change = difference(before, describe(dataset))
        order: list[int] = []

        def batches() -> Iterator[list[int]]:
            indices = torch.randperm(count, generator=generator).tolist()
            order[:] = indices
            return iter([indices[at : at + BATCH_SIZE] for at in range(0, count, BATCH_SIZE)])

        loader: DataLoader[Any] = DataLoader(
            cached,
            batch_sampler=_Batches(batches),
            collate_fn=list,
            num_workers=num_workers,
            multiprocessing_context=start_method if num_workers else None,
            persistent_workers=num_workers > 0,
        )
        wrong = strided = 0
        for _epoch in range(EPOCHS):
            got = [sample for batch in loader for sample in batch]
            wrong += abs(len(got) - count)
            for idx, sample in zip(order, got, strict=False):
                if describe(sample, strides=False) != right[0][idx]:
                    wrong += 1
                elif describe(sample) != right[1][idx]:
                    strided += 1
        stats = cached.stats().total
        del loader
    return {"wrong": wrong, "strides": strided, "change": change, "hits": stats.hits, "rejected": stats.rejected}


class _Batches:
    """A batch sampler whose batches are new in each epoch."""

    def __init__(self, make: Callable[[], Iterator[list[int]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[int]]:
        return self.make()


def experiment(kind: str, start_method: str, count: int) -> dict[str, Any]:
    """Read a kind with each number of workers."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        KINDS[kind](folder, count)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fresh:
            right = [fresh.submit(expected, kind, folder, count, strides).result() for strides in (False, True)]
        for workers in WORKERS:
            if workers or start_method == "fork":
                try:
                    results[str(workers)] = read(kind, folder, count, start_method, workers, right)
                except Exception as error:  # libraries raise anything
                    results[str(workers)] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return results


def row(kind: str, start_method: str, count: int, results: dict[str, Any], notes: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells, changes, strides = [], set(), 0
    for workers in map(str, WORKERS):
        result = results.get(workers)
        if result is None:
            cells.append("")
        elif "error" in result:
            cells.append("error")
            notes[result["error"][-300:]].append(f"{kind}, {start_method}, {workers} workers")
        else:
            cells.append(f"{result['wrong']:,}" + (f" ({result['rejected']:,} uncached)" if result["rejected"] else ""))
            strides += result["strides"]
            changes.add("unchanged" if result["change"] is None else "changed")
            if result["change"] is not None:
                notes[f"changed {result['change']:.150}"].append(f"{kind}, {start_method}, {workers} workers")
    changed = " and ".join(sorted(changes)) or "-"
    return f"| {kind} | {start_method} | {EPOCHS} x {count:,} | {' | '.join(cells)} | {strides:,} | {changed} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--start-methods", nargs="+", choices=START_METHODS, default=START_METHODS)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--spawned", type=int, default=200, help="samples where workers are spawned or come from a forkserver")
    parser.add_argument("--timeout-s", type=float, default=300, help="seconds for a kind with one start method")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # kind, start method, samples: in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        kind, start_method, count = arguments.one
        multiprocessing.set_forkserver_preload(["torch"])
        print(json.dumps(experiment(kind, start_method, int(count))))
        return

    print("| dataset | workers | samples | wrong with 0 | 2 | 4 workers | right, with other strides | after wrapping |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    notes: dict[str, Any] = collections.defaultdict(list)
    environment = {
        "PYTHONWARNINGS": "ignore",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    for kind in arguments.kinds:
        for start_method in arguments.start_methods:
            count = (arguments.samples if start_method == "fork" else arguments.spawned) // COSTLY.get(kind, 1)
            command = [sys.executable, "-m", "benchmark.kinds", "--one", kind, start_method, str(count)]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=arguments.timeout_s, check=False
                )
                lines = done.stdout.splitlines()
                results = json.loads(lines[-1]) if done.returncode == 0 else {"0": {"error": " ".join(done.stderr.split())}}
            except subprocess.TimeoutExpired:
                results = {"0": {"error": f"hang: not over after {arguments.timeout_s} s"}}
            print(row(kind, start_method, count, results, notes), flush=True)
    for note, cases in notes.items():
        print(f"\n- {'; '.join(cases)}: {note}")


if __name__ == "__main__":
    main()
