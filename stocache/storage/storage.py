"""Where prepared samples are kept: the interface, one file for what fits in memory, a folder of blocks for what does not."""

import contextlib
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from stocache.errors import DamagedError, StorageError
from stocache.samples.indices import check_index
from stocache.storage.block import Block, BytesFile, File, encode
from stocache.storage.local import folder_at, write_file
from stocache.storage.manifest import INDEX, INFO, Entry, Index, block_name, open_block, parse_index
from stocache.storage.remote import Mirror, RemoteStore
from stocache.storage.writer import BLOCK_BYTES, SampleWriter, check_block_bytes, snapshot
from stocache.system.deprecation import old_name

TSample = TypeVar("TSample")
TInfo = TypeVar("TInfo")

_OPEN_BLOCKS = 256  # at most, and a quarter of the descriptors a process may have


class DataStorage(ABC, Generic[TSample, TInfo]):
    """Stores prepared samples, and gives them back by number. Write your own by these six methods; two classes have them.

    Source: the article on block storage in PyTorch Lightning, whose names and contract these are.
    """

    @abstractmethod
    def is_prepared(self) -> bool:
        """Return whether all samples and the info are there."""

    @abstractmethod
    def start_preparation(self) -> None:
        """Begin to take samples."""

    @abstractmethod
    def save_sample(self, sample: TSample) -> None:
        """Take the next sample: the first one saved is number 0.

        Raises:
            RuntimeError: `start_preparation` was not called.
        """

    @abstractmethod
    def finish_preparation(self, info: TInfo) -> None:
        """Take the info, and make everything last: from now on the storage is prepared."""

    @abstractmethod
    def load_dataset_info(self) -> TInfo:
        """Return what `finish_preparation` was given."""

    @abstractmethod
    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx`` as it was saved; the caller's own, to change as he likes."""


class InMemoryDataStorage(DataStorage[TSample, TInfo]):
    """All samples in one file, which is read whole when the first sample is asked for, and kept in memory.

    Workers started by fork share that memory if the parent has asked for a sample before; others read the file again. Samples
    are as in `OnDiskBlockDataStorage`.

    Args:
        datafile: the file; written to when preparation is finished.
        allow_pickle: whether to pickle what has no bytes of its own, and to load what was pickled.

    Raises:
        StorageError: when read, it is no such file.
        DamagedError: when read, it is missing, or a sample is not as it was written.
    """

    def __init__(self, datafile: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        self.datafile, self._allow_pickle = os.fspath(datafile), allow_pickle
        self._saved: list[TSample] | None = None
        self._loaded: Block | None = None

    def is_prepared(self) -> bool:
        """Return whether the file is there: it is written whole or not at all."""
        return os.path.exists(self.datafile)

    def start_preparation(self) -> None:
        """Begin to take samples.

        Raises:
            StorageError: the file is there already.
        """
        if self.is_prepared():
            raise StorageError(f"{self.datafile} is prepared already. Remove it to prepare it again, or give another name.")
        self._saved = []

    def save_sample(self, sample: TSample) -> None:
        """Take the next sample.

        Raises:
            StorageError: `start_preparation` was not called.
        """
        if self._saved is None:
            raise StorageError("save_sample: call start_preparation first.")
        self._saved.append(snapshot(sample))

    def finish_preparation(self, info: TInfo) -> None:
        """Write the file.

        Raises:
            StorageError: `start_preparation` was not called.
            SampleError: a sample or the info cannot be stored.
            OSError: the disk is full, or fails.
        """
        if self._saved is None:
            raise StorageError("finish_preparation: call start_preparation first.")
        inner, _ = encode([info], 0, self._allow_pickle)
        pieces, _ = encode(self._saved, 0, self._allow_pickle, b"".join(inner))
        os.makedirs(os.path.dirname(self.datafile) or ".", exist_ok=True)
        write_file(self.datafile, *pieces)
        self._saved = self._loaded = None

    def load_dataset_info(self) -> TInfo:
        """Return the info."""
        block = self._block()
        name = f"the info in {self.datafile}"
        try:
            info: TInfo = Block(BytesFile(block.info), name, self._allow_pickle).sample(0)
        except (KeyError, ValueError) as error:
            raise StorageError(f"{self.datafile} is a block without info. Give a file that was prepared.") from error
        return info

    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx``, the caller's own.

        Raises:
            SampleIndexError: there is none.
            DamagedError: it is not as it was written.
        """
        block = self._block()
        sample: TSample = block.sample(check_index(idx, block.samples, "load_sample"))
        return sample

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._block().samples

    def _block(self) -> Block:
        block = self._loaded
        if block is None:
            try:
                with open(self.datafile, "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                raise DamagedError(f"{self.datafile} is missing: nothing was prepared there. Prepare it first.") from None
            block = self._loaded = Block(BytesFile(data), self.datafile, self._allow_pickle)
        return block

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded": None}


class OnDiskBlockDataStorage(DataStorage[TSample, TInfo]):
    """A folder of blocks, each a file of samples: for datasets larger than memory.

    A sample is read by itself, without its block; one after another from the same block has the rest of it read ahead. Each is
    checked against its checksum. Samples are those of a `RaggedCache`: tensors, arrays, numbers, str, enum members, dates and
    so on in any containers. They come back equal; nothing is pickled unless allowed, and no module is imported then either.

    Args:
        base_folder: the folder.
        block_size: samples in a block. None for as many as make about ``block_bytes``, told by the first samples.
        block_bytes: bytes of a block, or a str such as "8MB".
        allow_pickle: whether to pickle what has no bytes of its own, and to load what was pickled. Loading runs what the
            pickles say: only from folders you trust.
        local_folder, local_limit: where ``base_folder`` is a URL, as for `Mirror`: blocks are fetched whole, once per machine,
            into a local folder of limited size. Blocks that are prepared go to the URL straight; nothing is locked there.
        storage_options: for the fsspec file system of the URL.

    Raises:
        LimitError: no such size.
        StorageError: it is a URL, and fsspec, or what it needs for that, is not installed.

    Any number of processes and threads may read. A storage pickles as the name of its folder.
    The layout is told in NOTE [ Storage folders ], NOTE [ Blocks ] and NOTE [ Columns ] of the source, and in the README.
    """

    def __init__(
        self,
        base_folder: str | os.PathLike[str],
        block_size: int | None = None,
        *,
        block_bytes: int | str = BLOCK_BYTES,
        allow_pickle: bool = False,
        local_folder: str | os.PathLike[str] | None = None,
        local_limit: int | str = "64GiB",
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.base_folder, self.allow_pickle = os.fspath(base_folder), allow_pickle
        self.storage_options = storage_options
        self._folder = folder_at(self.base_folder, storage_options)
        self._mirror: Mirror | None = None
        if isinstance(self._folder, RemoteStore):
            self._mirror = Mirror(self._folder, None if local_folder is None else os.fspath(local_folder), local_limit)
        self.asked_block_size, self.block_bytes = block_size, check_block_bytes(block_size, block_bytes)
        self._writing: SampleWriter | None = None
        self._forget()

    def _forget(self) -> None:
        self._index: Index | None = None
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()
        self._last_block = -1

    # ------------------------------------------------------------------------------------------------ writing

    def is_prepared(self) -> bool:
        """Return whether the folder is whole."""
        return self._folder.exists(INDEX)

    def start_preparation(self) -> None:
        """Begin to take samples; what an interrupted preparation has left is removed (`prepare` goes on from there).

        Raises:
            StorageError: the folder is prepared, holds files of others, or another process prepares there.
        """
        self.close()
        self._writing = SampleWriter(self._folder, self.asked_block_size, self.block_bytes, self.allow_pickle)

    def save_sample(self, sample: TSample) -> None:
        """Take the next sample. Blocks are written as they fill.

        Raises:
            StorageError: `start_preparation` was not called.
            SampleError: the sample, or one before it in the block, cannot be stored.
            OSError: the disk is full, or fails.
        """
        if self._writing is None:
            raise StorageError("save_sample: call start_preparation first.")
        self._writing.save(sample)

    def finish_preparation(self, info: TInfo) -> None:
        """Write the last block, the info, and the index that makes the folder a prepared one.

        Raises:
            StorageError: `start_preparation` was not called.
            SampleError: a sample or the info cannot be stored.
            OSError: the disk is full, or fails.
        """
        if self._writing is None:
            raise StorageError("finish_preparation: call start_preparation first.")
        self._writing.finish(info)
        self._writing = None
        self._forget()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def index(self) -> Index:
        """What is in the folder.

        Raises:
            DamagedError: the folder is not prepared, or the index is not as it was written.
            StorageError: it is of another version.
        """
        if self._index is None:
            path = os.path.join(self.base_folder, INDEX)
            try:
                text = self._folder.read(INDEX)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedError(f"{path} is missing: nothing was prepared there, or not to its end. Prepare it.") from None
            self._index = parse_index(text, path)
        return self._index

    @property
    def block_size(self) -> int:
        """Samples in each block but the last."""
        return self.index.block_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.index.samples

    def load_dataset_info(self) -> TInfo:
        """Return the info."""
        info: TInfo = self.index.info
        if self.index.info_checksum is not None:
            info = self._opened(INFO, Entry(1, 0, self.index.info_checksum)).sample(0)
        return info

    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx``, the caller's own.

        Raises:
            SampleIndexError: there is none.
            DamagedError: it is not as it was written.
        """
        index = self._index or self.index
        number, row = divmod(check_index(idx, index.samples, "load_sample"), index.block_size)
        sample: TSample = (self._blocks.get(number) or self._open(number)).sample(row)
        return sample

    def load_block(self, b: int) -> list[TSample]:
        """Return all samples of block ``b``, each the caller's own.

        Raises:
            SampleIndexError: there is none.
            DamagedError: one is not as it was written.
        """
        block = self._open(check_index(b, len(self.index.blocks), "load_block"))
        if b == self._last_block + 1 < len(self.index.blocks) - 1:
            self.prefetch_blocks([b + 1])  # who reads one after the other wants that next
        self._last_block = b
        return block.all()

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Have the kernel read blocks ahead, which are wanted soon; those that cannot be are left out. Not of a URL."""
        for b in blocks if self._mirror is None else ():
            with contextlib.suppress(OSError):
                File(os.path.join(self.base_folder, block_name(b))).prefetch()

    expect = old_name("expect", "prefetch_blocks")

    def check(self, b: int) -> str | None:
        """Return what is wrong with block ``b``; None when nothing is. Reads it whole; makes no samples."""
        name = block_name(check_index(b, len(self.index.blocks), "check"))
        try:
            self._opened(name, self.index.blocks[b], decode=False).verify()
        except StorageError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Close the files that are open, and end a preparation that was not finished. Twice is fine."""
        with self._lock:
            self._blocks.clear()
        if self._writing is not None:
            self._writing.end()
            self._writing = None

    def __enter__(self) -> "OnDiskBlockDataStorage[TSample, TInfo]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_index", "_blocks", "_lock", "_last_block", "_writing")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._writing = None
        self._forget()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.base_folder}>"

    def _open(self, number: int) -> Block:
        """Return a block, open; of many, those that were opened first are closed when their last reader is done."""
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                block = self._opened(block_name(number), self.index.blocks[number])
                self._blocks[number] = block
                while len(self._blocks) > _most_open():
                    self._blocks.popitem(last=False)
        return block

    def _opened(self, name: str, entry: Entry, decode: bool = True) -> Block:
        path = os.path.join(self.base_folder, name)
        if self._mirror is None:
            return open_block(path, path, entry, self.allow_pickle, decode=decode)
        try:
            return open_block(self._mirror.fetch(name), path, entry, self.allow_pickle, decode=decode)
        except DamagedError:  # removed again before it was opened, to make room; or fetched before it was prepared anew
            self._mirror.forget(name)
            return open_block(self._mirror.fetch(name), path, entry, self.allow_pickle, decode=decode)


def _most_open() -> int:
    return min(_OPEN_BLOCKS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
