"""The worker threads of a DataLoader: the dataset of each, and the random numbers that its samples draw.

NOTE [ Random numbers in threads ]
    A worker process w draws from its global generators, which torch has seeded, for the batches w, w + N, w + 2N, ... A sample
    that draws from ``thread_safe_generator()`` gets the same numbers in a thread. For this, each *stream* of batches has
    generators of its own. Whichever thread makes a sample, the generators of its stream are given out in the order of the
    samples: the first time that a sample asks for them, it waits until all samples before it in the stream are made. The
    threads take the samples in order, so they are making those already. Once a sample has asked, each thread makes whole
    batches, and the streams do not wait for each other.

    With ``sample_seed`` nothing waits: the generators of a thread are seeded for each sample.

    Threads share the global generators with the training step. A sample that draws from these gets other numbers in each run.
    The first samples are watched for that, while the loop waits for a batch, and a warning is logged. For a collate function
    see NOTE [ Collating in threads ].
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch._utils import ExceptionWrapper  # raises the error of a worker in the loop, as torch's DataLoader does
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data._utils.worker import _generate_state  # torch's seed for numpy in worker processes

from stocache.errors import ClosedError, DatasetError, WorkerError
from stocache.loader.threads.collating import WorkerGlobals
from stocache.loader.threads.info import Generators, WorkerRng, make_worker_info, set_worker_info
from stocache.system import generators as rng
from stocache.system.loading.arrays import Arrays
from stocache.system.loading.children import hold_to_fork
from stocache.system.loading.copies import (
    copy_dataset,
    find_open_handle,
    find_running,
    holds_dataset,
    holds_environment,
    holds_generator,
)

logger = logging.getLogger("stocache")

_WATCHED = 8  # runs of samples
_POLL_S = 0.05  # between checks whether it is a sample's turn
_LONG_S = 30.0  # to wait for it, before a warning
_OPENING_S = 2.0  # for another thread, to open a file that a process opens only once


graph_lock = threading.RLock()  # torch walks through a graph of DataPipes with a global hook
hold_to_fork(graph_lock)  # a child that inherits the hook could not walk through any graph


class Stopped(BaseException):
    """Ends a sample that a thread is making: the iterator is gone, or an earlier sample of its batch has raised."""


class ThreadWorker:
    """The dataset, the collate function and the random numbers of one thread.

    Attributes:
        number: of the thread.
        dataset: its own; see copies.py.
        collate_fn: its own.
        rng: the ``rng`` of its worker info. Its own generators are seeded as those of a worker process of this number.
        error: the error of ``worker_init_fn``; None without one.
    """

    def __init__(self, number: int, count: int, base_seed: int, parts: tuple[Any, Any, Any]) -> None:
        self.number, self._count, self._seed = number, count, base_seed + number
        self.dataset, self.collate_fn, self._init_fn = parts
        self.rng = WorkerRng()
        self.error: ExceptionWrapper | None = None

    def begin(self, shared_seed: int | None) -> None:
        """Run ``worker_init_fn`` in the thread of this worker."""
        try:
            with graph_lock if isinstance(self.dataset, IterDataPipe | MapDataPipe) else nullcontext():
                if isinstance(self.dataset, IterDataPipe):
                    self.reseed(shared_seed)
                self.use(self.dataset)
                if self._init_fn is not None:
                    self._init_fn(self.number)
        except BaseException as error:
            self.error = wrap_error(error, self.number)

    def use(self, dataset: object) -> None:
        """Set the dataset of this worker, and the worker info of this thread."""
        self.dataset = dataset
        set_worker_info(self.info(self.rng))

    def info(self, rng: WorkerRng) -> Any:
        """Return the worker info."""
        return make_worker_info(self.number, self._count, self._seed, self.dataset, rng)

    def reseed(self, shared_seed: int | None) -> None:
        """Seed a graph of DataPipes for an epoch, as torch does in a worker process."""
        shared = torch.Generator()
        shared.manual_seed(shared_seed or 0)
        with graph_lock:
            self.dataset = graph_settings.apply_random_seed(self.dataset, shared)


def seed_generators(generators: Generators, base_seed: int, number: int) -> None:
    """Seed generators as torch seeds those of worker process ``number``."""
    words = _generate_state(base_seed, number)  # type: ignore[no-untyped-call]
    generators.seed(base_seed + number, sum(word << 32 * place for place, word in enumerate(words)), base_seed + number)


class RaisedError(Exception):
    """Carries an error that was wrapped before."""


def wrap_error(error: BaseException, number: int) -> ExceptionWrapper:
    """Return an error of a worker, to be raised in the loop with the traceback of the thread as text."""
    if isinstance(error, RaisedError):
        wrapped: ExceptionWrapper = error.args[0]
        return wrapped
    if isinstance(error, SystemExit):
        error = WorkerError(f"the dataset, collate_fn or worker_init_fn called sys.exit({error.code!r}) in a worker thread.")
    raised: Any = type(error), error, error.__traceback__
    return ExceptionWrapper(raised, where=f"in DataLoader worker thread {number}")  # type: ignore[no-untyped-call]


class ThreadWorkers:
    """The workers, the streams of random numbers, and how the threads share the dataset.

    Attributes:
        workers: one for each thread.
        globals: the global generators of each worker.
        begun: whether the worker of each thread has begun.
        streams: the generators of each stream.
        draws: whether a sample has asked for the generators of its stream.
        in_turn: whether one thread at a time may load samples, and call a collate function.
        turns: taken to load samples, and to collate.
        waiting: whether the loop waits for a batch now: it does not draw random numbers meanwhile.
        stopped: returns whether the iterator is gone.
        arrays: of the dataset, which it may change in place.
        holds_generator: whether the dataset or collate function has a random number generator of its own, or the collate
            function refers to a dataset.
        claiming: the batches that have claimed samples, each a `LazyBatch`.
    """

    stopped: Callable[[], bool]

    def __init__(
        self,
        count: int,
        parts: tuple[Any, Any, Any],
        base_seed: int,
        shared_seed: int | None,
        one_at_a_time: bool,
        warned: set[str],
    ) -> None:
        running = find_running(parts[0]) or find_running(parts[1])
        if running is not None:
            raise DatasetError(
                f"worker threads cannot use {running}: it has one position, or belongs to the thread that made it. Create it "
                f"when the first sample is read, so that each thread has its own; or use worker_method='multiprocessing'."
            )
        handle = find_open_handle(parts[0]) or find_open_handle(parts[1])
        if one_at_a_time:
            handle = "an object that a hook of sample_seed sets"
        self.arrays = Arrays()
        copies = [parts if one_at_a_time else copy_dataset(parts, self.arrays) for _ in range(count)]
        self.workers = [ThreadWorker(number, count, base_seed, own) for number, own in enumerate(copies)]
        self.holds_generator = holds_generator(parts[:2]) or holds_dataset(parts[1])
        self.claiming: set[Any] = set()
        self.streams = [Generators() for _ in range(count)]
        for number, stream in enumerate(self.streams):
            seed_generators(stream, base_seed, number)
        self.globals = [WorkerGlobals(base_seed, number, stream) for number, stream in enumerate(self.streams)]
        self._has_init, self._beginning = parts[2] is not None, threading.Lock()
        self.begun = [threading.Event() for _ in range(count)]
        self._base_seed, self._shared_seed = base_seed, shared_seed
        self.draws = self.waiting = self._has_loaded = False
        self._waits = 0  # that the loop has begun
        self.progressed = threading.Condition()
        self._watches, self._warned = _WATCHED, warned
        self.in_turn = handle is not None
        self.turns: Any = threading.Lock() if self.in_turn else nullcontext()
        if handle is not None:
            self._warn(
                "worker threads load one sample at a time, because they share %s. Open files when the first sample is read, so "
                "that each thread has its own; or set thread_safe = True on the dataset, or use "
                "worker_method='multiprocessing'.",
                handle,
            )

    def _warn(self, message: str, *values: object) -> None:
        """Log a warning, once for all iterators of a loader."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def shares_opened(self, worker: ThreadWorker, error: Exception) -> bool:
        """Whether to load a sample again, because its worker has got the environment of LMDB that it could not open."""
        is_of_lmdb = type(error).__module__ == "lmdb" and "already open" in str(error)
        if not is_of_lmdb or holds_environment(worker.dataset):
            return False
        until = time.monotonic() + _OPENING_S
        while time.monotonic() < until and not self.stopped():
            for other in self.workers:
                if holds_environment(other.dataset) and find_open_handle(other.dataset) is None:
                    worker.use(copy_dataset(other.dataset))
                    return True
            time.sleep(_POLL_S)
        return False

    def begin_wait(self) -> None:
        """Note that the loop waits for a batch, until it sets ``waiting`` to False."""
        self._waits += 1
        self.waiting = True

    def begin(self, first: int, at: int) -> None:
        """Begin worker ``first + at`` in its thread.

        Its ``worker_init_fn`` may seed the global generators, which are its own meanwhile.
        """
        number = first + at
        worker = self.workers[number]
        seed_generators(worker.rng.own, self._base_seed, number)
        if self._has_init:
            with self._beginning, self.globals[number]:
                worker.begin(self._shared_seed)
        else:
            worker.begin(self._shared_seed)
        self.begun[number].set()

    def await_begun(self, patience_s: float) -> None:
        """Wait until all ``worker_init_fn`` have run, ``patience_s`` at most."""
        until = time.monotonic() + patience_s
        for begun in self.begun if self._has_init else ():
            begun.wait(max(0.0, until - time.monotonic()))

    def check_shared(self) -> None:
        """Warn if memory that the threads share was changed since the last call."""
        loaded, self._has_loaded = self._has_loaded, False  # samples that are gathered from a cache change nothing
        if loaded and (size := self.arrays.changed()):
            self._warn(
                "an array of %s, which worker threads share, was changed while they made samples. Worker processes would each "
                "have a copy of their own. Have __getitem__ change copies, or use worker_method='multiprocessing'.", size,
            )  # fmt: skip

    def release(self, lazy: Any) -> None:
        """Release the claims of a `LazyBatch`. If the cache was closed, it has none."""
        self.claiming.discard(lazy)
        with suppress(ClosedError):
            lazy.release_claims()

    def release_all(self) -> None:
        """Release the claims of all batches, because nobody will request them."""
        while self.claiming:
            with suppress(KeyError):
                self.release(self.claiming.pop())

    def end(self, number: int) -> None:
        """End the worker of a thread."""
        rng = self.workers[number].rng
        rng.draws = rng.own  # not a sample, which refers to this object
        self.release_all()

    def await_turn(self, is_turn: Callable[[], bool], waits_for_loop: Callable[[], bool] = lambda: False) -> None:
        """Wait until all samples before one in its stream are made. Raises Stopped. ``is_turn`` may raise it, too.

        Args:
            waits_for_loop: whether it waits for the loop, which may take any time.
        """
        self.draws = True
        until = time.monotonic() + _LONG_S
        with self.progressed:
            while not is_turn():
                if self.stopped():
                    raise Stopped
                self.progressed.wait(_POLL_S)
                if waits_for_loop():
                    until = time.monotonic() + _LONG_S
                elif time.monotonic() > until:
                    self._warn(
                        "a sample has waited %d s for its random numbers, which come after those of earlier samples. If the "
                        "dataset holds a lock while it draws, use sample_seed or worker_method='multiprocessing'.",
                        _LONG_S,
                    )

    def tell_progress(self) -> None:
        """Wake the samples that wait for their turn."""
        if self.draws:
            with self.progressed:
                self.progressed.notify_all()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load samples: one thread at a time, where the dataset demands it. Watch the global generators."""
        with self.turns:
            self._has_loaded = True
            if not self._watches:
                yield
                return
            waits = self._waits
            watched = rng.Kept() if self.waiting else None
            yield
            drawn = watched is not None and watched.drawn()
            if watched is not None and self.waiting and self._waits == waits:
                self._end_watch(drawn)

    def _end_watch(self, drawn: bool) -> None:
        """Note that a run of samples was watched. Warn once that the global generators were drawn from meanwhile."""
        with self.progressed:
            warns = drawn and self._watches > 0
            self._watches = 0 if drawn else max(0, self._watches - 1)
        if warns:
            self._warn(
                "samples draw from the global random number generators. Worker threads share these with the training step, so "
                "each run gets other numbers. Draw from torch.random.thread_safe_generator(), or from "
                "get_worker_info().rng; or use worker_method='multiprocessing'."
            )
