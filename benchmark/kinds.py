"""Kinds of datasets, as people write them, through a cache: wrong samples of three epochs, and changes by wrapping.

Each kind is read by two workers, by two persistent ones, which are forked, spawned or come from a forkserver, and by the
process itself, in a different random order each epoch. A sample is wrong if it differs in type, structure, dtype, shape or
bytes from the result of a dataset without a cache, in the same loader, in a process of its own. Wrapping must change no
attribute of a dataset, compared deeply: no file is opened. Files and datasets are made as by the programs of the tests.
"""

import functools
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset, TensorDataset

from benchmark.support.datasets import Made
from benchmark.support.faults import differing
from benchmark.support.harness import Run, experiment
from benchmark.support.processes import in_fork, in_interpreter
from stocache import CachedDataset
from stocache.system.describe import describe
from tests.programs import lazy_files, vision
from tests.programs.lazy_files import png
from tests.support.epochs import epochs

CLAIM = "Samples of all kinds of datasets come back exactly, and wrapping a dataset changes nothing in it."

LOADERS = "torch, persistent", "ours, 2 workers", "torch"  # the last one opens files in this process
START_METHODS = "fork", "spawn", "forkserver"

# ---------------------------------------------------------------------------------------------------- in memory


def tensors(folder: Path, count: int) -> Any:
    """Return a TensorDataset."""
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(count))


def samples(folder: Path, count: int) -> Any:
    """Return a list of tuples."""
    return [(torch.full((3, 8, 8), idx, dtype=torch.int32), idx, f"name {idx}") for idx in range(count)]


def from_frame(frame: pd.DataFrame, idx: int) -> Any:
    """Return a row of a data frame."""
    row = frame.iloc[idx]
    return torch.tensor([row["x"], row["y"]], dtype=torch.float32), row["name"]


def frame(folder: Path, count: int) -> Any:
    """Return a data frame of pandas."""
    names = [f"n{idx}" for idx in range(count)]
    return Made(count, partial(from_frame, pd.DataFrame({"x": range(count), "y": np.linspace(0, 1, count), "name": names})))


def hugging_face(folder: Path, count: int, form: str | None = None) -> Any:
    """Return a dataset of Hugging Face, of texts and tokens of varying length."""
    import datasets

    tokens = [list(range(idx % 9)) for idx in range(count)]
    data = {"text": ["word " * (idx % 7) for idx in range(count)], "input_ids": tokens}
    return datasets.Dataset.from_dict(data).with_format(form)


# ---------------------------------------------------------------------------------------------------- files


def to_tensor(image: Any) -> torch.Tensor:
    """Return an image as people do without torchvision: a permuted view."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def image_folder(folder: Path, count: int) -> Any:
    """Return a folder of images, with a folder for each class."""
    for idx in range(count):
        path = folder / f"class{idx % 10}" / f"{idx}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png(idx))
    return vision.ImageFolder(folder, transform=to_tensor)


def lazy(cls: Any, file: str) -> Callable[[Path, int], Any]:
    """Return a function that makes a dataset, which opens its file at the first sample."""

    def open_lazily(folder: Path, count: int) -> Any:
        if not (folder / file).exists():
            cls.make(folder / file, count)
        return cls(folder / file)

    return open_lazily


def monai(folder: Path, count: int) -> Any:
    """Return MONAI's Dataset of dicts, of MetaTensors."""
    from tests.programs import monai_dicts

    return monai_dicts.make_dataset(folder, ".npy", count)


def penn_fudan(folder: Path, count: int) -> Any:
    """Return images of varying size, with boxes and masks that are subclasses of tensors."""
    from tests.programs import detection

    if not (folder / "PNGImages").exists():
        detection.make(folder, count)
    return detection.PennFudanDataset(folder)


class Shards(Dataset[Any]):
    """Files of several samples, loaded when they are needed and then kept."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count, self.loaded = folder, count, {}
        for number in range(-(-count // 100)):
            np.save(folder / f"{number:05d}.npy", np.random.default_rng(number).random((100, 4, 4), dtype=np.float32))

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


def from_handle(path: Path, handles: dict[int, BinaryIO], idx: int) -> Any:
    """Return a record of a file."""
    if os.getpid() not in handles:
        handles[os.getpid()] = open(path, "rb")  # noqa: SIM115
    handles[os.getpid()].seek(64 * idx)
    return np.frombuffer(handles[os.getpid()].read(64), dtype=np.float32), idx


def per_process(folder: Path, count: int) -> Any:
    """Return a file, with a handle for each process, found by its number."""
    (folder / "data.bin").write_bytes(np.random.default_rng(0).random((count, 16), dtype=np.float32).tobytes())
    return Made(count, partial(from_handle, folder / "data.bin", {}))


KINDS: dict[str, Callable[[Path, int], Any]] = {
    "TensorDataset": tensors,
    "list": samples,
    "pandas": frame,
    "ImageFolder": image_folder,
    "datasets": hugging_face,
    "datasets, torch format": partial(hugging_face, form="torch"),
    **{f"{name}, lazy": lazy(*row) for name, row in lazy_files.KINDS.items()},
    "MONAI dicts": monai,
    "detection": penn_fudan,
    "lru_cache": Shards,
    "handle per process": per_process,
}
COSTLY = {"MONAI dicts": 10, "detection": 10}  # samples are divided by this


def compare(kind: str, start_method: str, count: int) -> dict[str, int]:
    """Return the numbers of samples, of wrong ones and of changed datasets of a kind."""
    multiprocessing.set_start_method(start_method, force=True)
    multiprocessing.set_forkserver_preload(["torch"])
    make, counts = KINDS[kind], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for loader in LOADERS:
            plain, inner = make(Path(folder), count), make(Path(folder), count)
            expected = in_fork(partial(epochs, plain, loader, 40))  # a library may open a file once in a process
            before = describe(inner)
            with CachedDataset(inner, 0.25) as cached:
                counts["changed"] += describe(inner) != before
                found = epochs(cached, loader, 40)
                counts["rejected"] += cached.stats().total.rejected
            counts["samples"] += sum(len(epoch.samples) for epoch in found)
            counts["wrong"] += differing(found, expected)
    return counts


@experiment(rounds=4000, quick=40)
def kinds(run: Run) -> None:
    """Compare samples of 15 kinds of datasets, with three start methods; rounds are the samples that forked workers read."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONWARNINGS": "ignore"}
    table = run.table("", "samples", "uncached", "wrong", "changed by wrapping")
    for kind in list(run.chosen(KINDS))[:: run.size(1, 7)]:
        for method in run.size(START_METHODS, START_METHODS[:1]):
            count = run.rounds // COSTLY.get(kind, 1) // (1 if method == "fork" else 20)
            counts = in_interpreter(compare, kind, method, count, env=environment, timeout=600)
            table.row(f"{kind}, {method}", *map(counts.__getitem__, ("samples", "rejected", "wrong", "changed")))
    run.claim("no sample is wrong", not any(table.column("wrong")))
    run.claim("wrapping changes no dataset", not any(table.column("changed by wrapping")))
