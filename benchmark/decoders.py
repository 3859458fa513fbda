"""Samples that are drawn before they are read: pairs, mosaics, windows, from files, bytes and archives."""

import io
import random
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmark.support.harness import Run, experiment
from benchmark.support.measuring import epoch_s
from stocache import CachedDataset

CLAIM = "Samples that are drawn before they are read come from decoded files in memory."

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
    "scales, Pillow": (scaled, "pair"), "pair, OpenCV": (opencv, "pair"),
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


def sixth_pass_s(dataset: Any) -> float:
    """Return the seconds of a sample in the sixth pass, in which all is in memory."""
    return [epoch_s(dataset[idx] for idx in range(N)) / N for _ in range(6)][-1]


def served_pass_s(dataset: Any) -> float:
    """Return the same with decoders. While one dataset is served, all are."""
    with CachedDataset(dataset, 1) as served:
        return sixth_pass_s(served)


@experiment(rounds=9, needs="PIL cv2 lmdb soundfile")
def cases(run: Run) -> None:
    """Milliseconds of a sample: plain, and with what decoders return from memory."""
    torch.set_num_threads(1)
    table = run.table("case", "plain, ms", "decoders, ms", "times as fast")
    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder))
        for name, (read, kind) in run.chosen(dict(list(CASES.items())[:: run.size(1, 5)])).items():
            dataset = Drawn(paths, read, kind)
            ways = {"plain": partial(sixth_pass_s, dataset), "decoders": partial(served_pass_s, dataset)}
            took = run.turns(ways, warm_up=0)
            table.row(name, *(1e3 * took.median(way) for way in took), took.ratio("plain", "decoders"))
    run.claim("samples come 1.6 times as fast", min(table.column("times as fast")), least=1.6)
