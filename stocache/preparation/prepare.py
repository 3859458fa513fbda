"""Preparing a dataset: samples from wherever they come, into a folder of blocks, once."""

import logging
import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from types import ModuleType
from typing import Any, Generic, Literal

import numpy as np
import torch
from tqdm import tqdm

from stocache.datasets.stored import StorageDataset
from stocache.errors import DatasetError, LimitError, StorageError
from stocache.storage.local import folder_at
from stocache.storage.manifest import STAGING, BlockFolderWriter, Entry
from stocache.storage.storage import OnDiskBlockDataStorage, TInfo, TSample
from stocache.storage.writer import BLOCK_BYTES, PROBE, check_block_bytes, size_for, snapshot
from stocache.system import rng
from stocache.system.children import in_children_or_here
from stocache.system.ranks import is_first_rank
from stocache.system.urls import is_url

logger = logging.getLogger("stocache")


class DataPreparer(ABC, Generic[TSample, TInfo]):
    """Makes the samples of a dataset, once, for a `DataStorage` to keep: all preprocessing that is not random belongs here.

    Source: the article on block storage in PyTorch Lightning, whose names and contract these are.
    """

    @abstractmethod
    def prepare_data(self) -> Iterator[TSample]:
        """Yield the samples: the same ones each time, or an interrupted preparation cannot be resumed."""

    @abstractmethod
    def get_dataset_info(self) -> TInfo:
        """Return what is to be known of the dataset; called when all samples have been yielded."""


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
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> OnDiskBlockDataStorage[Any, Any]:
    """Prepare a dataset as a folder of blocks, in parallel, and return the storage; when it is prepared already, only that.

    What comes out is the same, byte for byte, whatever the engine, the number of workers and however often it was interrupted.

    Args:
        source: a `DataPreparer`, or a map-style dataset (``__len__`` and ``__getitem__``).
        folder: where to, new or empty: a path, or a URL that fsspec can write to. A URL cannot be locked: have one process at
            a time prepare there.
        num_workers: child processes that load and write blocks of a dataset; of a `DataPreparer`, whose samples come one after
            the other, threads that write. With 0, a dataset is loaded by one child process while this one writes.
            With Ray, blocks to be at, at one time, and 0 for what the cluster can do.
        block_size, block_bytes, allow_pickle: as for `OnDiskBlockDataStorage`.
        shuffle_seed: assign samples to blocks at random, by this seed: sample i of the storage is then not sample i of the
            source. What a `DataPreparer` yields is first prepared in order, and takes twice the room until it is done.
        info: the info, of a dataset. A `DataPreparer` says it itself.
        fingerprint: a string that says which data this is; whatever changes the samples must change it.
        progress: show a bar (not on ranks above 0).
        resume: go on where an interrupted preparation of the same source stopped, by its whole blocks; False starts again.
        engine: "ray" has blocks written by the tasks of a Ray cluster, those of a dataset loaded, too. All its nodes must see
            the folder, what the dataset reads, and the modules. A worker or a node that dies costs only the blocks it was at.
        address: of a running Ray, where this process is not connected to one; None for $RAY_ADDRESS, or, if that is not set, a
            Ray that is started on this machine and ends with the preparation.
        storage_options: for the fsspec file system, where ``folder`` is a URL.

    Raises:
        LimitError: no such size or engine.
        DatasetError: ``source`` is neither.
        StorageError: the folder is prepared in another way, or holds files of others; the URL cannot be written to; there is no
            Ray.
        WorkerError: a Ray worker died, and those that tried again, too.
        SampleError: a sample or the info cannot be stored.
        OSError: the disk is full, or fails. Preparing again goes on from there.
        Exception: what the source raises.

    Several processes that prepare the same folder wait for the one that does it. Random numbers that samples are made with are
    seeded for each block.
    """
    nbytes = check_block_bytes(block_size, block_bytes)
    ray = _cluster(engine, address)
    if ray is not None and not is_url(str(folder)):
        folder = os.path.abspath(folder)  # workers are in other directories
    preparer = source if isinstance(source, DataPreparer) else None
    if preparer is None and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DatasetError(f"prepare takes a DataPreparer or a map-style dataset, not a {type(source).__name__}.")
    if preparer is not None and shuffle_seed is not None and is_url(str(folder)):
        raise StorageError(
            f"{folder} is a URL, and what a DataPreparer yields is shuffled by way of a local folder. Leave out shuffle_seed, "
            f"or prepare a local folder and copy it there."
        )
    plan = {
        "source": type(source).__name__,
        "samples": None if preparer else len(source),
        "block_size": block_size,
        "block_bytes": nbytes,
        "shuffle_seed": shuffle_seed,
        "fingerprint": fingerprint,
    }
    workshop = BlockFolderWriter(folder_at(str(folder), storage_options), allow_pickle)
    storage = OnDiskBlockDataStorage[Any, Any](
        folder, block_size, block_bytes=nbytes, allow_pickle=allow_pickle, storage_options=storage_options
    )
    with workshop.folder.locked():
        if workshop.prepared:
            if storage.index.plan != plan:
                raise StorageError(
                    f"{folder} is prepared in another way: {storage.index.plan}, not {plan}. Remove it to prepare it again, or "
                    f"give another folder."
                )
            workshop.tidy()  # who prepared it may have been killed before he could
            logger.info("%s is prepared already", folder)
            return storage
        job = _Preparation(workshop, plan, block_size, nbytes, num_workers, progress and is_first_rank(), ray)
        with nullcontext() if ray is None else ray.connected(address, num_workers):
            if preparer is None:
                job.run(source, info, resume, shuffle_seed)
            elif shuffle_seed is None:
                job.run_preparer(preparer, resume)
            else:
                workshop.begin(plan, resume)
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
                    job.run(StorageDataset(ordered), ordered.load_dataset_info(), True, shuffle_seed)
    return storage


def _cluster(engine: str, address: str | None) -> ModuleType | None:
    """Return the module for Ray, if that is the engine."""
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


class _Changed(Exception):
    """The source gives other samples than those of the blocks that are there."""


class _Preparation:
    """One preparation, of a folder that is locked."""

    def __init__(
        self,
        workshop: BlockFolderWriter,
        plan: dict[str, Any],
        block_size: int | None,
        nbytes: int,
        num_workers: int,
        progress: bool,
        ray: ModuleType | None,
    ) -> None:
        self._workshop, self._plan, self._size, self._bytes = workshop, plan, block_size, nbytes
        self._num_workers, self._progress, self._cluster = num_workers, progress, ray

    def _bar(self, total: int | None) -> Any:
        return tqdm(unit="sample", desc=f"preparing {self._workshop.path}", total=total, disable=not self._progress)

    # ------------------------------------------------------------------------------------------------ of a dataset

    def run(self, dataset: Any, info: Any, resume: bool, shuffle_seed: int | None) -> None:
        """Prepare the samples of a map-style dataset, block by block."""
        length = len(dataset)
        size = self._size
        if size is None:
            size = next(
                in_children_or_here(dataset, [partial(_sizes, dataset, length, self._bytes, self._workshop.allow_pickle)])
            )
        order = np.arange(length) if shuffle_seed is None else np.random.default_rng(shuffle_seed).permutation(length)
        blocks = _Blocks(dataset, order, size, self._workshop)
        found = self._workshop.begin(self._plan, resume)
        if found and next(in_children_or_here(dataset, [partial(blocks.encoded, [max(found)])]))[2] != found[max(found)]:
            logger.warning("%s: the dataset gives other samples than last time; starting again", self._workshop.path)
            found = {}
            self._workshop.keep(found)
        missing = [number for number in range(len(blocks)) if number not in found]
        count = min(self._num_workers, len(missing))
        if self._cluster is not None:
            written = self._written_by_cluster(blocks, missing)
        elif count:
            written = in_children_or_here(dataset, [partial(blocks.written, missing[first::count]) for first in range(count)])
        else:
            written = self._loaded_by_a_child(blocks, missing)
        with self._bar(length) as bar, closing(written):  # nobody writes afterwards
            bar.update(sum(entry.samples for entry in found.values()))
            for number, entry in written:
                found[number] = entry
                bar.update(entry.samples)
        self._workshop.finish([found[number] for number in range(len(blocks))], size, info, self._plan)

    def _written_by_cluster(self, blocks: "_Blocks", missing: list[int]) -> Generator[tuple[int, Entry], None, None]:
        assert self._cluster is not None
        with closing(self._cluster.entries(blocks.write, ((number,) for number in missing), self._num_workers)) as entries:
            yield from zip(missing, entries, strict=True)

    def _loaded_by_a_child(self, blocks: "_Blocks", missing: list[int]) -> Generator[tuple[int, Entry], None, None]:
        with closing(in_children_or_here(blocks.dataset, [partial(blocks.encoded, missing)])) as encoded:
            yield from zip(missing, self._by_threads(self._workshop.write_encoded, encoded), strict=True)

    def _by_threads(
        self, write: Callable[..., Entry], calls: Iterable[tuple[int, list[Any], Any]]
    ) -> Generator[Entry, None, None]:
        """Write blocks by calls of ``write``, and give their entries in order; while some are written, the next ones come."""
        count = max(1, self._num_workers)
        pending: deque[Future[Entry]] = deque()
        with ThreadPoolExecutor(count) as pool:
            for call in calls:
                pending.append(pool.submit(write, *call))
                if len(pending) > count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    # ------------------------------------------------------------------------------------------------ of a preparer

    def run_preparer(self, preparer: DataPreparer[Any, Any], resume: bool) -> None:
        """Prepare the samples that come from a `DataPreparer`."""
        try:
            self._run_preparer(preparer, self._workshop.begin(self._plan, resume))
        except _Changed:
            logger.warning("%s: the preparer gives other samples than last time; starting again", self._workshop.path)
            self._run_preparer(preparer, self._workshop.begin(self._plan, resume=False))

    def _run_preparer(self, preparer: DataPreparer[Any, Any], found: dict[int, Entry]) -> None:
        kept = next(number for number in range(len(found) + 1) if number not in found)  # those from the first on
        samples: Iterator[Any] = map(snapshot, preparer.prepare_data())
        head = list(islice(samples, PROBE))
        size = self._size or size_for(head, self._bytes, self._workshop.allow_pickle)
        samples = chain(head, samples)
        blocks = enumerate(iter(lambda: list(islice(samples, size)), []))
        entries: list[Entry] = []
        with self._bar(None) as bar:
            for number, block in islice(blocks, kept):
                if number == kept - 1 and self._workshop.encoded(block, number * size)[1] != found[number]:
                    raise _Changed
                entries.append(found[number])
                bar.update(len(block))
            if len(entries) < kept:
                raise _Changed
            calls = ((number, block, number * size) for number, block in blocks)
            if self._cluster is not None:
                written = self._cluster.entries(self._workshop.write_block, calls, self._num_workers)
            else:
                written = self._by_threads(self._workshop.write_block, calls)
            with closing(written):
                for entry in written:
                    entries.append(entry)
                    bar.update(entry.samples)
        self._workshop.finish(entries, size, preparer.get_dataset_info(), self._plan)


class _Blocks:
    """The blocks of a dataset, to be written where it is loaded: in child processes, or on a cluster."""

    def __init__(self, dataset: Any, order: np.ndarray[Any, Any], size: int, workshop: BlockFolderWriter) -> None:
        self.dataset, self._order, self.size, self._workshop = dataset, order, size, workshop

    def __len__(self) -> int:
        return -(-len(self._order) // self.size)

    def write(self, number: int) -> Entry:
        """Write a block, and return its entry of the index."""
        return self._workshop.write_block(number, self.samples(number), number * self.size)

    def written(self, numbers: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        """Write blocks, and yield their numbers and entries."""
        for number in numbers:
            yield number, self.write(number)

    def encoded(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[bytes], Entry]]:
        """Yield the numbers of blocks, their files in pieces, and what the index is to say of them."""
        for number in numbers:
            pieces, entry = self._workshop.encoded(self.samples(number), number * self.size)
            yield number, list(map(bytes, pieces)), entry

    def samples(self, number: int) -> list[Any]:
        """Return the samples of a block."""
        indices = self._order[number * self.size : (number + 1) * self.size].tolist()
        together = getattr(self.dataset, "__getitems__", None)
        with _seeded(number):
            return list(together(indices)) if together is not None else [self.dataset[idx] for idx in indices]


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Have random numbers depend on the number of the block alone; afterwards they go on as they would have."""
    with rng.preserve_rng_state():
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        yield


def _sizes(dataset: Any, length: int, block_bytes: int, allow_pickle: bool) -> Iterator[int]:
    """Yield how many samples like some of the dataset's make a block."""
    with _seeded(0):
        probed = [dataset[idx] for idx in np.unique(np.linspace(0, length - 1, min(PROBE, length)).astype(int)).tolist()]
    yield size_for(probed, block_bytes, allow_pickle)
