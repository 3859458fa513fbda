"""Sources of samples, and the stores that prepare and read them: stocache, LitData, MosaicML streaming, torch.save."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stocache
from benchmark.support.datasets import Made
from benchmark.support.peers import clean_mosaic, mosaic
from stocache import BlockSampler, OnDiskBlockDataStorage, StorageDataset, prepare

BATCH, WINDOW = 64, 16

# ---------------------------------------------------------------------------------------------------- the samples


@dataclass
class Source(Made):
    """Samples to prepare: pairs of a value and the sample's number.

    Attributes:
        column: the type of the values, as MosaicML streaming names it.
        nbytes: bytes of all samples.
    """

    column: str
    nbytes: int


def rows(count: int, *shape: int) -> Source:
    """Return random rows of uint8, and their numbers, from memory."""
    data = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    column = f"ndarray:uint8:{','.join(map(str, shape))}"
    return Source(count, partial(_row, data), column, data.numel() + 8 * count)


def _row(data: torch.Tensor, idx: int) -> Any:
    return data[idx].clone(), idx


def texts(count: int) -> Source:
    """Return texts of some 1 KB of random words, from memory."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(1000)]
    text = " ".join(rng.choices(words, k=150_000))
    return Source(count, partial(_text, text), "str", 1008 * count)


def _text(text: str, idx: int) -> Any:
    begin = idx * 7919 % (len(text) - 1000)
    return text[begin : begin + 1000], idx


def photos(paths: list[Path]) -> Source:
    """Return the bytes of JPEG files, from files."""
    nbytes = sum(path.stat().st_size + 8 for path in paths)
    return Source(len(paths), partial(_file, paths), "bytes", nbytes)


def _file(paths: list[Path], idx: int) -> Any:
    return paths[idx].read_bytes(), idx


def decoded_photos(paths: list[Path]) -> Source:
    """Return the pixels of JPEG files, decoded and resized."""
    nbytes = (3 * 224 * 224 + 8) * len(paths)
    return Source(len(paths), partial(_pixels, paths), "ndarray:uint8:3,224,224", nbytes)


def _pixels(paths: list[Path], idx: int) -> Any:
    with Image.open(paths[idx]) as image:
        pixels = np.array(image.convert("RGB").resize((224, 224)))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), idx


def collate(samples: list[Any]) -> tuple[Any, list[int]]:
    """Make a batch for which all bytes of its samples have been read."""
    pairs = [(sample["value"], sample["label"]) if isinstance(sample, dict) else sample for sample in samples]
    values, labels = zip(*pairs, strict=True)
    if isinstance(values[0], torch.Tensor | np.ndarray):
        return torch.from_numpy(np.stack([np.asarray(value) for value in values])), list(labels)
    return list(values) if isinstance(values[0], str) else list(map(bytes, values)), list(labels)


# ---------------------------------------------------------------------------------------------------- contenders


class Store(ABC):
    """A contender: a folder of its own that it prepares and reads."""

    name: str
    reads = 2048
    """How many samples to read at random."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.folder, self.block_bytes = folder / type(self).__name__, block_bytes

    def files(self) -> list[Path]:
        """Return all that it has written."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    @abstractmethod
    def prepare(self, source: Source) -> None:
        """Write all samples of a dataset, in one process."""

    @abstractmethod
    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Return an iterable over batches of samples in the order given."""

    @abstractmethod
    def shuffled(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in the contender's own shuffled order, in which each block is one stretch."""

    @abstractmethod
    def sequential(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in order."""


def write_bare(folder: Path, nbytes: int, block_bytes: int) -> None:
    """Write as many bytes in files of a block's size, each written at once and synchronised: the disk itself."""
    block = os.urandom(block_bytes)
    folder.mkdir()
    for number in range(max(1, round(nbytes / block_bytes))):
        with open(folder / str(number), "wb", buffering=0) as file:
            file.write(block)
            os.fsync(file.fileno())


def loading(dataset: Any, workers: int, make: Any = DataLoader, **options: Any) -> Iterable[Any]:
    """Return a DataLoader, the same for all."""
    fixed = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    loader: Iterable[Any] = make(dataset, **fixed | options)
    return loader


class Stocache(Store):
    """This library, by torch's DataLoader, shuffling within each block, as LitData and the article do."""

    name = "stocache"
    loading = staticmethod(loading)

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.folder, self.block_bytes = folder / "stocache", block_bytes

    def prepare(self, source: Source) -> None:
        """Write by `stocache.prepare`."""
        prepare(source, self.folder, num_workers=0, block_bytes=self.block_bytes, progress=False)

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by `StorageDataset`."""
        return self.loading(StorageDataset(OnDiskBlockDataStorage(self.folder)), workers, sampler=order)

    def shuffled(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by `BlockSampler`."""
        storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(self.folder)
        dataset = StorageDataset(storage)
        sampler = BlockSampler(dataset.indices, storage.block_size, shuffle, window=1, prefetch=dataset.prefetch_blocks)
        return self.loading(dataset, workers, sampler=sampler)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read whole blocks in this process; in workers by `BlockSampler`."""
        return self.shuffled(workers, shuffle=False) if workers else self.loading(_WholeBlocks(self.folder), 0)


class _WholeBlocks(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(folder)

    def __iter__(self) -> Iterator[Any]:
        for b in range(len(self.storage.index.blocks)):
            yield from self.storage.load_block(b)


class OwnLoader(Stocache):
    """This library, by its own DataLoader, as LitData and MosaicML streaming are read by theirs."""

    name = "stocache, its DataLoader"
    loading = staticmethod(partial(loading, make=stocache.DataLoader, collate_fn=None))


class LitData(Store):
    """LitData, as its README says; on a local disk it maps its files."""

    name = "LitData"

    def prepare(self, source: Source) -> None:
        """Write by `litdata.optimize`: it needs a worker, forked, because a spawned one imports torch under the clock."""
        import litdata

        options = {"num_workers": 1, "keep_data_ordered": True, "chunk_bytes": self.block_bytes}
        inputs = list(range(len(source)))
        litdata.optimize(source.__getitem__, inputs, str(self.folder), start_method="fork", verbose=False, **options)

    def by_number(self) -> Dataset[Any]:
        """Return a dataset to read by ``dataset[i]``, which by default decodes 32 images each time."""
        import litdata

        return _ByNumber(litdata.StreamingDataset(str(self.folder), batch_decode=0))

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by number."""
        return loading(self.by_number(), workers, sampler=order)

    def shuffled(self, workers: int) -> Iterable[Any]:
        """Read by its loader, which by default decodes 32 images each time, too, and shuffles 256."""
        return self.sequential(workers, shuffle=True, batch_decode=256)

    def sequential(self, workers: int, **options: Any) -> Iterable[Any]:
        """Read by its loader."""
        import litdata

        return loading(litdata.StreamingDataset(str(self.folder), **options), workers, litdata.StreamingDataLoader)


class _ByNumber(Dataset[Any]):
    """A dataset that torch takes for one to iterate over, though it has ``__getitem__``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[idx]


class Mosaic(Store):
    """MosaicML streaming, as its documentation says. It shuffles about as many samples at a time as are in 16 blocks."""

    name = "MosaicML streaming, 16 blocks"

    def prepare(self, source: Source) -> None:
        """Write by `MDSWriter`."""
        columns = {"value": source.column, "label": "int"}
        with mosaic().MDSWriter(columns=columns, out=str(self.folder), size_limit=self.block_bytes) as writer:
            for value, label in map(source.make, range(len(source))):
                writer.write({"value": value.numpy() if isinstance(value, torch.Tensor) else value, "label": label})

    def by_number(self) -> Any:
        """Return its dataset for local files, which needs no shared memory."""
        return mosaic().LocalDataset(str(self.folder))

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by number."""
        return loading(self.by_number(), workers, sampler=order)

    def shuffled(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its loader. It may download all ahead; otherwise it would check after each sample for the next ones."""
        clean_mosaic()
        samples, streaming = len(self.by_number()), mosaic()
        options = {"shuffle": shuffle, "batch_size": BATCH, "num_canonical_nodes": 1, "predownload": samples}
        options["shuffle_block_size"] = WINDOW * (samples // len(list(self.folder.rglob("*.mds"))))
        dataset = streaming.StreamingDataset(local=str(self.folder), **options)
        return loading(dataset, workers, streaming.StreamingDataLoader)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its loader."""
        return self.shuffled(workers, shuffle=False)


class Article(Store):
    """The storage of the article on block storage: lists of samples written by torch.save, the last one loaded is kept."""

    name = "torch.save blocks"
    reads = BATCH

    def prepare(self, source: Source) -> None:
        """Write a file for each block."""
        self.folder.mkdir()
        size = max(1, round(self.block_bytes / (source.nbytes / len(source))))
        for number, first in enumerate(range(0, len(source), size)):
            block = [source[idx] for idx in range(first, min(first + size, len(source)))]
            torch.save(block, self.folder / f"block_{number}.pt")
        torch.save({"samples": len(source), "block_size": size}, self.folder / "info.pt")

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by number; in small batches, as otherwise one worker would do it all."""
        return loading(_Blocks(self.folder), workers, sampler=order, batch_size=BATCH // 4)

    def shuffled(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its sampler, which is ours with a window of one."""
        dataset = _Blocks(self.folder)
        return loading(dataset, workers, sampler=BlockSampler(range(len(dataset)), dataset.block_size, shuffle, window=1))

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its sampler."""
        return self.shuffled(workers, shuffle=False)


class _Blocks(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        info = torch.load(folder / "info.pt", weights_only=True)
        self.folder, self.samples, self.block_size = folder, info["samples"], info["block_size"]
        self.number = -1
        self.block: list[Any] = []

    def __len__(self) -> int:
        return int(self.samples)

    def __getitem__(self, idx: int) -> Any:
        number, row = divmod(idx, self.block_size)
        if number != self.number:
            self.block, self.number = torch.load(self.folder / f"block_{number}.pt", weights_only=False), number
        return self.block[row]
