"""What samples are prepared from: a `DataPreparer` yields them, a `Source` has the samples of files by index."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic

import xxhash
from torch.utils.data import Dataset

from stocache.errors import StorageError
from stocache.samples.indices import check_index
from stocache.storage.storage import TInfo, TSample

_HASHED_AT_ONCE = 1 << 22  # bytes


class DataPreparer(ABC, Generic[TSample, TInfo]):
    """Makes the samples of a dataset, once, for a `DataStorage`. All preprocessing that is not random belongs here.

    Source: the article on block storage in PyTorch Lightning; names and contract are from there.

    Examples:
        >>> class Squares(DataPreparer):
        ...     def prepare_data(self):
        ...         yield from (number**2 for number in range(5))
        ...     def get_dataset_info(self):
        ...         return {"unit": "cm2"}
        >>> storage = prepare(Squares(), "squares", progress=False)
        >>> storage.load_sample(3), storage.load_dataset_info()
        (9, {'unit': 'cm2'})
    """

    @abstractmethod
    def prepare_data(self) -> Iterator[TSample]:
        """Yield the samples. They must be the same each time, or an interrupted preparation cannot be resumed."""

    @abstractmethod
    def get_dataset_info(self) -> TInfo:
        """Return facts about the whole dataset. Called after the last sample."""


class Source(Dataset[Any], ABC):
    """The samples of a file or folder. It is pickled without its open files and the data it has read.

    Attributes:
        info: facts about all samples, for `prepare`.
        hashes: whether `describe_files` reads the contents of the files.
        options: the settings that the samples depend on, besides the files.
    """

    hashes: bool = False
    _opened: Any = None  # a file or data that each process opens for itself

    def __init__(self, path: str) -> None:
        self._path, self.info, self.options = path, dict[str, Any](), dict[str, Any]()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, idx: int) -> Any:
        """Return sample ``idx``.

        Raises:
            IndexError: ``idx`` is out of range.
            StorageError: the sample cannot be read.
        """
        return self._sample(check_index(idx, len(self), "__getitem__"))

    @abstractmethod
    def _sample(self, idx: int) -> Any:
        """Return sample ``idx``, which is in range."""

    def files(self) -> list[str]:
        """Return the paths of the files that the samples come from."""
        return [self._path]

    def describe_sample(self, idx: int) -> str:
        """Return where sample ``idx`` comes from: a file, or a row of one."""
        return f"{self._path}, row {idx}"

    def describe_files(self) -> dict[str, Any]:
        """Return facts that identify the files: their number, bytes and place, and a checksum of sizes and times of change.

        If it ``hashes``, the checksum is a checksum of the contents, and files that were moved or touched stay the same.

        Raises:
            StorageError: a file cannot be read.
        """
        paths = self.files()
        above, digest, nbytes, newest = os.path.dirname(os.path.commonpath(paths)), xxhash.xxh3_64(), 0, 0
        for path in paths:
            with reading(path, "a part of the source"):
                status = os.stat(path)
                digest.update(f"{os.path.relpath(path, above)}\0{status.st_size}\0".encode(errors="surrogateescape"))
                if self.hashes:
                    with open(path, "rb") as file:
                        while piece := file.read(_HASHED_AT_ONCE):
                            digest.update(piece)
                else:
                    digest.update(f"{status.st_mtime_ns}\0".encode())
            nbytes, newest = nbytes + status.st_size, max(newest, status.st_mtime_ns)
        facts: dict[str, Any] = {"files": len(paths), "bytes": nbytes} | self.options
        if not self.hashes:
            facts |= {"folder": os.path.abspath(above), "last change": str(datetime.fromtimestamp(newest // 10**9))}
        return facts | {"contents" if self.hashes else "list of files": digest.hexdigest()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}


def import_library(name: str, package: str) -> Any:
    """Return a module. Raises StorageError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StorageError(f"this source needs {name.partition('.')[0]}: pip install {package}") from error


@contextmanager
def reading(path: str, kind: str) -> Iterator[None]:
    """Turn errors into a StorageError that names the file."""
    try:
        yield
    except (MemoryError, StorageError):
        raise
    except Exception as error:  # each library has its own errors
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise StorageError(f"{path} cannot be read as {kind}: {reason}. Repair, convert or remove it.") from error
