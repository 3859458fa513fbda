"""StreamLoader: batches of tensors from text files of any size, through an internal buffer, cached after the first pass."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from stocache.cache.stats import CacheStats
from stocache.errors import CacheNameError, ClosedError, MismatchError, StateError, StreamError
from stocache.loader.collate import as_is
from stocache.loader.dataloader import DataLoader
from stocache.system.deprecation import renamed_arguments
from stocache.system.hashing import checksum
from stocache.system.ranks import is_first_rank
from stocache.text.buffers import Buffers
from stocache.text.files import Paths, TextFile, find_files
from stocache.text.flat import flat_arguments
from stocache.text.formats import Column, CsvFormat, CustomFormat, TextFormat
from stocache.text.lines import LinePosition, Lines
from stocache.text.options import CacheName, ReadOptions, ShardOptions, check_choice, check_integer, check_type
from stocache.text.windows import Deliveries, Shuffle, ShuffleKey, WindowBatches, Windows, WorkerShard, by_threads, one_by_one

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("stocache")

_STATE_VERSION = 1


class CsvArguments(TypedDict, total=False):
    """Fields of a `CsvFormat` that `StreamLoader` takes directly, in place of a format."""

    delimiter: str | None
    skip_header: int
    columns: Sequence[Column] | None
    label_columns: Column | Sequence[Column] | None


@dataclass(frozen=True)
class StreamStats:
    """What a `StreamLoader` has done in this process, and its workers for it.

    Attributes:
        epochs: finished.
        batches: delivered.
        rows: of the buffers they came from, as often as they came.
        skipped: of these, lines that were left out because of ``on_error="skip"``.
        dropped: of these, rows that were left out because they fill no batch of their buffer or window (``drop_last``).
        cache: of its cache, by all processes that share it: a sample is a buffer. None without.
    """

    epochs: int
    batches: int
    rows: int
    skipped: int
    dropped: int
    cache: CacheStats | None


class StreamLoader(IterableDataset[Any]):
    """Batches of tensors from text files that need not fit in memory.

        loader = StreamLoader("train.tsv", batch_size=256, buffer_size=65536, shuffle=True, size_limit_gib=8)
        for epoch in range(10):
            for x, y in loader:  # float32 (256, columns), int64 (256,)
                train(x, y)

    Rows are read through a buffer of ``buffer_size`` of them, parsed in bulk, ahead of the training step. Iterating it is one
    epoch; iterating it again is the next. Parsed buffers stay in a shared cache while there is room: from the second epoch on
    they are neither read nor parsed; the others are found by their bytes.

    Args:
        path: a file, a glob or an fsspec URL, or a sequence of these. They are read as one text, in this order. Files
            compressed by gzip, zstd or bz2 are decompressed as they are read.
        batch_size: rows in a batch.
        buffer_size: rows in a buffer, a multiple of ``batch_size``. About six buffers are in memory at a time.
        shuffle: False keeps the order of the files. True shuffles inside each buffer. "buffers" also takes the buffers in
            random order; the files are first read once for that, without parsing.
        window: number of buffers that are shuffled together. All of them are in memory together.
        seed: the order depends only on the seed, the epoch and the rank.
        drop_last: True leaves out the last rows that do not fill a buffer, "batch" those that do not fill a batch, False
            leaves out nothing. Batches do not reach beyond their window: where lines are skipped, this applies to the end of
            each window.
        format: a `CsvFormat`, `FixedWidthFormat`, `JsonLinesFormat` or `CustomFormat`. The default is ``CsvFormat("\\t")``.
        transform: called with each batch; its result is delivered instead. Results are not cached.
        num_workers: processes that read, parse and transform; 0 uses threads of this process. The order is the same.
        size_limit_gib: memory for the cache on this machine, as for `RaggedCache`; None for no cache.
        cache: the `CacheName` by which jobs share the cache. The ranks of one job share a cache without it, unless the format
            is a `CustomFormat`.
        count_rows: True reads the files once when the loader is made, without parsing. The length is then known. Several
            ranks then deliver equally many batches, unless ``drop_last`` is False or lines are skipped.
        shard: the `ShardOptions` of this process. By default they come from torch.distributed or torchrun.
        read: `ReadOptions`: engine, start method of workers, options for URLs, progress bar.
        csv: ``delimiter``, ``skip_header``, ``columns`` and ``label_columns`` stand for
            ``format=CsvFormat(delimiter, skip_header=…, columns=…, label_columns=…)``.

    Raises:
        StreamError: the arguments contradict each other or the first row; while iterating, a line is bad.
        DamagedError: while iterating, a file changes, or compressed data ends too soon.
        FileNotFoundError: a file does not exist.
        LimitError, CacheNameError, MismatchError, SegmentError: as for `RaggedCache`.

    A file that has changed when an epoch begins is read anew. In a `torch.utils.data.DataLoader` (``batch_size=None``) each
    worker takes a part of the buffers; the order is then reproducible by torch's seed, or after `set_epoch`.
    Source: the article on a streaming data loader for PyTorch (J. McCaffrey).
    """

    @renamed_arguments(count="count_rows")
    @flat_arguments
    def __init__(
        self,
        path: Paths,
        batch_size: int,
        buffer_size: int,
        *,
        shuffle: Shuffle = False,
        window: int = 1,
        seed: int = 0,
        drop_last: bool | Literal["batch"] = True,
        format: TextFormat | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        size_limit_gib: float | str | None = None,
        cache: CacheName | None = None,
        count_rows: bool = False,
        shard: ShardOptions | None = None,
        read: ReadOptions | None = None,
        **csv: "Unpack[CsvArguments]",
    ) -> None:
        if unknown := csv.keys() - CsvArguments.__annotations__.keys():
            raise TypeError(f"StreamLoader has no argument {min(unknown)!r}.")
        if format is not None and csv:
            raise StreamError(f"{min(csv)} belongs to format=. Pass it to {type(format).__name__}.")
        self._format = format or CsvFormat(**({"delimiter": "\t"} | csv))
        self._shard = shard or ShardOptions.from_env()
        self._read = read or ReadOptions()
        check_type("format", self._format, TextFormat)
        check_type("shard", self._shard, ShardOptions)
        check_type("read", self._read, ReadOptions)
        check_type("cache", cache, CacheName, optional=True)
        check_integer("batch_size", batch_size, 1)
        check_integer("buffer_size", buffer_size, 1)
        check_integer("window", window, 1)
        check_integer("seed", seed, 0)
        check_integer("num_workers", num_workers, 0)
        check_choice("shuffle", shuffle, (False, True, "buffers"))
        check_choice("drop_last", drop_last, (False, True, "batch"))
        if buffer_size % batch_size:
            fits = max(batch_size, buffer_size // batch_size * batch_size)
            raise StreamError(
                f"buffer_size={buffer_size} is not a multiple of batch_size={batch_size}. Use for example {fits}."
            )
        if seed >= 2**63:
            raise StreamError(f"seed={seed} has more than 63 bits.")
        if isinstance(self._format, CustomFormat) and self._shard.world_size > 1 and size_limit_gib and cache is None:
            raise CacheNameError(
                "ranks cannot tell whether their CustomFormats parse alike. To share a cache, pass cache=CacheName(…) with a "
                "name, and with a fingerprint that changes with the function."
            )
        self._paths, self._buffer_size = path, buffer_size
        self._order_options: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "window": window,
            "seed": seed,
            "drop_last": drop_last,
        }
        self._transform, self._num_workers = transform, num_workers
        self._limit_gib, self._cache_name = size_limit_gib, cache
        self._counts = count_rows or shuffle == "buffers"
        self._progress = self._read.progress and is_first_rank()
        self._epoch, self._epoch_was_set = 0, False
        self._resumed: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None  # after the batch that was delivered last
        self._workers: DataLoader | None = None
        self._totals = {"epochs": 0, "batches": 0, "rows": 0, "skipped": 0, "dropped": 0}
        self._fault = ""  # of the first line that was left out
        self._warned_of_rest = False
        self._turn = 0  # of iterations by workers
        self._windows: Windows | None = None
        self._open(find_files(path, self._read.storage_options))

    # ------------------------------------------------------------------------------------------------ the files

    def _open(self, files: list[TextFile], cached: bool = True) -> None:
        """Set up all that follows from what is in the files."""
        full = [file for file in files if file.size]
        if not full or (len(full) < len(files) and not self._format.skips):
            empty = next(file.path for file in files if not file.size)
            raise StreamError(f"{empty} is empty: a file of at least one line was expected.")
        shard = self._shard.rank, self._shard.world_size
        rows = self._format
        lines = Lines(
            full, self._buffer_size, rows.skip_header, rows.comments, rows.white_delimiter, *shard, rows.line_limit, rows.skips
        )
        with contextlib.closing(lines):
            if lines.compressed and self._order_options["shuffle"] == "buffers":
                packed = next(file for file in full if file.compression)
                raise StreamError(
                    f"shuffle='buffers' needs files that can be read from any byte, and {packed.path} is {packed.compression}. "
                    "Use shuffle=True, with a window of several buffers, or decompress it."
                )
            parser = rows.parser(lines, self._read.engine)
            whole = self._order_options["drop_last"] is True
            limit, name = (self._limit_gib, self._name_of_cache(full)) if cached else (None, None)
            buffers = Buffers(lines, parser, rows.skips, whole, limit, name, *shard)
            self._windows = Windows(buffers, **self._order_options, transform=self._transform, rank=self._shard.rank)
            self._files = files if cached or get_worker_info() is not None else None  # else it tries again
            if self._counts:
                self._count(self._windows)

    def _name_of_cache(self, files: list[TextFile]) -> CacheName | None:
        """Return the name of the cache, with a fingerprint of its content; None for a cache of this loader alone."""
        given, world_size = self._cache_name, self._shard.world_size
        facts = [(os.path.abspath(file.path), file.size, file.stamp, file.ends) for file in files]
        fingerprint = None if given is None else given.fingerprint
        settings = (self._buffer_size, self._format.skip_header, self._format.skip_identity, world_size, fingerprint)
        identity = checksum(repr((facts, settings, self._format.identity)).encode())
        if given is not None:
            return CacheName(given.name, given.persist, identity)
        if world_size == 1:
            return None
        return CacheName(f"rows-{checksum(identity.encode(), repr(self._limit_gib).encode())}", fingerprint=identity)

    def _count(self, windows: Windows) -> None:
        """Count the rows of this rank, and find where the rank with the fewest batches ends."""
        lines = windows.buffers.lines
        with tqdm(unit="row", unit_scale=True, desc="counting rows", disable=not self._progress) as bar:
            rows = windows.buffers.count(lambda position: bar.update(position.rows - bar.n))
        if self._shard.world_size == 1 or windows.drop_last is False:
            return
        windows.limit = windows.batches_of(rows, lines.first)
        for rank in range(self._shard.world_size):
            with contextlib.closing(lines.share_of(rank, self._shard.world_size)) as share:
                known = lines.step > 1 or rank == self._shard.rank  # ranks of every so manyth buffer have counted the same rows
                windows.limit = min(windows.limit, windows.batches_of(rows if known else share.count(), share.first))
        if not windows.limit:
            raise StreamError(
                f"{self._paths}: with buffer_size={self._buffer_size}, a rank of {self._shard.world_size} has no batch."
            )

    def _refreshed(self) -> Windows:
        """Return the windows of the files as they are now."""
        files = find_files(self._paths, self._read.storage_options)
        if files == self._files:
            return self._current()
        if self._files is not None:
            logger.info("the files have changed, and are read anew: %s", self._paths)
        self._files = None
        self._end_workers()
        self._current().buffers.close()
        try:
            self._open(files, cached=get_worker_info() is None)  # a worker cannot tell the others of a new cache
        except MismatchError as error:  # another rank or job has not noticed yet
            logger.warning("this epoch runs uncached: %s", str(error))
            self._open(files, cached=False)
        return self._current()

    # ------------------------------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of one epoch: the next, or the rest of the one that was resumed."""
        # a generator begins with the first batch: by then a persistent worker has been told the epoch
        worker = get_worker_info()
        windows = self._refreshed()
        state, self._resumed = self._resumed, None
        if state is None:
            state = self._beginning(self._epoch)
        elif state["identity"] != self._identity():
            raise StateError("the files have changed since the state was taken. Begin an epoch of its own: set_epoch(…).")
        epoch, window, done = state["epoch"], state["window"], state["batch"]
        key = self._key(epoch) if window is None else tuple(state["key"])
        if state.get("position") is not None:
            windows.buffers.resume_at(state["buffer"], LinePosition(*state["position"]))
        self._epoch = epoch + 1
        self._state = {"epoch": epoch, "key": state["key"], "window": window, "batch": done}
        if worker is not None:
            deliveries = one_by_one(windows, key, worker.id if window is None else window, worker.num_workers)
        elif self._num_workers:
            deliveries = self._by_workers(windows, epoch, window or 0)
        else:
            deliveries = by_threads(windows, key, window or 0)
        before, rows = self._totals.copy(), windows.buffers.total_rows
        bar = tqdm(total=rows, unit="row", unit_scale=True, desc=f"epoch {epoch}", disable=not self._progress)
        with bar, contextlib.closing(windows.buffers.lines), contextlib.closing(deliveries):
            for number, delivery in deliveries:
                self._note(delivery)
                for batch in delivery.batches[done:]:
                    done += 1
                    self._totals["batches"] += 1
                    self._state = {"epoch": epoch, "key": list(key), "window": number, "batch": done}
                    yield batch
                bar.update(delivery.rows)
                done = 0
        self._state = self._beginning(epoch + 1)
        self._totals["epochs"] += 1
        self._log_epoch(epoch, {what: count - before[what] for what, count in self._totals.items()})

    def _key(self, epoch: int) -> ShuffleKey:
        worker = get_worker_info()
        return (epoch,) if worker is None or self._epoch_was_set else (worker.seed - worker.id, epoch)

    def _by_workers(self, windows: Windows, epoch: int, start: int) -> Deliveries:
        """Yield all windows from ``start`` on, made by worker processes in turn."""
        if self._workers is None or start:
            self._end_workers()
            self._workers = DataLoader(
                WorkerShard(windows, epoch, start),
                batch_size=None,
                num_workers=self._num_workers,
                collate_fn=as_is,
                generator=torch.Generator().manual_seed(windows.seed),  # else torch would draw from the user's
                persistent_workers=True,
                multiprocessing_context=self._read.multiprocessing_context,
            )
        self._workers.set_epoch(epoch)
        self._turn += 1
        turn = self._turn
        made = iter(self._workers)
        while self._turn == turn:
            try:
                found = next(made)
            except StopIteration:
                return
            except Exception:
                self._end_workers()
                raise
            yield found
        raise StreamError("another iteration has begun: with num_workers, a StreamLoader has one at a time.")

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end_workers()
        self._workers = None

    def _note(self, delivery: WindowBatches) -> None:
        self._totals["rows"] += delivery.rows
        self._totals["skipped"] += delivery.skipped
        self._totals["dropped"] += delivery.dropped
        if delivery.fault is not None and not self._fault:
            place, reason = delivery.fault
            self._fault = f"{self._current().buffers.lines.where(place)}: {reason}"
            logger.warning("a line is left out; so will others be, counted at the end of the epoch: %s", self._fault)

    def _log_epoch(self, epoch: int, counts: dict[str, int]) -> None:
        """Say what is to be known of an epoch that is over."""
        windows = self._current()
        total, size = windows.buffers.total_rows, self._buffer_size
        rank = f", rank {self._shard.rank}" if self._shard.world_size > 1 else ""
        if total is not None and not windows.batches_of(total, windows.buffers.lines.first):
            if not total:
                raise StreamError(f"{self._paths}{rank}: no line holds data.")
            less = f"drop_last={windows.drop_last} leaves no batch. Lower buffer_size, or say drop_last=False."
            raise StreamError(
                f"{self._paths}{rank}: with {total} rows, buffer_size={size}, batch_size={windows.batch_size}, {less}"
            )
        if counts["skipped"] + counts["dropped"] == counts["rows"] > 0 and get_worker_info() is None:
            lost = f"{counts['skipped']} of {counts['rows']} lines were left out, and the others fill no batch"
            raise StreamError(f"{self._paths}{rank}: {lost}. The first: {self._fault}")
        if is_first_rank():
            logger.info("epoch %d: %d rows in %d batches", epoch, counts["rows"], counts["batches"])
        if counts["skipped"]:
            logger.warning(
                "epoch %d%s: %d of %d lines were left out, and %d good ones that then filled no batch",
                epoch, rank, counts["skipped"], counts["rows"], counts["dropped"],
            )  # fmt: skip
        if total and total % size and windows.drop_last is True and not self._warned_of_rest:
            self._warned_of_rest = True
            logger.warning(
                "the last %d of %d rows do not fill a buffer of %d and are left out of each epoch; drop_last='batch' leaves "
                "out only what does not fill a batch, drop_last=False nothing",
                total % size, total, size,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ where it stands

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is iterated over next."""
        if type(epoch) is not int or epoch < 0:
            raise StreamError(f"epoch={epoch!r} is no integer of at least 0.")
        self._epoch, self._epoch_was_set = epoch, True
        self._resumed = self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, after the batch it has delivered last: numbers and strings only."""
        if self._resumed is not None:
            return dict(self._resumed)
        state: dict[str, Any] = {"version": _STATE_VERSION, "identity": self._identity()} | (
            self._state or self._beginning(self._epoch)
        )
        windows = self._current()
        if state["window"] is not None and windows.shuffle != "buffers":  # where else it takes reading up to there
            number = windows.numbers(state["key"], state["window"])[0]
            position = windows.buffers.position(number)
            state |= {"buffer": number, "position": None if position is None else list(position)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next iterator delivers the batches that followed, and parses no others.

        Raises:
            StateError: it is no such state, or of other files, or of another order.
        """
        parts = {"version", "identity", "epoch", "key", "window", "batch"}
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION or not parts <= set(state):
            raise StateError(f"{state!r:.100} is no state of a StreamLoader of this version of stocache.")
        if state["identity"] != self._identity():
            raise StateError("the state is of a StreamLoader with other files, or other arguments that its order follows from.")
        self._resumed = dict(state)

    def _beginning(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "key": None, "window": None, "batch": 0}

    def _identity(self) -> str:
        """Return what the batches follow from: not where the files lie, nor how many processes parse them."""
        files = [(file.size, file.ends) for file in self._current().buffers.lines.files]
        follows = (
            self._shard.rank,
            self._shard.world_size,
            self._buffer_size,
            self._format.skip_header,
            self._format.skip_identity,
            self._order_options,
        )
        return checksum(repr((files, follows, self._format.identity)).encode())

    def __len__(self) -> int:
        """Return the number of batches in an epoch if no line is left out: known after a first one, or with
        ``count_rows=True``.

        Raises:
            TypeError: it is not known yet.
        """
        windows = self._current()
        rows = windows.buffers.total_rows
        if rows is None:
            raise TypeError("the length of a StreamLoader is known after its first epoch, or with count_rows=True.")
        return windows.batches_of(rows, windows.buffers.lines.first) if windows.limit is None else windows.limit

    def __bool__(self) -> bool:
        return True  # rather than ask for the length

    def stats(self) -> StreamStats:
        """Return what it has done."""
        cache = self._current().buffers.cache
        return StreamStats(**self._totals, cache=None if cache is None else cache.stats())

    # ------------------------------------------------------------------------------------------------ life

    def close(self) -> None:
        """End its workers, close its files, and let go of its memory. Twice is fine."""
        self._end_workers()
        if self._windows is not None:
            self._windows.buffers.close()
            self._windows = None

    def _current(self) -> Windows:
        if self._windows is None:
            raise ClosedError("the StreamLoader is closed. Make a new one, or close it later.")
        return self._windows

    def __enter__(self) -> "StreamLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_workers": None}
