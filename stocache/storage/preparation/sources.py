"""Open images, tables, arrays and datasets on disk as map-style datasets, to prepare from."""

import csv
import io
import logging
import os
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stocache.errors import LimitError, StorageError
from stocache.samples.indices import check_indices
from stocache.storage.files import File
from stocache.storage.preparation.source import DataPreparer, InOrder, Source, check_columns, import_library, reading

logger = logging.getLogger("stocache")

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision's ImageFolder
_ACCEPTED = (
    "a folder of images, with or without a subfolder for each class; a .csv, .tsv, .npy or .parquet file; a folder of .parquet "
    "files; a folder that save_to_disk of Hugging Face datasets has written"
)


def open_source(path: str | os.PathLike[str], *, size: int | None = None, hashes: bool = False, nan: bool = False) -> Source:
    """Open a file or folder as a map-style dataset.

    Args:
        path: one of
            a folder of images, with or without a subfolder for each class. Samples: {"image": bytes of the file, "name": its
            path in the folder, "label": index of its class}; without "label" if there are no classes.
            a .csv or .tsv file in UTF-8 whose first line names the columns. Samples: a dict of the columns, see `CsvFile`.
            a .npy file. Samples: the rows of its array.
            a .parquet file, or a folder of them (needs pyarrow). Samples: a dict of the columns.
            a folder that ``save_to_disk`` of Hugging Face datasets has written (needs datasets). Samples: as in that dataset.
        size: decode images to uint8 tensors of shape (3, size, size) (needs Pillow).
        nan: blank cells of a table are NaN where all other cells of their column are numbers; the column is then float. Without
            it such a column is str, and a warning says so.
        hashes: `prepare` identifies the source by the contents of its files, not by sizes and times of change.

    Raises:
        StorageError: the path is not one of these, holds no samples, or cannot be read; or a library is missing.
        LimitError: ``size`` is not a number of pixels.
    """
    path = os.fspath(path)
    if size is not None and (type(size) is not int or size < 1):
        raise LimitError(f"size={size!r} is not the size of an image. Use 1 or more pixels.")
    source = _open(path, size, nan)
    source.hashes = hashes
    if size is not None and not isinstance(source, ImageFolder):
        raise StorageError(f"{path} is not a folder of images, and size={size} is for images. Leave it out.")
    if not len(source):
        raise StorageError(f"{path} holds no samples. Accepted: {_ACCEPTED}.")
    return source


def _open(path: str, size: int | None, nan: bool) -> Source:
    if not os.path.exists(path):
        raise StorageError(f"{path} does not exist. Accepted: {_ACCEPTED}.")
    if os.path.isdir(path):
        with reading(path, "a folder"):
            names = sorted(os.listdir(path))
        if "dataset_dict.json" in names:
            splits = [name for name in names if os.path.exists(os.path.join(path, name, "state.json"))]
            raise StorageError(f"{path} holds several datasets. Give one of them: {path}/ and one of {', '.join(splits)}.")
        if {"state.json", "dataset_info.json"} <= set(names):
            return SavedDataset(path)
        parquet = [os.path.join(path, name) for name in names if name.endswith(".parquet") and name[0] not in "._"]
        return ParquetFiles(parquet) if parquet else ImageFolder(path, size)
    suffix = os.path.splitext(path)[1].lower()
    if suffix in (".csv", ".tsv"):
        return CsvFile(path, nan)
    if suffix == ".npy":
        return NpyFile(path)
    if suffix == ".parquet":
        return ParquetFiles([path])
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


_KINDS: list[tuple[Any, Any]] = [
    (int, re.compile(r"-?(0|[1-9][0-9]*)\Z")),
    (float, re.compile(r"-?(((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf)\Z", re.IGNORECASE)),
    (str, re.compile("")),
]


class CsvFile(Source):
    """The rows of a table. Columns with numbers only are int or float, the others str.

    A column with an empty cell is str; or float, with NaN there, if its other cells are numbers and ``nan`` is True.
    A column with a number such as 007 or +49, which would not come back as written, is str.
    Quoted cells may hold line breaks. Opening reads the file once, and keeps 8 bytes for each row in memory: its offset.
    """

    def __init__(self, path: str, nan: bool = False) -> None:
        super().__init__(path)
        self._nan, self.options = nan, {"blank cells": "NaN" if nan else "str"}
        self._format: dict[str, Any] = {"delimiter": "\t" if path.lower().endswith(".tsv") else ",", "strict": True}
        self._begins = array("q")
        with reading(path, "a table"), open(path, "rb") as file, _long_cells():
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            rows = csv.reader((line.decode() for line in file), **self._format)  # it reads only the lines of the current row
            columns = next(rows, [])
            check_columns(columns)
            kinds, blanks, begin = [0] * len(columns), [0] * len(columns), file.tell()
            try:
                for row in rows:
                    if row:  # not a blank line
                        self._begins.append(begin)
                        for number, cell in enumerate(_check_row(row, columns)):
                            blanks[number] += not cell
                            while cell and not _KINDS[kinds[number]][1].match(cell):
                                kinds[number] += 1
                    begin = file.tell()
            except (csv.Error, ValueError) as error:
                raise ValueError(f"line {rows.line_num}: {error}") from error
            self._begins.append(begin)
        self._columns = dict(zip(columns, map(self._kind, columns, kinds, blanks), strict=True))
        self.info = {"columns": columns}

    def _kind(self, name: str, kind: int, blanks: int) -> Any:
        """Return how the cells of a column are read."""
        if not blanks:
            return _KINDS[kind][0]
        if _KINDS[kind][0] is str or blanks == len(self):
            return str
        if self._nan:
            return _float_or_nan
        logger.warning(
            "%s: the column %r holds numbers and blank cells (%d of %d), so it is str. With nan=True, --nan, these are NaN.",
            self._path, name, blanks, len(self),
        )  # fmt: skip
        return str

    def __len__(self) -> int:
        return len(self._begins) - 1

    def _sample(self, idx: int) -> dict[str, Any]:
        with reading(self._path, "a table"), _long_cells():
            if self._opened is None:
                self._opened = File(self._path)
            begin, end = self._begins[idx : idx + 2]
            text = str(self._opened.read(begin, end - begin)[0], "utf-8")
            row = next(csv.reader(io.StringIO(text, newline=""), **self._format))
            cells = zip(self._columns.items(), _check_row(row, list(self._columns)), strict=True)
            return {name: kind(cell) for (name, kind), cell in cells}


def _float_or_nan(cell: str) -> float:
    return float(cell or "nan")


def _check_row(row: list[str], columns: Sequence[str]) -> list[str]:
    if len(row) != len(columns):
        raise ValueError(f"{len(row)} cells, in a table of {len(columns)} columns")
    return row


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let the csv module read cells of more than 128 KiB."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


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


class ParquetFiles(Source):
    """The rows of Parquet files, one file after the other.

    A process keeps the row group that it has read last. So reading in order, or many rows at once, is fast; a row of another
    row group costs reading that row group.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths[0])
        parquet = import_library("pyarrow.parquet", "pyarrow")
        self._groups: list[tuple[str, Any, int]] = []  # of each row group: its file, that file's metadata, its number there
        rows = []
        for path in paths:
            with reading(path, "parquet"):
                footer = parquet.read_metadata(path)
                columns = footer.schema.to_arrow_schema().names
                check_columns(columns)
                if path == paths[0]:
                    self.info = {"columns": columns}
                elif columns != self.info["columns"]:
                    raise ValueError(f"its columns are {columns}, those of {paths[0]} are {self.info['columns']}")
            self._groups += [(path, footer, number) for number in range(footer.num_row_groups)]
            rows += [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        self._ends = np.cumsum([0, *rows])[1:]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def for_shuffling(self) -> DataPreparer[Any, Any]:
        """Return a preparer that reads in order: random access would read a row group for each row."""
        return InOrder(self)

    def files(self) -> list[str]:
        """Return the paths of the files."""
        return list(dict.fromkeys(path for path, _, _ in self._groups))

    def describe_sample(self, idx: int) -> str:
        """Return the file of a row, and its number in it."""
        group = int(np.searchsorted(self._ends, idx, side="right"))
        path = self._groups[group][0]
        first = next(number for number, (other, _, _) in enumerate(self._groups) if other == path)
        return f"{path}, row {idx - (int(self._ends[first - 1]) if first else 0)}"

    def _sample(self, idx: int) -> Any:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples; reads each row group once."""
        wanted = check_indices(indices, len(self), "__getitems__")
        groups = np.searchsorted(self._ends, wanted, side="right")
        samples: dict[int, Any] = {}
        for group in np.unique(groups).tolist():
            table, positions = self._table(group), np.flatnonzero(groups == group)
            rows = wanted[positions] - (self._ends[group] - table.num_rows)
            in_order = (np.diff(rows) == 1).all()
            table = table.slice(rows[0], len(rows)) if in_order else table.take(rows)  # take is four times as slow
            samples.update(zip(positions.tolist(), table.to_pylist(), strict=True))
        return [samples[position] for position in range(len(wanted))]

    def _table(self, group: int) -> Any:
        if self._opened is None or self._opened[0] != group:
            self._opened = None  # free its memory before the next one is read
            path, footer, number = self._groups[group]
            with reading(path, "parquet"):
                with import_library("pyarrow.parquet", "pyarrow").ParquetFile(path, metadata=footer) as file:
                    self._opened = group, file.read_row_group(number, use_threads=False)  # worker processes run in parallel
        return self._opened[1]


class SavedDataset(Source):
    """A Hugging Face dataset that was saved to disk. Images, audio and video stay encoded: {"bytes": ..., "path": ...}."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        library = import_library("datasets", "datasets")
        with reading(path, "a Hugging Face dataset"):
            self._dataset = library.load_from_disk(path)
            for name, feature in self._dataset.features.items():
                if getattr(feature, "decode", False):
                    self._dataset = self._dataset.cast_column(name, replace(feature, decode=False))
            self.info = {"columns": self._dataset.column_names, "features": self._dataset.features.to_dict()}

    def __len__(self) -> int:
        return len(self._dataset)

    def files(self) -> list[str]:
        """Return the paths of the files in the folder."""
        return sorted(entry.path for entry in os.scandir(self._path) if entry.is_file())

    def _sample(self, idx: int) -> Any:
        return self._dataset[idx]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, read together."""
        return list(self._dataset.__getitems__(list(indices)))
