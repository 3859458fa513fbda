"""The time to wrap a dataset of a million paths; readers of other formats and iterable datasets, alone and wrapped."""

import json
import multiprocessing
import operator
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, CachedIterable
from stocache.system.describe import describe

CLAIM = "Wrapping a dataset of a million paths takes at most 100 ms beyond the loading of a few samples."

IMAGES = 2000


class Folder(Dataset[Any]):
    """An ImageFolder's list of samples, whose loading costs nothing."""

    def __init__(self, count: int) -> None:
        self.samples = [(f"/data/train/class_{idx % 1000:04d}/image_{idx:08d}.jpg", idx % 1000) for idx in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Any:
        path, label = self.samples[idx]
        return torch.full((3, 64, 64), len(path), dtype=torch.uint8), label


@experiment(rounds=9)
def paths(run: Run) -> None:
    """Milliseconds to wrap a dataset of a million paths, and to load the samples that are probed."""
    dataset = Folder(run.size(1_000_000, 100_000))
    example = dataset[0]

    def load() -> None:
        for idx in range(0, len(dataset), len(dataset) // 9):
            dataset[idx]

    took = run.turns(
        {
            "loading the samples of the probe": load,
            "CachedDataset": lambda: CachedDataset(dataset, 1).close(),
            "with example=": lambda: CachedDataset(dataset, 1, example=example).close(),
        },
        warm_up=0,
    )
    table = run.table("", "median, ms", "largest, ms")
    for name in took:
        table.row(name, 1e3 * took.median(name), 1e3 * max(took[name]))
    run.claim("a dataset of a million paths is wrapped in 100 ms", 1e3 * took.median("CachedDataset"), most=100)


# ---------------------------------------------------------------------------------------------------- readers


def image(idx: int) -> dict[str, Any]:
    """Return an image of 6 to 7 KB of random bytes, and its index."""
    return {"x": np.random.default_rng(idx).integers(0, 256, (3, 40 + idx % 8, 48), np.uint8), "y": idx}


def mds(folder: Path) -> Any:
    """Write and open shards of MosaicML."""
    from streaming import LocalDataset, MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray", "y": "int"}) as writer:
        for idx in range(IMAGES):
            writer.write(image(idx))
    return LocalDataset(str(folder))


def litdata(folder: Path, **options: Any) -> Any:
    """Write and open chunks of LitData."""
    from litdata import StreamingDataset, optimize

    optimize(fn=image, inputs=list(range(IMAGES)), output_dir=str(folder), chunk_bytes="4MB", num_workers=1)
    return StreamingDataset(str(folder), **options)


def tar(path: Path, indices: range) -> None:
    """Write some of the images into a tar file of webdataset."""
    import webdataset

    with webdataset.TarWriter(str(path)) as writer:
        for idx in indices:
            writer.write({"__key__": f"{idx:06}", "x.npy": image(idx)["x"], "y.cls": idx})


def webdataset(folder: Path) -> Any:
    """Write a tar file with an index, and open it by wids."""
    import wids

    tar(folder / "images.tar", range(IMAGES))
    shards = {"shardlist": [{"url": str(folder / "images.tar"), "nsamples": IMAGES}]}
    (folder / "index.json").write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1} | shards))
    return wids.ShardListDataset(str(folder / "index.json"))


def table_of(indices: range = range(IMAGES)) -> Any:
    """Return some of the images as a table of Arrow."""
    import pyarrow

    images = [image(idx) for idx in indices]
    return pyarrow.table({"x": [each["x"].tobytes() for each in images], "y": [each["y"] for each in images]})


def lance(folder: Path) -> Any:
    """Write and open a table of Lance."""
    import lance
    from lance.torch.data import SafeLanceDataset

    lance.write_dataset(table_of(), str(folder / "images.lance"))
    return SafeLanceDataset(str(folder / "images.lance"))


def parquet(folder: Path) -> Any:
    """Write a Parquet file, and open it by Hugging Face."""
    import datasets
    import pyarrow.parquet

    pyarrow.parquet.write_table(table_of(), folder / "images.parquet")
    return datasets.load_dataset("parquet", data_files=str(folder / "images.parquet"), split="train", cache_dir=str(folder))


READERS: tuple[Callable[[Path], Any], ...] = (mds, litdata, webdataset, lance, parquet)


@experiment()
def readers(run: Run) -> None:
    """Samples per second of readers, alone and behind a filled cache, in random order and in order; each if installed."""
    table = run.table("reader", "samples/s", "cached", "in order", "in order, cached", "equal")
    for make in READERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                dataset = make(Path(folder))
            except ImportError as error:
                table.row(make.__name__, f"not installed: {error}")
                continue
            order, rates, equal = random.Random(0).sample(range(IMAGES), IMAGES), list[float](), True
            with CachedDataset(dataset, 1) as cached:
                cached.warm(progress=False)
                for indices in (order, range(IMAGES)):
                    plain, samples = read(dataset, indices, rates), read(cached, indices, rates)
                    equal &= list(map(describe, plain)) == list(map(describe, samples))
        table.row(make.__name__, *rates, equal)
    run.claim("all samples are equal", all(table.column("equal")))
    ratios = map(operator.truediv, table.column("cached"), table.column("samples/s", equal=True))
    run.claim("readers are faster cached, in random order", min(ratios, default=1.0), least=1)


def read(dataset: Any, indices: Sequence[int], rates: list[float]) -> list[Any]:
    """Read samples, and append how many come in a second."""
    began = time.perf_counter()
    samples = [dataset[idx] for idx in indices]
    rates.append(len(indices) / (time.perf_counter() - began))
    return samples


# ---------------------------------------------------------------------------------------------------- iterable datasets


class Counted:
    """A decoder that counts its samples, over all processes."""

    def __init__(self) -> None:
        self.count = multiprocessing.Value("q")

    def __call__(self, sample: Any) -> Any:
        """Return a sample with its bytes as an array of its own."""
        with self.count.get_lock():
            self.count.value += 1
        x = sample["x"]
        return {"x": np.frombuffer(x, np.uint8).copy() if isinstance(x, bytes) else np.array(x), "y": sample["y"]}


class Iterable(IterableDataset[Any]):
    """The images, divided among workers by hand."""

    def __init__(self, decode: Counted) -> None:
        self.decode = decode

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from map(self.decode, map(image, range(first, IMAGES, step)))


def parts() -> list[range]:
    """Return the indices of four files."""
    return [range(part * IMAGES // 4, (part + 1) * IMAGES // 4) for part in range(4)]


def hugging_face_stream(folder: Path, decode: Counted) -> Any:
    """Write four Parquet files, and stream them by Hugging Face."""
    import datasets
    import pyarrow.parquet

    for part, indices in enumerate(parts()):
        pyarrow.parquet.write_table(table_of(indices), folder / f"{part}.parquet")
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).map(decode)


def webdataset_stream(folder: Path, decode: Counted) -> Any:
    """Write four tar files, and stream them by webdataset."""
    import webdataset

    for part, indices in enumerate(parts()):
        tar(folder / f"{part}.tar", indices)
    source = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    return source.decode().map(lambda sample: decode({"x": sample["x.npy"], "y": sample["y.cls"]}))


STREAMS: dict[str, Callable[[Path, Counted], Any]] = {
    "torch": lambda folder, decode: Iterable(decode),
    "Hugging Face": hugging_face_stream,
    "webdataset": webdataset_stream,
    "LitData": lambda folder, decode: litdata(folder, transform=decode),
}


@experiment()
def iterables(run: Run) -> None:
    """Samples that three epochs take from each source, and samples per second of the source and of the third epoch."""
    table = run.table("stream", "workers", "read in epochs 1, 2, 3", "N, 0, 0 and equal", "samples/s", "cached")
    for name, make in STREAMS.items():
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                decode = Counted()
                try:
                    source = make(Path(folder), decode)
                except ImportError as error:
                    table.row(name, f"not installed: {error}")
                    break
                with CachedIterable(source, 1) as cached:
                    epochs, reads, rates = [], [], []
                    for dataset in (source, cached, cached, cached):
                        context = "fork" if workers else None
                        loader = DataLoader(dataset, 50, num_workers=workers, collate_fn=list, multiprocessing_context=context)
                        before, began = decode.count.value, time.perf_counter()
                        samples = [sample for batch in loader for sample in batch]
                        rates.append(len(samples) / (time.perf_counter() - began))
                        reads.append(decode.count.value - before)
                        epochs.append(list(map(describe, samples)))
            right = all(epoch == epochs[0] for epoch in epochs) and reads[1:] == [reads[0], 0, 0]
            table.row(name, workers, f"{reads[1:]} of {reads[0]}", right, rates[0], rates[3])
    run.claim("iterables read their source N, 0 and 0 times, and all samples are equal", all(table.column("N, 0, 0 and equal")))
