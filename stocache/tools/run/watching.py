"""The loaders of a program: what each did, for the report.

They are loaders that the program finds in place of torch's, and the loaders that it takes from stocache: `DataLoader`,
`DataLoader2`, `StreamLoader`. stocache's iterators time themselves. All others are timed from outside.
"""

import multiprocessing
import os
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import get_worker_info

from stocache.datasets.cached import CachedDataset
from stocache.loader.dataloader import DataLoader
from stocache.loader.engine import engine_of
from stocache.loader.epochs import EpochLog, RunningEpoch
from stocache.loader.iteration import Iteration
from stocache.observe.recording.record import TimingRecord
from stocache.observe.verdict import TRY, LoaderEpochStats
from stocache.shm.tables.sharing import tables_shared
from stocache.system.ranks import ranks_here
from stocache.tools.run.caching import ProgramDataset, ProgramDatasets
from stocache.tools.run.loaders import ProgramLoader, has_own_way
from stocache.tools.run.messages import as_options
from stocache.tools.run.report import LoaderLines
from stocache.tools.run.use import LoaderName, Use

_STDLIB = sysconfig.get_paths()["stdlib"]
_WRITE_S, _WRITE_SHARE = 1.0, 0.02  # between two writes of the files while the program runs, at least; of the time, at most
_TOLD_BY = "stocache.tools.", "stocache.loader.dataloader", "stocache.text.loader", "stocache.reading.loader"
_OWN_WAY = "{} iterates in its own way, {}only waiting is timed."
_AGAIN = "the program makes a new dataset for each loader, so each has a cache of its own. Make the dataset once"


@dataclass
class _Loader:
    """A loader of the program. Its log outlives it."""

    reference: "weakref.ref[Any]"
    name: LoaderName
    dataset: ProgramDataset
    log: EpochLog
    note: str
    in_place: bool  # whether it stands in place of torch's, so that options of the command hold for it
    skipped: int = 0  # epochs of the process that has forked this one


class ProgramLoaders:
    """The loaders of a program, from `use_everywhere` on. ``use`` says what to do with them."""

    def __init__(self, use: Use) -> None:
        self._use = use
        self._loaders: list[_Loader] = []
        self._datasets = ProgramDatasets(use.options, use.tried)
        self._write_at_s = 0.0
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._loaders)

    def note(self, loader: Any) -> _Loader | None:
        """Note a loader of the program, for the report; return None if it is not the program's."""
        if not _is_asked_by_program():
            return None
        engine, in_place = engine_of(loader) if isinstance(loader, DataLoader) else None, isinstance(loader, ProgramLoader)
        known, note = self._datasets.of(loader if engine is None else loader.dataset), ""
        if has_own_way(loader):
            note = _OWN_WAY.format(type(loader).__qualname__, "so torch's iterators are used: " if engine is not None else "")
            known.problem = known.problem if in_place else "its batches are made in another way."
        log, length = (EpochLog(), None) if engine is None else (engine.log, known.length)
        seen = _Loader(weakref.ref(loader), (_place(), known.name, length), known, log, note, in_place)
        self._loaders.append(seen)
        seen.log.on_epoch = partial(self._on_epoch, seen)
        if engine is not None and self._use.options.share:
            engine.while_starting = tables_shared
        return seen

    def _on_epoch(self, seen: _Loader, epoch: LoaderEpochStats) -> None:
        if get_worker_info() is not None:
            return
        if self._use.on_epoch is not None:
            self._use.on_epoch(seen.name, self._worded(seen, epoch, waits=False))
        if self._use.write is not None and (began_s := time.monotonic()) > self._write_at_s:
            self._use.write()
            self._write_at_s = time.monotonic() + max(_WRITE_S, (time.monotonic() - began_s) / _WRITE_SHARE)

    def _worded(self, seen: _Loader, epoch: LoaderEpochStats, waits: bool) -> LoaderEpochStats:
        """Return the figures of an epoch with the verdict in the words of ``stocache run``, and with advice that was tried.

        ``waits``: for the advice. If it does not, there is none as long as that is being tried.
        """
        verdict, caches = epoch.verdict, self._use.options.cache is not None
        if verdict is None or (epoch.hits is not None and not caches):  # the program uses stocache's cache itself
            return epoch
        text = as_options(verdict.text) if seen.in_place else verdict.text
        if text.endswith(TRY):
            advice = "" if caches else self._advice(seen, epoch.seconds, waits)
            text = f"{text.removesuffix(TRY)}{advice}".removesuffix("; ")
        return replace(epoch, verdict=replace(verdict, text=text))

    def _advice(self, seen: _Loader, epoch_s: float, waits: bool) -> str:
        """Return what ``--cache auto`` would do for the dataset of a loader."""
        known = seen.dataset
        if any(each.name == seen.name and each.dataset is not known and each.dataset.advice for each in self._loaders):
            known.advice = _AGAIN
        elif known.advice is None and not self._use.rank and (dataset := known.reference()) is not None:
            self._datasets.try_cache(dataset, seen.reference(), bool(seen.note), epoch_s)
        trial = known.trial
        if trial is not None and waits:
            trial.join()
        return "" if trial is not None and trial.is_alive() else known.advice or ""

    def enter(self, loader: Any) -> _Loader | None:
        """Note that this process iterates over a loader: it reports at its end, also if the program has started it.

        Return None in a worker, and for a loader that is not the program's.
        """
        use, number = self._use, self.number_of(loader)
        if get_worker_info() is not None:
            return None
        seen = self.note(loader) if number < 0 else self._loaders[number]  # or it came from another process
        if seen is None:
            return None
        use.rank = ranks_here().rank
        if use.at_end is not None and use.reports_in != os.getpid():
            use.reports_in, use.process = os.getpid(), multiprocessing.current_process().name
            for each in self._loaders:
                each.skipped = len(each.log.epochs())
            # Children of multiprocessing end without `atexit`; this is the last of their finalizers
            Finalize(None, use.at_end, exitpriority=-1000)
        return seen

    def iterate(self, loader: Any, begin: Callable[[], Any]) -> Any:
        """Return the iterator that ``begin`` makes, of the dataset or of its cache, and timed."""
        own_way = has_own_way(loader)
        if isinstance(loader, ProgramLoader) or not own_way:
            engine_of(loader).served = self.served(loader)
        is_timed = not own_way or hasattr(type(loader).__iter__, "times")
        batches, number = begin() if is_timed else self.timed(loader, begin), self.number_of(loader)
        return batches if self._use.compared is None or number < 0 else self._use.compared(number, batches)

    def timed(self, loader: Any, begin: Callable[[], Any]) -> Any:
        """Return the iterator that ``begin`` makes, as one that notes how long each batch took."""
        seen = self.enter(loader)
        if seen is None:
            return begin()
        record, workers, persistent = TimingRecord(0, shared=False), 0, False
        if isinstance(loader, DataLoader):
            record, persistent = engine_of(loader).record, loader.persistent_workers
            workers = min(loader.num_workers, record.workers)
        epoch = seen.log.begin(record, None, workers, persistent, None)
        batches = begin()
        return batches if batches is loader else _TimedIteration(batches, epoch, seen.log)

    def served(self, loader: DataLoader[Any], keeps_iterator: bool = False) -> CachedDataset | None:
        """Return the cached dataset for the next iterator of a loader; None if it iterates over the dataset itself."""
        if self.enter(loader) is None or self._use.without or os.getpid() != self._pid:
            return None
        return self._datasets.served(loader, has_own_way(loader), keeps_iterator)

    def number_of(self, loader: Any) -> int:
        """Return the number of a loader, in the order in which the program made them."""
        return next((number for number, seen in enumerate(self._loaders) if seen.reference() is loader), -1)

    def lines(self, waits: bool = True) -> list[LoaderLines]:
        """Return what the report says of each loader; one that the program makes again and again counts as one.

        ``waits``: for what is being tried.
        """
        found: dict[LoaderName, LoaderLines] = {}
        states: dict[LoaderName, dict[bool, str]] = {}  # the last ones of datasets that are cached, and that are not
        for seen in self._loaders:
            if seen.reference() is None:
                seen.log.leave()  # the loop has left its last epoch, with the loader
            epochs = [self._worded(seen, epoch, waits) for epoch in seen.log.epochs()[seen.skipped :]]
            if epochs or seen.note:
                before = found[seen.name].epochs if seen.name in found else ()
                state = "" if self._use.options.cache is None else seen.dataset.state()
                (told := states.setdefault(seen.name, {}))[not seen.dataset.problem] = state
                found[seen.name] = LoaderLines(*seen.name, (*before, *epochs), "\n  ".join(told.values()), seen.note)
        return list(found.values())


class _TimedIteration(Iteration):
    """An iterator of the program, timed. Making it starts the workers."""

    def __init__(self, batches: Any, epoch: RunningEpoch, log: EpochLog) -> None:
        self._batches, self._epoch, self._log = batches, epoch, log
        epoch.last_ns = time.perf_counter_ns()

    def __iter__(self) -> Any:
        again = iter(self._batches)
        return self if again is self._batches else again

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __next__(self) -> Any:
        began = time.perf_counter_ns()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.note_request(began)
            self._log.end(self._epoch)
            raise
        ended = time.perf_counter_ns()
        self._epoch.note_batch(ended, ended - began, None)
        return batch


def _stack() -> Iterator[tuple[str, str, int]]:
    """Yield the modules, files and lines that have called this module, the last call first."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line


def _is_asked_by_program() -> bool:
    """Whether the program makes a loader or iterates over it, or an adapter for it; not torch, or stocache for itself."""
    module = next((module for module, *_ in _stack() if not module.startswith(_TOLD_BY)), "")
    return module.startswith("stocache.integrations.") or module.partition(".")[0] not in ("stocache", "torch")


def _place() -> str:
    """Return the place of the program that builds a loader; the place of a framework if no file of the program calls it."""
    places = [(path, line) for module, path, line in _stack() if module.partition(".")[0] not in ("stocache", "torch")]
    own = [place for place in places if "-packages" not in place[0] and not place[0].startswith((_STDLIB, "<"))]
    path, line = next(iter(own or places), ("", 0))
    return f"{os.path.basename(path)}:{line}" if path else ""
