"""The iterator of a DataLoader whose workers are threads.

NOTE [ Batches made by threads ]
    The order of the samples is known ahead. A batch becomes tasks as soon as it is known: *parts* of its samples, which take
    some milliseconds each. The threads take the parts in order, whichever batch they belong to. So a slow sample delays only
    its own batch, while the other threads go on with the next ones. The thread that makes the last part of a batch collates it;
    with a ``collate_fn`` of the user the loop does (NOTE [ Collating in threads ]).

    Of a batch over a cache, only the samples that are not cached are divided into parts. The batch is then gathered into memory
    that is used again. Batches that are wholly cached are gathered in *groups* of some megabytes, because each hand-over of the
    GIL costs as much as gathering some samples. A group waits until all loads that are known have begun, for these take longer.
    If the loop comes to such a batch before a thread does, it gathers the group itself. So hits do not wait behind misses.
    If a group has several batches, the loop asks the sampler for more of them ahead than ``prefetch_factor`` says, and looks
    for the samples of all of them at once.

    A batch of a dataset that makes whole batches is one part. Datasets that have an order or a state of their own (iterable,
    with ``state_dict``, or with a generator) are *bound*: the thread of worker w makes the batches w, w + N, w + 2N, ... as a
    worker process does.

    ``_BaseDataLoaderIter`` of torch, which is private, draws the seeds, asks the sampler and counts. The tests check the parts
    of it that are used.
"""

import os
import time
from functools import partial
from itertools import cycle, islice
from typing import Any

from stocache.errors import WorkerError
from stocache.loader.thread_maker import ThreadMaker
from stocache.loader.threads.batches import Batch, Group
from stocache.loader.threads.crew import Crew
from stocache.loader.threads.workers import WorkerThreads
from stocache.loader.torch_iterators import BaseIterator, next_batch
from stocache.observe.recording.gil import GilWatch

_PATIENCE_S = 5.0  # for the beginning of the workers, and for running tasks when they are shut down
_CHECK_S = 1.0  # between checks of the loop whether the threads are alive

_GROUP_BYTES = 12 << 20  # of batches that are gathered together
_MOST_IN_GROUP = 32


class ThreadIterator(BaseIterator):  # type: ignore[misc]
    """An iterator over the batches of a DataLoader, made by threads; see NOTE [ Batches made by threads ].

    Args:
        loader: torch's arguments, and a `LoaderEngine`. Its sampler yields a `ThreadRequest` for each batch.

    Attributes:
        last_worker: the number of the worker that made the last batch; None if the loop gathered it.
    """

    __next__ = next_batch
    last_worker: int | None = None
    _sampler_iter: Any

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._pid, count, engine = os.getpid(), self._num_workers, loader._stocache
        self._in_order, self._ahead = getattr(loader, "in_order", True), count * loader.prefetch_factor
        self._runs_ahead = self._index_sampler.may_run_ahead
        self._most_planned = self._index_sampler.most_at_once if self._runs_ahead else 1
        parts = self._dataset, self._collate_fn, loader.worker_init_fn
        has_hooks = engine.sample_seed is not None and bool(engine.sample_seed.hooks)
        crew = Crew(count, parts, self._base_seed, has_hooks, engine.warned)
        self._crew, self._maker = crew, ThreadMaker(loader, crew, self._pin_memory_device if self._pin_memory else None)
        self._threads = WorkerThreads(count, crew.begin, crew.release_all, _PATIENCE_S)
        crew.tasks = self._threads.tasks
        self._reset(loader, first_iter=True)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of its loader makes an iterator of its own

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        if not first_iter:
            self.finish_epoch()
        super()._reset(loader, first_iter)
        if not first_iter:
            self._maker.begin_epoch()
        self._gil_watch = GilWatch(self._maker.record.main.add_look)
        self._batches: dict[int, Batch] = {}  # the batches that were asked for, in order
        self._streams = islice(cycle(range(self._num_workers)), self._index_sampler.progress.turn, None)
        self._active = set(range(self._num_workers))
        self._group_size, self._loading = 1, 0  # batches
        self._groups_ahead = self._num_workers + 2
        self._ask()

    def finish_epoch(self) -> None:
        """Make the batches that were asked for, as worker processes do: random numbers and states depend on it.

        Batches that are only to be gathered from a cache are dropped.
        """
        for batch in self._batches.values():
            for dropped in batch.group.take() if batch.group is not None else ():
                dropped.finish()  # those after it in its stream may wait for it
        while self._batches:
            del self._batches[self._await()]
        self._crew.check_shared()
        self._crew.tasks.drop()
        self._crew.release_all()

    def _ask(self) -> None:
        """Request as many batches as may be made ahead now."""
        most = self._ahead
        if self._group_size > 1 and not self._loading:  # then all that were asked for are cached
            most = max(most, self._groups_ahead * self._group_size)
            if len(self._batches) > most - self._group_size:
                return
        while self._ask_for(min(most - len(self._batches), self._group_size)):
            if self._loading:
                most = self._ahead

    def _ask_for(self, count: int) -> bool:
        """Request up to ``count`` batches. Return whether there were any."""
        batches: list[Batch] = []
        try:
            while len(batches) < count and (stream := self._next_stream()) is not None:
                batch = Batch(self._crew, self._next_index(), self._crew.workers[stream], self._maker.shares)
                self._batches[batch.number] = batch
                batches.append(batch)
        except StopIteration:
            pass
        finally:
            for group in self._maker.submit(batches) if batches else ():
                self._gather_later(group)
            self._loading += sum(batch.group is None for batch in batches)
        return bool(batches)

    def _next_stream(self) -> int | None:
        """Return the stream of the next batch. Without order, one that is not behind, as torch does; None if all are."""
        for stream in islice(self._streams, self._num_workers):
            if stream in self._active and (
                self._in_order
                or sum(batch.worker.number == stream for batch in self._batches.values()) < self._ahead // len(self._active)
            ):
                return stream
        return None

    def _gather_later(self, group: Group) -> None:
        """Have a thread gather a group. If a GPU does, pass on the indices now, of as many batches as it plans together."""
        if group.lazy.on_device:
            self._group_size, self._groups_ahead = self._most_planned, 2
            self._maker.gather(group)
            return
        if self._runs_ahead:
            nbytes = max(1, group.lazy.nbytes // group.size)
            self._group_size = max(1, min(_MOST_IN_GROUP, _GROUP_BYTES // nbytes))
        self._crew.tasks.put(partial(self._maker.gather, group), may_wait=True)

    def _next_data(self) -> Any:
        while True:
            number = self._await()
            batch = self._batches.pop(number)
            self._loading -= batch.group is None
            if batch.ended:
                self._active.discard(batch.worker.number)
                self._ask()
                continue
            self._ask()
            if batch.error is not None:
                batch.error.reraise()  # type: ignore[no-untyped-call]
            data, batch.data = batch.data, None
            self.last_worker = batch.maker
            return data

    def _await(self) -> int:
        """Wait until a batch is done, and return its number: the next one, or with ``in_order=False`` any.

        Raises:
            StopIteration: there are no more.
            RuntimeError: none came within the ``timeout`` of the loader.
            WorkerError: the iterator belongs to another process, or the threads have ended.
        """
        if os.getpid() != self._pid:
            raise WorkerError("worker threads do not exist in a forked process. Make another iterator there.")
        until = time.monotonic() + self._timeout if self._timeout else None
        crew = self._crew
        try:
            while (number := self._done()) is None:
                rest_s = _CHECK_S if until is None else until - time.monotonic()
                if not crew.waiting:
                    crew.begin_wait()  # and look again
                elif self.ended:
                    raise WorkerError("the worker threads of this iterator have ended. Make another iterator.")
                elif rest_s <= 0:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
                else:
                    self._gil_watch.wait(crew.wait, min(rest_s, _CHECK_S))
        finally:
            crew.waiting = 0
        return number

    def _done(self) -> int | None:
        if not self._batches:
            self._crew.check_shared()
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        for number, batch in islice(self._batches.items(), 1 if self._in_order else None):
            if not batch.done and batch.group is not None:
                self._maker.gather(batch.group)
            elif not batch.done and batch.ready:
                self._maker.collate(batch)
            if batch.done:
                return number
        return None

    def is_ready(self) -> bool:
        """Return whether a batch is done."""
        return any(batch.done for batch in islice(self._batches.values(), 1 if self._in_order else None))

    @property
    def ended(self) -> bool:
        """Whether a thread has ended, so that no more batches can be asked for."""
        return self._threads.ended

    def _shutdown_workers(self) -> None:
        """End the threads, and release the claims of batches that nobody will request."""
        if os.getpid() == self._pid:
            self._threads.stop(_PATIENCE_S)
            self._crew.release_all()
        self._batches = {}
