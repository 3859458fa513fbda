"""Keep prepared samples that fit in memory: one file, which is read whole."""

import os
from functools import cached_property
from typing import Any

from stocache.errors import DamagedError, StorageError
from stocache.samples.indices import check_index
from stocache.storage.block import Block, encode
from stocache.storage.files import BytesFile
from stocache.storage.local import write_file
from stocache.storage.storage import DataStorage, TInfo, TSample
from stocache.storage.writer import copy_sample

_INFO = ":info"  # the only key of the last sample


class InMemoryDataStorage(DataStorage[TSample, TInfo]):
    """Keeps all samples in one file. The first access reads the whole file and keeps it in memory.

    Forked workers share that memory if the parent process has read a sample before the fork. Other workers read the file again.
    Kinds of samples: as for `OnDiskBlockDataStorage`. The file is one block, whose last sample is the info.

    Args:
        datafile: the file; `finish_preparation` writes it.
        allow_pickle: whether to pickle values of types that have no own encoding, and to load pickled values.

    Raises:
        StorageError: on reading, the file is not one that was prepared.
        DamagedError: on reading, the file is missing, or a sample is not as it was written.
    """

    def __init__(self, datafile: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        self.datafile, self._allow_pickle = os.fspath(datafile), allow_pickle
        self._saved: list[Any] | None = None

    def is_prepared(self) -> bool:
        """Return whether the file exists: it is written completely or not at all."""
        return os.path.exists(self.datafile)

    def start_preparation(self) -> None:
        """Start to store samples.

        Raises:
            StorageError: the file exists.
        """
        if self.is_prepared():
            raise StorageError(f"{self.datafile} is prepared already. Remove it to prepare it again, or give another name.")
        self._saved = []

    def save_sample(self, sample: TSample) -> None:
        """Store a copy of the next sample, in memory.

        Raises:
            StorageError: `start_preparation` was not called.
        """
        if self._saved is None:
            raise StorageError("save_sample: call start_preparation first.")
        self._saved.append(copy_sample(sample))

    def finish_preparation(self, info: TInfo) -> None:
        """Write the file.

        Raises:
            StorageError: `start_preparation` was not called.
            SampleError: a sample or the info cannot be stored.
            OSError: the disk is full, or fails.
        """
        if self._saved is None:
            raise StorageError("finish_preparation: call start_preparation first.")
        pieces, _ = encode([*self._saved, {_INFO: info}], 0, self._allow_pickle)
        os.makedirs(os.path.dirname(self.datafile) or ".", exist_ok=True)
        write_file(self.datafile, *pieces)
        self._saved = None
        vars(self).pop("_block", None)  # of a file that was removed meanwhile

    def load_dataset_info(self) -> TInfo:
        """Return the info."""
        info: TInfo = self._block.sample(len(self))[_INFO]
        return info

    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx``. The caller may change it.

        Raises:
            SampleIndexError: ``idx`` is out of range.
            DamagedError: the sample is not as it was written.
        """
        sample: TSample = self._block.sample(check_index(idx, len(self), "load_sample"))
        return sample

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._block.samples - 1

    @cached_property
    def _block(self) -> Block:
        try:
            with open(self.datafile, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise DamagedError(f"{self.datafile} is missing: nothing was prepared there. Prepare it first.") from None
        block = Block(BytesFile(data), self.datafile, self._allow_pickle)
        last = block.sample(block.samples - 1) if block.samples else None
        if not (type(last) is dict and last.keys() == {_INFO}):
            raise StorageError(
                f"{self.datafile} does not end with an info: it is a block of a folder, or was prepared by an earlier "
                "stocache. Prepare it again."
            )
        return block

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_block"}
