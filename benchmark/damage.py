"""Flip single bits of a prepared folder, and read all of it each time.

Found: a read is an error that names the file. Harmless: every sample and the info are unchanged since they were saved.
"""

import functools
import random
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.support.faults import trials
from benchmark.support.harness import Run, experiment
from stocache import OnDiskBlockDataStorage, StorageError
from tests.support.disks import flip
from tests.support.equality import same
from tests.support.storages import sample, save

CLAIM = "Each bit that is flipped in a prepared folder is found or harmless."

SAMPLES = 60
FILES = "blocks/*", "index.json", "info.safetensors"
INFO = {"mean": torch.ones(3), "classes": ["a", "b"]}


@functools.cache
def prepared() -> tuple[tempfile.TemporaryDirectory[str], dict[Path, bytes]]:
    """Return a folder of the samples, and its files."""
    folder = tempfile.TemporaryDirectory(prefix="damage-")
    save(OnDiskBlockDataStorage[Any, Any](folder.name, 8), SAMPLES, INFO).close()
    return folder, {path: path.read_bytes() for path in sorted(Path(folder.name).rglob("*")) if path.is_file()}


def flip_bit(pattern: str, seed: int) -> Counter[str]:
    """Flip one bit of a file, and read everything; return whether that was found, or harmless."""
    rng, (folder, files) = random.Random(seed), prepared()
    path = rng.choice(sorted(Path(folder.name).glob(pattern)))
    path.write_bytes(flip(rng, files[path]))
    named = list[bool]()
    try:
        with OnDiskBlockDataStorage[Any, Any](folder.name) as storage:
            for idx in range(-1, SAMPLES):
                try:
                    got = storage.load_dataset_info() if idx < 0 else storage.load_sample(idx)
                except StorageError as error:
                    named.append(path.name in str(error))
                else:
                    assert same(got, INFO if idx < 0 else sample(idx)), f"sample {idx} is wrong: {got}"
    finally:
        path.write_bytes(files[path])
    assert all(named), f"an error does not name {path.name}"
    return Counter(found=bool(named), harmless=not named)


@experiment(rounds=3333, quick=30)
def flips(run: Run) -> None:
    """Flip single bits of the blocks, of the index and of the info."""
    trials(run, {pattern: partial(flip_bit, pattern) for pattern in FILES})
