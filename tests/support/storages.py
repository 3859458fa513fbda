"""A storage that a user might write, and samples to fill any storage with."""

import collections
import datetime
import decimal
import fractions
import json
import pathlib
from pathlib import Path

import numpy as np
import pytest
import torch

from stocache import DataStorage
from stocache.storage.block import Block, encode
from stocache.storage.files import BytesFile
from tests.support.containers import Box, Point
from tests.support.equality import same
from tests.support.samples import Access, Annotated, Kind

N = 50


def file_of(values, allow_pickle=False):
    """The file of a block."""
    return b"".join(encode(values, 0, allow_pickle)[0])


def opened(data, allow_pickle=False):
    """The block of a file."""
    return Block(BytesFile(bytes(data)), "a block", allow_pickle)


def apart(data):
    """The header of a block, the facts in it, and the columns."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["stocache"]), bytearray(data[8 + length :])


class FilePerSample(DataStorage):
    """A storage that a user might write: each sample in a file of its own."""

    def __init__(self, folder):
        self.folder, self.count = Path(folder), 0

    def is_prepared(self):
        return (self.folder / "info").exists()

    def start_preparation(self):
        self.folder.mkdir()

    def save_sample(self, sample):
        torch.save(sample, self.folder / str(self.count))
        self.count += 1

    def finish_preparation(self, info):
        torch.save(info, self.folder / "info")

    def load_dataset_info(self):
        return torch.load(self.folder / "info", weights_only=False)

    def load_sample(self, idx):
        return torch.load(self.folder / str(idx), weights_only=False)


def sample(idx):
    return {
        "image": torch.full((3, 4), idx, dtype=torch.uint8), "box": Box(np.arange(idx % 3), idx), "text": "ab" * (idx % 4),
        "tags": [str(n) for n in range(idx % 3)], "maybe": None if idx % 5 else 0.5,
    }  # fmt: skip


def save(storage, count=N, info=None, sample=sample):
    """Prepare a storage, and return it; the samples are what a function makes of their index."""
    storage.start_preparation()
    for idx in range(count):
        storage.save_sample(sample(idx))
    storage.finish_preparation(info)
    return storage


def files_of(storage):
    return sorted(path for path in Path(storage.base_folder).rglob("*") if path.is_file())


def read(storage, order=range(N)):
    """Whether the samples of a storage are the samples that `save` saved."""
    return all(same(storage.load_sample(idx), sample(idx)) for idx in order)


def pixels(idx, *shape):
    return np.random.default_rng(idx).integers(0, 256, shape, dtype=np.uint8)


def picture(idx, *shape):
    images = pytest.importorskip("PIL.Image", reason="the samples are images")
    return images.fromarray(pixels(idx, *shape))


def boxes(idx):
    value = torch.from_numpy(pixels(idx, idx % 4, 4)).float().as_subclass(Annotated)
    value.canvas_size, value.space = (idx, 5), "xy" * (idx % 3)
    return value


COPIED = {
    "bytes": lambda idx: bytes([idx]) * (300 * (idx % 5)),
    "text": lambda idx: "\udc80" * (idx % 2) + "ä" * (40 * idx),
    "encoded images": lambda idx: {"jpeg": pixels(idx, 900 + idx).tobytes(), "label": idx},
    "tokens": lambda idx: {"input_ids": [idx + n for n in range(3 + idx)], "mask": tuple([idx % 2 == 0] * 5), "score": idx / 7},
    "numbers, at times none": lambda idx: (list(range(idx % 3)), 1j * idx, 2**70 + idx),
    "tensors": lambda idx: {"image": torch.from_numpy(pixels(idx, 3, 4 + idx % 6, 5)), "boxes": torch.zeros(idx % 3, 4)},
    "permuted tensors": lambda idx: torch.from_numpy(pixels(idx, 4 + idx % 6, 5, 3)).permute(2, 0, 1),
    "arrays": lambda idx: (pixels(idx, 2, idx % 4).astype(">i4"), np.zeros((idx, 0), "f4"), np.array(["ab"] * idx, "<U2")),
    "records of numpy": lambda idx: np.array([(idx, "é")] * (idx % 3), np.dtype([("a", "<i2"), ("b", "<U2")])),
    "scalars": lambda idx: {"a": np.float32(idx), "b": np.str_("x" * 3), "c": np.datetime64(idx, "D")},
    "nested": lambda idx: {"a": Point({"b": {"c": "x" * idx}}, (idx, "y")), 3: {Kind.BOX: Box(np.arange(idx % 3), idx)}},
    "optional parts": lambda idx: {"maybe": None if idx % 2 else "x" * idx, "value": idx if idx % 3 else [1.5] * idx},
    "other types": lambda idx: [
        collections.OrderedDict(day=datetime.date(2026, 1, 1 + idx), path=pathlib.PurePosixPath(f"a/{idx}"), kind=Kind.BOX),
        decimal.Decimal(idx) / 4, fractions.Fraction(idx, 3), Access(idx % 8), range(idx),
    ],
    "tensors with attributes": lambda idx: {"boxes": boxes(idx), "label": idx},
    "made containers": lambda idx: {
        "image": picture(idx, 4 + idx % 5, 7, 3), "size": torch.Size([idx, 2]), "text": "x" * idx,
    },
    "little": lambda idx: ({}, None, b"" if idx else b"x"),
}  # fmt: skip
"""Samples of varying size, of all kinds whose records are copied from blocks: functions of their index."""

STRUCTURES = {
    "lists of texts": lambda idx: ["x" * n for n in range(idx % 5)],
    "lists of tensors": lambda idx: {"points": [torch.full((n,), idx) for n in range(1 + idx % 4)], "text": "x" * idx},
    "a structure each": lambda idx: {f"key {idx}": bytes(idx)},
    "one of two": lambda idx: torch.full((3,), idx) if idx % 2 else "x",
}
"""Samples that vary in their structure."""
ROWS = {
    "image and label": lambda idx: {"image": torch.from_numpy(pixels(idx, 3, 5, 4)), "label": idx},
    "all alignments": lambda idx: (
        idx % 2 == 0, np.float32(idx), idx, torch.full((3,), idx, dtype=torch.int16), 1j * idx, [0.5 * idx, 2.0],
        np.full(2, idx, "f8"),
    ),
    "permuted": lambda idx: torch.from_numpy(pixels(idx, 4, 5, 3)).permute(2, 0, 1),
    "text of one length": lambda idx: f"{idx:4}",
    "nothing": lambda idx: (torch.zeros(0, 2), {}),
}  # fmt: skip
"""Samples of one structure."""
