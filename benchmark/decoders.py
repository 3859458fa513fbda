"""Samples that are drawn before they are read: pairs, mosaics, windows, from files, bytes and archives; results and times.

    python -m benchmark decoders [--quick]

A sample or generator is wrong if it differs from that of the dataset without a cache, in three epochs of each loader. "by
hand" is the same dataset with `stocache.cached` around the function that reads a file.
"""

import argparse
import contextlib
import io
import logging
import operator
import os
import random
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache import CachedDataset, cached
from tests.support.epochs import LOADERS, epochs

CLAIM = "Samples that are drawn before they are read decode each file once, and stay the same."
NEEDS = (("cv2", '-e ".[test]"'), ("lmdb", '-e ".[test]"'), ("soundfile", '-e ".[test]"'))

N, SIDE, FRAMES = 24, 480, 40


def pillow(path: str) -> Any:
    """Read a picture with Pillow."""
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def pillow_of_bytes(path: str) -> Any:
    """Read a picture of bytes, as from LMDB."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB"))


def pillow_of_zip(path: str) -> Any:
    """Read a picture in an archive."""
    from PIL import Image

    with zipfile.ZipFile(Path(path).with_name("all.zip")) as archive, archive.open(Path(path).name) as file:
        return np.asarray(Image.open(file).convert("RGB"))


def opencv(path: str) -> Any:
    """Read a picture with OpenCV."""
    import cv2

    return cv2.imread(path)


def sound(path: str) -> Any:
    """Read a wave."""
    import soundfile

    return soundfile.read(Path(path).with_suffix(".flac"), dtype="float32")[0]


def lmdb_image(path: str) -> Any:
    """Read a picture in LMDB."""
    import cv2
    import lmdb

    with lmdb.open(str(Path(path).with_name("lmdb")), readonly=True, lock=False) as opened, opened.begin() as transaction:
        return cv2.imdecode(np.frombuffer(transaction.get(Path(path).name.encode()), np.uint8), 1)


def scaled(path: str) -> Any:
    """Read a picture with Pillow at one of three scales."""
    from PIL import Image

    picture = Image.open(path)
    picture.draft("RGB", random.choice([(640, 480), (320, 240), (160, 120)]))
    return np.asarray(picture.convert("RGB").resize((320, 240)))


def frame(path: str) -> Any:
    """Read a random frame, of which each is a member of an archive."""
    return np.load(Path(path).with_name("frames.npz"))[str(random.randrange(FRAMES))]


def archive(path: str) -> Any:
    """Read an array of a compressed archive."""
    return np.load(Path(path).with_suffix(".npz"))["picture"]


class Drawn(Dataset[Any]):
    """Samples of a kind, read by a function."""

    def __init__(self, paths: list[str], read: Callable[[str], Any], kind: str) -> None:
        self.paths, self.read, self.kind = paths, read, kind

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        return getattr(self, self.kind)(), idx

    def one(self) -> Any:
        """Return a random file."""
        return self.read(random.choice(self.paths))

    def pair(self) -> Any:
        """Return two random files, mixed."""
        return torch.from_numpy(self.one()[:224].astype(np.float32) * random.random() + self.one()[:224])

    def mosaic(self) -> Any:
        """Return four random files side by side."""
        return torch.from_numpy(np.concatenate([self.one()[::2] for _ in range(4)]))

    def window(self) -> Any:
        """Return a random window of a random file, changed in place."""
        found = self.one()
        found = found if found.flags.writeable else found.copy()
        found *= found.dtype.type(2)
        begin = random.randrange(len(found) // 2)
        return torch.from_numpy(found[begin : begin + 100].copy())


CASES = {
    "pair, Pillow": (pillow, "pair"), "mosaic, Pillow": (pillow, "mosaic"), "window, Pillow": (pillow, "window"),
    "pair, bytes": (pillow_of_bytes, "pair"), "pair, zip": (pillow_of_zip, "pair"), "pair, LMDB": (lmdb_image, "pair"),
    "scales, Pillow": (scaled, "pair"), "rewritten, OpenCV": (opencv, "pair"), "pair, OpenCV": (opencv, "pair"),
    "mosaic, OpenCV": (opencv, "mosaic"), "window, OpenCV": (opencv, "window"), "window, FLAC": (sound, "window"),
    "pair, npz": (archive, "pair"), "window, npz": (archive, "window"), "frame, npz": (frame, "pair"),
}  # fmt: skip


def files(folder: Path) -> list[str]:
    """Make the files, and return the paths of the pictures."""
    import lmdb
    import soundfile
    from PIL import Image

    rng, paths = np.random.default_rng(0), [str(folder / f"{number}.jpg") for number in range(N)]
    for path in paths:
        small = Image.fromarray(rng.integers(0, 256, (SIDE // 4, SIDE // 3, 3), np.uint8))
        small.resize((SIDE * 4 // 3, SIDE)).save(path, quality=92)
        soundfile.write(Path(path).with_suffix(".flac"), rng.normal(0, 0.1, 160_000), 16_000)
        np.savez_compressed(Path(path).with_suffix(".npz"), picture=pillow(path))
    np.savez_compressed(folder / "frames.npz", **{str(n): np.roll(pillow(paths[n % N]), n, 0) for n in range(FRAMES)})
    with lmdb.open(str(folder / "lmdb"), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for path in paths:
            transaction.put(Path(path).name.encode(), Path(path).read_bytes())
    with zipfile.ZipFile(folder / "all.zip", "w") as made:
        for path in paths:
            made.write(path, Path(path).name)
    return paths


def rewrite(dataset: Any, inner: Any, epoch: int) -> None:
    """Give the files the contents of others, of equal times; after three epochs all have their own again."""
    paths, moved = inner.paths, [Path(path).read_bytes() for path in inner.paths]
    for number, path in enumerate(paths):
        times = os.stat(path)
        Path(path).write_bytes(moved[(number + (1, 1, -2)[epoch]) % N])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def per_sample(dataset: Any) -> float:
    """Return the seconds of a sample."""
    began = time.perf_counter()
    for idx in range(N):
        dataset[idx]
    return (time.perf_counter() - began) / N


def row(name: str, paths: list[str], loaders: list[str], rounds: int) -> str:
    """Return what becomes of a case."""
    read, kind = CASES[name]
    change = rewrite if "rewritten" in name else None
    plain, wrong, text = Drawn(paths, read, kind), 0, ""
    for loader in loaders:
        expected = epochs(plain, loader, inner=plain, change=change)
        with CachedDataset(Drawn(paths, read, kind), 1) as served:
            found = epochs(served, loader, inner=plain, change=change)
            text = text or served.stats().decoders.removeprefix("decoders: ").removesuffix(" from memory")
        for one, other in zip(found, expected, strict=True):
            wrong += sum(map(operator.ne, map(repr, one.samples), map(repr, other.samples)))
            wrong += repr(one.generators) != repr(other.generators)
    times = []
    for _ in range(rounds):  # while a dataset is served, all are
        times.append([per_sample(plain)])
        by_hand = cached("1GB")(read)
        for dataset in (CachedDataset(Drawn(paths, read, kind), 1), Drawn(paths, by_hand, kind)):
            with contextlib.closing(dataset) if isinstance(dataset, CachedDataset) else contextlib.nullcontext():
                times[-1].append([per_sample(dataset) for _ in range(6)][-1])
        by_hand.close()
    without, with_decoders, hand = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
    return f"| {name} | {wrong} | {text} | {without:.2f} | {with_decoders:.2f} | {without / with_decoders:.1f} | {hand:.2f} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    logging.getLogger("stocache").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    loaders = [name for name in LOADERS if "thread" not in name]  # which draw in no order
    print("| case | wrong | from memory, first loader | plain, ms | decoders, ms | times as fast | by hand, ms |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        for name in CASES:
            print(row(name, paths, loaders[:2] if options.quick else loaders, 3 if options.quick else 9), flush=True)


if __name__ == "__main__":
    main()
