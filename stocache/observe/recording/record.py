"""Record how long the steps of loading take, in shared memory: a row for each worker of a loader, one for its main process.

NOTE [ Who writes a row ]
    A *row* is an array of ``TIMING_ROW_WORDS`` words: sums, and the buckets of histograms. Row 0 belongs to the main
    process, the others to workers. A worker process claims its row by a kernel lock, which ends with the process, so the
    next worker adds to the same row. A worker thread takes the row of its number, if that is free. Each word has one
    writer, and needs no lock.
    Workers write the times of their own work. The main process writes how long it waited for a batch, in the row of the worker
    that made it; and how long packing and unpacking took, in its own row. It keeps these durations in a list first, and writes
    them some times a second: a batch of 3 MB evicts most of the CPU caches, so each access to memory costs.

    The record of a loader over a named cache is a file beside the cache. It has a name of its own, and is removed with the
    loader. So other processes can read it (`read_named`). It has 34 KiB for each row, and two rows for each worker: two
    iterators over a loader may overlap.
"""

import contextlib
import glob
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stocache.errors import StocacheError
from stocache.observe.recording.gil import queued_seconds
from stocache.observe.recording.histogram import BUCKETS, Counts, Distribution, bucket_of, count_all
from stocache.shm import named, registry
from stocache.shm.layout import Layout
from stocache.shm.segment import Segment
from stocache.system.platform import here

logger = logging.getLogger("stocache")

_clock_ns = time.perf_counter_ns

# The words of a row. Sums are of nanoseconds
WAIT_NS, LOAD_NS, COLLATE_NS, HAND_OVER_NS = range(4)  # these have a histogram as well
MAKE_NS = 4  # to make the samples of batches, without loading: to read cached ones, transforms; without a cache all of it
SAMPLES_MADE = 5  # of made batches
WORKER, PID = 6, 7  # the worker's number plus 1, and its process
CPU_NS, QUEUED_NS, SEEN_BUSY_NS = 8, 9, 10  # of the thread, when looked: on a CPU, waiting for one, and busy in all
LOOKS, HELD = 11, 12  # how often the main process looked at the GIL while it waited, and found it held
_WORDS = 16

HISTOGRAMS = ("wait", "load", "collate", "hand_over")
TIMING_ROW_WORDS = _WORDS + len(HISTOGRAMS) * BUCKETS
_HISTOGRAM_AT = tuple(range(_WORDS, TIMING_ROW_WORDS, BUCKETS))
_MOST_WORKERS, _MOST_COUNTED = 4096, 1 << 40

_PATIENCE_S = 0.1  # for a thread that writes, which may be this one: a finalizer may read
_MANY = 8  # durations, from which numpy is faster
_LATER = 256  # durations that are written together
_LOOK_NS = 50_000_000  # between two looks of a thread at its CPU time

SUFFIX = ".loader-"
"""Stands in the name of a file between the name of the cache and a number."""


class TimingRow:
    """The times that one thread records, in words of shared memory; see NOTE [ Who writes a row ].

    A worker process calls `begin_step` and `add_batch` for each batch. Other threads call `begin_step`, `add_making` and
    `add_collating`, in this order: each of them adds the time since the one before. Times are without the times that went into
    `add_loads` meanwhile.

    Attributes:
        loaded_ns: nanoseconds that `add_loads` has added so far.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self.counts: Counts = np.frombuffer(words, np.int64)[_WORDS:].reshape(len(HISTOGRAMS), BUCKETS)
        self.loaded_ns = 0
        self._look_again_ns, self._before = 0, (0, 0)
        self._now = self._loads = self._samples = 0  # when this step began, `loaded_ns` then, and the samples of the batch
        # Durations that are not written yet, by quantity; see `add_later`. Plain numbers: the garbage collector would follow
        # pairs, and run more often
        self._later: list[deque[int]] = [deque() for _ in HISTOGRAMS]
        self._writing = threading.Lock()

    def begin(self, worker: int) -> None:
        """Note who writes the row: this thread, of worker ``worker``; -1 for the main process."""
        self._words[WORKER], self._words[PID] = worker + 1, os.getpid()
        self._before, self._words[SEEN_BUSY_NS] = _thread_times(), self._busy_ns
        self._look_again_ns = _clock_ns() + _LOOK_NS

    @property
    def _busy_ns(self) -> int:
        return sum(self._words[word] for word in (LOAD_NS, MAKE_NS, COLLATE_NS, HAND_OVER_NS))

    def add(self, quantity: int, duration_ns: int) -> None:
        """Add a duration to a quantity that has a histogram."""
        words = self._words
        words[quantity] += duration_ns
        words[_HISTOGRAM_AT[quantity] + bucket_of(duration_ns)] += 1

    def _add_all(self, quantity: int, durations_ns: list[int]) -> None:
        if len(durations_ns) < _MANY:
            for duration_ns in durations_ns:
                self.add(quantity, duration_ns)
        else:
            self._words[quantity] += sum(durations_ns)
            count_all(self.counts[quantity], durations_ns)

    def add_later(self, quantity: int, duration_ns: int) -> None:
        """Keep a duration for `write`, in the process that reads the record: a tenth of the cost of `add`."""
        later = self._later[quantity]
        later.append(duration_ns)
        if len(later) >= _LATER:
            self.write()

    def write(self, wait_s: float = 0.0) -> None:
        """Write the durations that `add_later` has kept. Any thread may call it.

        ``wait_s``: to wait for another thread that is writing.
        """
        if (wait_s or any(self._later)) and self._writing.acquire(timeout=wait_s):
            try:
                for quantity, later in enumerate(self._later):
                    self._add_all(quantity, [later.popleft() for _ in range(len(later))])
            finally:
                self._writing.release()

    def add_loads(self, costs_s: Sequence[float]) -> None:
        """Add the seconds that loading took, for each sample that was not in memory."""
        costs_ns = [int(1e9 * cost_s) for cost_s in costs_s]
        self.loaded_ns += sum(costs_ns)
        self._add_all(LOAD_NS, costs_ns)

    def begin_step(self, now_ns: int = 0, samples: int = 0) -> None:
        """Begin a batch of ``samples`` samples, or a part of one, now or at an earlier time."""
        self._now, self._loads, self._samples = now_ns or _clock_ns(), self.loaded_ns, samples

    def add_batch(self, made_ns: int, loaded_ns: int, collated_ns: int) -> None:
        """Add the batch of this step.

        Args:
            made_ns, loaded_ns: when its samples were made, and `loaded_ns` then.
            collated_ns: when they were collated.
        """
        words, making_ns = self._words, made_ns - self._now - loaded_ns + self._loads
        collating_ns = collated_ns - made_ns - self.loaded_ns + loaded_ns
        words[SAMPLES_MADE] += self._samples
        if making_ns > 0:
            words[MAKE_NS] += making_ns
        if collating_ns < 0:
            collating_ns = 0
        words[COLLATE_NS] += collating_ns  # as `add` does: a call less for each batch
        words[_HISTOGRAM_AT[COLLATE_NS] + bucket_of(collating_ns)] += 1
        if collated_ns > self._look_again_ns:
            self._look(collated_ns)

    def _step(self) -> int:
        """Return the time since the last step ended, without loads, and begin the next step."""
        now, loads = _clock_ns(), self.loaded_ns
        took_ns = now - self._now - loads + self._loads
        self._now, self._loads = now, loads
        return max(0, took_ns)

    def add_making(self, samples: int) -> None:
        """Add the samples of a batch, or some of them, and the time that making them took."""
        self._words[SAMPLES_MADE] += samples
        self._words[MAKE_NS] += self._step()

    def add_collating(self) -> None:
        """Add a batch, and the time that collating it took."""
        self.add_later(COLLATE_NS, self._step())
        if self._now > self._look_again_ns:
            self._look(self._now)

    def add_gathered(self, samples: int, batches: int, duration_ns: int) -> None:
        """Add whole batches that threads of the main process have gathered together."""
        self._words[SAMPLES_MADE] += samples
        for _ in range(batches):
            self.add_later(COLLATE_NS, duration_ns // batches)

    def add_look(self, held: bool) -> None:
        """Add a look at the GIL."""
        self._words[LOOKS] += 1
        self._words[HELD] += held

    def _look(self, now: int) -> None:
        self.write()
        words, times = self._words, _thread_times()
        words[CPU_NS] += max(0, times[0] - self._before[0])  # another thread, or a forked child, may go on
        words[QUEUED_NS] += max(0, times[1] - self._before[1])
        words[SEEN_BUSY_NS] = self._busy_ns
        self._look_again_ns, self._before = now + _LOOK_NS, times


def _thread_times() -> tuple[int, int]:
    """Return the nanoseconds for which this thread was on a CPU, and for which it waited for one."""
    return time.thread_time_ns(), int(1e9 * queued_seconds())


class _RowHere(threading.local):
    row: TimingRow | None = None


_here = _RowHere()
here.at_fork(after_in_child=lambda: record_here(None))  # the row belongs to the parent


def record_here(row: TimingRow | None) -> TimingRow | None:
    """Have this thread record the loads of caches in ``row``; None ends that. Return the row that it had before."""
    before, _here.row = _here.row, row
    return before


def row_here() -> TimingRow | None:
    """Return the row of this thread, if it has one."""
    return _here.row


def note_loads(costs_s: Sequence[float]) -> None:
    """Record the seconds that loading took, for each sample that was not in memory, if this thread has a row."""
    if _here.row is not None:
        _here.row.add_loads(costs_s)


class TimingRecord:
    """The rows of one loader. The main process makes it, and pickles it to its worker processes.

    Args:
        workers: number of workers.
        shared: whether workers may be processes.
        cache_name: the name of the cache, under which other processes find the record; None for a cache without a name.
        rank: of this process, for readers that find the record.

    Attributes:
        workers: number of workers.
    """

    def __init__(self, workers: int, shared: bool, cache_name: str | None = None, rank: int = 0) -> None:
        rows = 1 + 2 * workers
        segment = None if cache_name is None else make_named(cache_name, rows, rank)
        if segment is None and shared:
            segment = Segment.create(rows * TIMING_ROW_WORDS * 8, 0)
        self._segment, self._pid = segment, os.getpid()
        self.workers = workers
        self._assemble(memoryview(bytearray(rows * TIMING_ROW_WORDS * 8)) if segment is None else segment.control)
        self.main = self.row(0)
        self.main.begin(-1)

    def _assemble(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._rows: dict[int, TimingRow] = {}
        self._claimed: tuple[int, TimingRow | None] = 0, None
        self._taking, self._takers = threading.Lock(), dict[int, int]()  # threads, by the number of their row

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_segment", "_pid", "workers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        assert self._segment is not None  # only a record with worker processes is sent
        self._assemble(self._segment.control)

    @property
    def mine(self) -> bool:
        """Whether this process made the record; False in a forked child."""
        return self._pid == os.getpid()

    def row(self, number: int) -> TimingRow:
        """Return a row: 0 for the main process, and 1 + w for worker w."""
        return self._rows.get(number) or self._new_row(number)

    def _new_row(self, number: int) -> TimingRow:
        row = self._rows[number] = TimingRow(self._words[number * TIMING_ROW_WORDS : (number + 1) * TIMING_ROW_WORDS])
        return row

    def claim(self, worker: int) -> TimingRow | None:
        """Return the row of this process, worker ``worker``, claimed at the first call; None if no row is free."""
        if self._claimed[0] != os.getpid():
            self._claimed = os.getpid(), self._claim(worker)
        return self._claimed[1]

    def _claim(self, worker: int) -> TimingRow | None:
        segment = self._segment
        if segment is None or segment.backing == "none" or self.mine:
            return None
        for number in (1 + worker, 1 + self.workers + worker):  # the second, if a different iterator's worker has the first
            with segment.guard:
                claimed = segment.try_lock(number)
            if claimed:
                row = self._new_row(number)  # after a fork, the old one keeps durations that the parent will write
                row.begin(worker)
                return row
        return None

    def take(self, worker: int) -> TimingRow:
        """Return a row for this thread, of worker ``worker``, that no other living thread has taken."""
        thread = threading.get_native_id()
        with self._taking:
            candidates = (1 + worker, *range(1, 1 + 2 * self.workers))
            free = (each for each in candidates if not os.path.exists(f"/proc/self/task/{self._takers.get(each)}"))
            number = next(free, 1 + worker)
            self._takers[number] = thread
        row = self.row(number)
        row.begin(worker)
        return row

    def write(self, wait_s: float = 0.0) -> None:
        """Write the durations that this process has kept; then other processes see them."""
        if self.mine:  # a forked child has a copy of what its parent will write
            for row in list(self._rows.values()):
                row.write(wait_s)

    def read(self) -> "Counted":
        """Return a copy of all rows."""
        self.write(_PATIENCE_S)
        return Counted(np.frombuffer(self._words, np.int64).reshape(-1, TIMING_ROW_WORDS).copy())


class Counted:
    """The counts of a record at one moment, or between two.

    Attributes:
        rows: of shape (1 + 2 workers, TIMING_ROW_WORDS).
    """

    def __init__(self, rows: "NDArray[np.int64]") -> None:
        self.rows = rows

    def since(self, earlier: "Counted | None") -> "Counted":
        """Return the counts since an earlier moment."""
        return self if earlier is None else Counted(self.rows - earlier.rows)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return (len(self.rows) - 1) // 2

    def sum(self, word: int) -> int:
        """Return the sum of a word over all rows."""
        return sum(self.rows[:, word].tolist())

    def of_workers(self, word: int) -> int:
        """Return the sum of a word over the rows of workers; without workers, the word of the main process."""
        return sum(self.rows[1 if self.workers else 0 :, word].tolist())

    @property
    def batches(self) -> int:
        """The number of batches that were made."""
        return int(self.counts(COLLATE_NS).sum())

    def distribution(self, quantity: int, row: int | None = None) -> Distribution:
        """Return the distribution of a quantity that has a histogram: in one row, or in all."""
        rows = self.rows if row is None else self.rows[row : row + 1]
        return Distribution.of(Counted(rows).counts(quantity), int(rows[:, quantity].sum()))

    def distributions(self) -> dict[str, Any]:
        """Return the distributions of all quantities that have a histogram, by name."""
        return {name: self.distribution(quantity) for quantity, name in enumerate(HISTOGRAMS)}

    def counts(self, quantity: int) -> Counts:
        """Return the buckets of a quantity that has a histogram, summed over all rows."""
        begin = _WORDS + quantity * BUCKETS
        return self.rows[:, begin : begin + BUCKETS].sum(0)  # type: ignore[no-any-return]


def make_named(cache_name: str, rows: int, rank: int) -> Segment | None:
    """Return the segment of a new named record, beside the cache of that name; None if it cannot be made.

    Records that killed processes left behind for the same cache are removed.
    """
    prefix = f"{cache_name[:60]}{SUFFIX}"
    try:
        _remove_dead(prefix)
        names = (f"{prefix}{os.getpid()}-{number}" for number in itertools.count())
        name = next(each for each in names if not os.path.lexists(registry.path_of(each)))
        identity: named.Identity = {"loader": name, "cache": cache_name, "rank": rank, "pid": os.getpid()}
        descriptor = named.Descriptor(identity, {"dataset_len": 0, "capacity": 0, "rows": rows}).pack()
        layout = Layout.for_sizes(rows * TIMING_ROW_WORDS * 8, 0, descriptor)
        joined = named.join(name, identity, False, lambda: (layout, lambda control: None))
    except (StocacheError, OSError) as error:
        logger.debug("the loader is not shown by 'stocache metrics': %s", error)
        return None
    return None if joined is None else joined[0]


def _remove_dead(prefix: str) -> None:
    for path in glob.glob(f"{registry.directory_of()}/{prefix}*"):
        with contextlib.suppress(StocacheError, OSError):
            named.remove(path, dead=True)


def read_named(fd: int, layout: Layout) -> Counted:
    """Return the counts of a named record that another process may be writing, or may have forged.

    Raises:
        ValueError: it is not a record.
    """
    row_bytes = TIMING_ROW_WORDS * 8
    count = layout.control_bytes // row_bytes
    if not 1 <= count <= 1 + 2 * _MOST_WORKERS or layout.control_bytes % row_bytes:
        raise ValueError("is not the record of a loader.")
    data = os.pread(fd, layout.control_bytes, layout.control_at)
    if len(data) < layout.control_bytes:
        raise ValueError("is damaged: it was cut.")
    rows = np.frombuffer(data, np.int64).reshape(count, TIMING_ROW_WORDS).clip(0)
    np.minimum(rows[:, _WORDS:], _MOST_COUNTED, out=rows[:, _WORDS:])  # so that no sum overflows
    return Counted(rows)
