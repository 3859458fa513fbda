"""The loaders of a program: what each did, for the report."""

import multiprocessing
import os
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import get_worker_info

from stocache.datasets.cached import CachedDataset
from stocache.loader.dataloader import DataLoader
from stocache.loader.engine import engine_of
from stocache.loader.epochs import EpochLog
from stocache.observe.verdict import TRY, LoaderEpochStats
from stocache.system.ranks import ranks_here
from stocache.tools.run.caching import ProgramDataset, ProgramDatasets
from stocache.tools.run.messages import as_options
from stocache.tools.run.report import LoaderLines
from stocache.tools.run.use import LoaderName, Use

_STDLIB = sysconfig.get_paths()["stdlib"]
_WRITE_S, _WRITE_SHARE = 1.0, 0.02  # between two writes of the files while the program runs, at least; of the time, at most
_AGAIN = "the program makes a new dataset for each loader, so each has a cache of its own. Make the dataset once"


@dataclass
class _Loader:
    """A loader of the program. Its log outlives it."""

    reference: "weakref.ref[DataLoader[Any]]"
    name: LoaderName
    dataset: ProgramDataset
    log: EpochLog
    note: str
    skipped: int = 0  # epochs of the process that has forked this one


class ProgramLoaders:
    """The loaders of a program, from `use_everywhere` on.

    Args:
        use: says what to do with them.
        has_own_way: whether a loader is of a subclass that keeps torch's iterators.
    """

    def __init__(self, use: Use, has_own_way: Callable[[Any], bool]) -> None:
        self._use, self._has_own_way = use, has_own_way
        self.events: list[dict[str, Any]] = []  # of a trace
        self._loaders: list[_Loader] = []
        self._datasets = ProgramDatasets(use.options, use.tried)
        self._write_at_s = 0.0
        self._pid = os.getpid()

    def note(self, loader: DataLoader[Any]) -> None:
        """Note a loader of the program, for the report."""
        way = f"{type(loader).__qualname__} iterates in its own way, so torch's iterators are used: only waiting is timed."
        note = way if self._has_own_way(loader) else ""
        known = self._datasets.of(loader.dataset)
        seen = _Loader(weakref.ref(loader), (_place(), known.name, known.length), known, engine_of(loader).log, note)
        self._loaders.append(seen)
        seen.log.on_epoch = partial(self._on_epoch, seen)
        if self._use.traces:
            seen.log.on_batch = partial(self.trace, self.number_of(loader))

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
        text = as_options(verdict.text)
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

    def enter(self, loader: DataLoader[Any]) -> None:
        """Note that this process iterates over a loader: it reports at its end, also if the program has started it."""
        use = self._use
        if get_worker_info() is not None:
            return
        use.rank = ranks_here().rank
        if use.at_end is not None and use.reports_in != os.getpid():
            use.reports_in, use.process = os.getpid(), multiprocessing.current_process().name
            for seen in self._loaders:
                seen.skipped = len(seen.log.epochs())
            # Children of multiprocessing end without `atexit`; this is the last of their finalizers
            Finalize(None, use.at_end, exitpriority=-1000)
        if self.number_of(loader) < 0:  # it came from another process
            self.note(loader)

    def served(self, loader: DataLoader[Any], keeps_iterator: bool = False) -> CachedDataset | None:
        """Return the cached dataset for the next iterator of a loader; None if it iterates over the dataset itself."""
        self.enter(loader)
        if self._use.without or os.getpid() != self._pid:
            return None
        return self._datasets.served(loader, self._has_own_way(loader), keeps_iterator)

    def number_of(self, loader: DataLoader[Any]) -> int:
        """Return the number of a loader, in the order in which the program made them."""
        return next((number for number, seen in enumerate(self._loaders) if seen.reference() is loader), -1)

    def trace(self, number: int, note: Callable[..., None], now_ns: int, duration_ns: int, worker: int | None) -> None:
        """Note when a batch came; the time between two waits is the time of a step."""
        times = {"ts": (now_ns - duration_ns) / 1e3, "dur": duration_ns / 1e3, "pid": os.getpid(), "tid": number}
        arguments = {"worker": worker, "loader": self._loaders[number].name[0]}
        self.events.append({"ph": "X", "name": "wait for data", **times, "args": arguments})
        note(now_ns, duration_ns, worker)

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


def _place() -> str:
    """Return the place of the program that builds a loader; the place of a framework if no file of the program calls it."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("stocache", "torch")
    ]  # fmt: skip
    own = [place for place in places if "-packages" not in place[0] and not place[0].startswith((_STDLIB, "<"))]
    path, line = next(iter(own or places), ("", 0))
    return f"{os.path.basename(path)}:{line}" if path else ""
