"""Sources of samples, and the stores that prepare and read them: stocache, LitData, MosaicML streaming, torch.save."""

import multiprocessing
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stocache
from benchmark.support.peers import clean_mosaic, mosaic
from stocache import BlockSampler, OnDiskBlockDataStorage, StorageDataset, prepare
from stocache.tools.bench import find_jpegs

BATCH, WINDOW = 64, 16
fork = multiprocessing.get_context("fork")

# ---------------------------------------------------------------------------------------------------- the samples


class Source(Dataset[Any]):
    """Samples to prepare: pairs of a value and the sample's number.

    Attributes:
        name: what the samples are.
        column: the type of the values, as MosaicML streaming names it.
        nbytes: bytes of all samples.
    """

    name: str
    column: str
    nbytes: int

    def __len__(self) -> int:
        raise NotImplementedError


class Images(Source):
    """Random images and their numbers, from memory."""

    name, column = "3x64x64 uint8, label", "ndarray:uint8:3,64,64"

    def __init__(self, samples: int) -> None:
        self.data = torch.randint(0, 256, (samples, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.nbytes = self.data.numel() + 8 * samples

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: int) -> Any:
        return self.data[idx].clone(), idx


class Texts(Source):
    """Rows of some 1 KB of random words, from memory."""

    name, column = "text of 1 KB, label", "str"

    def __init__(self, samples: int) -> None:
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(1000)]
        self.text, self.samples = " ".join(rng.choices(words, k=150_000)), samples
        self.nbytes = 1008 * samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> Any:
        begin = idx * 7919 % (len(self.text) - 1000)
        return self.text[begin : begin + 1000], idx


class Photos(Source):
    """The bytes of JPEG files, from files; all of them several times."""

    name, column = "JPEG bytes, label", "bytes"

    def __init__(self, folder: Path, repeat: int) -> None:
        self.paths = find_jpegs(folder) * repeat
        self.nbytes = sum(path.stat().st_size + 8 for path in self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        return self.paths[idx].read_bytes(), idx


class DecodedPhotos(Photos):
    """The pixels of JPEG files, decoded and resized."""

    name, column = "decoded photo 3x224x224 uint8, label", "ndarray:uint8:3,224,224"

    def __init__(self, folder: Path, repeat: int) -> None:
        super().__init__(folder, repeat)
        self.nbytes = (3 * 224 * 224 + 8) * len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        with Image.open(self.paths[idx]) as image:
            pixels = np.array(image.convert("RGB").resize((224, 224)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), idx


def _pair(sample: Any) -> tuple[Any, int]:
    return (sample["value"], sample["label"]) if isinstance(sample, dict) else sample


def collate(samples: list[Any]) -> tuple[Any, list[int]]:
    """Make a batch for which all bytes of its samples have been read."""
    values, labels = zip(*map(_pair, samples), strict=True)
    if isinstance(values[0], torch.Tensor | np.ndarray):
        return torch.from_numpy(np.stack([np.asarray(value) for value in values])), list(labels)
    return list(values) if isinstance(values[0], str) else list(map(bytes, values)), list(labels)


# ---------------------------------------------------------------------------------------------------- contenders


class Writer(ABC):
    """What samples are prepared with, into a folder of its own."""

    name: str
    parallel = True
    """Whether it can be prepared by several processes."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.folder, self.block_bytes = folder / type(self).__name__, block_bytes

    @abstractmethod
    def prepare(self, source: Any, workers: int) -> None:
        """Write all samples of a dataset."""

    def files(self) -> list[Path]:
        """Return all that it has written."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


class Disk(Writer):
    """The disk itself: files of a block's size, each written at once and synchronised."""

    name = "the disk: write and fsync alone"

    def prepare(self, source: Any, workers: int) -> None:
        """Write as many bytes as the samples have."""
        self.folder.mkdir()
        block, files = os.urandom(self.block_bytes), round(source.nbytes / self.block_bytes)
        in_processes(self._write, [(block, range(rank, files, max(1, workers))) for rank in range(max(1, workers))])

    def _write(self, block: bytes, numbers: range) -> None:
        for number in numbers:
            with open(self.folder / str(number), "wb", buffering=0) as file:
                file.write(block)
                os.fsync(file.fileno())


def in_processes(work: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
    """Make each call in a forked process of its own; a single one in this process."""
    if len(calls) == 1:
        work(*calls[0])
        return
    processes = [fork.Process(target=work, args=arguments) for arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


class Store(Writer):
    """A contender: a folder that it prepares and reads."""

    reads = 2048
    """How many samples to read at random."""
    by = ""
    """What reads sequentially, where it is not the same as in windowed order."""
    window: str
    """Among how many blocks its windowed order shuffles at a time."""

    @abstractmethod
    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Return an iterable over batches of samples in the order given."""

    @abstractmethod
    def windowed(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in the contender's own shuffled order, in which each block is one stretch."""

    @abstractmethod
    def sequential(self, workers: int) -> Iterable[Any]:
        """Return an iterable over batches in order."""


def one_by_one(loader: Any) -> Iterable[Any]:
    """Return a loader over the same samples, each read and delivered by itself."""
    return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, collate_fn=_alone)


def _alone(sample: Any) -> Any:
    return collate([sample])


def loading(dataset: Any, workers: int, make: Any = DataLoader, **options: Any) -> Iterable[Any]:
    """Return a DataLoader, the same for all."""
    fixed = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    loader: Iterable[Any] = make(dataset, **{"batch_size": BATCH} | fixed | options)
    return loader


class Stocache(Store):
    """This library, by torch's DataLoader."""

    name = "stocache"
    by = ": load_block; with workers BlockSampler(shuffle=False)"
    window = str(WINDOW)
    loading = staticmethod(loading)

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `stocache.prepare`."""
        prepare(source, self.folder, num_workers=workers, block_bytes=self.block_bytes, progress=False)

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by `StorageDataset`."""
        return self.loading(StorageDataset(OnDiskBlockDataStorage(self.folder)), workers, sampler=order)

    def windowed(self, workers: int, shuffle: bool = True, window: int = WINDOW) -> Iterable[Any]:
        """Read by `BlockSampler`."""
        storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(self.folder)
        dataset = StorageDataset(storage)
        sampler = BlockSampler(dataset.indices, storage.block_size, shuffle, window=window, prefetch=dataset.prefetch_blocks)
        return self.loading(dataset, workers, sampler=sampler)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read whole blocks in this process; in workers by `BlockSampler`."""
        return self.windowed(workers, shuffle=False) if workers else self.loading(_WholeBlocks(self.folder), 0)


class _WholeBlocks(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.storage: OnDiskBlockDataStorage[Any, Any] = OnDiskBlockDataStorage(folder)

    def __iter__(self) -> Iterator[Any]:
        for b in range(len(self.storage.index.blocks)):
            yield from self.storage.load_block(b)


class Unmixed(Stocache):
    """This library, shuffling as far as LitData and the article do."""

    window = "1"

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.folder, self.block_bytes = folder / Stocache.__name__, block_bytes

    def windowed(self, workers: int, shuffle: bool = True, window: int = 1) -> Iterable[Any]:
        """Read by `BlockSampler`, shuffling within each block."""
        return super().windowed(workers, shuffle, window)


class OwnLoader(Unmixed):
    """This library, by its own DataLoader, as LitData and MosaicML streaming are read by theirs."""

    name = "stocache, its DataLoader"
    loading = staticmethod(partial(loading, make=stocache.DataLoader, collate_fn=None))


class LitData(Store):
    """LitData, as its README says; on a local disk it maps its files."""

    name = "LitData"
    window = "1, in runs of 256 samples"

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `litdata.optimize`: with at least one worker, forked, because spawned ones import torch under the clock."""
        import litdata

        options = {"num_workers": max(1, workers), "keep_data_ordered": True, "chunk_bytes": self.block_bytes}
        inputs = list(range(len(source)))
        litdata.optimize(source.__getitem__, inputs, str(self.folder), start_method="fork", verbose=False, **options)

    def _dataset(self, **options: Any) -> Any:
        import litdata

        return litdata.StreamingDataset(str(self.folder), **options)

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by ``dataset[i]``, which by default decodes 32 images each time."""
        return loading(_ByNumber(self._dataset(batch_decode=0)), workers, sampler=order)

    def windowed(self, workers: int) -> Iterable[Any]:
        """Read by its loader, which by default decodes 32 images each time, too, and shuffles 256."""
        return self._loading(workers, shuffle=True, batch_decode=256)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its loader."""
        return self._loading(workers)

    def _loading(self, workers: int, **options: Any) -> Iterable[Any]:
        import litdata

        return loading(self._dataset(**options), workers, litdata.StreamingDataLoader)


class _ByNumber(Dataset[Any]):
    """A dataset that torch takes for one to iterate over, though it has ``__getitem__``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[idx]


class Mosaic(Store):
    """MosaicML streaming, as its documentation says."""

    name = "MosaicML streaming"
    window = str(WINDOW)

    def prepare(self, source: Any, workers: int) -> None:
        """Write by `MDSWriter`; in parallel by one for each worker, in folders of their own, whose indices are merged."""
        if not workers:
            self._write(source, range(len(source)), self.folder)
            return
        bounds = np.linspace(0, len(source), workers + 1).astype(int).tolist()
        in_processes(
            self._write, [(source, range(*bounds[rank : rank + 2]), self.folder / str(rank)) for rank in range(workers)]
        )
        mosaic().base.util.merge_index(str(self.folder), keep_local=True)

    def _write(self, source: Any, indices: range, folder: Path) -> None:
        columns = {"value": source.column, "label": "int"}
        with mosaic().MDSWriter(columns=columns, out=str(folder), size_limit=self.block_bytes) as writer:
            for idx in indices:
                value, label = source[idx]
                writer.write({"value": value.numpy() if isinstance(value, torch.Tensor) else value, "label": label})

    def random(self, order: list[int], workers: int) -> Iterable[Any]:
        """Read by its dataset for local files, which needs no shared memory."""
        return loading(mosaic().LocalDataset(str(self.folder)), workers, sampler=order)

    def windowed(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its loader, which shuffles about as many samples at a time as are in our window.

        It may download all ahead; otherwise it would check after each sample for the next ones.
        """
        clean_mosaic()
        streaming = mosaic()
        samples = len(streaming.LocalDataset(str(self.folder)))
        options = {"shuffle": shuffle, "batch_size": BATCH, "num_canonical_nodes": 1, "predownload": samples}
        options["shuffle_block_size"] = WINDOW * (samples // len(list(self.folder.rglob("*.mds"))))
        dataset = streaming.StreamingDataset(local=str(self.folder), **options)
        return loading(dataset, workers, streaming.StreamingDataLoader)

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its loader."""
        return self.windowed(workers, shuffle=False)


class Article(Store):
    """The storage of the article on block storage: lists of samples written by torch.save, the last one loaded is kept."""

    name = "torch.save blocks"
    parallel = False
    reads = BATCH
    window = "1"

    def prepare(self, source: Any, workers: int) -> None:
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

    def windowed(self, workers: int, shuffle: bool = True) -> Iterable[Any]:
        """Read by its sampler, which is ours with a window of one."""
        dataset = _Blocks(self.folder)
        return loading(dataset, workers, sampler=BlockSampler(range(len(dataset)), dataset.block_size, shuffle, window=1))

    def sequential(self, workers: int) -> Iterable[Any]:
        """Read by its sampler."""
        return self.windowed(workers, shuffle=False)


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


CONTENDERS = (Stocache, LitData, Mosaic, Article)
