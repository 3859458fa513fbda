"""The time to wrap a dataset of a million paths, beyond the loading of the samples that are probed.

python -m benchmark wrapping
python -m benchmark wrapping readers      # readers of other formats, in random order, alone and wrapped; each if installed
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache import CachedDataset
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
    """Print the rate of each reader, alone and behind a filled cache."""
    print("| reader | samples/s | cached | equal |\n| --- | ---: | ---: | --- |")
    for make in READERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                dataset = make(Path(folder))
            except ImportError as error:
                print(f"| {make.__name__} | not installed: {error} | | |", flush=True)
                continue
            order, rates = random.Random(0).sample(range(len(dataset)), len(dataset)), []
            with CachedDataset(dataset, 1) as cached:
                for idx in order:
                    _ = cached[idx]
                for each in (dataset, cached):
                    began = time.perf_counter()
                    samples = [each[idx] for idx in order]
                    rates.append(f"{len(order) / (time.perf_counter() - began):,.0f}")
                    if each is dataset:
                        plain = list(map(describe, samples))
            equal = "yes" if plain == list(map(describe, samples)) else "no"
        print(f"| {make.__name__} | {rates[0]} | {rates[1]} | {equal} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="?", choices=["readers"])
    if parser.parse_args().of == "readers":
        readers()
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
