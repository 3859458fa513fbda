"""The iterator over the batches of a `DataLoader` that the user gets."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stocache.errors import WorkerError
from stocache.loader.epochs import EpochLog, RunningEpoch
from stocache.loader.order import Progress
from stocache.loader.worker_group import WorkerGroup, is_timeout
from stocache.loader.workers.states import StateBatch, WorkerStates
from stocache.observe.recording.record import record_here
from stocache.system.spans import WAIT, span


@dataclass(eq=False, repr=False)
class Iteration:
    """An iterator over batches that counts them, and explains the deaths of workers.

    It has the attributes of torch's iterator (``_batches``). The batches come from ``_source``: from there, or from a GPU.
    """

    _batches: Any
    _source: Any
    _progress: Progress
    _worker_group: WorkerGroup
    _worker_states: WorkerStates
    _ordered: bool
    _epoch: RunningEpoch
    _log: EpochLog

    def __post_init__(self) -> None:
        self._own_row = None if self._epoch.workers else self._epoch.record.main  # where this thread makes the batches
        self._epoch.last_ns = time.perf_counter_ns()

    def __iter__(self) -> "Iteration":
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # __init__ has not run
            raise AttributeError(name)
        return getattr(self._batches, name)  # attributes of torch's iterator

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        group, began, before = self._worker_group, time.perf_counter_ns(), None
        if group.busy:
            raise WorkerError("an interrupt ended the last step of this iterator, and may have lost a batch. Make another one.")
        group.busy = True
        try:
            with span(WAIT):
                if self._own_row is not None:
                    before = record_here(self._own_row)
                    self._own_row.begin_step()
                batch = self._next()
                while self._progress.replay:
                    self._progress.replay -= 1
                    batch = self._next()
        except StopIteration:
            self._progress.finished = True
            self._epoch.note_request(began)
            self._log.end(self._epoch)
            group.busy = False
            raise
        except Exception as error:
            death = group.explanation(error)
            group.busy = self._own_row is None and death is None and not group.expects(error)
            if isinstance(error, WorkerError) and death is not None:
                raise
            if death is not None:
                raise WorkerError(death) from error
            if not is_timeout(error):
                self._progress.deliver()  # the error took the place of a batch
                self._worker_states.note_error()
            raise
        finally:
            if self._own_row is not None:
                record_here(before)
        ended = time.perf_counter_ns()
        self._epoch.note_batch(ended, ended - began, getattr(self._source, "last_worker", None))
        group.busy = False
        return batch

    def _next(self) -> Any:
        """Return the next batch, and note its number and the state of its worker."""
        while True:
            if self._worker_group.ring is not None:
                self._worker_group.ring.reap()
            batch = next(self._source)
            if type(batch) is not StateBatch:
                self._progress.deliver()
                return batch
            self._worker_states.note(batch, self._progress.delivered)
            if not batch.dropped:
                self._progress.deliver(None if self._ordered else batch.number)
                return batch.batch


class LateIteration(Iteration):
    """An iterator that begins when it is first used, for samplers that have ``set_epoch``.

    Lightning makes the first iterator of a run before it sets the epoch of the samplers. Workers would begin at once, with the
    order of epoch 0. And after a checkpoint of the last step of an epoch, the iterator would resume that epoch, which has
    nothing left, and Lightning would count it as the next one. Without workers torch, too, takes the epoch that is set when the
    first batch is asked for.
    """

    def __init__(self, begin: Callable[[], Iteration]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        if "_begin" in vars(self):  # of its attributes it has no other yet
            vars(self).update(vars(self._begin()))
            del self._begin
            return getattr(self, name)
        return super().__getattr__(name)
