"""Deliver batches of tensors from text files of any size, and cache parsed rows in shared memory: `StreamLoader`."""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from stocache.cache.options import CacheOptions
from stocache.errors import CacheNameError, ClosedError, MismatchError, StateError, StreamError
from stocache.system.hashing import checksum
from stocache.system.loading import watch
from stocache.system.ranks import is_first_rank
from stocache.system.state import StateForm
from stocache.text.arrow import check_arrow
from stocache.text.buffers import RECORD_VERSION, Buffers
from stocache.text.files import Paths, TextFile, find_files
from stocache.text.formats import CsvArguments, CsvFormat, CustomFormat, TextFormat
from stocache.text.lines import Lines
from stocache.text.options import ReadOptions, StreamStats, are_counts, check_choice, check_integer, check_type, share_of
from stocache.text.windows import Shuffle, ShuffleKey, WindowBatches, Windows, by_threads, one_by_one

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("stocache")


_FORM = StateForm(
    "StreamLoader",
    2,
    position={
        "epoch": (int,),
        "key": (list, NoneType),  # its order depends on this and the loader's seed; None before the first batch
        "window": (int, NoneType),  # of the last batch
        "batch": (int,),  # batches of that window that were delivered
        "line": (list, NoneType),  # file and offset where that window begins, if known
    },
    parts={},
    mismatch="the state belongs to a StreamLoader with other files, or other arguments for its batches.",
)


class StreamLoader(IterableDataset[Any]):
    """Batches of tensors from text files that need not fit in memory.

        loader = StreamLoader("train.tsv", batch_size=256, buffer_size=65536, shuffle=True, size_limit_gib=8)
        for epoch in range(10):
            for x, y in loader:  # float32 (256, columns), int64 (256,)
                train(x, y)

    Rows are read into buffers of ``buffer_size`` rows and parsed in bulk, ahead of the training step. Each iteration is one
    epoch. Parsed buffers stay in a shared cache while there is room; from the second epoch on they are neither read nor
    parsed. The other buffers are read again, from where they begin; or, with a disk, they are kept there, also for later runs.

    Args:
        path: a file, a glob or an fsspec URL, or a sequence of these. They are read as one text, in this order. Files
            compressed by gzip, zstd or bz2 are decompressed as they are read.
        batch_size: rows in a batch.
        buffer_size: rows in a buffer, a multiple of ``batch_size``. About six buffers are in memory at a time.
        shuffle: False keeps the order of the files. True shuffles inside each buffer. "buffers" also takes the buffers in
            random order; the files are first read once for that, without parsing.
        window: number of buffers that are shuffled together. All of them are in memory together.
        seed: the order depends only on the seed, the epoch and the rank.
        drop_last: True leaves out the last rows that do not fill a buffer, "batch" the rows that do not fill a batch, False
            leaves out nothing. Batches do not reach beyond their window: if lines are skipped, this applies to the end of
            each window.
        format: a `CsvFormat`, `FixedWidthFormat`, `JsonLinesFormat` or `CustomFormat`. The default is ``CsvFormat("\\t")``.
        transform: called with each batch; its result is delivered instead. Results are not cached.
        size_limit_gib: memory for the cache on this machine; None for no cache.
        cache: `CacheOptions`, in place of ``size_limit_gib``: also a name by which jobs share the cache, a codec, and a disk.
            The ranks of one job share a cache without a name, unless the format is a `CustomFormat`. The folder on the disk is
            for these files (path, size, time, both ends), format, buffer size and number of ranks, and for ``fingerprint``,
            which a `CustomFormat` needs; if one of them changes, the folder is emptied.
        count_rows: True reads the files once when the loader is made, without parsing. The length is then known. Several
            ranks then deliver equally many batches, unless ``drop_last`` is False or lines are skipped.
        rank, world_size: this process, and how many share the rows; by default as torch.distributed or torchrun say.
        read: `ReadOptions`: options for URLs, progress bar.
        csv: ``delimiter``, ``skip_header``, ``columns`` and ``label_columns`` stand for
            ``format=CsvFormat(delimiter, skip_header=…, columns=…, label_columns=…)``.

    Raises:
        StreamError: the arguments contradict each other or the first row; while iterating, a line is bad.
        DamagedError: while iterating, a file changes, or compressed data ends too soon.
        FileNotFoundError: a file does not exist.
        LimitError, CacheNameError, MismatchError, SegmentError: as for `RaggedCache`; and, with a disk, DiskError as for
            `DiskCache`.

    A file that has changed when an epoch begins is read again. In a `torch.utils.data.DataLoader` (``batch_size=None``) each
    worker takes a part of the buffers; the order is then reproducible by torch's seed, or after `set_epoch`. The state of a
    `stocache.DataLoader`, or of torchdata's StatefulDataLoader, holds the state of this dataset in each worker. So it is
    resumed with that loader, and needs as many workers as before.
    Source: the article on a streaming data loader for PyTorch (J. McCaffrey).

    Examples:
        >>> np.savetxt("train.csv", [[0.5, 1.5, 0], [2.5, 3.5, 1], [4.5, 5.5, 2]], "%g", delimiter=",")
        >>> with StreamLoader("train.csv", batch_size=2, buffer_size=2, delimiter=",", drop_last=False) as loader:
        ...     for x, y in loader:
        ...         print(x.tolist(), y.tolist())
        [[0.5, 1.5], [2.5, 3.5]] [0, 1]
        [[4.5, 5.5]] [2]
    """

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
        transform: Callable[[Any], object] | None = None,
        size_limit_gib: float | str | None = None,
        cache: CacheOptions | None = None,
        count_rows: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        read: ReadOptions | None = None,
        **csv: "Unpack[CsvArguments]",
    ) -> None:
        check_arrow()
        if "num_workers" in csv:
            raise TypeError("StreamLoader has no workers of its own: DataLoader(stream, batch_size=None, num_workers=…) has.")
        if unknown := csv.keys() - CsvArguments.__annotations__.keys():
            raise TypeError(f"StreamLoader has no argument {min(unknown)!r}.")
        if format is not None and csv:
            raise StreamError(f"{min(csv)} belongs to format=. Pass it to {type(format).__name__}.")
        self._format = format or CsvFormat(**({"delimiter": "\t"} | csv))
        self._rank, self._world_size = share_of(rank, world_size)
        self._read = read or ReadOptions()
        check_type("format", self._format, TextFormat)
        check_type("read", self._read, ReadOptions)
        check_type("cache", cache, CacheOptions, optional=True)
        if cache is not None and size_limit_gib is not None:
            raise StreamError("size_limit_gib belongs to cache=. Pass it to CacheOptions.")
        self._cache_options = cache or CacheOptions(0 if size_limit_gib is None else size_limit_gib)
        check_integer("batch_size", batch_size, 1)
        check_integer("buffer_size", buffer_size, 1)
        check_integer("window", window, 1)
        check_integer("seed", seed, 0)
        check_choice("shuffle", shuffle, (False, True, "buffers"))
        check_choice("drop_last", drop_last, (False, True, "batch"))
        if buffer_size % batch_size:
            fits = max(batch_size, buffer_size // batch_size * batch_size)
            raise StreamError(
                f"buffer_size={buffer_size} is not a multiple of batch_size={batch_size}. Use for example {fits}."
            )
        if seed >= 2**63:
            raise StreamError(f"seed={seed} has more than 63 bits.")
        if isinstance(self._format, CustomFormat):
            self._check_custom(self._cache_options)
        self._paths, self._buffer_size = path, buffer_size
        self._order_options: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "window": window,
            "seed": seed,
            "drop_last": drop_last,
        }
        self._transform = transform
        self._count_first = count_rows or shuffle == "buffers"
        self._progress = self._read.progress and is_first_rank()
        self._epoch, self._epoch_was_set = 0, False
        self._resumed: dict[str, Any] | None = None  # a state that was loaded
        self._position: dict[str, Any] | None = None  # after the batch that was delivered last
        self._totals = {"epochs": 0, "batches": 0, "rows": 0, "skipped": 0, "dropped": 0}
        self._fault = ""  # of the first line that was left out
        self._warned_of_rest = False
        self._windows: Windows | None = None
        self._open(find_files(path, self._read.storage_options))

    def _check_custom(self, options: CacheOptions) -> None:
        """Raise CacheNameError if a cache could hold rows of a different `CustomFormat`."""
        is_cached = options.size_limit_gib != 0 or options.disk is not None
        if self._world_size > 1 and is_cached and options.name is None:
            raise CacheNameError(
                "ranks cannot check whether their CustomFormats parse alike. To share a cache, pass cache=CacheOptions(…) with "
                "a name, and with a fingerprint that changes with the function."
            )
        if options.disk is not None and options.fingerprint is None:
            raise CacheNameError(
                "a later run cannot check whether its CustomFormat parses like the one whose rows are on the disk. Pass "
                "cache=CacheOptions(…, fingerprint=…), and change the fingerprint with the function."
            )

    def _open(self, files: list[TextFile], cached: bool = True) -> None:
        """Set the windows for these files, and count their rows if asked to."""
        full = [file for file in files if file.size]
        if not full or (len(full) < len(files) and not self._format.skips):
            empty = next(file.path for file in files if not file.size)
            raise StreamError(f"{empty} is empty: a file of at least one line was expected.")
        form, shard = self._format, (self._rank, self._world_size)
        marks = form.comments, form.white_delimiter
        lines = Lines(full, self._buffer_size, form.skip_header, *marks, *shard, form.line_limit, form.skips, form.retry)
        with contextlib.closing(lines):
            if lines.compressed and self._order_options["shuffle"] == "buffers":
                packed = next(file for file in full if file.compression)
                raise StreamError(
                    f"shuffle='buffers' needs files that can be read from any byte, and {packed.path} is {packed.compression}. "
                    "Use shuffle=True, with a window of several buffers, or decompress it."
                )
            parser = form.parser(lines)
            full_only = self._order_options["drop_last"] is True
            options = self._shared_options(full) if cached else CacheOptions(0)
            buffers = Buffers(lines, parser, form.skips, full_only, options, *shard)
            self._windows = Windows(buffers, **self._order_options, transform=self._transform, rank=self._rank)
            self._files = files if cached or get_worker_info() is not None else None  # None: the next epoch opens them again
            if self._count_first:
                self._count(self._windows)

    def _shared_options(self, files: list[TextFile]) -> CacheOptions:
        """Return the options of the cache; with a fingerprint of its content, unless it is this loader's own, and in memory."""
        given, world_size = self._cache_options, self._world_size
        is_own = given.name is None and world_size == 1
        if is_own and given.disk is None:
            return given
        facts = [(os.path.abspath(file.path), file.size, file.stamp, file.ends) for file in files]
        skipped = self._format.skip_header, self._format.skip_identity
        settings = (self._buffer_size, *skipped, world_size, given.fingerprint, RECORD_VERSION)
        identity = checksum(repr((facts, settings, self._format.identity)).encode())
        name = given.name
        if name is None and not is_own:
            name = f"rows-{checksum(identity.encode(), repr(given.size_limit_gib).encode())}"
        return replace(given, name=name, fingerprint=identity)

    def _count(self, windows: Windows) -> None:
        """Count the rows of this rank, and the batches of the rank that has the fewest."""
        lines = windows.buffers.lines
        with tqdm(unit="row", unit_scale=True, desc="counting rows", disable=not self._progress) as bar:
            rows = windows.buffers.count(lambda position: bar.update(position.rows - bar.n))
        if self._world_size == 1 or windows.drop_last is False:
            return
        windows.limit = windows.batches_of(rows, lines.first)
        for rank in range(self._world_size):
            with contextlib.closing(lines.share_of(rank, self._world_size)) as share:
                known = lines.step > 1 or rank == self._rank  # ranks that take every R-th buffer count the same rows
                its_rows = rows if known else windows.buffers.total_rows_of(rank) or share.count()
                windows.limit = min(windows.limit, windows.batches_of(its_rows, share.first))
        if not windows.limit:
            raise StreamError(
                f"{self._paths}: with buffer_size={self._buffer_size}, a rank of {self._world_size} has no batch."
            )

    def _reopen_changed(self) -> Windows:
        """Return the windows of the files as they are now; open files that have changed."""
        files = find_files(self._paths, self._read.storage_options)
        if files == self._files:
            return self._current()
        if self._files is not None:
            logger.info("the files have changed and are read again: %s", self._paths)
        self._files = None
        self._current().buffers.close()
        try:
            self._open(files, cached=get_worker_info() is None)  # the other workers would not know a new cache
        except MismatchError as error:  # another rank or job still has the old files
            logger.warning("this epoch runs uncached: %s", str(error))
            self._open(files, cached=False)
        return self._current()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of the next epoch, or over the rest of one that was resumed."""
        return watch.current.iterate(self, self._deliver)

    def _deliver(self) -> Iterator[Any]:
        # this is a generator, so it runs from the first batch on: by then a persistent worker has its epoch
        worker = get_worker_info()
        windows = self._reopen_changed()
        state, self._resumed = self._resumed, None
        if state is not None and state["identity"] != self._identity():
            raise StateError("the files have changed since the state was taken. Call set_epoch(…) to begin an epoch.")
        position = self._beginning(self._epoch) if state is None else state["position"]
        epoch, window, done = position["epoch"], position["window"], position["batch"]
        key = self._key(epoch) if window is None else tuple(position["key"])
        if position["line"] is not None:
            windows.buffers.resume_at(windows.numbers(key, window)[0], *position["line"])
        self._epoch = epoch + 1
        self._position = position
        if worker is not None:
            deliveries = one_by_one(windows, key, worker.id if window is None else window, worker.num_workers)
        else:
            deliveries = by_threads(windows, key, window or 0)
        before, rows = self._totals.copy(), windows.buffers.total_rows
        bar = tqdm(total=rows, unit="row", unit_scale=True, desc=f"epoch {epoch}", disable=not self._progress)
        with bar, contextlib.closing(windows.buffers.lines), contextlib.closing(deliveries):
            for number, made in deliveries:
                self._count_rows(made)
                for batch in made.batches[done:]:
                    done += 1
                    self._totals["batches"] += 1
                    self._position = {"epoch": epoch, "key": list(key), "window": number, "batch": done, "line": None}
                    yield batch
                bar.update(made.rows)
                done = 0
        windows.buffers.flush()
        self._position = self._beginning(epoch + 1)
        self._totals["epochs"] += 1
        self._check_and_log(epoch, {name: count - before[name] for name, count in self._totals.items()})

    def _key(self, epoch: int) -> ShuffleKey:
        worker = get_worker_info()
        return (epoch,) if worker is None or self._epoch_was_set else (worker.seed - worker.id, epoch)

    def _count_rows(self, made: WindowBatches) -> None:
        self._totals["rows"] += made.rows
        self._totals["skipped"] += made.skipped
        self._totals["dropped"] += made.dropped
        if made.fault is not None and not self._fault:
            location, reason = made.fault
            self._fault = f"{self._current().buffers.lines.where(location)}: {reason}"
            logger.warning("a bad line is left out; the end of the epoch counts them all: %s", self._fault)

    def _check_and_log(self, epoch: int, counts: dict[str, int]) -> None:
        """Log the counts of a finished epoch.

        Raises:
            StreamError: it delivered nothing.
        """
        windows = self._current()
        total, size = windows.buffers.total_rows, self._buffer_size
        rank = f", rank {self._rank}" if self._world_size > 1 else ""
        if total is not None and not windows.batches_of(total, windows.buffers.lines.first):
            if not total:
                raise StreamError(f"{self._paths}{rank}: no line holds data.")
            less = f"drop_last={windows.drop_last} leaves no batch. Lower buffer_size, or pass drop_last=False."
            raise StreamError(
                f"{self._paths}{rank}: with {total} rows, buffer_size={size}, batch_size={windows.batch_size}, {less}"
            )
        if counts["skipped"] + counts["dropped"] == counts["rows"] > 0 and get_worker_info() is None:
            lost = f"{counts['skipped']} of {counts['rows']} lines were left out, and the others fill no batch"
            raise StreamError(f"{self._paths}{rank}: {lost}. The first: {self._fault}")
        if (skip := self._format.skip) is not None and counts["skipped"] > (most := skip.most(counts["rows"])):
            raise StreamError(
                f"{self._paths}{rank}: {counts['skipped']} of {counts['rows']} lines were left out, more than the {most} that "
                f"on_error allows. The first: {self._fault}"
            )
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
                "out only rows that do not fill a batch, drop_last=False none",
                total % size, total, size,
            )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iterator delivers."""
        check_integer("epoch", epoch, 0)
        self._epoch, self._epoch_was_set = epoch, True
        self._resumed = self._position = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the last batch it delivered. JSON can save it."""
        if self._resumed is not None:
            return copy.deepcopy(self._resumed)
        position = copy.deepcopy(self._position or self._beginning(self._epoch))
        windows = self._current()
        if position["window"] is not None and windows.shuffle != "buffers":  # or it is not known without reading
            begin = windows.buffers.position(windows.numbers(position["key"], position["window"])[0])
            position["line"] = None if begin is None else [begin.file, begin.offset]
        return _FORM.make(self._identity(), position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iterator delivers the batches after it, and parses only those.

        Raises:
            StateError: this is not such a state, or it belongs to other files or a different order. The next iterator raises it
                if the files have changed.
        """
        identity = self._identity()
        position, _ = _FORM.read(state, identity)
        key, line, begun = position["key"], position["line"], position["window"] is not None
        if begun != (key is not None) or not are_counts(key, 1, 2) or not are_counts(line, 2, 2) or (line and not begun):
            raise StateError(f"the state of a StreamLoader is damaged: its position is {position!r:.200}.")
        self._resumed = copy.deepcopy(_FORM.make(identity, position))

    def _beginning(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "key": None, "window": None, "batch": 0, "line": None}

    def _identity(self) -> dict[str, Any]:
        """Return a checksum of all that the batches depend on: not the files' paths, nor the number of processes."""
        files = [(file.size, file.ends) for file in self._current().buffers.lines.files]
        settings = (
            self._rank,
            self._world_size,
            self._buffer_size,
            self._format.skip_header,
            self._format.skip_identity,
            self._order_options,
        )
        return {"checksum": checksum(repr((files, settings, self._format.identity)).encode())}

    def __len__(self) -> int:
        """Return the number of batches in an epoch if no line is left out.

        Raises:
            TypeError: the first epoch has not ended, and ``count_rows`` is False.
        """
        windows = self._current()
        rows = windows.buffers.total_rows
        if rows is None:
            raise TypeError("the length of a StreamLoader is known after its first epoch, or with count_rows=True.")
        return windows.batches_of(rows, windows.buffers.lines.first) if windows.limit is None else windows.limit

    def __bool__(self) -> bool:
        return True  # or bool() would ask for the length

    def stats(self) -> StreamStats:
        """Return counts of the epochs so far."""
        cache = self._current().buffers.cache
        memory, disk = (None, None) if cache is None else cache.stats()
        return StreamStats(**self._totals, cache=memory, disk=disk)

    def close(self) -> None:
        """Close the files and release the memory. May be called twice."""
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
