"""The time to wrap a dataset of a million paths, beyond the loading of the samples that are probed.

python -m benchmark wrapping
python -m benchmark wrapping readers      # readers of other formats, alone and wrapped, in both orders; each if installed
python -m benchmark wrapping iterables    # three epochs of iterable datasets, 0 and 2 workers: samples of the source, rates
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stocache import CachedDataset, CachedIterable
from stocache.system.describe import describe

CLAIM = "Wrapping a dataset of a million paths takes at most 100 ms beyond the loading of a few samples."

COUNT, ROUNDS = 1_000_000, 9


class Folder(Dataset[Any]):
    """An ImageFolder's list of samples, whose loading costs nothing."""

    def __init__(self, count: int) -> None:
        self.samples = [(f"/data/train/class_{idx % 1000:04d}/image_{idx:08d}.jpg", idx % 1000) for idx in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Any:
        path, label = self.samples[idx]
        return torch.full((3, 64, 64), len(path), dtype=torch.uint8), label


IMAGES = 2000


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


def litdata(folder: Path) -> Any:
    """Write and open chunks of LitData."""
    from litdata import StreamingDataset, optimize

    optimize(fn=image, inputs=list(range(IMAGES)), output_dir=str(folder), chunk_bytes="4MB", num_workers=1)
    return StreamingDataset(str(folder))


def webdataset(folder: Path) -> Any:
    """Write a tar file with an index, and open it by wids."""
    import webdataset
    import wids

    path = folder / "images.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for idx in range(IMAGES):
            sample = image(idx)
            writer.write({"__key__": f"{idx:06}", "npy": sample["x"], "cls": idx})
    shards = {"shardlist": [{"url": str(path), "nsamples": IMAGES}]}
    (folder / "index.json").write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1} | shards))
    return wids.ShardListDataset(str(folder / "index.json"))


def table() -> Any:
    """Return the images as a table of Arrow."""
    import pyarrow

    images = [image(idx) for idx in range(IMAGES)]
    return pyarrow.table({"x": [each["x"].tobytes() for each in images], "y": [each["y"] for each in images]})


def lance(folder: Path) -> Any:
    """Write and open a table of Lance."""
    import lance
    from lance.torch.data import SafeLanceDataset

    lance.write_dataset(table(), str(folder / "images.lance"))
    return SafeLanceDataset(str(folder / "images.lance"))


def parquet(folder: Path) -> Any:
    """Write a Parquet file, and open it by Hugging Face."""
    import datasets
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(), folder / "images.parquet")
    return datasets.load_dataset("parquet", data_files=str(folder / "images.parquet"), split="train", cache_dir=str(folder))


READERS: tuple[Callable[[Path], Any], ...] = (mds, litdata, webdataset, lance, parquet)


def readers() -> None:
    """Print the rate of each reader, alone and behind a filled cache, in random order and in order, everything warm."""
    print("| reader | samples/s | cached | in order | cached | equal |\n| --- | ---: | ---: | ---: | ---: | --- |")
    for make in READERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                dataset = make(Path(folder))
            except ImportError as error:
                print(f"| {make.__name__} | not installed: {error} | | | | |", flush=True)
                continue
            order, rates = random.Random(0).sample(range(len(dataset)), len(dataset)), list[str]()
            with CachedDataset(dataset, 1) as cached:
                for idx in order:
                    _ = cached[idx]
                equal = True
                for indices in (order, range(len(dataset))):
                    plain, samples = _read(dataset, indices, rates), _read(cached, indices, rates)
                    equal &= list(map(describe, plain)) == list(map(describe, samples))
        print(f"| {make.__name__} | {' | '.join(rates)} | {'yes' if equal else 'no'} |", flush=True)


def _read(dataset: Any, indices: Sequence[int], rates: list[str]) -> list[Any]:
    """Read samples, and append how many come in a second."""
    began = time.perf_counter()
    samples = [dataset[idx] for idx in indices]
    rates.append(f"{len(indices) / (time.perf_counter() - began):,.0f}")
    return samples


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


def torch_stream(folder: Path, decode: Counted) -> Any:
    """Make an iterable dataset of torch."""
    return Iterable(decode)


def hugging_face_stream(folder: Path, decode: Counted) -> Any:
    """Write four Parquet files, and stream them by Hugging Face."""
    import datasets
    import pyarrow.parquet

    for part in range(4):
        pyarrow.parquet.write_table(table().slice(part * IMAGES // 4, IMAGES // 4), folder / f"{part}.parquet")
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).map(decode)


def webdataset_stream(folder: Path, decode: Counted) -> Any:
    """Write four tar files, and stream them by webdataset."""
    import webdataset

    for part in range(4):
        with webdataset.TarWriter(str(folder / f"{part}.tar")) as writer:
            for idx in range(part * IMAGES // 4, (part + 1) * IMAGES // 4):
                sample = image(idx)
                writer.write({"__key__": f"{idx:06}", "x.npy": sample["x"], "y.cls": idx})
    source = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    return source.decode().map(lambda sample: decode({"x": sample["x.npy"], "y": sample["y.cls"]}))


def litdata_stream(folder: Path, decode: Counted) -> Any:
    """Write chunks of LitData, and stream them."""
    from litdata import StreamingDataset

    litdata(folder)
    return StreamingDataset(str(folder), transform=decode)


STREAMS = (torch_stream, hugging_face_stream, webdataset_stream, litdata_stream)


def iterables() -> None:
    """Print the samples that three epochs take from each source, and rates of the source and of the third epoch."""
    print(
        "| stream | workers | read in epochs 1, 2, 3 | equal | samples/s | cached |\n| --- | ---: | --- | --- | ---: | ---: |"
    )
    for make in STREAMS:
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                decode = Counted()
                try:
                    source = make(Path(folder), decode)
                except ImportError as error:
                    print(f"| {make.__name__} | not installed: {error} | | | | |", flush=True)
                    break
                with CachedIterable(source, 1) as cached:
                    epochs, reads, seconds = [], [], []
                    for dataset in (source, cached, cached, cached):
                        context = "fork" if workers else None
                        loader = DataLoader(dataset, 50, num_workers=workers, collate_fn=list, multiprocessing_context=context)
                        before, began = decode.count.value, time.perf_counter()
                        samples = [sample for batch in loader for sample in batch]
                        seconds.append(time.perf_counter() - began)
                        reads.append(decode.count.value - before)
                        epochs.append(list(map(describe, samples)))
            equal = "yes" if all(epoch == epochs[0] for epoch in epochs) else "no"
            rates = [f"{len(epochs[0]) / seconds[epoch]:,.0f}" for epoch in (0, 3)]
            print(
                f"| {make.__name__} | {workers} | {reads[1:]} of {reads[0]} | {equal} | {rates[0]} | {rates[1]} |", flush=True
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="?", choices=["readers", "iterables"])
    if (of := parser.parse_args().of) is not None:
        {"readers": readers, "iterables": iterables}[of]()
        return
    dataset = Folder(COUNT)
    probed = [0, *np.linspace(0, COUNT - 1, 8).astype(int).tolist()]
    example = dataset[0]
    seconds: dict[str, list[float]] = {"loading the samples of the probe": [], "CachedDataset": [], "with example=": []}
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for idx in probed:
            dataset[idx]
        seconds["loading the samples of the probe"].append(time.perf_counter() - began)
        for name, options in (("CachedDataset", {}), ("with example=", {"example": example})):
            began = time.perf_counter()
            cached = CachedDataset(dataset, 1, **options)  # type: ignore[arg-type]
            seconds[name].append(time.perf_counter() - began)
            cached.close()
    print(f"| {COUNT:,} paths | median | largest |\n| --- | ---: | ---: |")
    for name, times in seconds.items():
        print(f"| {name} | {statistics.median(times) * 1e3:.1f} ms | {max(times) * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
