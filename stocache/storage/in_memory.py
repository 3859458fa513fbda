"""Keep prepared samples that fit in memory: a folder of one block, which is read whole."""

import os
import sys

from stocache.storage.files import BytesFile, ByteSource
from stocache.storage.storage import OnDiskBlockDataStorage, TInfo, TSample


class InMemoryDataStorage(OnDiskBlockDataStorage[TSample, TInfo]):
    """Keeps all samples in one block. The first access reads that file whole and keeps it in memory.

    Forked workers share that memory if the parent process has read a sample before the fork. Other workers read the file again.
    Kinds of samples, methods and errors: as for `OnDiskBlockDataStorage`.

    Args:
        base_folder: the folder; `finish_preparation` completes it.
        allow_pickle: whether to pickle values of types that have no own encoding, and to load pickled values.
    """

    def __init__(self, base_folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        super().__init__(base_folder, sys.maxsize, allow_pickle=allow_pickle)

    @property
    def block_size(self) -> None:  # type: ignore[override]
        """None: samplers and caches need not take the samples by the block."""

    def _open_source(self, path: str) -> ByteSource:
        with open(path, "rb") as file:
            return BytesFile(file.read())
