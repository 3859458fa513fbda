"""Flip single bits of a prepared folder, and read all of it each time: is each flip found, or harmless?

python -m benchmark damage [--flips 10000]

Found: some read is an error that names the file. Harmless: every sample and the info are as they were saved. A flip after which
a read gives anything else, or anything but an error of stocache is raised, ends the run.
"""

import argparse
import collections
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stocache import OnDiskBlockDataStorage, StorageError

CLAIM = "Each bit that is flipped in a prepared folder is found or harmless."

SAMPLES, BLOCK_SIZE = 60, 8
INFO = {"mean": torch.ones(3), "classes": ["a", "b"]}


def sample(idx: int) -> Any:
    """A sample that has a column of every kind."""
    return {
        "image": torch.full((3, 4), idx, dtype=torch.uint8),
        "ragged": np.full((2, idx % 4), idx, dtype=np.float32),
        "label": idx,
        "text": "ab" * (idx % 4),
        "tags": [str(n) for n in range(idx % 3)],
        "maybe": None if idx % 5 else 0.5,
        "numbers": list(range(idx % 6)),
    }


def same(a: Any, b: Any) -> bool:
    """Whether two samples are equal in type, dtype, shape and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def prepare(folder: str) -> None:
    """Save the samples."""
    with OnDiskBlockDataStorage[Any, Any](folder, BLOCK_SIZE) as storage:
        storage.start_preparation()
        for idx in range(SAMPLES):
            storage.save_sample(sample(idx))
        storage.finish_preparation(INFO)


def read(folder: str, name: str) -> str:
    """Read everything; return whether the damage in the file ``name`` was found, or harmless."""
    found = False
    with OnDiskBlockDataStorage[Any, Any](folder) as storage:
        for idx in range(-1, SAMPLES):
            try:
                got = storage.load_sample(idx) if idx >= 0 else storage.load_dataset_info()
            except StorageError as error:
                if name not in str(error):
                    raise
                found = True
            else:
                if not same(got, sample(idx) if idx >= 0 else INFO):
                    raise SystemExit(f"{name}: wrong sample {idx}: {got}")
    return "found" if found else "harmless"


def trials(flips: int, seed: int) -> collections.Counter[tuple[str, str]]:
    """Return the number of flips by file and result."""
    rng, counts = random.Random(seed), collections.Counter[tuple[str, str]]()
    folder = tempfile.mkdtemp(prefix="damage-")
    try:
        prepare(folder)
        files = {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        for _ in range(flips):
            path = rng.choices(list(files), [len(data) for data in files.values()])[0]
            data = bytearray(files[path])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            kind = "blocks" if path.parent.name == "blocks" else path.name
            counts[kind, read(folder, path.name)] += 1
            path.write_bytes(files[path])
        assert read(folder, "") == "harmless"
    finally:
        shutil.rmtree(folder)
    return counts


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = trials(arguments.flips, arguments.seed)
    print("| file | flips | found | harmless | wrong |\n| --- | ---: | ---: | ---: | ---: |")
    for kind in sorted({kind for kind, _ in counts}):
        found, harmless = counts[kind, "found"], counts[kind, "harmless"]
        print(f"| {kind} | {found + harmless} | {found} | {harmless} | 0 |")


if __name__ == "__main__":
    main()
