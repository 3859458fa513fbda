"""The batches of worker threads, and the tasks that make them; see NOTE [ Batches made by threads ]."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import pin_memory as torch_pinning

from stocache.datasets.batches import LazyBatch
from stocache.datasets.cached import CachedDataset, is_cache
from stocache.datasets.lazy import LazyConcat
from stocache.errors import StocacheError
from stocache.loader.collate import as_is
from stocache.loader.sample_seed import SeededDataset as ThreadSeededDataset
from stocache.loader.threads.batches import NOT_MADE, Batch, Group, Turn
from stocache.loader.threads.collating import Collator
from stocache.loader.threads.crew import RaisedError, Stopped, ThreadWorker, ThreadWorkers, wrap_error
from stocache.loader.threads.info import Generators
from stocache.loader.threads.workers import Task, WorkerThreads
from stocache.loader.torch_iterators import DatasetKind
from stocache.loader.workers.requests import EpochIndices, count_samples, set_epoch
from stocache.loader.workers.states import StateBatch, StatefulCollate, StatefulMap
from stocache.observe.recording.record import TimingRow, record_here, row_here
from stocache.system.objects import attribute_of, get_many_of
from stocache.system.spans import COLLATE, span
from stocache.system.walking import through_subsets, walk

_RUN_S = 0.002  # a run of samples takes about as long
_FIRST_RUNS = 8  # for each thread, of a batch whose samples' cost is not known

# Of a dataset, a cache or torch. Others that are raised in the loop are of a signal's handler
_OF_SAMPLES = StocacheError, IndexError, TypeError, ValueError, MemoryError, RuntimeError

_pin_memory: Any = torch_pinning.pin_memory


class ThreadMaker:
    """Makes batches in threads. The tasks hold this object; it does not hold the iterator."""

    def __init__(self, loader: Any, crew: ThreadWorkers, pin: Any) -> None:
        self.crew, self._pin, self.record = crew, pin, loader._stocache.record
        self._batched, self._drop_last, self._kind = loader._auto_collation, loader.drop_last, loader._dataset_kind
        dataset = crew.workers[0].dataset
        iterable = self._kind == DatasetKind.Iterable
        self.is_bound = (
            iterable or isinstance(dataset, StatefulMap) or (loader._stocache.sample_seed is None and crew.holds_generator)
        )
        self._way = None if self.is_bound else _way_of(dataset)
        if self._way is list and crew.arrays.copied and loader.persistent_workers:  # it may depend on what a worker changed
            self.is_bound, self._way = True, None
        self._audits = [cached._audit for cached in walk(dataset) if is_cache(cached)]
        self._makes_whole = self._batched and self._way is None
        self._epoch: dict[int, int] = {}  # that was set in each worker's dataset
        self._cost_s = 0.0  # of a sample, as the last runs have shown
        self._fetchers: dict[int, Any] = {}
        self.collators = self._make_collators()

    def _make_collators(self) -> list[Collator]:
        """Return a collator for each stream, and have workers collate nothing; return no collators if the function is pure."""
        workers, states = self.crew.workers, self.crew.globals
        if self.is_bound:
            for worker, own in zip(workers, states, strict=True):
                own.generators = worker.rng.own
        functions = [getattr(worker.collate_fn, "collate", worker.collate_fn) for worker in workers]
        if functions[0].is_pure or self._way is LazyBatch:
            return []
        for worker in workers:
            if isinstance(worker.collate_fn, StatefulCollate):
                worker.collate_fn.collate = as_is
            else:
                worker.collate_fn = as_is
        return [Collator(*each) for each in zip(functions, states, [worker.info for worker in workers], strict=True)]

    def begin_epoch(self, shared_seed: int | None) -> None:
        """Have the iterators of bound workers begin again."""
        self._fetchers = {}
        for worker in self.crew.workers:
            if shared_seed is not None and isinstance(worker.dataset, IterDataPipe):
                worker.reseed(shared_seed)

    def _fetch(self, batch: Batch, _: int) -> None:
        """Make a batch of a bound worker, as torch's worker process does."""
        number = batch.maker = batch.stream
        worker = self.crew.workers[number]
        row = self._begin_step(number)
        try:
            self._check(worker, batch)
            if self.collators:  # the collate function and the next samples may depend on each other
                self.crew.await_turn(batch.is_next, batch.waits_for_loop)
            with self.crew.loading():
                fetcher = self._fetchers.get(number)
                if fetcher is None:
                    fetcher = self._fetchers[number] = DatasetKind.create_fetcher(
                        self._kind, worker.dataset, self._batched, worker.collate_fn, self._drop_last
                    )
                batch.index = index = batch.request.answer()
                data = fetcher.fetch(index)
            row.add_making(count_samples(_indices_of(index)))
            self._finish(batch, data if self.collators else self._pinned(data), row)
        except StopIteration as error:
            batch.ended = self._kind == DatasetKind.Iterable
            batch.finish(error=None if batch.ended else wrap_error(error, number))
        except Stopped:
            return
        except BaseException as error:
            batch.finish(error=wrap_error(error, number))

    def _begin_step(self, number: int) -> TimingRow:
        """Return the row of this thread, and record from now on."""
        row = row_here()
        if row is None:
            row = self.record.take(number)
            record_here(row)
        row.begin_step()
        return row

    def _pinned(self, data: object) -> Any:
        return data if self._pin is None else _pin_memory(data, self._pin)

    def find_cached(self, batches: list[Batch]) -> Group | None:
        """Look for the samples of several batches at once. Return them as a group; None unless all are cached."""
        lists = [batch.request.answer() for batch in batches]
        if not all(isinstance(each, np.ndarray) for each in lists) or self._will_compare(sum(map(len, lists))):
            return None
        try:
            with self._unaudited():
                together = self.crew.workers[0].dataset.__getitems__(np.concatenate(lists))
                if not together.cached:
                    return None
        except _OF_SAMPLES:  # which one raises it is found out when they are submitted
            return None
        for batch, index in zip(batches, lists, strict=True):
            batch.index, batch.samples = index, [None] * len(index)
        return Group(batches, together)

    def _will_compare(self, count: int) -> bool:
        return any(audit.will_compare(count) for audit in self._audits)

    @contextlib.contextmanager
    def _unaudited(self) -> Iterator[None]:
        for audit in self._audits:
            audit.is_paused = True
        try:
            yield
        finally:
            for audit in self._audits:
                audit.is_paused = False

    def submit(self, batch: Batch, threads: WorkerThreads) -> Group | None:
        """Put the tasks that make a batch. Return a group of it alone if it is wholly cached, and is to be gathered."""
        if self.is_bound:
            threads.put(partial(self._fetch, batch))
            return None
        index = batch.index = batch.request.answer()
        rows = range(len(_indices_of(index)) if self._batched else 1)
        batch.samples = [NOT_MADE] * len(rows)
        if not self._batched or self._way is not LazyBatch:
            self._put_runs(batch, rows, threads.put)
            return None
        if self._will_compare(len(rows)):  # with the dataset of the first worker: in its thread
            threads.put_own(partial(self._compare, batch, threads.put), 0)
            return None
        with self._unaudited():
            found_all = self._find(batch, threads.put)
        return Group([batch], batch.lazy) if found_all and batch.lazy is not None else None

    def _compare(self, batch: Batch, put: Callable[[Task], None], number: int) -> None:
        """Compare cached samples, and put the tasks that make a batch."""
        worker = self.crew.workers[number]
        self._begin_step(number)
        worker.rng.draws = Generators()  # not those of a stream
        try:
            self._check(worker, batch)
            with self.crew.loading():
                found_all = self._find(batch, put)
        except BaseException as error:
            batch.finish(error=wrap_error(error, number))
            return
        if found_all:
            put(partial(self._make_alone, batch))

    def _find(self, batch: Batch, put: Callable[[Task], None]) -> bool:
        """Make the `LazyBatch` of a batch, and put the tasks that load what is missing. Return whether it is wholly cached."""
        try:
            batch.lazy = self.crew.workers[0].dataset.__getitems__(batch.index)
            self.crew.claiming.add(batch.lazy)  # before an interrupt may come between
            rows: list[int] = batch.lazy.claim_missing()
        except Exception as error:
            if batch.lazy is not None:
                self.crew.release(batch.lazy)
            batch.finish(error=wrap_error(error, batch.stream))
            return False
        if batch.lazy.found_all:
            self.crew.claiming.discard(batch.lazy)
            return True
        batch.samples = [None] * len(batch.samples)
        for row in rows:
            batch.samples[row] = NOT_MADE
        self._put_runs(batch, rows, put)
        return False

    def _put_runs(self, batch: Batch, rows: Sequence[int], put: Callable[[Task], None]) -> None:
        """Put the tasks that load rows of a batch."""
        length = self._run_length(len(rows))
        runs = [rows[at : at + length] for at in range(0, len(rows), length)] or [[]]
        batch.runs_left = len(runs)
        for run in runs:
            put(partial(self._load_run, batch, batch.index, run))

    def _run_length(self, count: int) -> int:
        if self.crew.draws or self._makes_whole or not count:
            return max(1, count)
        if not self._cost_s:
            return max(1, count // (_FIRST_RUNS * len(self.crew.workers)))
        return min(count, max(1, int(_RUN_S / self._cost_s)))

    def _load_run(self, batch: Batch, index: Any, rows: Sequence[int], number: int) -> None:
        worker = self.crew.workers[number]
        at = rows[0] if rows else 0
        turn = Turn(self.crew, batch)
        worker.rng.draws = turn
        began, row = time.perf_counter(), self._begin_step(number)
        try:
            self._check(worker, batch)
            with self.crew.loading():
                turn.position = at
                if self._makes_whole:
                    batch.samples = worker.dataset.__getitems__(index)
                elif batch.lazy is not None and rows:
                    batch.lazy.take_loaded(worker.dataset.__getitems__(_part_of(index, rows)).load_all())
                    for at in rows:
                        batch.samples[at] = None
                elif self._batched and self._way is CachedDataset:
                    for at, sample in zip(rows, worker.dataset.__getitems__(_part_of(index, rows)), strict=True):
                        batch.samples[at] = sample
                else:
                    dataset, samples = worker.dataset, batch.samples
                    for at, part in zip(rows, _parts_of(index, rows) if self._batched else [index], strict=True):
                        turn.position = at
                        samples[at] = dataset[part]
                        if self.crew.draws:
                            self.crew.tell_progress()
        except BaseException as error:
            if isinstance(error, Exception) and self.crew.shares_opened(worker, error):
                return self._load_run(batch, index, rows, number)
            batch.errors.append((at, wrap_error(error, number)))
        if rows:
            cost_s = (time.perf_counter() - began) / len(rows)
            self._cost_s = cost_s if not self._cost_s else 0.9 * self._cost_s + 0.1 * cost_s
        row.add_making(0)
        with batch.lock:
            batch.runs_left -= 1
            last = not batch.runs_left
        if last:
            turn.position = 0 if self._makes_whole else len(batch.samples)
            self._collate(batch, worker, row)

    def _check(self, worker: ThreadWorker, batch: Batch) -> None:
        """Set the epoch of the dataset. Raise the error of ``worker_init_fn``: such a worker cannot make any batch."""
        if worker.error is not None:
            raise RaisedError(worker.error)
        epoch = batch.request.epoch
        if epoch is not None and self._epoch.get(worker.number) != epoch:
            self._epoch[worker.number] = epoch
            set_epoch(worker.dataset, epoch)

    def _collate(self, batch: Batch, worker: ThreadWorker, row: TimingRow) -> None:
        error, data = min(batch.errors, key=itemgetter(0), default=(0, None))[1], None
        batch.maker = worker.number
        row.add_making(len(batch.samples))
        try:
            if error is None:
                batch.request.note(batch.index)
                if self._batched and self._way is LazyBatch:
                    own = worker.dataset.__getitems__(batch.index)
                    if batch.lazy is None:
                        batch.lazy = own
                    batch.lazy.load_as(own)  # samples that are still missing are loaded by this thread, from its own dataset
                samples = batch.samples if self._batched else batch.samples[0]
                with span(COLLATE):
                    data = worker.collate_fn(samples if batch.lazy is None else batch.lazy)
                data = data if self.collators else self._pinned(data)
        except Stopped:
            return
        except BaseException as raised:
            error = wrap_error(raised, worker.number)
        if batch.lazy is not None:
            self.crew.release(batch.lazy)
        self._finish(batch, data, row, error)

    def _finish(self, batch: Batch, data: object, row: TimingRow, error: ExceptionWrapper | None = None) -> None:
        """Finish a batch, or leave it to the loop to collate it."""
        if error is None and self.collators and not (isinstance(data, StateBatch) and data.dropped):
            batch.data, batch.ready = data, True
            batch.wake()
            return
        row.add_collating()
        batch.finish(data, error)
        self.crew.tell_progress()

    def collate(self, batch: Batch) -> None:
        """Collate a batch, in the loop, if all batches before it in its stream are done."""
        if not batch.is_next():
            return
        row, data, error = self.record.main, batch.data, None
        row.begin_step()
        batch.request.note(batch.index)
        self.crew.waiting = False  # the function may draw random numbers
        try:
            with span(COLLATE), self.crew.turns:
                made = self.collators[batch.stream](data.batch if isinstance(data, StateBatch) else data)
            data = self._pinned(data._replace(batch=made) if isinstance(data, StateBatch) else made)
            row.add_collating()
        except (Exception, SystemExit) as raised:
            data, error = None, wrap_error(raised, batch.stream)
        batch.finish(data, error)
        self.crew.tell_progress()

    def gather(self, group: Group, number: int | None, threads: WorkerThreads | None = None) -> None:
        """Gather the batches of a group, unless another thread has begun to.

        Args:
            group: of batches that are wholly cached.
            number: of the thread; None for the loop.
            threads: of the loop, which make the batches if a sample is not cached any more.
        """
        if not group.claim.acquire(blocking=False):
            return
        batches = [batch for each in group.batches if (batch := each()) is not None]
        if len(batches) < len(group.batches):  # the iterator has died
            return
        worker = self.crew.workers[number or 0]
        row = self.record.main if number is None else self._begin_step(number)
        began, sizes = time.perf_counter_ns(), [len(batch.samples) for batch in batches]
        made: list[Any] = []
        try:
            if all(own.error is None for own in self.crew.workers):
                made = list(map(self._pinned, worker.collate_fn.gather(group.lazy, sizes) or ()))
        except BaseException as error:
            if number is None and not isinstance(error, _OF_SAMPLES):  # the iterator is not used any more
                for batch in batches:
                    batch.finish()
                raise
        if made:
            row.add_gathered(sum(sizes), len(batches), time.perf_counter_ns() - began)
        for batch, data in zip_longest(batches, made):
            batch.maker = number
            if made:
                batch.finish(data)
                continue
            batch.lazy = None  # look again
            if threads is None:
                self._make_alone(batch, number or 0)
            else:
                threads.put(partial(self._make_alone, batch))

    def _make_alone(self, batch: Batch, number: int) -> None:
        row, worker = self._begin_step(number), self.crew.workers[number]
        try:
            self._check(worker, batch)
        except Exception as error:
            batch.finish(error=wrap_error(error, number))
            return
        with self.crew.loading():  # of what is not cached any more
            self._collate(batch, worker, row)


def _indices_of(index: Any) -> Any:
    return index.indices if isinstance(index, EpochIndices) else index


def _part_of(index: Any, rows: Sequence[int]) -> Any:
    """Return the index of several rows of a batch."""
    if isinstance(index, EpochIndices):
        return EpochIndices(index.epoch, _part_of(index.indices, rows))
    return index[list(rows)] if isinstance(index, np.ndarray) else [index[row] for row in rows]


def _parts_of(index: Any, rows: Sequence[int]) -> list[Any]:
    """Return the index of each of several rows of a batch."""
    part = _part_of(index, rows)
    return [EpochIndices(part.epoch, each) for each in part.indices] if isinstance(part, EpochIndices) else part


def _way_of(dataset: Any) -> Any:
    """Return how a map-style dataset makes the samples of a run; None if it makes whole batches, which cannot be split.

    `LazyBatch`: it returns one; `CachedDataset`: by the ``__getitems__`` of one; `list`: one by one.
    """
    dataset, _ = through_subsets(dataset.dataset if type(dataset) is ThreadSeededDataset else dataset)
    if is_cache(dataset) and (dataset.transforms_batches or (dataset.is_left and get_many_of(dataset.dataset))):
        return None
    if isinstance(dataset, LazyConcat) or (is_cache(dataset) and dataset.is_lazy):
        return LazyBatch
    if is_cache(dataset):
        return CachedDataset
    return None if attribute_of(dataset, "__getitems__") else list
