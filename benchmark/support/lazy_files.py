"""More kinds of datasets that open their file at the first sample, beside those of tests/programs."""

# ruff: noqa: D102  # methods of the base class

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from tests.programs import lazy_files
from tests.programs.lazy_files import COUNT, Lazy, MemmapRows, decode, pictures, png


class TarDataset(Lazy):  # type: ignore[misc]
    """Images of a tar file, with their names."""

    def open(self) -> tarfile.TarFile:
        return tarfile.open(self.path)

    def find_keys(self, file: tarfile.TarFile) -> list[str]:
        return sorted(file.getnames())

    def read(self, key: str) -> Any:
        return torch.from_numpy(decode(self.file.extractfile(key).read())), key

    @staticmethod
    def make(path: Path, count: int = COUNT) -> None:
        with tarfile.open(path, "w") as file:
            for idx in range(count):
                info = tarfile.TarInfo(f"{idx:04d}.png")
                info.size = len(data := png(idx))
                file.addfile(info, BytesIO(data))


class RecordDataset(Lazy):  # type: ignore[misc]
    """Records of one size in a file, found by seeking."""

    def open(self) -> BinaryIO:
        return open(self.path, "rb")

    def find_keys(self, file: BinaryIO) -> range:
        return range(0, self.path.stat().st_size, 16 * 16 * 3)

    def read(self, key: int) -> torch.Tensor:
        self.file.seek(key)
        return torch.frombuffer(bytearray(self.file.read(16 * 16 * 3)), dtype=torch.uint8).view(16, 16, 3).float() / 255

    @staticmethod
    def make(path: Path, count: int = COUNT) -> None:
        path.write_bytes(pictures(count).tobytes())


class MemmapDataset(MemmapRows):  # type: ignore[misc]
    """Rows of a memmap, copied, with their numbers."""

    def read(self, key: int) -> Any:
        return torch.from_numpy(self.file[key].astype(np.float32)), key


KINDS = lazy_files.KINDS | {
    "tar": (TarDataset, "data.tar"),
    "raw": (RecordDataset, "data.bin"),
    "memmap": (MemmapDataset, "data.npy"),
}
