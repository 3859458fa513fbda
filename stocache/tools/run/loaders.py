"""The loaders of a program that does not know stocache: what it finds as torch's, and what its loaders cache. One module,
because what a loader caches decides what is said of it.
"""

import logging
import multiprocessing
import os
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info

from stocache.cache.options import CacheOptions, SampleOptions
from stocache.datasets.cached import CachedDataset
from stocache.datasets.proxy import cut_of, decoders_of, finding_of, has_decoders
from stocache.datasets.worth import costs_of, decoded_again
from stocache.loader.dataloader import DataLoader, with_arguments_of_torch
from stocache.loader.engine import SIGNATURE, engine_of, makes_iterators, torch_loader_of
from stocache.loader.epochs import EpochLog, RunningEpoch
from stocache.loader.iteration import Iteration
from stocache.observe.verdict import TRY, LoaderEpochStats
from stocache.samples.indices import length_of
from stocache.shm.tables.sharing import tables_shared
from stocache.system.figures import format_seconds
from stocache.system.limits import format_size, parse_size
from stocache.system.loading.children import in_children
from stocache.system.objects import TorchLoader, has_state
from stocache.system.platform import here
from stocache.system.ranks import ranks_here
from stocache.system.walking import walk
from stocache.tools.run.messages import as_options
from stocache.tools.run.report import LoaderLines
from stocache.tools.run.use import LoaderName, ProgramOptions, Use

logger = logging.getLogger("stocache")

_T = TypeVar("_T")

_STDLIB = sysconfig.get_paths()["stdlib"]
_SAMPLERS = 10  # within one another, as accelerate has them
_KEPT = 8  # datasets whose caches are kept when no loader uses them any more
_TRIAL_S, _TRIAL_SHARE = 1.2, 0.05  # without news, or this share of an epoch, after which the trial of a cache is given up
_WRITE_S, _WRITE_SHARE = 1.0, 0.02  # between two writes of the files while the program runs, at least; of the time, at most
_TRIED = 3  # samples
_LITTLE = 0.8  # share of a sample's time that a cache leaves, from which it saves little


_UNKNOWN = "whether a cache helps was not found in time; --cache auto tries it"
_AGAIN = "the program makes a new dataset for each loader, so each has a cache of its own. Make the dataset once"
_REMEDY = "Load first and draw random numbers later, or put @stocache.cached on the function that loads"


class ProgramLoader(DataLoader[_T]):
    """What a program finds in place of torch's ``DataLoader``; see `use_everywhere`."""

    @with_arguments_of_torch
    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        used = Use.current
        options = ProgramOptions() if used is None or used.without else used.options
        if options.num_workers is not None:
            _, _, *given = SIGNATURE.bind_partial(self, dataset, *args).arguments.items()
            args, kwargs = (), {**kwargs, **dict(given), "num_workers": options.num_workers}
        if options.worker_method is not None:
            kwargs.setdefault("worker_method", options.worker_method)
        super().__init__(dataset, *args, **kwargs)
        engine = engine_of(self)
        if options.share:
            engine.while_starting = tables_shared
        if used is not None:
            _loaders_of(used).note(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__iter__ is not ProgramLoader.__iter__ and not hasattr(cls.__iter__, "times"):
            cls.__iter__ = _timed(cls, vars(cls).get("__iter__"))  # type: ignore[method-assign]

    def __iter__(self) -> Any:
        used = Use.current
        if "_stocache" not in vars(self):  # a subclass has not called our constructor
            return TorchLoader.__iter__(self)
        engine = engine_of(self)
        if used is not None:
            engine.served = _loaders_of(used).served(self)
        if not iterates_as_torch(self):
            batches = engine.iterate()
        elif hasattr(type(self).__iter__, "times"):
            batches = _iterate_as_torch(self)
        else:  # ``_get_iterator`` is overridden, or ``__iter__`` was set later
            batches = _iterate_timed(self, partial(_iterate_as_torch, self))
        if used is None or used.compared is None:
            return batches
        return used.compared(_loaders_of(used).number_of(self), batches)

    def _get_iterator(self) -> Any:
        """Return an iterator of torch. A subclass may ask for it itself, and keep it."""
        used = Use.current
        if "_stocache" not in vars(self):
            return super()._get_iterator()
        engine = engine_of(self)
        if used is not None and not engine.in_iter:
            engine.served = _loaders_of(used).served(self, keeps_iterator=True)
        loader = self if engine.served is None else torch_loader_of(self, {"dataset": engine.served})
        with engine.while_starting(engine.source):
            return TorchLoader._get_iterator(loader)


def iterates_as_torch(loader: ProgramLoader[Any]) -> bool:
    """Whether a subclass of the program overrides what stocache's loader overrides of torch's."""
    used = Use.current
    overrides = makes_iterators(loader, ProgramLoader) or type(loader).__iter__ is not ProgramLoader.__iter__
    return overrides or (used is not None and used.without)


def _iterate_as_torch(loader: ProgramLoader[Any]) -> Any:
    engine = engine_of(loader)
    engine.in_iter = True
    try:
        return TorchLoader.__iter__(loader)
    finally:
        engine.in_iter = False


def _timed(cls: Any, iterate: Any) -> Any:
    """Return the method ``__iter__`` of a program's subclass, whose iterators are timed. None: it inherits its own."""

    @wraps(iterate or ProgramLoader.__iter__)
    def __iter__(self: Any) -> Any:
        begin = partial(iterate, self) if iterate is not None else super(cls, self).__iter__
        outermost = type(self).__iter__ is __iter__
        return _iterate_timed(self, begin) if outermost else begin()

    __iter__.times = True  # type: ignore[attr-defined]
    return __iter__


def _iterate_timed(loader: Any, iterate: Callable[[], Any]) -> Any:
    """Return the iterator that a subclass of the program makes in its own way, as one that notes how long each batch took."""
    used = Use.current
    if used is None or "_stocache" not in vars(loader):  # a class of a library has made a loader without our ``__init__``
        return iterate()
    _loaders_of(used).enter(loader)
    engine = engine_of(loader)
    workers = min(loader.num_workers, engine.record.workers)
    epoch = engine.log.begin(engine.record, None, workers, loader.persistent_workers, None)
    batches = iterate()
    return batches if batches is loader else _TimedIteration(batches, epoch, engine.log)


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


@dataclass
class _Loader:
    """A loader of the program. Its log outlives it."""

    reference: "weakref.ref[ProgramLoader[Any]]"
    name: LoaderName
    dataset: "_Dataset"
    log: EpochLog
    note: str
    skipped: int = 0  # epochs of the process that has forked this one


def _loaders_of(use: Use) -> "ProgramLoaders":
    if use.loaders is None:
        use.loaders = ProgramLoaders(use)
    return use.loaders  # type: ignore[no-any-return]


class _Dataset:
    """A dataset of the program, which is not kept alive."""

    def __init__(self, dataset: object) -> None:
        self.name, self.length = type(dataset).__qualname__, length_of(dataset)
        self.iterations = 0
        self.problem = ""  # why it is not cached
        self.cached: Callable[[], CachedDataset | None] = lambda: None  # in its place, as long as that is kept
        self.advice: str | None = None  # what a cache would change; None until it is tried
        try:
            self.reference: Any = weakref.ref(dataset)
        except TypeError:  # a list
            self.reference = lambda: dataset


class ProgramLoaders:
    """The loaders of a program, from `use_everywhere` on, and the datasets that they cache."""

    def __init__(self, use: Use) -> None:
        self._use, self.options = use, use.options
        self.events: list[dict[str, Any]] = []  # of a trace
        self._loaders: list[_Loader] = []
        self._datasets: dict[int, _Dataset] = {}
        self._kept: list[CachedDataset] = []  # the last one is the newest
        self._last_us: dict[int, float] = {}
        self._write_at_s = 0.0
        self._pid = os.getpid()

    def note(self, loader: ProgramLoader[Any]) -> None:
        """Note a loader of the program, for the report."""
        note = ""
        if iterates_as_torch(loader):
            note = f"{type(loader).__qualname__} iterates in its own way, so torch's iterators are used: only waiting is timed."
            logger.info("%s", note)
        known = self._of(loader.dataset)
        seen = _Loader(weakref.ref(loader), (_place(), known.name, known.length), known, engine_of(loader).log, note)
        self._loaders.append(seen)
        seen.log.on_epoch = partial(self._on_epoch, seen)
        if self._use.traces:
            seen.log.on_batch = partial(self.trace, self.number_of(loader))

    def _on_epoch(self, seen: _Loader, epoch: LoaderEpochStats) -> None:
        if get_worker_info() is not None:
            return
        if self._use.on_epoch is not None:
            self._use.on_epoch(seen.name, self._worded(seen, epoch))
        if self._use.write is not None and (began_s := time.monotonic()) > self._write_at_s:
            self._use.write()
            ended_s = time.monotonic()
            self._write_at_s = ended_s + max(_WRITE_S, (ended_s - began_s) / _WRITE_SHARE)

    def _worded(self, seen: _Loader, epoch: LoaderEpochStats) -> LoaderEpochStats:
        """Return the figures of an epoch with the verdict in the words of ``stocache run``, and with advice that was tried."""
        verdict, caches = epoch.verdict, self.options.cache is not None
        if verdict is None or (epoch.hits is not None and not caches):  # the program uses stocache's cache itself
            return epoch
        text = as_options(verdict.text)
        if text.endswith(TRY):
            advice = "" if caches else self._advice(seen, epoch.seconds)
            text = f"{text.removesuffix(TRY)}{advice}".removesuffix("; ")
        return replace(epoch, verdict=replace(verdict, text=text))

    def _advice(self, seen: _Loader, epoch_s: float) -> str:
        """Return what ``--cache auto`` would do for the dataset of a loader. A child process tries it."""
        known, dataset = seen.dataset, seen.dataset.reference()
        if any(each.name == seen.name and each.dataset is not known and each.dataset.advice for each in self._loaders):
            known.advice = _AGAIN
        if known.advice is None and dataset is not None and not self._use.rank:
            problem = _why_not(dataset, seen.reference(), self.options)
            known.advice = f"a cache does not help: {problem}".rstrip(".") if problem else _UNKNOWN
            job, patience_s = partial(self._try, dataset), max(_TRIAL_S, _TRIAL_SHARE * epoch_s)
            with suppress(Exception):  # whatever a dataset raises there
                for known.advice in () if problem else in_children([job], dataset, patience_s):
                    pass
            self._use.tried.append(f"--cache auto, in a child process, for {known.name}: {known.advice}")
        return known.advice or ""

    def _try(self, dataset: Any) -> Iterator[str]:
        """Cache a dataset as ``--cache auto`` would, and yield what that brings. For a child process."""
        logging.disable()
        cached = self._open(dataset, CacheOptions("auto", share_ranks=False), probe=_TRIED)
        if cached.is_left:
            finding = str(finding_of(cached))
            remedy = _REMEDY if finding.startswith("random numbers") else "See: stocache explain W05"
            yield f"a cache of samples does not help: {finding}. {remedy}"
            if libraries := decoded_again(cached):
                yield f"{finding}; --cache auto would keep what {libraries} decodes"
            return
        yield _UNKNOWN
        if costs := costs_of(cached):
            stats, cut = cached.cache.stats(), cut_of(cached)
            share = min(1.0, stats.capacity_bytes / max(1, stats.slot_bytes * stats.dataset_len))
            what = "a part of each" if cut else "them"
            brings = f"--cache auto would make {what} once" if share == 1 else f"--cache auto would keep {share:.0%} of them"
            brings = "a cache saves little" if costs[1] > _LITTLE * costs[0] else brings
            made, served = map(format_seconds, costs)
            yield f"{brings}: {made} a sample without a cache, {served} with it" + f" ({cut})" * bool(cut)

    def enter(self, loader: ProgramLoader[Any]) -> None:
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

    def number_of(self, loader: ProgramLoader[Any]) -> int:
        """Return the number of a loader, in the order in which the program made them."""
        return next((number for number, seen in enumerate(self._loaders) if seen.reference() is loader), -1)

    def trace(self, number: int, note: Callable[..., None], now_ns: int, duration_ns: int, worker: int | None) -> None:
        """Note when a batch came; the time between two batches is that of a step."""
        began, last = (now_ns - duration_ns) / 1e3, self._last_us.get(number)
        common = {"ph": "X", "pid": os.getpid(), "tid": number}
        if last is not None:
            self.events.append(common | {"name": "step", "ts": last, "dur": began - last})
        arguments = {"worker": worker, "loader": self._loaders[number].name[0]}
        self.events.append(common | {"name": "wait for data", "ts": began, "dur": duration_ns / 1e3, "args": arguments})
        self._last_us[number] = now_ns / 1e3
        note(now_ns, duration_ns, worker)

    def _of(self, dataset: object) -> _Dataset:
        known = self._datasets.get(id(dataset))
        if known is None or known.reference() is not dataset:
            known = self._datasets[id(dataset)] = _Dataset(dataset)
        return known

    def served(self, loader: ProgramLoader[Any], keeps_iterator: bool = False) -> CachedDataset | None:
        """Return the cached dataset for the next iterator of a loader; None if it iterates over the dataset itself.

        ``keeps_iterator``: it may be the only one that the loader makes.
        """
        self.enter(loader)
        known = self._of(loader.dataset)
        known.iterations += 1
        if self.options.cache is None or self._use.without or os.getpid() != self._pid:
            return None
        if loader.persistent_workers and loader._iterator is not None:  # the workers keep what they have
            return engine_of(loader).served  # type: ignore[no-any-return]
        first = keeps_iterator or loader.persistent_workers or not _reads_in_order(loader)
        if known.cached() is None and not known.problem and (first or known.iterations > 1):
            self._cache(loader, known)
        return None if known.problem else known.cached()

    def _cache(self, loader: ProgramLoader[Any], known: _Dataset) -> None:
        known.problem = _why_not(loader.dataset, loader, self.options)
        if known.problem:
            return
        try:
            cached = self._open(loader.dataset, self._cache_options())
        except Exception as error:  # whatever a dataset raises that does not expect to be wrapped
            known.problem = f"{type(error).__name__}: {str(error) or 'without a message'}"
            return
        if cached.is_left:
            known.problem = f"{finding_of(cached)}."
        elif (costs := costs_of(cached)) and costs[0] <= costs[1]:
            known.problem = "a sample takes {}, less than a cached one ({}).".format(*map(format_seconds, costs))
        if known.problem and not has_decoders(cached):
            cached.close()
            return
        known.cached = weakref.ref(cached)
        self._kept.append(cached)
        del self._kept[:-_KEPT]

    def _open(self, dataset: Any, options: CacheOptions, probe: int = SampleOptions.probe) -> CachedDataset:
        return CachedDataset(dataset, options, probe=probe, decoders=not any(map(has_decoders, self._kept)))

    def _cache_options(self) -> CacheOptions:
        options, limit = self.options, self.options.cache
        assert limit is not None
        if limit != "auto":
            total = parse_size(limit, "cache")
            limit = f"{max(0, total - sum(cached.cache.settle() for cached in self._kept))}B"
        disk = None if options.disk is None else os.path.join(options.disk, str(len(self._kept)))
        return CacheOptions(limit, disk=disk, disk_limit=options.disk_limit)

    def lines(self) -> list[LoaderLines]:
        """Return what the report says of each loader; one that the program makes again and again counts as one."""
        found: dict[LoaderName, LoaderLines] = {}
        states: dict[LoaderName, dict[bool, str]] = {}  # the last ones of datasets that are cached, and that are not
        for seen in self._loaders:
            if seen.reference() is None:
                seen.log.leave()  # the loop has left its last epoch, with the loader
            epochs = [self._worded(seen, epoch) for epoch in seen.log.epochs()[seen.skipped :]]
            if epochs or seen.note:
                before = found[seen.name].epochs if seen.name in found else ()
                (told := states.setdefault(seen.name, {}))[not seen.dataset.problem] = self._state_of(seen.dataset)
                found[seen.name] = LoaderLines(*seen.name, (*before, *epochs), "\n  ".join(told.values()), seen.note)
        return list(found.values())

    def _state_of(self, known: _Dataset) -> str:
        if self.options.cache is None:
            return ""
        cached = known.cached()
        if cached is None or known.problem:
            return f"not cached: {known.problem or 'it was iterated once'} {decoders_of(cached)}".rstrip()
        stats = cached.cache.stats()
        rest = f"{'samples depend on more than their index.' * cached.is_left} {decoders_of(cached)}".strip() or cut_of(cached)
        return (
            f"cached: {stats.filled} of {stats.dataset_len} samples, {format_size(stats.reserved_bytes)}, hit rate "
            f"{stats.hit_rate:.0%}{rest and f'; {rest}'}"
        )


def _reads_in_order(loader: ProgramLoader[Any]) -> bool:
    """Whether a loader reads its dataset from the first sample to the last, as far as its samplers are known."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(_SAMPLERS):
        if isinstance(sampler, SequentialSampler):
            return True
        within = (getattr(sampler, name, None) for name in ("batch_sampler", "sampler"))
        sampler = next((each for each in within if each is not None), None)
    return False


def _why_not(dataset: Any, loader: ProgramLoader[Any] | None, options: ProgramOptions) -> str:
    """Return why the dataset of a loader, which may be gone, cannot be cached; "" if that has to be tried."""
    if isinstance(dataset, IterableDataset):
        return "it is iterable. CachedIterable records a pass over it; StreamLoader reads text."
    if any(isinstance(found, CachedDataset) for found in walk(dataset)):
        return "the program caches it itself."
    if has_state(dataset):
        return "it has a state_dict, so its samples may depend on more than their index."
    if length_of(dataset) is None:
        return "it has no length."
    if loader is None:
        return ""
    if makes_iterators(loader, ProgramLoader, "_index_sampler", "_auto_collation"):
        return "its loader is a subclass that has its own way from samplers to batches."
    if not loader.num_workers or here.SHARES_MEMORY or options.disk is not None:
        return ""
    has_processes = engine_of(loader).worker_method == "multiprocessing" or iterates_as_torch(loader)
    return "on this system processes share no cache. --worker-method thread has one." if has_processes else ""


def _place() -> str:
    """Return the place of the program that makes a loader; that of a framework, where no file of the program calls it."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("stocache", "torch")
    ]  # fmt: skip
    own = [place for place in places if "-packages" not in place[0] and not place[0].startswith((_STDLIB, "<"))]
    path, line = next(iter(own or places), ("", 0))
    return f"{os.path.basename(path)}:{line}" if path else ""
