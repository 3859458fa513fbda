"""Open images, tables, arrays and datasets on disk as map-style datasets, to prepare from."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.errors import LimitError, StorageError
from stocache.storage.preparation.source import Source, import_library, reading

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's ImageFolder
_ACCEPTED = (
    "a folder of images, with or without a subfolder for each class; a .csv, .tsv, .json, .jsonl, .npy or .parquet file; a "
    "folder of .parquet files; a folder that save_to_disk of Hugging Face datasets has written"
)
_CSV = {"keep_default_na": False, "index_col": False, "chunksize": 1 << 20}
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("from_csv", _CSV), ".tsv": ("from_csv", _CSV | {"sep": "\t"}), ".json": ("from_json", {}),
    ".jsonl": ("from_json", {}), ".parquet": ("from_parquet", {"batch_size": 1000}),  # by default 0 if a file is empty
}  # fmt: skip
"""How the library reads a table: a method of its ``Dataset``, and options, by the suffix of the file."""


def open_source(path: str | os.PathLike[str], *, size: int | None = None, hashes: bool = False) -> Source:
    """Open a file or folder as a map-style dataset.

    Args:
        path: one of
            a folder of images, with or without a subfolder for each class. Samples: {"image": bytes of the file, "name": its
            path in the folder, "label": index of its class}; without "label" if there are no classes.
            a .npy file. Samples: the rows of its array.
            a .csv or .tsv file whose first line names the columns, a .json, .jsonl or .parquet file, a folder of .parquet
            files, or a folder that ``save_to_disk`` of Hugging Face datasets has written (all need ``pip install datasets``).
            Samples: a dict of the columns, as that library reads them. Images, audio and video stay encoded. A column of a
            .csv file is numeric if all its cells are numbers; a blank cell is an empty str.
        size: decode images to uint8 tensors of shape (3, size, size) (needs Pillow).
        hashes: `prepare` identifies the source by the contents of its files, not by sizes and times of change.

    Raises:
        StorageError: the path is not one of these, holds no samples, or cannot be read; or a library is missing.
        LimitError: ``size`` is not a number of pixels.
    """
    path = os.fspath(path)
    if size is not None and (type(size) is not int or size < 1):
        raise LimitError(f"size={size!r} is not the size of an image. Use 1 or more pixels.")
    source = _open(path, size)
    source.hashes = hashes
    if size is not None and not isinstance(source, ImageFolder):
        raise StorageError(f"{path} is not a folder of images, and size={size} is for images. Leave it out.")
    if not len(source):
        raise StorageError(f"{path} holds no samples. Accepted: {_ACCEPTED}.")
    return source


def _open(path: str, size: int | None) -> Source:
    if not os.path.exists(path):
        raise StorageError(f"{path} does not exist. Accepted: {_ACCEPTED}.")
    if os.path.isdir(path):
        with reading(path, "a folder"):
            names = sorted(os.listdir(path))
        if "dataset_dict.json" in names:
            splits = [name for name in names if os.path.exists(os.path.join(path, name, "state.json"))]
            raise StorageError(f"{path} holds several datasets. Give one of them: {path}/ and one of {', '.join(splits)}.")
        if {"state.json", "dataset_info.json"} <= set(names):
            return Table(path)
        parquet = [os.path.join(path, name) for name in names if name.endswith(".parquet") and name[0] not in "._"]
        return Table(path, parquet) if parquet else ImageFolder(path, size)
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".npy":
        return NpyFile(path)
    if suffix in _TABLES:
        return Table(path, [path])
    raise StorageError(f"{path} is not a file that can be prepared. Accepted: {_ACCEPTED}.")


class ImageFolder(Source):
    """The images of a folder, sorted by class and path. Hidden files are left out. Without ``size``, no file is decoded."""

    def __init__(self, path: str, size: int | None = None) -> None:
        super().__init__(path)
        self._size, self.options = size, {"size of images": size}
        if size is not None:
            import_library("PIL", "'stocache[bench]'")
        with reading(path, "a folder of images"):
            found = list(_walk(path))
        if not found:
            raise StorageError(f"{path} holds no images ({', '.join(IMAGES)}). Accepted: {_ACCEPTED}.")
        self._names = ["/".join(parts) for parts in sorted(found)]
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        loose = [parts[0] for parts in found if len(parts) == 1]
        if classes and loose:
            raise StorageError(
                f"{path} holds images, such as {loose[0]!r}, beside the folder {classes[0]!r}. Put all images into subfolders, "
                f"one for each class, or none."
            )
        if missing := sorted(set(classes) - {parts[0] for parts in found}):
            raise StorageError(f"{path}: the folder {missing[0]!r} would be a class, but holds no images. Remove it.")
        self._labels = {name: label for label, name in enumerate(classes)}
        self.info = {"classes": classes}

    def __len__(self) -> int:
        return len(self._names)

    def _sample(self, idx: int) -> dict[str, Any]:
        name = self._names[idx]
        sample = {"image": self._image(os.path.join(self._path, name)), "name": _readable(name)}
        return sample | {"label": self._labels[name.partition("/")[0]]} if self._labels else sample

    def describe_sample(self, idx: int) -> str:
        """Return the path of an image."""
        return _readable(os.path.join(self._path, self._names[idx]))

    def files(self) -> list[str]:
        """Return the paths of the images."""
        return [os.path.join(self._path, name) for name in self._names]

    def _image(self, path: str) -> Any:
        with reading(path, "an image"):
            if self._size is not None:
                return load_jpeg(Path(path), self._size)
            data = Path(path).read_bytes()
            if not data:
                raise ValueError("it is empty")
            return data


def load_jpeg(path: Path, size: int) -> Tensor:
    """Return a photo as a uint8 tensor of shape (3, size, size), from a file of any format that Pillow reads."""
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _readable(name: str) -> str:
    """Return the name of a file as text, also if it is not in UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _walk(path: str) -> Iterator[list[str]]:
    """Yield the path of each image under a folder, as a list of names."""
    seen = set()  # folders: a link may lead to one that it lies in
    for folder, folders, files in os.walk(path, onerror=_raise, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders[:] = []
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        above = os.path.relpath(folder, path).split(os.sep) if folder != path else []
        yield from ([*above, name] for name in files if name.lower().endswith(IMAGES) and not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


class NpyFile(Source):
    """The rows of an array, along its first dimension. Each is a copy; the file is mapped into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if not self._array.ndim:
            raise StorageError(f"{path} holds one value without dimensions. Give an array with a row for each sample.")

    def __len__(self) -> int:
        return len(self._array)

    def _sample(self, idx: int) -> Any:
        return self._array[idx].copy()

    @property
    def _array(self) -> Any:
        if self._opened is None:
            with reading(self._path, "an array"):
                self._opened = np.load(self._path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        return self._opened


class Table(Source):
    """The rows of a dataset that the library Hugging Face datasets reads: of a table, or of a folder that it has saved.

    A process opens the dataset when the process first reads a row. The library converts a table to Arrow files in its cache.

    Args:
        path: of the table, or of the folder.
        paths: the files of the table; none for a folder that was saved.
    """

    def __init__(self, path: str, paths: Sequence[str] = ()) -> None:
        super().__init__(path)
        self._paths = list(paths)
        self.info = {"columns": self._dataset.column_names, "features": self._dataset.features.to_dict()}
        self._len = len(self._dataset)

    def __len__(self) -> int:
        return self._len

    @property
    def _dataset(self) -> Any:
        if self._opened is None:
            library = import_library("datasets", "datasets")
            with reading(self._path, "a table" if self._paths else "a Hugging Face dataset"):
                self._opened = self._open(library)
                for name, feature in self._opened.features.items():
                    if getattr(feature, "decode", False):
                        self._opened = self._opened.cast_column(name, replace(feature, decode=False))
        return self._opened

    def _open(self, library: Any) -> Any:
        if not self._paths:
            return library.load_from_disk(self._path)
        read, options = _TABLES[os.path.splitext(self._paths[0])[1].lower()]
        return getattr(library.Dataset, read)(self._paths, **options)

    def files(self) -> list[str]:
        """Return the paths of the files of the table, or of the files in the folder."""
        return self._paths or sorted(entry.path for entry in os.scandir(self._path) if entry.is_file())

    def _sample(self, idx: int) -> Any:
        return self._dataset[idx]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, read together."""
        return list(self._dataset.__getitems__(list(indices)))
