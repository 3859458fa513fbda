"""What is cached of the datasets of a program, and what a cache would change: a child process tries it, beside the program."""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from stocache.cache.options import CacheOptions, SampleOptions
from stocache.datasets.cached import CachedDataset
from stocache.datasets.proxy import cut_of, decoders_of, finding_of, has_decoders
from stocache.datasets.worth import costs_of, decoded_again, saved_s_of
from stocache.loader.dataloader import DataLoader
from stocache.loader.engine import engine_of, makes_iterators
from stocache.loader.order import samplers_in
from stocache.samples.indices import length_of
from stocache.system.figures import format_seconds
from stocache.system.limits import format_size, parse_size
from stocache.system.loading.children import in_children
from stocache.system.objects import has_state
from stocache.system.platform import here
from stocache.system.walking import walk
from stocache.tools.run.use import ProgramOptions

_SAMPLERS = 10  # within one another, as accelerate has them
_KEPT = 8  # datasets whose caches are kept when no loader uses them any more
_TRIAL_S, _TRIAL_SHARE = 1.2, 0.05  # without news, or this share of an epoch, after which the trial of a cache is given up
_TRIED = 3  # samples
_START_S = 0.006  # that a worker takes longer to start if its dataset is cached
_LITTLE = 0.8  # share of a sample's time that a cache leaves, from which it saves little

_UNKNOWN = "whether a cache helps was not found in time; --cache auto tries it"
_UNFIT = "none of the probed samples can be cached. See: stocache explain W03."
_REMEDY = "Load first and draw random numbers later, or put @stocache.cached on the function that loads"


class ProgramDataset:
    """A dataset of the program, which is not kept alive.

    Attributes:
        name, length: its class, and the number of its samples.
        iterations: how often the program has iterated over it.
        problem: why it is not cached; "" if it is, or was not tried.
        cached: returns what stands in its place, as long as that is kept.
        references: how many references to the dataset that has.
        last: its state when the program had no reference to it any more.
        advice: what a cache would change; None until somebody asks. It is complete when the ``trial`` has ended.
        trial: the thread that waits for the child process which tries a cache.
    """

    def __init__(self, dataset: object) -> None:
        self.name, self.length = type(dataset).__qualname__, length_of(dataset)
        self.iterations = 0
        self.problem = ""
        self.cached: Callable[[], CachedDataset | None] = lambda: None
        self.references, self.last = 0, ""
        self.advice: str | None = None
        self.trial: threading.Thread | None = None
        try:
            self.reference: Any = weakref.ref(dataset)
        except TypeError:  # a list
            self.reference = lambda: dataset

    def state(self) -> str:
        """Return what is cached, or why it is not."""
        if self.last:
            return self.last
        cached = self.cached()
        if cached is None or self.problem:
            return f"not cached: {self.problem or 'it was iterated once'} {decoders_of(cached)}".rstrip()
        stats = cached.cache.stats()
        rest = f"{'samples depend on more than their index.' * cached.is_left} {decoders_of(cached)}".strip() or cut_of(cached)
        return (
            f"cached: {stats.filled} of {stats.dataset_len} samples, {format_size(stats.reserved_bytes)}, hit rate "
            f"{stats.hit_rate:.0%}{rest and f'; {rest}'}"
        )


class ProgramDatasets:
    """The datasets of a program, and the caches of some."""

    def __init__(self, options: ProgramOptions, tried: list[str]) -> None:
        self._options, self._tried = options, tried
        self._known: dict[int, ProgramDataset] = {}
        self._kept: list[CachedDataset] = []  # the last one is the newest
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # engines of the loaders whose end is noticed

    def of(self, dataset: object) -> ProgramDataset:
        """Return what is known of a dataset."""
        known = self._known.get(id(dataset))
        if known is None or known.reference() is not dataset:
            known = self._known[id(dataset)] = ProgramDataset(dataset)
        return known

    def served(self, loader: DataLoader[Any], own_way: bool, keeps_iterator: bool) -> CachedDataset | None:
        """Return the cached dataset for the next iterator of a loader; None if it iterates over the dataset itself.

        ``own_way``: it is a subclass, with torch's iterators. ``keeps_iterator``: this may be the only one that it makes.
        """
        known = self.of(loader.dataset)
        known.iterations += 1
        if self._options.cache is None:
            return None
        if loader.persistent_workers and loader._iterator is not None:  # the workers keep what they have
            return engine_of(loader).served  # type: ignore[no-any-return]
        first = keeps_iterator or loader.persistent_workers or not _reads_in_order(loader)
        if known.cached() is None and not known.problem and (first or known.iterations > 1):
            known.problem = _why_not(loader.dataset, loader, own_way, self._options) or self._cache(loader, known)
        if known.cached() is not None and engine_of(loader) not in self._watched:
            self._watched.add(engine_of(loader))
            weakref.finalize(loader, self._let_go, known, _references_of(loader)).atexit = False
        return None if known.problem else known.cached()

    def _let_go(self, known: ProgramDataset, references: int) -> None:
        """Drop the cache of a dataset whose last loader is gone, if the program does not keep the dataset.

        The files of the dataset are closed now, as without a cache: the program may open them again. LMDB opens none twice.
        """
        dataset, cached = known.reference(), known.cached()
        if dataset is not None and cached is not None and sys.getrefcount(dataset) <= _OWN + known.references + references:
            known.last, known.cached = known.state(), lambda: None
            self._kept = [each for each in self._kept if each is not cached]

    def _cache(self, loader: DataLoader[Any], known: ProgramDataset) -> str:
        """Cache the dataset of a loader; return why that is of no use, or ""."""
        dataset: Any = loader.dataset
        before = sys.getrefcount(dataset)
        try:
            cached = self._open(dataset, self._cache_options())
        except Exception as error:  # whatever a dataset raises that does not expect to be wrapped
            return f"{type(error).__name__}: {str(error) or 'without a message'}"
        problem = f"{finding_of(cached)}." if cached.is_left else _UNFIT * _takes_none(cached)
        if not problem and (saved_s := saved_s_of(cached)) is not None:
            starts = self._options.cache == "auto" and not loader.persistent_workers
            problem = _saves_nothing(saved_s, len(cached), starts * _START_S * loader.num_workers)
        if problem and not has_decoders(cached):
            cached.close()
            return problem
        known.cached, known.references, known.last = weakref.ref(cached), sys.getrefcount(dataset) - before, ""
        self._kept.append(cached)
        del self._kept[:-_KEPT]
        return problem

    def _open(self, dataset: Any, options: CacheOptions, probe: int = SampleOptions.probe) -> CachedDataset:
        return CachedDataset(dataset, options, probe=probe, decoders=not any(map(has_decoders, self._kept)))

    def _cache_options(self) -> CacheOptions:
        options, limit = self._options, self._options.cache
        assert limit is not None
        if limit != "auto":
            total = parse_size(limit, "cache")
            limit = f"{max(0, total - sum(cached.cache.settle() for cached in self._kept))}B"
        disk = None if options.disk is None else os.path.join(options.disk, str(len(self._kept)))
        return CacheOptions(limit, disk=disk, disk_limit=options.disk_limit)

    def try_cache(self, dataset: Any, loader: DataLoader[Any] | None, own_way: bool, epoch_s: float) -> None:
        """Have a child process try what ``--cache auto`` would do for a dataset. The program goes on meanwhile."""
        known = self.of(dataset)
        if problem := _why_not(dataset, loader, own_way, self._options):
            known.advice = f"a cache does not help: {problem}".rstrip(".")
            return
        found = in_children([partial(self._try, dataset)], dataset, max(_TRIAL_S, _TRIAL_SHARE * epoch_s))
        with suppress(Exception):
            known.advice = _UNKNOWN
            next(found)  # it forks here: the thread would do so at any moment of the program, which may hold a lock then
            known.trial = threading.Thread(target=self._follow, args=(known, found), daemon=True)
            known.trial.start()

    def _follow(self, known: ProgramDataset, found: Iterator[str]) -> None:
        with suppress(Exception):  # whatever a dataset raises in the child
            for known.advice in found:
                pass
        self._tried.append(f"--cache auto, in a child process, for {known.name}: {known.advice}")

    def _try(self, dataset: Any) -> Iterator[str]:
        """Cache a dataset as ``--cache auto`` would, and yield what that brings. For a child process."""
        yield _UNKNOWN
        logging.disable()
        cached = self._open(dataset, CacheOptions("auto", share_ranks=False), probe=_TRIED)
        if cached.is_left:
            finding = str(finding_of(cached))
            remedy = _REMEDY if finding.startswith("random numbers") else "See: stocache explain W05"
            yield f"a cache of samples does not help: {finding}. {remedy}"
            if libraries := decoded_again(cached):
                yield f"{finding}; --cache auto would keep what {libraries} decodes"
        elif _takes_none(cached):
            yield f"a cache does not help: {_UNFIT}".rstrip(".")
        elif costs := costs_of(cached):
            stats, cut = cached.cache.stats(), cut_of(cached)
            share = min(1.0, stats.capacity_bytes / max(1, stats.slot_bytes * stats.dataset_len))
            what = "a part of each" if cut else "them"
            brings = f"--cache auto would make {what} once" if share == 1 else f"--cache auto would keep {share:.0%} of them"
            brings = "a cache saves little" if costs[1] > _LITTLE * costs[0] else brings
            made, served = map(format_seconds, costs)
            yield f"{brings}: {made} a sample without a cache, {served} with it" + f" ({cut})" * bool(cut)


_OWN = 2  # references to an object while `sys.getrefcount` counts them: of a variable, and of its argument


def _references_of(loader: DataLoader[Any]) -> int:
    """Return how many references to its dataset a loader has, with its samplers."""
    samplers = samplers_in(engine_of(loader).index_source)
    return 1 + sum(getattr(sampler, "data_source", None) is loader.dataset for sampler in samplers)


def _saves_nothing(saved_s: float, length: int, starts_s: float) -> str:
    """Return why a cache that saves that many seconds for each sample is of no use; "" if it is of use.

    ``starts_s``: the seconds that the workers of an epoch take longer to start with it.
    """
    if saved_s <= 0:
        return "a cached sample takes no less time than one that the dataset makes."
    if length * saved_s < starts_s:
        return f"a cache would save {format_seconds(length * saved_s)} an epoch, less than the workers take longer to start."
    return ""


def _takes_none(cached: CachedDataset) -> bool:
    """Whether a cache has rejected all samples that were probed: it would try each in vain, in each epoch."""
    stats = cached.cache.stats()
    return stats.rejected > 0 and not stats.filled


def _reads_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads its dataset from the first sample to the last, as far as its samplers are known."""
    sampler = engine_of(loader).index_source
    for _ in range(_SAMPLERS):
        if isinstance(sampler, SequentialSampler):
            return True
        within = (getattr(sampler, name, None) for name in ("batch_sampler", "sampler"))
        sampler = next((each for each in within if each is not None), None)
    return False


def _why_not(dataset: Any, loader: DataLoader[Any] | None, own_way: bool, options: ProgramOptions) -> str:
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
    if makes_iterators(loader, DataLoader, "_index_sampler", "_auto_collation"):
        return "its loader is a subclass that has its own way from samplers to batches."
    if not loader.num_workers or here.SHARES_MEMORY or options.disk is not None:
        return ""
    has_processes = engine_of(loader).worker_method == "multiprocessing" or own_way
    return "on this system processes share no cache. --worker-method thread has one." if has_processes else ""
