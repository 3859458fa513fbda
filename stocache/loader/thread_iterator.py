"""The iterator of a DataLoader whose workers are threads.

NOTE [ Batches made by threads ]
    The order of the samples is known ahead. A batch becomes tasks as soon as it is known: *runs* of its samples, which take
    some milliseconds each. The threads take the runs in order, whichever batch they belong to. So a slow sample delays only its
    own batch, while the other threads go on with the next ones. The thread that makes the last sample of a batch collates it;
    with a ``collate_fn`` of the user the loop does (NOTE [ Collating in threads ]).

    Of a batch over a cache, only the samples that are not cached are runs. The batch is then gathered into memory that is used
    again. Batches that are wholly cached are gathered in *groups* of some megabytes, because each hand-over of the GIL costs as
    much as gathering some samples. A group waits until all loads that are known have begun, for these take longer. If the loop
    comes to such a batch before a thread does, it gathers the group itself. So hits do not wait behind misses. Where a group
    has several batches, the loop asks the sampler for more of them ahead than ``prefetch_factor`` says, and looks for the
    samples of all of them at once.

    Datasets that have an order or a state of their own (iterable, with ``state_dict``, or with a generator) are *bound*: worker
    w makes the batches w, w + N, w + 2N, ... by itself, as a worker process does.

    ``_BaseDataLoaderIter`` of torch, which is private, draws the seeds, asks the sampler and counts. The tests check the parts
    of it that are used.
"""

import os
import time
from functools import partial
from itertools import cycle, islice
from queue import SimpleQueue
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_dataloader

from stocache.errors import WorkerError
from stocache.loader.thread_batches import ThreadMaker
from stocache.loader.threads.batches import Batch, Group
from stocache.loader.threads.crew import ThreadWorkers, graph_lock
from stocache.loader.threads.workers import WorkerThreads, stop_all, wait_for
from stocache.loader.torch_iterators import QuickIterator
from stocache.observe.recording.gil import GilWatch
from stocache.system.platform import here

_PATIENCE_S = 5.0  # for running tasks, when the workers are shut down
_CHECK_S = 1.0  # between checks of the loop whether the threads are alive
_POLL_S = 0.0002  # between looks whether the last groups are gathered

_GROUP_BYTES = 12 << 20  # of batches that are gathered together
_MOST_IN_GROUP = 32


class ThreadIterator(QuickIterator):
    """An iterator over the batches of a DataLoader, made by threads; see NOTE [ Batches made by threads ].

    Args:
        loader: torch's arguments, and a `LoaderEngine`. Its sampler yields a `BatchRequest` for each batch.
    """

    _sampler_iter: Any

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._pid, count, self._kind = os.getpid(), self._num_workers, self._dataset_kind
        self._in_order, self._ahead = getattr(loader, "in_order", True), count * loader.prefetch_factor
        self._runs_ahead = self._index_sampler.may_run_ahead
        self._most_planned = self._index_sampler.most_at_once if self._runs_ahead else 1
        init = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init = partial(torch_dataloader._sharding_worker_init_fn, init, self._world_size, self._rank)
        parts = self._dataset, self._collate_fn, init
        engine = loader._stocache
        hooks = engine.sample_seed is not None and engine.sample_seed.hooks
        crew = ThreadWorkers(count, parts, self._base_seed, self._shared_seed, bool(hooks), engine.warned)
        pin = self._pin_memory_device if self._pin_memory else None
        self._maker = ThreadMaker(loader, crew, pin)
        self._is_bound, self._in_turn = self._maker.is_bound, crew.in_turn
        # One thread makes all batches where samples are made one at a time. With more, a sample that waits for its random
        # numbers could hold a lock that an earlier one needs; and collating, which calls hooks of ``sample_seed``, could meet a
        # sample
        pools = [1] * count if self._is_bound or self._in_turn else [count]
        cores = here.usable_cpus()  # on which to gather: more threads would only take the GIL from each other
        self._threads = [
            WorkerThreads(size, partial(crew.begin, first), crew.end, most_others=cores) for first, size in enumerate(pools)
        ]
        crew.stopped = self._threads[0].stopped
        crew.await_begun(_PATIENCE_S)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        if not first_iter:
            self._finish_epoch()
        with graph_lock:  # torch seeds a graph of DataPipes, while threads may be preparing theirs
            super()._reset(loader, first_iter)
        if not first_iter:
            self._maker.begin_epoch(self._shared_seed)
        self._gil_watch = GilWatch(self._maker.record.main.add_look)
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._batches: dict[int, Batch] = {}  # those that were asked for, in order
        self._asked = 0
        self._last: dict[int, Batch] = {}  # the newest batch of each stream
        self._streams = cycle(range(self._num_workers))
        self._active = set(range(self._num_workers))
        self._group_size, self._loading = 1, 0  # batches
        self._groups_ahead = self._num_workers + 2
        self._ask()

    def _finish_epoch(self) -> None:
        """Make the batches that were asked for, as worker processes do: random numbers and states depend on it.

        Those that are only gathered from a cache are dropped.
        """
        self.drop_gathers()
        while self._batches:
            del self._batches[self._await()]
        self._maker.crew.check_shared()
        for threads in self._threads:
            threads.drop()
        self._maker.crew.release_all()

    def drop_gathers(self) -> None:
        """Drop the batches that are only to be gathered from a cache, when nobody will ask for them; wait for those begun."""
        dropped = [batch for batch in self._batches.values() if batch.group is not None]
        self._batches = {number: batch for number, batch in self._batches.items() if batch.group is None}
        claimed = {batch.group for batch in dropped if batch.group is not None and batch.group.claim.acquire(blocking=False)}
        for batch in dropped:
            if batch.group in claimed:
                batch.finish()  # those after it in its stream may wait for it
        self._maker.crew.tell_progress()
        until = time.monotonic() + _PATIENCE_S
        while not all(batch.done for batch in dropped) and not self.ended and time.monotonic() < until:
            time.sleep(_POLL_S)

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

    def _next_stream(self) -> int | None:
        """Return the stream of the next batch. Without order, one that is not behind, as torch does; None if all are."""
        for stream in islice(self._streams, self._num_workers):
            if stream in self._active and (
                self._in_order
                or sum(batch.stream == stream for batch in self._batches.values()) < self._ahead // len(self._active)
            ):
                return stream
        return None

    def _ask_for(self, count: int) -> bool:
        """Request up to ``count`` batches. Return whether there were any."""
        batches: list[Batch] = []
        try:
            while len(batches) < count and (stream := self._next_stream()) is not None:
                batch = Batch(self._maker.crew, self._next_index(), stream, self._last.get(stream), self._finished)
                self._batches[self._asked] = self._last[stream] = batch
                self._asked += 1
                batches.append(batch)
        except StopIteration:
            pass
        finally:
            group = self._maker.find_cached(batches) if len(batches) > 1 else None
            if group is not None:
                self._gather_later(group)
            else:
                for batch in batches:
                    self._submit(batch)
        return bool(batches)

    def _submit(self, batch: Batch) -> None:
        group = self._maker.submit(batch, self._threads[batch.stream if self._is_bound else 0])
        if group is None:
            self._loading += 1
        else:
            self._gather_later(group)

    def _gather_later(self, group: Group) -> None:
        """Have a thread gather a group. If a GPU does, pass on the indices now, of as many batches as it plans together."""
        if group.lazy.on_device:
            self._group_size, self._groups_ahead = self._most_planned, 2
            self._maker.gather(group, None, self._threads[-1])
            return
        if self._runs_ahead:
            nbytes = max(1, group.lazy.nbytes // len(group.batches))
            self._group_size = max(1, min(_MOST_IN_GROUP, _GROUP_BYTES // nbytes))
        self._threads[-1].put(partial(self._maker.gather, group), urgent=False)

    def _next_data(self) -> Any:
        while True:
            number = self._await()
            batch = self._batches.pop(number)
            self._loading -= batch.group is None
            if batch.ended:
                self._active.discard(batch.stream)
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
        number = self._done()
        if number is not None:
            return number
        until = time.monotonic() + self._timeout if self._timeout else None
        self._maker.crew.begin_wait()
        watch = self._gil_watch
        try:
            while True:
                number = self._done()
                if number is not None:
                    return number
                if self.ended:
                    raise WorkerError("the worker threads of this iterator have ended. Make another iterator.")
                rest_s = _CHECK_S if until is None else until - time.monotonic()
                if rest_s <= 0:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
                watch.wait(partial(wait_for, self._finished), min(rest_s, _CHECK_S))
        finally:
            self._maker.crew.waiting = False

    def _done(self) -> int | None:
        if not self._batches:
            self._maker.crew.check_shared()
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        for number, batch in islice(self._batches.items(), 1 if self._in_order else None):
            if not batch.done and batch.group is not None:
                self._maker.gather(batch.group, None, self._threads[-1])
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
        return any(threads.ended for threads in self._threads)

    def _shutdown_workers(self) -> None:
        """End the threads, and release the claims of batches that nobody will request."""
        if os.getpid() == self._pid:
            self.drop_gathers()
            stop_all(self._threads, _PATIENCE_S)
            self._maker.crew.release_all()
        self._batches = {}
