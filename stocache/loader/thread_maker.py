"""Make batches in threads; see NOTE [ Batches made by threads ]."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from torch.utils.data._utils import pin_memory as torch_pinning

from stocache.datasets.batches.views import behind_views
from stocache.datasets.cached import is_cache
from stocache.datasets.lazy import returns_lazy_batches
from stocache.errors import StocacheError
from stocache.loader.collate import as_is
from stocache.loader.threads.batches import Batch, Group, Part
from stocache.loader.threads.crew import Crew, ThreadWorker
from stocache.loader.torch_iterators import DatasetKind
from stocache.loader.workers.states import StateBatch, StatefulCollate
from stocache.observe.recording.record import TimingRow, record_here, row_here
from stocache.system.objects import attribute_of, get_many_of
from stocache.system.spans import COLLATE, span
from stocache.system.walking import through_subsets, walk

_PART_S = 0.002  # a part of a batch takes about as long
_FIRST_PARTS = 8  # for each thread, of a batch whose samples' cost is not known

# Of a dataset, a cache or torch. Others that are raised in the loop are of a signal's handler
_OF_SAMPLES = StocacheError, IndexError, TypeError, ValueError, MemoryError, RuntimeError

_pin_memory: Any = torch_pinning.pin_memory


class ThreadMaker:
    """Makes batches in threads. The tasks hold this object; it does not hold the iterator.

    Attributes:
        is_bound: whether each worker makes whole batches of its own, in order, as a worker process does.
        shares: whether threads share the samples of a batch.
        in_loop: whether the loop collates.
    """

    def __init__(self, loader: Any, crew: Crew, pin: Any) -> None:
        self.crew, self._pin, self.record = crew, pin, loader._stocache.record
        self._kind, self._batched, self._drop_last = loader._dataset_kind, loader._auto_collation, loader.drop_last
        dataset, collate_fn = crew.workers[0].dataset, crew.workers[0].collate_fn
        inner, _ = through_subsets(behind_views(dataset))
        singly, is_lazy = _makes_singly(inner), returns_lazy_batches(inner)
        may_change = crew.arrays.copied and loader.persistent_workers  # samples may depend on what a worker has changed
        self.is_bound = (
            self._kind == DatasetKind.Iterable
            or isinstance(collate_fn, StatefulCollate)
            or (loader._stocache.sample_seed is None and crew.holds_generator)
            or (may_change and singly and not is_lazy and not is_cache(inner))
        )
        self.shares = self._batched and not self.is_bound and singly
        self._is_lazy = self.shares and is_lazy
        self._audits = [cached._audit for cached in walk(behind_views(dataset)) if is_cache(cached)]
        self._cost_s = 0.0  # of a sample, as the last parts have shown
        self.in_loop = not (self._is_lazy or getattr(collate_fn, "collate", collate_fn).is_pure)
        if self.in_loop:
            for worker in crew.workers:
                worker.leave_collating(as_is)

    def begin_epoch(self) -> None:
        """Have the workers begin again."""
        for worker in self.crew.workers:
            worker.fetcher = None
            worker.undone.clear()

    def submit(self, batches: list[Batch]) -> list[Group]:
        """Have threads make batches. Return the batches that are wholly cached as groups, which are to be gathered."""
        if not self._is_lazy:
            for batch in batches:
                self._put(batch, range(batch.count))
            return []
        count = sum(batch.count for batch in batches)
        compares = any(audit.will_compare(count) for audit in self._audits)  # of the first worker: in its thread
        if not compares and (group := self._find(batches)) is not None:
            return [group]
        if len(batches) > 1:
            return [group for batch in batches for group in self.submit([batch])]
        thread = 0 if compares or self.crew.in_turn else None
        self.crew.tasks.put(partial(self._claim, batches[0]), thread, batch=batches[0].number)
        return []

    def _find(self, batches: list[Batch]) -> Group | None:
        """Look for the samples of several batches at once. Return the batches as a group; None unless all are cached."""
        lists = [batch.index for batch in batches]
        if len(lists) > 1 and not all(isinstance(index, np.ndarray) for index in lists):
            return None
        for audit in self._audits:
            audit.is_paused = True
        try:
            lazy = self.crew.workers[0].dataset.__getitems__(np.concatenate(lists) if len(lists) > 1 else lists[0])
            return Group(batches, lazy) if lazy.cached else None
        except _OF_SAMPLES:  # it is raised again for the batch that has it
            return None
        finally:
            for audit in self._audits:
                audit.is_paused = False

    def _claim(self, batch: Batch, number: int) -> None:
        """Claim the missing samples of a batch, after comparing some that are cached, and have threads load them."""
        worker = self.crew.workers[number]
        self._begin_step(number)
        try:
            worker.set_epoch(batch.request.epoch)
            with self.crew.loading():
                batch.lazy = worker.dataset.__getitems__(batch.index)
                self.crew.claiming.add(batch.lazy)
                rows = batch.lazy.claim_missing()
        except BaseException as error:
            if batch.lazy is not None:
                self.crew.release(batch.lazy)
            batch.finish(error=worker.wrapped(error))
        else:
            self._put(batch, rows)

    def _put(self, batch: Batch, rows: Sequence[int]) -> None:
        """Put the tasks that make samples of a batch, and then the batch."""
        length = max(1, len(rows))
        if not self.crew.draws:
            length = min(length, self._part_length(length))
        parts = [rows[at : at + length] for at in range(0, len(rows), length)] or [rows]
        thread = batch.worker.number if self.is_bound else 0 if self.crew.in_turn else None
        for part in batch.divide(parts if self.shares else [None]):
            self.crew.tasks.put(partial(self._make, part), thread, batch=batch.number)

    def _part_length(self, count: int) -> int:
        """Return how many samples a thread makes at a time, of a batch of ``count``."""
        if self._cost_s:
            return max(1, int(_PART_S / self._cost_s))
        return max(1, count // (_FIRST_PARTS * len(self.crew.workers)))

    def _make(self, part: Part, number: int) -> None:
        """Make the samples of a part, and the batch if it is the last one."""
        batch, worker = part.batch, self.crew.workers[number]
        began, row = time.perf_counter(), self._begin_step(number)
        worker.rng.draws = part.generators
        try:
            worker.set_epoch(batch.request.epoch)
            if self.is_bound and self.in_loop:  # the collate function and the next samples may depend on each other
                self.crew.await_turn(batch.is_next)
            with self.crew.loading():
                if worker.fetcher is None:
                    worker.fetcher = DatasetKind.create_fetcher(
                        self._kind, worker.dataset, self._batched, as_is, self._drop_last
                    )
                part.make(worker)
        except BaseException as error:
            if self.crew.shares_opened(worker, error):
                return self._make(part, number)
            batch.ended = isinstance(error, StopIteration) and self._kind == DatasetKind.Iterable
            if not batch.ended:
                batch.errors[part.number] = worker.wrapped(error)
        if len(part):
            cost_s = (time.perf_counter() - began) / len(part)
            self._cost_s = cost_s if not self._cost_s else 0.9 * self._cost_s + 0.1 * cost_s
        row.add_making(0)
        if batch.note_made(part.number):
            self._finish(batch, worker, row)
        else:
            self.crew.tell_progress()
        worker.rng.draws = worker.rng.own.itself

    def _begin_step(self, number: int) -> TimingRow:
        """Return the row of this thread, and record from now on."""
        row = row_here()
        if row is None:
            row = self.record.take(number)
            record_here(row)
        row.begin_step()
        return row

    def _finish(self, batch: Batch, worker: ThreadWorker, row: TimingRow) -> None:
        """Collate a batch whose samples are made, or leave that to the loop."""
        error, data = batch.errors[min(batch.errors)] if batch.errors else None, None
        batch.maker = worker.number
        row.add_making(batch.count)
        if error is None and not batch.ended:
            try:
                data = self._collated(batch, worker)
            except BaseException as raised:
                error = worker.wrapped(raised)
            batch.ready = self.in_loop and error is None and not (isinstance(data, StateBatch) and data.dropped)
        if batch.lazy is not None:
            self.crew.release(batch.lazy)
        if batch.ready:
            batch.data = data
            self.crew.tell_loop()
        else:
            row.add_collating()
            batch.finish(data, error)

    def _collated(self, batch: Batch, worker: ThreadWorker) -> Any:
        batch.request.note()
        if self._is_lazy:
            own = worker.dataset.__getitems__(batch.index)
            if batch.lazy is None:
                batch.lazy = own
            batch.lazy.load_as(own)  # samples that are still missing are loaded by this thread, from its own dataset
        with self.crew.turns, span(COLLATE):
            data = worker.collate_fn(batch.samples if batch.lazy is None else batch.lazy)
        return data if self.in_loop else self._pinned(data)

    def _pinned(self, data: object) -> Any:
        return data if self._pin is None else _pin_memory(data, self._pin)

    def collate(self, batch: Batch) -> None:
        """Collate a batch, in the loop, if all batches before it in its stream are done."""
        if not batch.is_next():
            return
        row, data, error = self.record.main, batch.data, None
        row.begin_step()
        batch.request.note()
        self.crew.waiting = 0  # the function may draw random numbers
        try:
            with span(COLLATE), self.crew.turns:
                made = batch.worker.collate(data.batch if isinstance(data, StateBatch) else data)
            data = self._pinned(data._replace(batch=made) if isinstance(data, StateBatch) else made)
            row.add_collating()
        except (Exception, SystemExit) as raised:
            data, error = None, batch.worker.wrapped(raised)
        batch.finish(data, error)

    def gather(self, group: Group, number: int | None = None) -> None:
        """Gather the batches of a group, unless another thread has begun to.

        Args:
            group: of batches that are wholly cached.
            number: of the thread; None for the loop.
        """
        batches = group.take()
        if not batches:
            return
        worker = self.crew.workers[number or 0]
        row = self.record.main if number is None else self._begin_step(number)
        began, sizes = time.perf_counter_ns(), [batch.count for batch in batches]
        made: list[Any] = []
        try:
            if all(own.error is None for own in self.crew.workers):
                made = list(map(self._pinned, worker.collate_fn.gather(group.lazy, sizes) or ()))
        except BaseException as error:  # it is raised again for the batch that has it
            if number is None and not isinstance(error, _OF_SAMPLES):
                raise
        if made:
            row.add_gathered(sum(sizes), len(batches), time.perf_counter_ns() - began)
        for batch, data in zip_longest(batches, made):
            batch.maker = number
            if made:
                batch.finish(data)
            else:  # a sample is not cached any more
                self._put(batch, ())


def _makes_singly(dataset: Any) -> bool:
    """Whether a dataset, inside Subsets, makes the samples of a batch singly, so that threads can share them."""
    if is_cache(dataset):
        return not (dataset.transforms_batches or (dataset.is_left and get_many_of(dataset.dataset)))
    return returns_lazy_batches(dataset) or not attribute_of(dataset, "__getitems__")
