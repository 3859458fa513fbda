"""Prepare a dataset once: write its samples into a folder of blocks, in parallel, and resume after an interruption."""

import logging
import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, Generic, Literal

import numpy as np
import torch
from tqdm import tqdm

from stocache.datasets.stored import StorageDataset
from stocache.errors import DamagedError, DatasetError, LimitError, StorageError
from stocache.samples.indices import spread
from stocache.storage.local import folder_at
from stocache.storage.manifest import STAGING, BlockFolderWriter, Entry, Index, block_name
from stocache.storage.storage import OnDiskBlockDataStorage, TInfo, TSample
from stocache.storage.writer import BLOCK_BYTES, PROBE, BlockCutter, check_block_bytes, estimate_block_size
from stocache.system import rng
from stocache.system.children import in_children_or_here
from stocache.system.ranks import is_first_rank
from stocache.system.urls import is_url

logger = logging.getLogger("stocache")


class DataPreparer(ABC, Generic[TSample, TInfo]):
    """Makes the samples of a dataset, once, for a `DataStorage`. All preprocessing that is not random belongs here.

    Source: the article on block storage in PyTorch Lightning; names and contract are from there.
    """

    @abstractmethod
    def prepare_data(self) -> Iterator[TSample]:
        """Yield the samples. They must be the same each time, or an interrupted preparation cannot be resumed."""

    @abstractmethod
    def get_dataset_info(self) -> TInfo:
        """Return facts about the whole dataset. Called after the last sample."""


def prepare(
    source: Any,
    folder: Any,
    *,
    num_workers: int = 0,
    block_size: int | None = None,
    block_bytes: int | str = BLOCK_BYTES,
    shuffle_seed: int | None = None,
    info: Any = None,
    fingerprint: str | None = None,
    allow_pickle: bool = False,
    progress: bool = True,
    resume: bool = True,
    again: bool = False,
    repair: bool = False,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> OnDiskBlockDataStorage[Any, Any]:
    """Prepare a dataset as a folder of blocks, in parallel, and return the storage. A prepared folder is returned as it is.

    The bytes of the folder do not depend on the engine, the number of workers or interruptions. The folder keeps the sizes and
    times of change of the files of a source that `open_source` has opened. If they have changed, it is not returned.

    Args:
        source: a `DataPreparer`, or a map-style dataset (``__len__`` and ``__getitem__``).
        folder: a path or a URL that fsspec can write to, new or empty. A URL cannot be locked: run one preparation at a time
            there.
        num_workers: for a dataset, child processes that load and write blocks; with 0, one does, but at a URL this process
            writes. For a `DataPreparer`, whose samples come in order, threads that write. With Ray, blocks in work at a time; 0
            for as many as the cluster can run.
        block_size, block_bytes, allow_pickle: as for `OnDiskBlockDataStorage`.
        shuffle_seed: assign samples to blocks at random, with this seed: sample i of the storage is then not sample i of the
            source. The samples of a `DataPreparer` are first prepared in order, which takes twice the room until the end.
        info: facts about a dataset, to be stored. A `DataPreparer` returns them itself.
        fingerprint: a string that identifies the data. Change it whenever the samples change: the files of the source are then
            not compared.
        progress: show a progress bar (not on ranks above 0).
        resume: keep the complete blocks of an interrupted preparation of the same source; False starts again.
        again: prepare a prepared folder anew.
        repair: read all blocks of a prepared folder, and write those anew that are damaged.
        engine: "ray" makes the tasks of a Ray cluster write blocks, and load them if ``source`` is a dataset. All nodes must
            see the folder, the files of the dataset, and its modules. When a worker or node dies, other workers repeat only
            the blocks that it worked on.
        address: of a running Ray, if this process is not connected to one. None for $RAY_ADDRESS, or, if that is not set, for a
            Ray that is started on this machine and ends with the preparation.
        storage_options: options of the fsspec file system, for a URL.

    Raises:
        LimitError: a size is not a size, or the engine is unknown.
        DatasetError: ``source`` is neither a preparer nor a dataset.
        StorageError: the folder is prepared in another way or from other files, or holds other files; the source changes
            meanwhile; the URL cannot be written to; Ray is not installed or does not run; a folder cannot be repaired, because
            the source gives other samples now.
        WorkerError: a Ray worker died, and so did those that tried again.
        SampleError: a sample or the info cannot be stored.
        OSError: the disk is full, or fails. Preparing again continues from there.
        Exception: whatever the source raises.

    If several processes prepare the same folder, one does and the others wait for it. The random generators are seeded for each
    block.
    """
    nbytes = check_block_bytes(block_size, block_bytes)
    ray = _import_ray(engine, address)
    if ray is not None and not is_url(str(folder)):
        folder = os.path.abspath(folder)  # Ray's workers run in other directories
    preparer = _check_source(source, str(folder), shuffle_seed)
    plan = {
        "source": type(source).__name__,
        "samples": None if preparer else len(source),
        "block_size": block_size,
        "block_bytes": nbytes,
        "shuffle_seed": shuffle_seed,
        "fingerprint": fingerprint,
        "files": _files_of(source) if fingerprint is None else None,
    }
    writer = BlockFolderWriter(folder_at(str(folder), storage_options), allow_pickle)
    storage = OnDiskBlockDataStorage[Any, Any](
        folder, block_size, block_bytes=nbytes, allow_pickle=allow_pickle, storage_options=storage_options
    )
    with writer.folder.locked():
        job = _Preparation(writer, plan, num_workers, progress and is_first_rank(), ray)
        if repair and not writer.prepared:
            raise StorageError(f"{folder} is not prepared, so there is nothing to repair. Prepare it.")
        if repair and not job.has_sound_index(storage):
            job.forget_index(storage)  # the blocks tell what it held
        elif again:
            writer.reopen(plan={})
        elif writer.prepared:
            if differences := _differences(storage.index.plan, plan):
                raise StorageError(
                    f"{folder} is prepared in another way: {'; '.join(differences)}.\n"
                    f"Prepare it anew (again=True, --again), or give another folder. With a fingerprint, you say yourself when "
                    f"the data changes."
                )
            damaged = job.find_damaged(storage) if repair else []
            if not damaged:
                writer.clean_up()  # the process that prepared it may have been killed before it could
                logger.info("%s is prepared already", folder)
                return storage
            job.only = damaged, storage.index
        with nullcontext() if ray is None else ray.connected(address, num_workers):
            if preparer is None:
                job.write_dataset(source, info, resume)
            elif shuffle_seed is None:
                job.write_samples(preparer, resume)
            else:
                if job.only is None:
                    writer.begin(plan, resume)
                ordered = prepare(
                    preparer,
                    os.path.join(folder, STAGING),
                    num_workers=num_workers,
                    block_size=block_size,
                    block_bytes=nbytes,
                    fingerprint=fingerprint,
                    allow_pickle=allow_pickle,
                    progress=progress,
                    engine=engine,
                )
                with ordered:
                    job.write_dataset(StorageDataset(ordered), ordered.load_dataset_info(), resume=True)
    return storage


def _files_of(source: Any) -> dict[str, Any] | None:
    """Return the facts about the files of a source that its samples depend on; None if it does not tell."""
    describe = getattr(source, "describe_files", None)
    return describe() if callable(describe) else None


_CHECKSUMS = "list of files", "contents"  # facts that tell a reader nothing


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return how a plan differs from that of a folder, each difference as text."""
    found = []
    for name in new:
        before, now = old.get(name), new[name]
        if name == "files" and (before is None or now is None):  # an earlier version, or the other has a fingerprint
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            facts = [fact for fact in now if before.get(fact) != now[fact] and (fact in before or fact not in _CHECKSUMS)]
            told = [fact for fact in facts if fact not in _CHECKSUMS]
            found += [f"{fact} of the source: {before.get(fact)}, now {now[fact]}" for fact in told]
            found += ["the files of the source have changed"] * (len(facts) > len(told) == 0)
        elif before != now:
            found.append(f"{name.replace('_', ' ')}: {before}, now {now}")
    return found


def _check_source(source: Any, folder: str, shuffle_seed: int | None) -> DataPreparer[Any, Any] | None:
    """Return the source if it is a preparer, None if it is a dataset."""
    if not isinstance(source, DataPreparer):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise DatasetError(f"prepare takes a DataPreparer or a map-style dataset, not a {type(source).__name__}.")
        return None
    if shuffle_seed is not None and is_url(folder):
        raise StorageError(
            f"{folder} is a URL, and the samples of a DataPreparer are shuffled by way of a local folder. Leave out "
            f"shuffle_seed, or prepare a local folder and copy it there."
        )
    return source


def _import_ray(engine: str, address: str | None) -> ModuleType | None:
    """Return the module that runs blocks on Ray, if that is the engine."""
    if engine not in ("local", "ray"):
        raise LimitError(f"engine={engine!r} is unknown. Use 'local' or 'ray'.")
    if engine == "local":
        if address is not None:
            raise LimitError(f"address={address!r} is that of a Ray, which engine='local' does not use. Use engine='ray'.")
        return None
    try:
        from stocache.preparation import ray
    except ImportError as error:
        raise StorageError(f"engine='ray' needs Ray, which is not installed ({error}): pip install 'stocache[ray]'") from None
    return ray


class _SourceChangedError(Exception):
    """The source yields other samples than those in the blocks of an interrupted preparation."""


class _Preparation:
    """One run of `prepare`, in a folder that is locked."""

    def __init__(
        self, writer: BlockFolderWriter, plan: dict[str, Any], num_workers: int, progress: bool, ray: ModuleType | None
    ) -> None:
        self._writer, self._plan, self._num_workers, self._progress, self._ray = writer, plan, num_workers, progress, ray
        self.only: tuple[list[int], Index] | None = None  # to repair: the damaged blocks, and the index

    def _bar(self, total: int | None) -> Any:
        return tqdm(unit="sample", desc=f"preparing {self._writer.path}", total=total, disable=not self._progress)

    def _start_again(self, source: str) -> None:
        logger.warning("%s: the %s gives other samples than last time; starting again", self._writer.path, source)
        self._writer.remove_blocks_except(())

    # ------------------------------------------------------------------------------------------------ repairing

    def has_sound_index(self, storage: OnDiskBlockDataStorage[Any, Any]) -> bool:
        """Whether the index can be read, and the info with it."""
        try:
            return bool(storage.index) and storage.check_info() is None
        except DamagedError:
            return False

    def forget_index(self, storage: OnDiskBlockDataStorage[Any, Any]) -> None:
        """Make a folder whose index is damaged one of an interrupted preparation, without the blocks that are damaged."""
        self._writer.reopen(self._plan)
        for number in self._writer.find_damaged():
            self._writer.remove_block(number)

    def find_damaged(self, storage: OnDiskBlockDataStorage[Any, Any]) -> list[int]:
        """Return the numbers of the blocks of a prepared folder that are damaged."""
        numbers = range(len(storage.index.blocks))
        with ThreadPoolExecutor(max(1, self._num_workers)) as pool:
            problems = pool.map(storage.check, numbers)
            bar = tqdm(problems, f"checking {self._writer.path}", len(numbers), unit="block", disable=not self._progress)
            return [number for number, problem in zip(numbers, bar, strict=True) if problem is not None]

    def _repaired(self, number: int, entry: Entry, index: Index) -> None:
        """Check that a block that was written anew is the one in the index."""
        if entry != index.blocks[number]:
            raise StorageError(
                f"{self._writer.path}/{block_name(number)} cannot be repaired: the source gives other samples now. Prepare the "
                f"folder anew (again=True, --again)."
            )

    def _end_repair(self, damaged: list[int], index: Index) -> None:
        for number in damaged:
            self._writer.verify_block(number, index.blocks[number])
        self._writer.clean_up()
        logger.info(
            "%s: %d of %d blocks were damaged, and are written anew", self._writer.path, len(damaged), len(index.blocks)
        )

    # ------------------------------------------------------------------------------------------------ a dataset

    def write_dataset(self, dataset: Any, info: Any, resume: bool) -> None:
        """Write the samples of a map-style dataset, block by block, in any order; to repair, only those that are damaged."""
        if self.only is not None:
            damaged, index = self.only
            self._repair_dataset(
                _DatasetBlocks(dataset, self._plan | {"block_size": index.block_size}, self._writer), damaged, index
            )
            return
        blocks = _DatasetBlocks(dataset, self._plan, self._writer)
        found = self._writer.begin(self._plan, resume)
        if found:
            last = max(found)
            _, _, entry = next(in_children_or_here(dataset, [partial(blocks.encode, [last])]))
            if entry != found[last]:
                found = {}
                self._start_again("dataset")
        missing = [number for number in range(len(blocks)) if number not in found]
        with self._bar(len(dataset)) as bar, closing(self._write_missing(blocks, missing)) as written:
            bar.update(sum(entry.samples for entry in found.values()))
            for number, entry in written:
                found[number] = entry
                bar.update(entry.samples)
        self._check_unchanged(dataset)
        self._writer.finish([found[number] for number in range(len(blocks))], blocks.block_size, info, self._plan)

    def _check_unchanged(self, source: Any) -> None:
        """Raise StorageError if the files of the source are not those that they were when the preparation began."""
        before = self._plan["files"]
        if before is not None and (now := _files_of(source)) not in (None, before):
            changes = "; ".join(_differences({"files": before}, {"files": now}))
            raise StorageError(f"the source was changed while {self._writer.path} was prepared: {changes}. Prepare it again.")

    def _repair_dataset(self, blocks: "_DatasetBlocks", damaged: list[int], index: Index) -> None:
        with self._bar(sum(index.blocks[number].samples for number in damaged)) as bar:
            encoded = in_children_or_here(blocks.dataset, [partial(blocks.encode, damaged)])
            with closing(encoded):
                for number, pieces, entry in encoded:
                    self._repaired(number, entry, index)
                    self._writer.write_encoded(number, pieces, entry)
                    bar.update(entry.samples)
        self._end_repair(damaged, index)

    def _write_missing(self, blocks: "_DatasetBlocks", missing: list[int]) -> Generator[tuple[int, Entry], None, None]:
        """Write blocks, and yield their numbers and entries. Once it is closed, no process writes any more."""
        count = min(self._num_workers or int(not is_url(self._writer.path)), len(missing))
        if self._ray is not None:
            with closing(self._ray.entries(blocks.write, ((number,) for number in missing), self._num_workers)) as entries:
                yield from zip(missing, entries, strict=True)
        elif count:
            shares = [partial(blocks.write_all, missing[first::count]) for first in range(count)]
            with closing(in_children_or_here(blocks.dataset, shares)) as written:
                yield from written
        else:  # at a URL: some connections do not work after a fork
            with closing(in_children_or_here(blocks.dataset, [partial(blocks.encode, missing)])) as encoded:
                yield from zip(missing, _in_threads(self._writer.write_encoded, encoded, 1), strict=True)

    # ------------------------------------------------------------------------------------------------ a preparer

    def write_samples(self, preparer: DataPreparer[Any, Any], resume: bool) -> None:
        """Write the samples that a `DataPreparer` yields, in order; to repair, only the blocks that are damaged."""
        if self.only is not None:
            damaged, index = self.only
            cutter = BlockCutter(index.block_size, self._plan["block_bytes"], self._writer.allow_pickle)
            for number, samples, first in cutter.cut(preparer.prepare_data()):
                if number in damaged:
                    pieces, entry = self._writer.encode_block(samples, first)
                    self._repaired(number, entry, index)
                    self._writer.write_encoded(number, pieces, entry)
            self._end_repair(damaged, index)
            return
        try:
            self._write_samples(preparer, self._writer.begin(self._plan, resume))
        except _SourceChangedError:
            self._start_again("preparer")
            self._write_samples(preparer, {})

    def _write_samples(self, preparer: DataPreparer[Any, Any], found: dict[int, Entry]) -> None:
        cutter = BlockCutter(self._plan["block_size"], self._plan["block_bytes"], self._writer.allow_pickle)
        blocks = cutter.cut(preparer.prepare_data())
        kept = next(number for number in range(len(found) + 1) if number not in found)  # complete blocks before a missing one
        entries: list[Entry] = []
        with self._bar(None) as bar:
            for number, samples, first in islice(blocks, kept):
                if number == kept - 1 and self._writer.encode_block(samples, first)[1] != found[number]:
                    raise _SourceChangedError
                entries.append(found[number])
                bar.update(len(samples))
            if len(entries) < kept:
                raise _SourceChangedError
            if self._ray is not None:
                written = self._ray.entries(self._writer.write_block, blocks, self._num_workers)
            else:
                written = _in_threads(self._writer.write_block, blocks, max(1, self._num_workers))
            with closing(written):
                for entry in written:
                    entries.append(entry)
                    bar.update(entry.samples)
        assert cutter.block_size is not None
        self._check_unchanged(preparer)
        self._writer.finish(entries, cutter.block_size, preparer.get_dataset_info(), self._plan)


class _DatasetBlocks:
    """The blocks of a dataset. Pickles, so that child processes and clusters load and write them."""

    def __init__(self, dataset: Any, plan: dict[str, Any], writer: BlockFolderWriter) -> None:
        self.dataset, self._writer = dataset, writer
        length, seed = len(dataset), plan["shuffle_seed"]
        self._order = np.arange(length) if seed is None else np.random.default_rng(seed).permutation(length)
        self.block_size: int = plan["block_size"] or next(
            in_children_or_here(dataset, [partial(_estimate_block_size, dataset, plan["block_bytes"], writer.allow_pickle)])
        )

    def __len__(self) -> int:
        return -(-len(self._order) // self.block_size)

    def write(self, number: int) -> Entry:
        """Write a block, and return its entry in the index."""
        return self._writer.write_block(number, self._load(number), number * self.block_size)

    def write_all(self, numbers: Sequence[int]) -> Iterator[tuple[int, Entry]]:
        """Write blocks, and yield their numbers and entries. A thread writes a block while the next one is loaded."""
        calls = ((number, *self._writer.encode_block(self._load(number), number * self.block_size)) for number in numbers)
        yield from zip(numbers, _in_threads(self._writer.write_encoded, calls, 1), strict=True)

    def encode(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[bytes], Entry]]:
        """Yield the numbers of blocks, their files in pieces, and their entries in the index."""
        for number in numbers:
            pieces, entry = self._writer.encode_block(self._load(number), number * self.block_size)
            yield number, list(map(bytes, pieces)), entry

    def _load(self, number: int) -> list[Any]:
        indices = self._order[number * self.block_size : (number + 1) * self.block_size].tolist()
        together = getattr(self.dataset, "__getitems__", None)
        with _seeded(number):
            return list(together(indices)) if together is not None else [self.dataset[idx] for idx in indices]


def _in_threads(write: Callable[..., Entry], calls: Iterable[tuple[Any, ...]], count: int) -> Generator[Entry, None, None]:
    """Call ``write`` in so many threads, and yield the entries in order. A few more calls are taken while threads write."""
    pending: deque[Future[Entry]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for call in calls:
            pending.append(pool.submit(write, *call))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed the random generators with the number of a block, and restore their states afterwards."""
    with rng.preserve_rng_state():
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        yield


def _estimate_block_size(dataset: Any, block_bytes: int, allow_pickle: bool) -> Iterator[int]:
    """Yield how many samples like some of the dataset make a block."""
    with _seeded(0):
        samples = [dataset[idx] for idx in spread(len(dataset), PROBE)]
    yield estimate_block_size(samples, block_bytes, allow_pickle)
