"""Prepare a dataset once: write its samples into a folder of blocks, in parallel, and resume after an interruption."""

import logging
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from tqdm import tqdm

from stocache.errors import DatasetError, LimitError, StorageError
from stocache.storage.dataset import StorageDataset
from stocache.storage.local import folder_at
from stocache.storage.manifest import STAGING, BlockFolderWriter, Entry
from stocache.storage.preparation.blocks import DatasetBlocks, Result, in_threads
from stocache.storage.preparation.source import DataPreparer
from stocache.storage.skipped import SKIPPED, SkippedSample, SkippedSamples, read_skipped
from stocache.storage.storage import OnDiskBlockDataStorage
from stocache.storage.urls import is_url
from stocache.storage.writer import BLOCK_BYTES, BlockCutter, NewBlock, check_block_bytes
from stocache.system.loading.fallback import in_children_or_here
from stocache.system.on_error import OnError, Retry, Skip, of_word, parse_on_error
from stocache.system.ranks import is_first_rank

logger = logging.getLogger("stocache")


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
    on_error: Literal["stop", "skip"] | OnError = "stop",
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> OnDiskBlockDataStorage[Any, Any]:
    """Prepare a dataset as a folder of blocks, in parallel, and return the storage. A prepared folder is returned unchanged.

    The bytes of the folder do not depend on the engine, the number of workers or interruptions. The folder keeps the sizes and
    times of change of the files of a source that `open_source` has opened. If they have changed, it is not returned.

    Args:
        source: a `DataPreparer`, or a map-style dataset (``__len__`` and ``__getitem__``).
        folder: a path or a URL that fsspec can write to, new or empty. A URL cannot be locked: run one preparation at a time
            there.
        num_workers: for a dataset, child processes that load and write blocks; with 0, one does, but at a URL this process
            writes. For a `DataPreparer`, whose samples come in order, threads that write. With Ray, blocks in flight; 0 for as
            many as the cluster can run.
        block_size, block_bytes, allow_pickle: as for `OnDiskBlockDataStorage`.
        shuffle_seed: assign samples to blocks at random, with this seed: sample i of the storage is then not sample i of the
            source. The samples of a `DataPreparer` are first prepared in order, which takes twice the room until the end.
        info: facts about a dataset, to be stored. A `DataPreparer` returns them itself.
        fingerprint: a string that identifies the data. Change it whenever the samples change: the files of the source are then
            not compared.
        progress: show a progress bar (not on ranks above 0).
        resume: keep the complete blocks of an interrupted preparation of the same source; False starts again.
        again: prepare a prepared folder again, for example because it is damaged.
        on_error: "skip" leaves out the samples of a dataset that raise an Exception, and lists them in skipped.json, see
            `OnDiskBlockDataStorage.load_skipped`. The last samples in order take their places. Samples that were skipped are
            not loaded again when a preparation continues. With "stop" the error ends the preparation, as do MemoryErrors,
            samples that cannot be stored, workers that die, and a source of which no sample can be loaded any more. A `Retry`
            loads samples again before that; a `Skip` skips up to a share of the samples; a list has one of each.
        engine: "ray" makes the tasks of a Ray cluster write blocks, and load them if ``source`` is a dataset. All nodes must
            see the folder, the files of the dataset, and its modules. When a worker or node dies, other workers repeat only
            the blocks that it worked on.
        address: of a running Ray, if this process is not connected to one. None for $RAY_ADDRESS, or, if that is not set, for a
            Ray that is started on this machine and ends with the preparation.
        storage_options: options of the fsspec file system, for a URL.

    Raises:
        LimitError: a size is not a size, or ``engine`` or ``on_error`` is unknown.
        DatasetError: ``source`` is neither a preparer nor a dataset, or a preparer although ``on_error`` is "skip".
        StorageError: the folder is prepared in a different way or from other files, or holds other files; it lacks samples, and
            ``on_error`` is "stop"; not one sample can be loaded; the source changes meanwhile; the URL cannot be written to;
            Ray is not installed or does not run.
        DamagedError: the index of a prepared folder is damaged; or a preparation cannot be continued, because skipped.json is
            damaged.
        WorkerError: a Ray worker died, and so did the workers that tried again.
        SampleError: a sample or the info cannot be stored.
        OSError: the disk is full, or fails. Preparing again continues from there.
        Exception: whatever the source raises.

    If several processes prepare the same folder, one does and the others wait for it. The random generators are seeded for each
    block.

    Examples:
        >>> import os
        >>> storage = prepare(TensorDataset(torch.arange(10)), "numbers", block_size=4, progress=False)
        >>> sorted(os.listdir("numbers/blocks"))
        ['000000.safetensors', '000001.safetensors', '000002.safetensors']
        >>> len(storage), storage.load_sample(7)
        (10, (tensor(7),))
    """
    nbytes = check_block_bytes(block_size, block_bytes)
    retry, skip = _parse_on_error(on_error)
    ray = _import_ray(engine, address)
    if ray is not None and not is_url(str(folder)):
        folder = os.path.abspath(folder)  # Ray's workers run in other directories
    preparer = _check_source(source, str(folder), shuffle_seed, retry or skip)
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
        job = _Preparation(writer, plan, num_workers, progress and is_first_rank(), ray, retry, skip)
        if job.has_work(storage, again):
            with nullcontext() if ray is None else ray.connected(address, num_workers):
                job.begin(resume)
                if preparer is None:
                    job.write_dataset(source, info)
                elif shuffle_seed is None:
                    job.write_samples(preparer)
                else:
                    staging = os.path.join(folder, STAGING)
                    ordered = prepare(
                        preparer, staging, num_workers=num_workers, block_size=block_size, block_bytes=nbytes,
                        fingerprint=fingerprint, allow_pickle=allow_pickle, progress=progress, engine=engine,
                    )  # fmt: skip
                    with ordered:
                        job.write_dataset(StorageDataset(ordered), ordered.load_dataset_info())
    if storage.index.skipped and is_first_rank():
        logger.warning(
            "%s lacks %d of the %d samples of the source, which cannot be loaded: %s/%s lists them.",
            folder, storage.index.skipped, plan["samples"], folder, SKIPPED,
        )  # fmt: skip
    return storage


def _files_of(source: object) -> dict[str, Any] | None:
    """Return the facts about the files that the samples of a source depend on; None if it returns none."""
    describe = getattr(source, "describe_files", None)
    return describe() if callable(describe) else None


_CHECKSUMS = "list of files", "contents"  # facts that a person cannot read


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return how a plan differs from the plan of a folder, each difference as text."""
    found = []
    for name in new:
        before, now = old.get(name), new[name]
        if name == "files" and (before is None or now is None):  # an earlier version, or the other has a fingerprint
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            facts = [fact for fact in now if before.get(fact) != now[fact] and (fact in before or fact not in _CHECKSUMS)]
            readable = [fact for fact in facts if fact not in _CHECKSUMS]
            found += [f"{fact} of the source: {before.get(fact)}, now {now[fact]}" for fact in readable]
            found += ["the files of the source have changed"] * (len(facts) > len(readable) == 0)
        elif before != now:
            found.append(f"{name.replace('_', ' ')}: {before}, now {now}")
    return found


def _check_source(source: object, folder: str, shuffle_seed: int | None, on_error: object) -> DataPreparer[Any, Any] | None:
    """Return the source if it is a preparer, None if it is a dataset."""
    if not isinstance(source, DataPreparer):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise DatasetError(f"prepare takes a DataPreparer or a map-style dataset, not a {type(source).__name__}.")
        return None
    if on_error is not None:
        raise DatasetError(
            f"on_error is for datasets, whose samples are loaded one by one: {type(source).__name__} yields them, and "
            f"an error ends it. Leave out on_error (--on-error)."
        )
    if shuffle_seed is not None and is_url(folder):
        raise StorageError(
            f"{folder} is a URL, and the samples of a DataPreparer are shuffled by way of a local folder. Leave out "
            f"shuffle_seed, or prepare a local folder and copy it there."
        )
    return source


def _parse_on_error(on_error: Any) -> tuple[Retry | None, Skip | None]:
    """Return what happens when a sample cannot be loaded."""
    if isinstance(on_error, str) and on_error not in ("stop", "skip"):
        raise LimitError(f"on_error={on_error!r} is unknown. Use 'stop' or 'skip', a Retry or a Skip.")
    return parse_on_error(of_word(on_error))


def _import_ray(engine: str, address: str | None) -> ModuleType | None:
    """Return the module that runs blocks on Ray, if that is the engine."""
    if engine not in ("local", "ray"):
        raise LimitError(f"engine={engine!r} is unknown. Use 'local' or 'ray'.")
    if engine == "local":
        if address is not None:
            raise LimitError(f"address={address!r} names a Ray cluster, which engine='local' does not use. Use engine='ray'.")
        return None
    try:
        from stocache.storage.preparation import ray
    except ImportError as error:
        raise StorageError(f"engine='ray' needs Ray, which is not installed ({error}): pip install 'stocache[ray]'") from None
    return ray


class _SourceChangedError(Exception):
    """The source yields other samples than the samples in the blocks of an interrupted preparation."""


@dataclass
class _Preparation:
    """One run of `prepare`, in a folder that is locked."""

    _writer: BlockFolderWriter
    _plan: dict[str, Any]
    _num_workers: int
    _progress: bool
    _ray: ModuleType | None
    _retry: Retry | None
    _skip: Skip | None

    def __post_init__(self) -> None:
        self._skipped = SkippedSamples(self._writer.folder)
        self._found: dict[int, Entry] = {}  # the blocks that are complete

    def has_work(self, storage: OnDiskBlockDataStorage[Any, Any], again: bool) -> bool:
        """Return whether the folder is to be prepared; False if it is prepared as planned.

        Raises:
            StorageError: it is prepared in a different way, or lacks samples.
            DamagedError: the index is damaged.
        """
        if not self._writer.prepared:
            return True
        if again:
            self._writer.reopen()
            return True
        index = storage.index
        if differences := _differences(index.plan, self._plan):
            raise StorageError(
                f"{self._writer.path} is prepared in another way: {'; '.join(differences)}.\n"
                f"Prepare it again (again=True, --again), or give another folder. With a fingerprint, you say yourself when "
                f"the data changes."
            )
        if index.skipped and not self._skip:
            raise StorageError(
                f"{self._writer.path} lacks {index.skipped} of {self._plan['samples']} samples, which could not be loaded: see "
                f"{SKIPPED}. Accept that (on_error='skip', --on-error skip), or prepare it again (again=True, --again)."
            )
        self._writer.clean_up()  # the process that prepared it may have been killed before it could
        logger.info("%s is prepared already", self._writer.path)
        return False

    def begin(self, resume: bool) -> None:
        """Begin the preparation, or find the complete blocks of one that was interrupted."""
        self._found = self._writer.begin(self._plan, resume)
        self._skipped = read_skipped(self._writer.folder)

    def _bar(self) -> Any:
        return tqdm(unit="sample", desc=f"preparing {self._writer.path}", disable=not self._progress)

    def _collect(self, written: Generator[tuple[int, Result], None, None], bar: Any) -> None:
        """Note which blocks are written, and which samples failed. After that, or an error, no process writes any more."""
        with closing(written):
            for number, result in written:
                if isinstance(result, Entry):
                    self._found[number] = result
                    bar.update(result.samples)
                else:
                    self._skipped.note(result)
                    self._check_share()

    def _check_share(self) -> None:
        """Raise StorageError if more samples cannot be loaded than may be skipped."""
        failed, samples = self._skipped.known, self._plan["samples"]
        if self._skip is not None and len(failed) > (most := self._skip.most(samples)):
            said = "; ".join(f"{sample.index}: {sample.reason}" for sample in list(failed.values())[:3])
            raise StorageError(
                f"{len(failed)} of {samples} samples cannot be loaded, more than the {most} that on_error allows: {said}. "
                f"{self._writer.path}/{SKIPPED} lists them."
            )

    def _start_again(self, source: str) -> None:
        """Forget the blocks of an interrupted preparation: the source returns other samples for one of them now."""
        logger.warning("%s: the %s returns other samples than last time; starting again", self._writer.path, source)
        self._writer.remove_blocks_except(())
        self._found = {}
        self._skipped.leave_out({})

    def _finish(self, source: object, block_size: int, info: Callable[[], object]) -> None:
        """Complete the folder, whose blocks are all written."""
        self._check_unchanged(source)
        entries = [self._found[number] for number in range(len(self._found))]
        self._writer.finish(entries, block_size, info(), self._plan)

    def _check_unchanged(self, source: Any) -> None:
        """Raise StorageError if the length or the files of the source have changed since the preparation began."""
        now = {
            "samples": None if self._plan["samples"] is None else len(source),
            "files": None if self._plan["files"] is None else _files_of(source),
        }
        if changes := _differences(self._plan, now):
            raise StorageError(
                f"the source was changed while {self._writer.path} was prepared: {'; '.join(changes)}. Prepare it again."
            )

    def write_dataset(self, dataset: Any, info: Any) -> None:
        """Write the blocks of a map-style dataset that are missing, in any order."""
        blocks = self._blocks_of(dataset)
        with self._bar() as bar:
            while True:
                bar.reset(len(dataset) - len(self._skipped.left_out))
                bar.update(sum(entry.samples for entry in self._found.values()))
                self._collect(self._write_missing(blocks), bar)
                if not self._skipped.failed:
                    break
                self._leave_out_failed(blocks)
        self._finish(dataset, blocks.block_size, lambda: info)

    def _blocks_of(self, dataset: object) -> DatasetBlocks:
        """Return the blocks of a dataset. If one that is complete has other samples now, start again.

        Raises:
            StorageError: a sample of it cannot be loaded now.
        """
        known = self._skipped.known if self._skip else {}
        blocks = DatasetBlocks(dataset, self._plan, self._writer, self._retry, self._skip is not None, known)
        blocks.leave_out(self._skipped.left_out)
        if self._found:
            last = max(self._found)
            _, _, result = next(in_children_or_here(dataset, [partial(blocks.encode_all, [last])]))
            if isinstance(result, list):
                raise StorageError(
                    f"a sample that {self._writer.path} has cannot be loaded any more: {result[0].reason.rstrip('.')}. "
                    f"Restore it, or start again (resume=False, --no-resume)."
                )
            if result != self._found[last]:
                self._start_again("dataset")
                return self._blocks_of(dataset)
        if not self._skip and self._skipped.known:
            self._leave_out(blocks, {})
        return blocks

    def _leave_out_failed(self, blocks: DatasetBlocks) -> None:
        """Leave out the samples that failed, once the others are written. If the source is at fault, forget which failed."""
        try:
            self._check_unchanged(blocks.dataset)
            if len(self._skipped.known) == len(blocks.dataset):
                raise StorageError(f"{self._writer.path}: no sample of the source can be loaded any more.")
        except StorageError:
            self._skipped.leave_out(self._skipped.left_out)
            raise
        self._leave_out(blocks, self._skipped.known)

    def _leave_out(self, blocks: DatasetBlocks, samples: dict[int, SkippedSample]) -> None:
        """Leave exactly these samples out; see NOTE [ Skipped samples ]."""
        for number in blocks.leave_out(samples):
            if self._found.pop(number, None):
                self._writer.remove_block(number)
        self._skipped.leave_out(samples)

    def _write_missing(self, blocks: DatasetBlocks) -> Generator[tuple[int, Result], None, None]:
        """Write blocks, and yield their numbers and results. Blocks with samples that failed are left out."""
        missing = sorted(set(range(len(blocks))) - set(self._found) - blocks.numbers_of(self._skipped.failed))
        count = min(self._num_workers or int(not is_url(self._writer.path)), len(missing))
        if self._ray is not None:
            yield from self._ray.written(blocks.write, ((number,) for number in missing), self._num_workers)
        elif count:
            shares = [partial(blocks.write_all, missing[first::count]) for first in range(count)]
            yield from in_children_or_here(blocks.dataset, shares)
        else:  # at a URL a child process only loads and encodes: some connections do not work after a fork
            with closing(in_children_or_here(blocks.dataset, [partial(blocks.encode_all, missing)])) as encoded:
                yield from in_threads(blocks.save, encoded, 1)

    def write_samples(self, preparer: DataPreparer[Any, Any]) -> None:
        """Write the blocks that are missing of the samples that a `DataPreparer` yields, in order."""
        cutter = BlockCutter(self._plan["block_size"], self._plan["block_bytes"], self._writer.allow_pickle)
        try:
            with self._bar() as bar:
                missing = self._find_missing(cutter.cut(preparer.prepare_data()), bar)
                if self._ray is not None:
                    written = self._ray.written(self._writer.write_block, missing, self._num_workers)
                else:
                    written = in_threads(self._writer.write_block, missing, max(1, self._num_workers))
                self._collect(written, bar)
        except _SourceChangedError:
            self._start_again("preparer")
            self.write_samples(preparer)
            return
        assert cutter.block_size is not None
        self._finish(preparer, cutter.block_size, preparer.get_dataset_info)

    def _find_missing(self, blocks: Iterator[NewBlock], bar: Any) -> Iterator[NewBlock]:
        """Yield the missing blocks. Raises _SourceChangedError: the source returns other samples for the last written block."""
        last, number = max(self._found, default=-1), -1
        for number, samples, first in blocks:
            if number not in self._found:
                yield number, samples, first
                continue
            if number == last and self._writer.encode_block(samples, first)[1] != self._found[last]:
                raise _SourceChangedError
            bar.update(len(samples))
        if number < last:
            raise _SourceChangedError
