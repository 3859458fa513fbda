"""StreamLoader: batches of tensors from text files of any size, through an internal buffer, cached after the first pass."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from stocache.cache.stats import CacheStats
from stocache.errors import CacheNameError, ClosedError, MismatchError, StateError, StreamError
from stocache.loader.collate import as_is
from stocache.loader.dataloader import DataLoader
from stocache.system.deprecation import renamed_arguments
from stocache.system.hashing import checksum
from stocache.system.limits import parse_size
from stocache.system.ranks import is_first_rank, torch_ranks
from stocache.text.buffers import Buffers, CacheOptions
from stocache.text.files import Paths, TextFile, find_files
from stocache.text.lines import LinePosition, Lines
from stocache.text.schema import Column, Format, Schema
from stocache.text.windows import Deliveries, Shuffle, ShuffleKey, WindowBatches, Windows, WorkerShard, by_threads, one_by_one

logger = logging.getLogger("stocache")

_STATE_VERSION = 1
_LONGEST_LINE = "16MiB"
_LEAST = {"batch_size": 1, "buffer_size": 1, "window": 1, "seed": 0, "skip_header": 0, "num_workers": 0}
_KNOWN = {
    "shuffle": (False, True, "buffers"),
    "drop_last": (False, True, "batch"),
    "format": (None, "delimited", "fixed", "jsonl"),
    "nan": ("error", "keep"),
    "on_error": ("raise", "skip"),
    "engine": ("auto", "pyarrow", "numpy"),
}


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
        path: a file, a glob, an fsspec URL, or a sequence of such; read as one text, in this order. Files compressed by gzip,
            zstd or bz2 are decompressed as they are read.
        batch_size: rows in a batch.
        buffer_size: rows in a buffer, a multiple of ``batch_size``. About six are in memory at a time.
        shuffle: False for the order of the files; True to shuffle inside each buffer; "buffers" to take the buffers in random
            order too, for which the files are first read once, without parsing.
        window: buffers that are shuffled together, and are in memory together.
        seed: of the order, which follows from it, the epoch and the rank alone.
        drop_last: True leaves out the last rows that do not fill a buffer, "batch" those that do not fill a batch, False none.
            Batches do not reach beyond their window: where lines are skipped, it applies to the end of each window, too.
        format: "delimited", "fixed" or "jsonl".
        delimiter: between fields; None for white space.
        widths: of the fields in bytes, for "fixed".
        columns: features: their numbers from 0, or names: of the last header line, or JSON keys. None for all others.
        label_columns: one number or name, for labels of shape (batch,); a sequence, for (batch, labels); None for batches of
            features alone.
        dtype, label_dtype: of the tensors.
        comments: what begins a comment: to the end of the line, in delimited text, else whole lines only. None for none.
        skip_header: lines at the beginning of each file.
        nan: "error" for missing values ("", NA, nan, null, …) to be errors, "keep" for them to be NaN, in floating point.
        on_error: "raise", or "skip" lines that are not as they should be; the skipped ones are counted and reported.
        max_line_bytes: of a line, as a number of bytes or a size such as "64MiB". A longer one is an error, also a comment or
            a blank line; with ``on_error="skip"`` it is left out as a row that is wrong, unread. Lines of a header that are too
            long are always an error. About 16 MiB of text and a few such lines are in memory while a buffer is read.
        parse: a function of a list of lines that returns arrays, or a tree of them, with one row a line, instead of all this.
            Apart from their rows, arrays are of one shape whatever the lines.
        transform: called with each batch; what it returns is delivered. Nothing of it is cached.
        num_workers: processes that read, parse and transform; 0 for threads of this one. The order is the same.
        multiprocessing_context: their start method.
        size_limit_gib: memory of the cache on this machine, as for `RaggedCache`; None for no cache.
        name, persist, fingerprint: as for `RaggedCache`, for jobs that read the same files in the same way. That they do is
            checked; put what ``parse`` depends on into the fingerprint. Ranks share a cache without being told a name, but for
            one with ``parse``.
        count_rows: read the files once when the loader is made, without parsing, to know its length; and, with several ranks,
            to end all ranks' epochs after equally many batches, unless ``drop_last`` is False, or lines are skipped.
        progress: show a bar.
        rank, world_size: this process's part of the rows; by default torch.distributed's, or torchrun's. Both or none.
        engine: what parses: "pyarrow", "numpy", or "auto" for the fastest that is installed.
        storage_options: for fsspec.

    Raises:
        StreamError: the arguments contradict each other or the first line; while iterating, a line is not as it should be.
        DamagedError: while iterating, a file changes, or compressed data ends too soon.
        FileNotFoundError: there is no such file.
        LimitError, CacheNameError, MismatchError, SegmentError: as for `RaggedCache`.

    A file that has changed when an epoch begins is read anew. In a `torch.utils.data.DataLoader` (``batch_size=None``) each
    worker takes its part of the buffers; the order is then reproducible by torch's seed, or after `set_epoch`.
    Source: the article on a streaming data loader for PyTorch (J. McCaffrey).
    """

    @renamed_arguments(count="count_rows")
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
        format: Format | None = None,
        delimiter: str | None = "\t",
        widths: Sequence[int] | None = None,
        columns: Sequence[Column] | None = None,
        label_columns: Column | Sequence[Column] | None = -1,
        dtype: Any = torch.float32,
        label_dtype: Any = torch.int64,
        comments: str | None = "#",
        skip_header: int = 0,
        nan: Literal["error", "keep"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        max_line_bytes: int | str = _LONGEST_LINE,
        parse: Callable[[list[str]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        size_limit_gib: float | str | None = None,
        name: str | None = None,
        persist: bool = False,
        fingerprint: str | None = None,
        count_rows: bool = False,
        progress: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        engine: Literal["auto", "pyarrow", "numpy"] = "auto",
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        _check_arguments(locals())
        if buffer_size % batch_size:
            fits = max(batch_size, buffer_size // batch_size * batch_size)
            raise StreamError(f"buffer_size={buffer_size} is no multiple of batch_size={batch_size}. Use for example {fits}.")
        if name is None and (persist or fingerprint is not None):
            raise CacheNameError("persist and fingerprint are for caches with a name. Give one.")
        if (rank is None) != (world_size is None):
            raise StreamError(f"rank={rank} and world_size={world_size}: give both, or none.")
        if rank is None or world_size is None:
            rank, world_size = torch_ranks() or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        if parse is not None and world_size > 1 and size_limit_gib and name is None:
            raise CacheNameError(
                "what a parse function makes of a line is not known before: for ranks to share a cache, give it a name, and a "
                "fingerprint that changes with the function."
            )
        if seed >= 2**63:
            raise StreamError(f"seed={seed} is more than 63 bits.")
        if not 0 <= rank < world_size:
            raise StreamError(f"rank={rank} is none of world_size={world_size}.")
        self._schema = Schema(
            format, delimiter, widths, columns, label_columns, dtype, label_dtype, comments, nan, parse, engine
        )
        self._paths, self._options = path, storage_options
        self._buffer_size, self._skip_header, self._on_error = buffer_size, skip_header, on_error
        self._max_line_bytes = _line_limit(max_line_bytes)
        self._order_options: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "window": window,
            "seed": seed,
            "drop_last": drop_last,
        }
        self._transform, self._rank, self._world_size = transform, rank, world_size
        self._num_workers, self._context = num_workers, multiprocessing_context
        self._limit_gib, self._name, self._persist, self._fingerprint = size_limit_gib, name, persist, fingerprint
        self._counts = count_rows or shuffle == "buffers"
        self._progress = progress and is_first_rank()
        self._epoch, self._epoch_was_set = 0, False
        self._resumed: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None  # after the batch that was delivered last
        self._workers: DataLoader | None = None
        self._totals = {"epochs": 0, "batches": 0, "rows": 0, "skipped": 0, "dropped": 0}
        self._fault = ""  # of the first line that was left out
        self._told_of_rest = False
        self._turn = 0  # of iterations by workers
        self._windows: Windows | None = None
        self._open(find_files(path, storage_options))

    # ------------------------------------------------------------------------------------------------ the files

    def _open(self, files: list[TextFile], cached: bool = True) -> None:
        """Set up all that follows from what is in the files."""
        full = [file for file in files if file.size]
        if not full or (len(full) < len(files) and self._on_error == "raise"):
            empty = next(file.path for file in files if not file.size)
            raise StreamError(f"{empty} is empty: a file of at least one line was expected.")
        whose = self._rank, self._world_size
        marks = self._schema.comments, self._schema.white_delimiter
        skip = self._on_error == "skip"
        lines = Lines(full, self._buffer_size, self._skip_header, *marks, *whose, self._max_line_bytes, skip)
        with contextlib.closing(lines):
            if lines.compressed and self._order_options["shuffle"] == "buffers":
                packed = next(file for file in full if file.compression)
                raise StreamError(
                    f"shuffle='buffers' needs files that can be read from any byte, and {packed.path} is {packed.compression}. "
                    "Use shuffle=True, with a window of several buffers, or decompress it."
                )
            parser = self._schema.parser(lines)
            keeping = self._keeping(full) if cached else CacheOptions(None, None, False, "")
            whole = self._order_options["drop_last"] is True
            buffers = Buffers(lines, parser, skip, whole, keeping, *whose)
            self._windows = Windows(buffers, **self._order_options, transform=self._transform, rank=self._rank)
            self._files = files if cached or get_worker_info() is not None else None  # else it tries again
            if self._counts:
                self._count(self._windows)

    def _keeping(self, files: list[TextFile]) -> CacheOptions:
        """Return how buffers are cached: by ranks together, in a cache that is named by what is in it if it has no name."""
        facts = [(os.path.abspath(file.path), file.size, file.stamp, file.ends) for file in files]
        settings = (self._buffer_size, self._skip_header, self._lenience, self._world_size, self._fingerprint)
        identity = checksum(repr((facts, settings, self._schema.identity)).encode())
        name = self._name
        if name is None and self._world_size > 1:
            name = f"rows-{checksum(identity.encode(), repr(self._limit_gib).encode())}"
        return CacheOptions(self._limit_gib, name, self._persist, identity)

    def _count(self, windows: Windows) -> None:
        """Count the rows of this rank, and find where the rank with the fewest batches ends."""
        lines = windows.buffers.lines
        with tqdm(unit="row", unit_scale=True, desc="counting rows", disable=not self._progress) as bar:
            rows = windows.buffers.count(lambda position: bar.update(position.rows - bar.n))
        if self._world_size == 1 or windows.drop_last is False:
            return
        windows.limit = windows.batches_of(rows, lines.first)
        for rank in range(self._world_size):
            with contextlib.closing(lines.share_of(rank, self._world_size)) as share:
                known = lines.step > 1 or rank == self._rank  # ranks of every so manyth buffer have counted the same rows
                windows.limit = min(windows.limit, windows.batches_of(rows if known else share.count(), share.first))
        if not windows.limit:
            raise StreamError(
                f"{self._paths}: with buffer_size={self._buffer_size}, a rank of {self._world_size} has no batch."
            )

    def _refreshed(self) -> Windows:
        """Return the windows of the files as they are now."""
        files = find_files(self._paths, self._options)
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
                multiprocessing_context=self._context,
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
        rank = f", rank {self._rank}" if self._world_size > 1 else ""
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
        if total and total % size and windows.drop_last is True and not self._told_of_rest:
            self._told_of_rest = True
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

    @property
    def _lenience(self) -> str:
        """Which lines are left out. The longest line that is read is part of it only where others are left out."""
        skips = self._on_error == "skip" and self._max_line_bytes != _line_limit(_LONGEST_LINE)
        return f"{self._on_error} {self._max_line_bytes}" if skips else self._on_error

    def _beginning(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "key": None, "window": None, "batch": 0}

    def _identity(self) -> str:
        """Return what the batches follow from: not where the files lie, nor how many processes parse them."""
        files = [(file.size, file.ends) for file in self._current().buffers.lines.files]
        follows = (
            self._rank,
            self._world_size,
            self._buffer_size,
            self._skip_header,
            self._lenience,
            self._order_options,
        )
        return checksum(repr((files, follows, self._schema.identity)).encode())

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


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise StreamError for arguments that are none by themselves."""
    for what, least in _LEAST.items():
        if type(given[what]) is not int or given[what] < least:
            raise StreamError(f"{what}={given[what]!r} is no integer of at least {least}.")
    for what, values in _KNOWN.items():
        if not any(given[what] is value or (type(value) is str and given[what] == value) for value in values):
            raise StreamError(f"{what}={given[what]!r} is unknown. Use {' or '.join(map(repr, values))}.")


def _line_limit(size: int | str) -> int:
    """Return ``max_line_bytes`` as bytes.

    Raises:
        LimitError: it is a string that is not a size.
        StreamError: it is not a size of at least one byte.
    """
    found = parse_size(size, "max_line_bytes") if isinstance(size, str) and not size.strip().isdecimal() else size
    if isinstance(found, str):
        found = int(found)
    if type(found) is not int or found < 1:
        raise StreamError(f"max_line_bytes={size!r} must be at least 1 byte: a number of bytes, or a size such as '64MiB'.")
    return found
