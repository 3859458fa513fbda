"""The worker threads of a DataLoader: the dataset of each, and the random numbers that its samples draw.

NOTE [ Random numbers in threads ]
    A worker process w draws from its global generators, which torch has seeded, for the batches w, w + N, w + 2N, ... These are
    the *stream* of worker w. A sample that draws from ``thread_safe_generator()`` gets the same numbers in a thread. For this,
    each stream has generators of its own. Whichever thread makes a sample, the generators of its stream are given out in the
    order of the samples: the first time that a sample asks for them, it waits until all samples before it in the stream are
    made. The threads take the samples in order, so they are making those already. Once a sample has asked, each thread makes
    whole batches, and the streams do not wait for each other.

    With ``sample_seed`` nothing waits: the generators of a thread are seeded for each sample.

    Threads share the global generators with the training step. A sample that draws from these gets other numbers in each run.
    The first samples are watched for that, while the loop waits for a batch, and a warning is logged.

NOTE [ Collating in threads ]
    A collate function may draw random numbers, count its calls, or make a generator at its first call. A worker process has a
    copy of it, calls it for the batches of this worker in their order, and draws from global generators of its own. So each
    `ThreadWorker` has a copy of the function, which takes the batches of its stream in order, whichever thread has made their
    samples.

    Threads share the global generators with the training step, which does not draw while it waits for a batch. So the loop
    itself collates then, with the generators of the worker in the place of its own, and puts these back. Functions of torch
    that draw nothing are called by any thread.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper  # raises the error of a worker in the loop, as torch's DataLoader does
from torch.utils.data._utils.worker import WorkerInfo, _generate_state  # torch's seed for numpy in worker processes

from stocache.errors import ClosedError, DatasetError, WorkerError
from stocache.loader.threads.info import CollateRng, Generators, WorkerRng, answer_in_threads, set_worker_info, worker_info
from stocache.loader.threads.workers import Tasks
from stocache.loader.workers.states import StatefulCollate
from stocache.system.generators import Kept, read, restore_all
from stocache.system.loading.arrays import Arrays
from stocache.system.loading.copies import (
    copy_dataset,
    find_open_handle,
    find_running,
    holds_dataset,
    holds_environment,
    holds_generator,
)
from stocache.system.walking import set_epoch

logger = logging.getLogger("stocache")

_WATCHED = 8  # parts of batches
_POLL_S = 0.05  # between checks whether it is a sample's turn
_LONG_S = 30.0  # to wait for it, before a warning
_OPENING_S = 2.0  # for another thread, to open a file that a process opens only once


class Stopped(BaseException):
    """Ends a sample that a thread is making: the iterator is gone, or an earlier sample or ``worker_init_fn`` has raised."""


class ThreadWorker:
    """What worker process ``number`` would have: a dataset, a collate function, and random numbers.

    The thread of this number makes samples of any batch with this dataset. The batches that the process would make draw from
    the generators of this worker; see NOTE [ Random numbers in threads ].

    Attributes:
        number: of the worker.
        dataset: its own; see copies.py.
        collate_fn: its own.
        fetcher: of torch, gets samples from the dataset; None until the first are fetched in an epoch.
        rng: the ``rng`` of its worker info.
        stream: the generators of its stream.
        undone: the batches of its stream that are asked for and not done, by number.
        error: the error of ``worker_init_fn``; None without one.
    """

    def __init__(self, number: int, count: int, base_seed: int, parts: tuple[Any, Any, Any]) -> None:
        self.number, self._count, self._seed = number, count, base_seed + number
        self.dataset, self.collate_fn, self._init_fn = parts
        self.fetcher: Any = None
        self.rng, self.stream, self.undone = WorkerRng(), Generators(), set[int]()
        self._numpy_seed: list[int] = _generate_state(base_seed, number)  # type: ignore[no-untyped-call]
        as_one = sum(word << 32 * place for place, word in enumerate(self._numpy_seed))
        self.stream.seed(self._seed, as_one, self._seed)
        self._globals: dict[int, Any] | None = None  # states of its global generators; None until they are used
        self.error: ExceptionWrapper | None = None
        self._epoch: int | None = None

    def begin(self, lock: threading.Lock) -> None:
        """Begin in the thread of this worker, and run ``worker_init_fn``, which may seed the global generators, with a lock."""
        self.rng.draws = self.stream.itself
        try:
            self.use(self.dataset)
            if self._init_fn is not None:
                with lock, self.global_generators():
                    self._init_fn(self.number)
        except BaseException as error:
            self.error = self.wrapped(error)

    def use(self, dataset: object) -> None:
        """Set the dataset of this worker, and the worker info of this thread."""
        self.dataset, self.fetcher = dataset, None
        set_worker_info(self._info(self.rng))

    def _info(self, rng: WorkerRng) -> Any:
        facts: Any = {"id": self.number, "num_workers": self._count, "seed": self._seed, "dataset": self.dataset}
        return WorkerInfo(**facts, rng=rng, worker_method="thread")  # type: ignore[arg-type]

    def set_epoch(self, epoch: int | None) -> None:
        """Set the epoch of the dataset. Raises Stopped after an error of ``worker_init_fn``."""
        if self.error is not None:
            raise Stopped
        if epoch is not None and self._epoch != epoch:
            self._epoch = epoch
            set_epoch(self.dataset, epoch)

    def wrapped(self, error: BaseException) -> ExceptionWrapper:
        """Return an error, for the loop, with the traceback of the thread as text; or the error of ``worker_init_fn``."""
        if self.error is not None:
            return self.error
        if isinstance(error, SystemExit):
            name = "the dataset, collate_fn or worker_init_fn"
            error = WorkerError(f"{name} called sys.exit({error.code!r}) in a worker thread.")
        raised: Any = type(error), error, error.__traceback__
        return ExceptionWrapper(raised, where=f"in DataLoader worker thread {self.number}")  # type: ignore[no-untyped-call]

    @contextmanager
    def global_generators(self) -> Iterator[None]:
        """Put the global generators of this worker in the place of the generators of the process, in a ``with`` block.

        torch's is the generator of the stream.
        """
        mine = read()
        if self._globals is None:  # as torch's worker process begins
            random.seed(self._seed)
            np.random.seed(self._numpy_seed)
        else:
            restore_all(self._globals)
        torch.default_generator.set_state(self.stream.torch_generator.get_state())
        try:
            yield
        finally:
            self._globals = read()
            self.stream.torch_generator.set_state(torch.default_generator.get_state())
            restore_all(mine)

    def leave_collating(self, as_is: Callable[[Any], Any]) -> None:
        """Have ``collate_fn`` call ``as_is``, and leave the batch to `collate`; see NOTE [ Collating in threads ]."""
        self._collate_rng = CollateRng()
        self._collate_rng.draws = self.stream.itself
        if isinstance(self.collate_fn, StatefulCollate):
            self._collate, self.collate_fn.collate = self.collate_fn.collate, as_is
        else:
            self._collate, self.collate_fn = self.collate_fn, as_is

    def collate(self, samples: object) -> Any:
        """Return the next batch of the stream, in the loop."""
        with worker_info(self._info(self._collate_rng)), self.global_generators():
            return self._collate(samples)


class Crew:
    """The workers, and how their threads share the dataset and the global generators.

    Attributes:
        workers: one for each thread.
        arrays: of the dataset, which it may change in place.
        holds_generator: whether the dataset or collate function has a random number generator of its own, or the collate
            function refers to a dataset.
        in_turn: whether one thread at a time may load samples, and call a collate function.
        turns: taken to load samples, and to collate.
        draws: whether a sample has asked for the generators of its stream.
        waiting: the number of the loop's wait for a batch, during which it does not draw random numbers; 0 if it does not wait.
        claiming: the batches that have claimed samples, each a `LazyBatch`.
        tasks: of the threads; set when they are started.
    """

    tasks: Tasks

    def __init__(
        self,
        count: int,
        parts: tuple[Any, Any, Any],
        base_seed: int,
        one_at_a_time: bool,
        warned: set[str],
    ) -> None:
        running = find_running(parts[0]) or find_running(parts[1])
        if running is not None:
            raise DatasetError(
                f"worker threads cannot use {running}: it has one position, or belongs to the thread that made it. Create it "
                f"when the first sample is read, so that each thread has its own; or use worker_method='multiprocessing'."
            )
        answer_in_threads()
        handle = find_open_handle(parts[0]) or find_open_handle(parts[1])
        if one_at_a_time:
            handle = "an object that a hook of sample_seed sets"
        self.arrays = Arrays()
        copies = [parts if one_at_a_time else copy_dataset(parts, self.arrays) for _ in range(count)]
        self.workers = [ThreadWorker(number, count, base_seed, own) for number, own in enumerate(copies)]
        self.holds_generator = holds_generator(parts[:2]) or holds_dataset(parts[1])
        self.claiming: set[Any] = set()
        self._lock = threading.Lock()
        self.draws = self._has_loaded = False
        self.waiting = self._waits = 0  # the second: how many have begun
        self._wakes: SimpleQueue[None] = SimpleQueue()  # wake the loop
        self._progressed = threading.Condition()
        self._watches, self._warned, self._warning = _WATCHED, warned, threading.Lock()
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
        with self._warning:
            if message not in self._warned:
                self._warned.add(message)
                logger.warning(message, *values)

    def begin(self, number: int) -> None:
        """Begin a worker in its thread."""
        self.workers[number].begin(self._lock)

    def shares_opened(self, worker: ThreadWorker, error: BaseException) -> bool:
        """Whether to load a sample again, because its worker has got the environment of LMDB that it could not open."""
        is_of_lmdb = type(error).__module__ == "lmdb" and "already open" in str(error)
        if not is_of_lmdb or holds_environment(worker.dataset):
            return False
        until = time.monotonic() + _OPENING_S
        while time.monotonic() < until and not self.tasks.stopped:
            for other in self.workers:
                if holds_environment(other.dataset) and find_open_handle(other.dataset) is None:
                    worker.use(copy_dataset(other.dataset))
                    return True
            time.sleep(_POLL_S)
        return False

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

    def begin_wait(self) -> None:
        """Note that the loop waits for a batch, until it sets ``waiting`` to 0."""
        self.waiting = self._waits = self._waits + 1

    def wait(self, timeout_s: float) -> bool:
        """Wait until `tell_loop` is called. Return False after ``timeout_s``; Ctrl-C interrupts the wait."""
        try:
            self._wakes.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def tell_loop(self) -> None:
        """Wake the loop, if it waits."""
        if self.waiting:
            self._wakes.put(None)

    def await_turn(self, is_turn: Callable[[], bool]) -> None:
        """Wait until all samples before one in its stream are made. Raises Stopped. ``is_turn`` may raise it, too."""
        self.draws = True
        waited_s = 0.0
        with self._progressed:
            while not is_turn():
                if self.tasks.stopped:
                    raise Stopped
                began = time.monotonic()
                self._progressed.wait(_POLL_S)
                if self.waiting:  # else it may wait for the loop to collate, which may take any time
                    waited_s += time.monotonic() - began
                if waited_s > _LONG_S:
                    self._warn(
                        "a sample has waited %d s for its random numbers, which come after those of earlier samples. If the "
                        "dataset holds a lock while it draws, use sample_seed or worker_method='multiprocessing'.",
                        _LONG_S,
                    )

    def tell_progress(self) -> None:
        """Wake the samples that wait for their turn."""
        if self.draws:
            with self._progressed:
                self._progressed.notify_all()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load samples: one thread at a time, if the dataset demands it. Watch the global generators."""
        with self.turns:
            self._has_loaded = True
            wait = self.waiting
            watched = Kept() if wait and self._watches > 0 else None
            yield
            drawn = watched is not None and watched.drawn()
            if watched is not None and self.waiting == wait:
                self._watches -= 1
                if drawn:
                    self._watches = 0
                    self._warn(
                        "samples draw from the global random number generators. Worker threads share these with the training "
                        "step, so each run gets other numbers. Draw from torch.random.thread_safe_generator(), or from "
                        "get_worker_info().rng; or use worker_method='multiprocessing'."
                    )
