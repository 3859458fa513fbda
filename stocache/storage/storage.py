"""Keep prepared samples: the interface, and a folder of blocks for data larger than memory."""

import contextlib
import operator
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from stocache.errors import DamagedError, SampleIndexError, StorageError
from stocache.samples.indices import check_index
from stocache.samples.spec import RowLayout
from stocache.storage.block import Block
from stocache.storage.files import HEAD_BYTES, ByteSource, File
from stocache.storage.local import folder_at, open_file
from stocache.storage.manifest import INDEX, INFO, Entry, Index, block_name, open_block, parse_index
from stocache.storage.remote import Mirror, RemoteStore
from stocache.storage.skipped import SkippedSample, damaged, read_skipped
from stocache.storage.writer import BLOCK_BYTES, SampleWriter, check_block_bytes
from stocache.system.platform import here

TSample = TypeVar("TSample")
TInfo = TypeVar("TInfo")

_OPEN_BLOCKS = 256  # at most; and at most a quarter of the descriptors that a process may have
_CLOSED_SAMPLES = 1 << 20  # at most, in blocks whose files are closed, with 16 bytes each in memory


class DataStorage(ABC, Generic[TSample, TInfo]):
    """Stores prepared samples, and returns them by index. A subclass has these six methods.

    Subclasses: `InMemoryDataStorage` and `OnDiskBlockDataStorage`.
    Source: the article on block storage in PyTorch Lightning; names and contract are from there.
    """

    @abstractmethod
    def is_prepared(self) -> bool:
        """Return whether all samples and the info are stored."""

    @abstractmethod
    def start_preparation(self) -> None:
        """Start to store samples."""

    @abstractmethod
    def save_sample(self, sample: TSample) -> None:
        """Store the next sample. The first one has index 0.

        Raises:
            RuntimeError: `start_preparation` was not called.
        """

    @abstractmethod
    def finish_preparation(self, info: TInfo) -> None:
        """Store the info, and make everything permanent: the storage is prepared from now on."""

    @abstractmethod
    def load_dataset_info(self) -> TInfo:
        """Return the info that `finish_preparation` got."""

    @abstractmethod
    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx`` as it was saved. The caller may change it."""


class OnDiskBlockDataStorage(DataStorage[TSample, TInfo]):
    """Keeps samples in a folder of blocks, each a file of many samples: for datasets larger than memory.

    Reading a sample reads its bytes only, and checks them against its checksum. After several reads from one block, the kernel
    is asked to read the rest of that block ahead. Kinds of samples: as for `RaggedCache`, that is tensors, arrays, numbers,
    str, enum members, dates and so on, in any containers. They come back equal. Unless pickles are allowed, nothing is pickled
    and reading imports no module.

    Args:
        base_folder: the folder, or an fsspec URL.
        block_size: samples in a block. None for as many as make about ``block_bytes``, estimated from the first samples.
        block_bytes: bytes of a block, or a str such as "8MB".
        allow_pickle: whether to pickle values of types that have no own encoding, and to load pickled values. Loading runs the
            code that a pickle names: allow it only for folders that you trust.
        local_folder, local_limit: for a URL, as for `Mirror`: each machine copies whole blocks once into this folder, up to
            this size. Preparation writes to the URL directly. Nothing is locked there.
        storage_options: options of the fsspec file system, for a URL.

    Raises:
        LimitError: a size is not a size.
        StorageError: ``base_folder`` is a URL, and fsspec or a package that it needs is not installed.

    Any number of processes and threads may read. A pickle of a storage holds the arguments only.
    The format: NOTE [ Storage folders ], NOTE [ Blocks ] and NOTE [ Records ] in the source, and the README.

    Examples:
        >>> prepared = prepare(TensorDataset(torch.arange(10)), "numbers", block_size=4, progress=False)
        >>> with OnDiskBlockDataStorage("numbers") as storage:
        ...     print(len(storage), storage.load_sample(7), storage.load_block(2))
        10 (tensor(7),) [(tensor(8),), (tensor(9),)]
    """

    thread_safe = True  # worker threads share it

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
        self._closed_blocks: OrderedDict[int, Block] = OrderedDict()
        self._locks: dict[int, Any] = {}  # by process: in a forked child the lock of its parent may be held for ever
        self._last_block = -1

    def is_prepared(self) -> bool:
        """Return whether the folder is complete."""
        return self._folder.exists(INDEX)

    def start_preparation(self) -> None:
        """Start to store samples. Removes the blocks of an interrupted preparation (`prepare` would continue it).

        Raises:
            StorageError: the folder is prepared or holds other files, or another process prepares there.
        """
        self.close()
        self._writing = SampleWriter(self._folder, self.asked_block_size, self.block_bytes, self.allow_pickle)

    def save_sample(self, sample: TSample) -> None:
        """Store the next sample. A block is written when it is full.

        Raises:
            StorageError: `start_preparation` was not called.
            SampleError: this sample, or an earlier one of the same block, cannot be stored.
            OSError: the disk is full, or fails.
        """
        if self._writing is None:
            raise StorageError("save_sample: call start_preparation first.")
        self._writing.save(sample)

    def finish_preparation(self, info: TInfo) -> None:
        """Write the last block, the info, and the index, which completes the folder.

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

    @property
    def index(self) -> Index:
        """The index of the folder: its blocks and the facts about its samples. Read once.

        Raises:
            DamagedError: the folder is not prepared, or the index has changed since it was written.
            StorageError: the index has a different version.
        """
        if self._index is None:
            path = os.path.join(self.base_folder, INDEX)
            try:
                text = self._folder.read(INDEX)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedError(f"{path} is missing: nothing was prepared there, or not completely. Prepare it.") from None
            self._index = parse_index(text, path)
        return self._index

    @property
    def reads_whole_blocks(self) -> bool:
        """Whether reading one sample may fetch its whole block each time: from a URL, if not all blocks fit into the folder
        of local copies."""
        return self._mirror is not None and self.index.nbytes > self._mirror.limit

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
            info = self._open_file(INFO, Entry(1, 0, self.index.info_checksum)).sample(0)
        return info

    def load_skipped(self) -> list[SkippedSample]:
        """Return the samples of the source that `prepare` left out because they could not be loaded, from skipped.json.

        Raises:
            DamagedError: the file is missing, or has changed since it was written.
        """
        lacks = self.index.skipped
        skipped = list(read_skipped(self._folder).left_out.values()) if lacks else []
        if len(skipped) != lacks:
            raise damaged(
                self.base_folder, f"missing or of another preparation ({len(skipped)} samples, the folder lacks {lacks})"
            )
        return skipped

    def load_sample(self, idx: int) -> TSample:
        """Return sample ``idx``. The caller may change it.

        Raises:
            SampleIndexError: ``idx`` is out of range.
            DamagedError: the sample has changed since it was written.
        """
        index = self._index or self.index
        number, row = divmod(check_index(idx, index.samples, "load_sample"), index.block_size)
        sample: TSample = (self._blocks.get(number) or self._open(number)).sample(row)
        return sample

    def load_range(self, begin: int, end: int) -> list[TSample]:
        """Return the samples from ``begin`` up to, and without, ``end``; small ones of a block are read together.

        The caller may change them.

        Raises:
            SampleIndexError: they are out of range.
            DamagedError: a sample has changed since it was written.
        """
        try:
            first, last = operator.index(begin), operator.index(end)
        except TypeError:
            first, last = -1, -1
        if not 0 <= first <= last <= len(self):
            raise SampleIndexError(f"load_range({begin!r:.50}, {end!r:.50}): not within the {len(self)} samples.")
        size, samples = self.index.block_size, list[TSample]()
        for number in range(first // size, -(-last // size)):
            rows = range(max(0, first - number * size), min(size, last - number * size))
            samples += self._open(number).some(rows)
        return samples

    def load_block(self, b: int) -> list[TSample]:
        """Return all samples of block ``b``. The caller may change them.

        Raises:
            SampleIndexError: ``b`` is out of range.
            DamagedError: a sample has changed since it was written.
        """
        block = self._open(check_index(b, len(self.index.blocks), "load_block"))
        if b == self._last_block + 1 < len(self.index.blocks) - 1:
            self.prefetch_blocks([b + 1])  # blocks are read in order: that is the next one
        self._last_block = b
        return block.all()

    def load_encoded(self, b: int, rows: Sequence[int], layout: RowLayout | None = None) -> dict[int, Any] | None:
        """Return the bytes of samples of block ``b``, as `Block.encoded`. Raises as that, and DamagedError."""
        return self._open(check_index(b, len(self.index.blocks), "load_encoded")).encoded(rows, layout)

    def record_bytes(self) -> list[float]:
        """Return about how many bytes the samples of each block take as records. Opens the first block.

        The other blocks are assumed to be of the same layout as the first one.

        Raises:
            DamagedError: that block is damaged.
        """
        entries = self.index.blocks
        if not entries:
            return []
        first = self._open(0)
        return [first.record_bytes(entry.samples, entry.nbytes) for entry in entries]

    def prefetch_blocks(self, blocks: Iterable[int]) -> None:
        """Ask the kernel to read blocks ahead. Blocks that cannot be read are skipped. Does nothing for a URL."""
        self._prefetch(blocks, None)

    def prefetch_samples(self, indices: Sequence[int]) -> None:
        """Ask the kernel to read samples ahead: a disk reads many at one time faster than one after the other.

        Does nothing for a URL.

        Raises:
            SampleIndexError: an index is out of range.
            DamagedError: a block is damaged.
        """
        if self._mirror is not None:
            return
        index = self.index
        places = [divmod(check_index(idx, index.samples, "prefetch_samples"), index.block_size) for idx in indices]
        blocks, closed = self._blocks, self._closed_blocks
        self._prefetch({number for number, _ in places if number not in blocks and number not in closed}, HEAD_BYTES)
        for number, row in places:
            (blocks.get(number) or self._open(number)).prefetch(row)

    def _prefetch(self, blocks: Iterable[int], nbytes: int | None) -> None:
        for b in blocks if self._mirror is None else ():
            with contextlib.suppress(OSError):
                File(os.path.join(self.base_folder, block_name(b))).prefetch(0, nbytes)

    def check(self, b: int) -> str | None:
        """Read block ``b`` completely, without building samples; return a description of its damage, or None."""
        name = block_name(check_index(b, len(self.index.blocks), "check"))
        return self._damage_of(name, self.index.blocks[b])

    def check_info(self) -> str | None:
        """Read the file of the info, if there is one; return a description of its damage, or None."""
        checksum = self.index.info_checksum
        return None if checksum is None else self._damage_of(INFO, Entry(1, 0, checksum))

    def _damage_of(self, name: str, entry: Entry) -> str | None:
        try:
            self._open_file(name, entry).verify()
        except StorageError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Close the open files, and end a preparation that was not finished. May be called twice."""
        with self._lock:
            self._blocks.clear()
            self._closed_blocks.clear()
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
            if name not in ("_index", "_blocks", "_closed_blocks", "_locks", "_last_block", "_writing")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._writing = None
        self._forget()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.base_folder}>"

    @property
    def _lock(self) -> Any:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _open(self, number: int) -> Block:
        """Return an open block. When too many are open, the first ones are closed after their last reader."""
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                block = self._closed_blocks.pop(number, None)
                if block is None:
                    block = self._open_file(block_name(number), self.index.blocks[number])
                self._blocks[number] = block
                most = _most_open()
                while len(self._blocks) > most:
                    first, closed = self._blocks.popitem(last=False)
                    if self._mirror is None:  # else the file may be gone when it is read again
                        closed.close()
                        self._closed_blocks[first] = closed
                while len(self._closed_blocks) * self.index.block_size > _CLOSED_SAMPLES:
                    self._closed_blocks.popitem(last=False)
        return block

    def _open_file(self, name: str, entry: Entry) -> Block:
        path, mirror = os.path.join(self.base_folder, name), self._mirror

        def open_at(local: str) -> Block:
            return open_block(local, path, entry, self.allow_pickle, open_source=self._open_source)

        if mirror is None:
            return open_at(path)
        try:
            return open_at(mirror.fetch(name))
        except DamagedError:  # another process made room before it was opened; or the copy is older than the data at the URL
            mirror.forget(name)
            return open_at(mirror.fetch(name))

    def _open_source(self, path: str) -> ByteSource:
        return open_file(path)


def _most_open() -> int:
    return min(_OPEN_BLOCKS, here.limit_of("NOFILE")[0] // 4)
