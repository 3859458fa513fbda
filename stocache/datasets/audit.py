"""Check, while samples are served, that the dataset would give them now: `Audit`.

NOTE [ The audit ]
    A sample may depend on more than its index: on random numbers, an epoch, a mode, a size that was set in place, an edited
    file. Nobody declares these. So in each epoch each process, before it serves or fills the cache, loads a sample that is
    cached from the dataset as well, and compares the two bit for bit. A few more samples follow in the epoch, as long
    as all this takes at most a share of the time.

    A loop over a `stocache.DataLoader` raises a version in memory that all processes share. A process that sees a different
    version than at its last audit, or has served as many samples as its share of the dataset, audits again. Calls that may
    change the dataset of one process (``set_epoch``, an attribute that is set, a method that is looked up) have that process
    audit again: several samples if an attribute has a different value, because one may be equal by chance.

    An audit leaves the dataset as it was: the generators that it holds, and small values in attributes, lists and dicts of the
    user's own objects, are put back. Objects of libraries are left as they are: an image that was decoded stays decoded. If a
    sample differs, no process serves cached samples of this dataset any more: the dataset makes them itself.
"""

import logging
import operator
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from stocache.cache.options import AuditOptions, OnChange
from stocache.cache.stats import MISSING
from stocache.datasets.probing import AGAIN, load_again, log_draws_without_effect
from stocache.errors import DatasetError
from stocache.shm.segment import Segment
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, in_worker_thread, is_own, own_generators, parts_of
from stocache.system.objects import vars_of
from stocache.system.platform import here

logger = logging.getLogger("stocache")


_VERSION, _CHANGED, _COMPARED, _WORDS = range(4)  # words that all processes share
_STRIDE = 5  # samples of a batch, by which the one that is compared moves on
_MANY = 8  # samples that are audited where an attribute was set
_EXTRA = 20  # samples in an epoch, besides the first
_SMALL = (int, float, str, bool, bytes, type(None))
_LONGEST = 200  # characters of a text that is looked at

_live: "weakref.WeakSet[Audit]" = weakref.WeakSet()


class Audit:
    """Decides when a process compares cached samples with those of the dataset, and remembers whether one differed.

    Args:
        dataset: makes the samples.
        length: how many samples it has.
        options: see `CachedDataset`.
        any_sample: whether the dataset can be asked for any sample; else only for those that are wanted.

    Slots hide its attributes from libraries that walk through a dataset and seed the objects that they find (MONAI).
    """

    __slots__ = (
        "__weakref__", "_any_sample", "_attributes", "_attributes_of_workers", "_began", "_checked_draws", "_dataset",
        "_doubted", "_extra", "_failed", "_length", "_lock", "_next", "_own", "_requests", "_seen", "_set_by_loads",
        "_share", "_shared", "_took_s", "is_paused", "loads", "on_change",
    )  # fmt: skip

    def __init__(self, dataset: Any, length: int, options: AuditOptions, any_sample: bool = True) -> None:
        self.on_change: OnChange = options.on_change
        self._assemble(dataset, length, options.audit, any_sample, _SharedWords(Segment.create(_WORDS * 8, 0)))

    def _assemble(self, dataset: object, length: int, share: float, any_sample: bool, shared: "_SharedWords") -> None:
        self._dataset, self._length, self._share, self._shared = dataset, length, share, shared
        self._any_sample = any_sample
        self._lock = threading.RLock()
        self.is_paused = False  # whether nothing is compared now: another thread may be loading from the dataset
        self.loads = 0  # samples that this process has loaded to compare them
        self._own, self._attributes = own_generators(dataset), _small_attributes(dataset) if share else {}
        self._attributes_of_workers: dict[str, Any] = {}
        self._set_by_loads: set[str] = set()  # names of attributes, such as counters
        self._checked_draws = self._failed = False
        self._enter_process()
        _live.add(self)

    def _enter_process(self) -> None:
        self._seen, self._doubted = -1, False  # the version at the last audit, and whether the dataset may have changed since
        self._requests = self._next = self._extra = 0  # samples wanted in this epoch, when to look, and further audits
        self._began, self._took_s = time.monotonic(), 0.0

    def close(self) -> None:
        """Release the shared memory. May be called twice."""
        self._shared.close()

    def __getstate__(self) -> tuple[Any, ...]:
        shared = self._any_sample, self._shared, self.on_change
        return self._dataset, self._length, self._share, *shared, self._attributes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *arguments, self.on_change, attributes = state
        self._assemble(*arguments)
        self._attributes = attributes

    @property
    def changed(self) -> bool:
        """Whether cached samples are not served any more."""
        return bool(self._shared.words[_CHANGED])

    @property
    def compared(self) -> int:
        """Samples that all processes have loaded to compare them; a few less if two counted at one moment."""
        return int(self._shared.words[_COMPARED])

    def begin_epoch(self) -> None:
        """Have each process audit before it serves the next sample."""
        self._shared.words[_VERSION] += 1

    def doubt(self) -> None:
        """Have this process audit before it serves the next sample: its dataset may have changed."""
        self._doubted = True

    def change(self, finding: str) -> None:
        """Serve no cached samples from now on, in any process.

        Args:
            finding: which sample depends on what: a sentence without its end.

        Raises:
            DatasetError: ``on_change`` is "raise".
        """
        if self.on_change == "keep" or self.changed:
            return
        if self.on_change == "raise":
            raise DatasetError(f"{finding}. {_REMEDY}")
        self.leave()
        logger.warning(
            "%s. From now on %s makes each sample itself. %s", finding.rstrip("."), type(self._dataset).__name__, _REMEDY
        )

    def leave(self) -> None:
        """Serve no cached samples from now on, in any process."""
        self._shared.words[_CHANGED] = 1
        self._shared.words[_VERSION] += 1

    def meet_workers(self, started: bool) -> None:
        """Note that a loop with persistent workers begins. Warn where an attribute was set since they ``started``."""
        if not started:
            self._attributes_of_workers = _small_attributes(self._dataset)
        elif self._share and (names := _differing(self._attributes_of_workers, _small_attributes(self._dataset))):
            self._attributes_of_workers = _small_attributes(self._dataset)
            logger.warning(
                "%s was set after persistent workers had started. They have copies of the dataset, where it is as before. Use "
                "persistent_workers=False, or loader.set_epoch() for an epoch.", ", ".join(names[:3]),
            )  # fmt: skip

    def is_due(self, count: int) -> bool:
        """Return whether to call `allows` before ``count`` samples are served."""
        self._requests += count
        return self.changed if self.is_paused else self._is_due(0)

    def will_compare(self, count: int) -> bool:
        """Return whether `allows` will load samples for the next ``count``."""
        if not self._share or self.on_change == "keep" or self.changed or not self._is_due(count):
            return False
        return self._doubted or self._begins(self._shared.words[_VERSION], count) or self._may_compare_more()

    def _is_due(self, count: int) -> bool:
        return self._doubted or self._requests + count > self._next or bool(self._shared.words[_VERSION] != self._seen)

    def _begins(self, version: int, count: int = 0) -> bool:
        """Return whether an epoch of this process begins with the next ``count`` samples: its first is compared in any case."""
        return version != self._seen or self._requests + count > self._own_length()

    def _may_compare_more(self, doubted: bool = False) -> bool:
        """Return whether a further sample may be compared in this epoch; where it is ``doubted``, whatever time that takes."""
        has_time = doubted or self._took_s <= self._share * (time.monotonic() - self._began)
        return self._extra < _EXTRA and has_time

    def allows(
        self, indices: Sequence[int], cached: Any, served: Callable[[int], object], fresh: Callable[[int], object] | None = None
    ) -> bool:
        """Return whether samples of the cache may be served, after comparing some where it is time to.

        Args:
            indices: of the samples that are wanted.
            cached: the cache, which has the states of the samples.
            served: returns a sample as it would be served; it must be cached.
            fresh: returns the value that it must equal; None for the sample of the dataset.

        Raises:
            DatasetError: one differs, and ``on_change`` is "raise".
        """
        if self.changed:
            return False
        if not self._share or self.on_change == "keep":
            self._next, self._seen, self._doubted = sys.maxsize, self._shared.words[_VERSION], False
            return True
        locked = self._lock.acquire(timeout=_PATIENCE_S)  # a thread compares a sample that takes longer: go on
        try:
            version = self._shared.words[_VERSION]
            wanted = self._wanted(version, len(indices))
            began = time.monotonic()
            at = self.compared * _STRIDE % max(1, len(indices))  # not the same sample in each epoch
            for idx in _choose([*indices[at:], *indices[:at]], cached, wanted, self._any_sample):
                finding = self._compare(idx, served, fresh or partial(operator.getitem, self._dataset))
                if finding is not None:
                    self.change(finding)
                    return False
            self._took_s += time.monotonic() - began
            self._seen = version
            self._next = min(max(self._requests + 8, self._requests * 5 // 4), max(self._requests, self._own_length()))
        finally:
            if locked:
                self._lock.release()
        return True

    def _wanted(self, version: int, count: int) -> int:
        """Return how many samples to compare now."""
        doubted, self._doubted = self._doubted, False
        if self._begins(version):
            several = bool(self._set_attributes())
            self._requests, self._extra, self._own = count, 0, own_generators(self._dataset)
            self._began, self._took_s = time.monotonic(), 0.0
            return _MANY if several else 1
        if doubted and self._set_attributes():
            return _MANY
        if not self._may_compare_more(doubted):
            return 0
        self._extra += 1
        return 1

    def _own_length(self) -> int:
        """Return how many samples this process serves in an epoch, if all workers serve equally many."""
        worker = get_worker_info()
        return self._length if worker is None else -(-self._length // worker.num_workers)

    def _compare(self, idx: int, served: Callable[[int], object], load: Callable[[int], object]) -> str | None:
        """Return how a sample differs from the one that would be served; None if it does not."""
        with _KeptState(self._dataset) as state, self._kept() as kept:
            try:
                self.loads += 1
                self._shared.words[_COMPARED] += 1
                before = _small_attributes(self._dataset)
                fresh = load(idx)
                self._set_by_loads |= {_holder_of(name) for name in _differing(before, _small_attributes(self._dataset))}
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    name = type(self._dataset).__name__
                    logger.warning("sample %d of %s, which is cached, cannot be loaded any more: %s", idx, name, repr(error))
                return None
            drawn, after = kept.drawn(), kept.now()
            kept.restore()
            state.restore()
            if (mine := served(idx)) is MISSING:  # it is of a class that is not imported here
                return None
            drawn = drawn and after != kept.now()  # by the cached sample
            place = difference(describe(mine, strides=False), describe(fresh, strides=False))
            if place is None and drawn and not self._checked_draws:
                self._checked_draws = True
                return self._depends_on_draws(idx, fresh, load)
        if place is None:
            return None
        names = self._set_attributes()
        cause = f": {', '.join(names[:3])} was set meanwhile" if names else ", and random numbers are drawn for it" * drawn
        return f"sample {idx} of {type(self._dataset).__name__} differs from the cached sample{cause} ({place:.300})"

    def _kept(self) -> Kept:
        return Kept(self._own, global_too=not in_worker_thread())  # from which the training loop may draw meanwhile

    def _set_attributes(self) -> list[str]:
        """Return the names of small attributes of the dataset, and of the objects that it holds, that are not as they were."""
        names = _differing(self._attributes, _small_attributes(self._dataset))
        return [name for name in names if _holder_of(name) not in self._set_by_loads]

    def watched(self, load: Callable[[int], object]) -> Callable[[int], Any]:
        """Return a function that loads a sample for the cache, and notices if it depends on random numbers."""
        if not self._share or self.on_change == "keep":
            return load
        return lambda idx: next(self._watch_each(load, [idx], map(load, [idx])))

    def watched_many(self, loader: Any) -> Callable[[list[int]], Iterable[Any]]:
        """Return a function that loads several samples for the cache, and notices if they depend on random numbers."""
        if not self._share or self.on_change == "keep" or self._checked_draws:
            return loader.load_many  # type: ignore[no-any-return]
        return lambda indices: self._watch_many(loader, indices)

    def _watch_many(self, loader: Any, indices: list[int]) -> Iterable[Any]:
        before = Kept(self._own)
        samples = loader.load_many(indices)
        if not isinstance(samples, list):
            return self._watch_each(loader.load, indices, iter(samples))
        self._check_draws(before, zip(indices, samples, strict=True), loader.load)
        return samples

    def _watch_each(self, load: Callable[[int], object], indices: list[int], samples: Iterator[object]) -> Iterator[Any]:
        for idx in indices:
            before = Kept(self._own)
            for sample in samples:
                self._check_draws(before, [(idx, sample)], load)
                yield sample
                break

    def _check_draws(self, before: Kept, samples: Iterable[tuple[int, object]], load: Callable[[int], object]) -> None:
        """If a generator has been drawn from, find out whether a sample depends on that."""
        if self._checked_draws or not before.drawn():
            return
        self._checked_draws = True
        with self._kept():
            finding = next(filter(None, (self._depends_on_draws(idx, sample, load) for idx, sample in samples)), None)
        if finding is not None:
            self.change(finding)

    def _depends_on_draws(self, idx: int, sample: object, load: Callable[[int], object]) -> str | None:
        """Load a sample several times with other random numbers; return a finding if it differs, else None."""

        def counted(idx: int) -> Any:
            self.loads += 1
            return load(idx)

        place = load_again(counted, idx, describe(sample, strides=False), AGAIN)
        if place is not None:
            return f"sample {idx} of {type(self._dataset).__name__} is made with random numbers ({place:.300})"
        log_draws_without_effect(self._dataset, idx)
        return None


class _SharedWords:
    """Words that all processes and threads share, until they are closed."""

    thread_safe = True

    def __init__(self, segment: Segment | None) -> None:
        self._segment = segment
        self.words = memoryview(array("q", [0] * _WORDS)) if segment is None else segment.control.cast("q")

    def __reduce__(self) -> Any:
        return _SharedWords, (self._segment,)

    def close(self) -> None:
        """Release the memory. The words stay as they are here."""
        self.words, self._segment = memoryview(array("q", self.words)), None


class _KeptState:
    """Small values in attributes, lists and dicts of a dataset and of the objects in it. A ``with`` block restores them.

    Objects that are ``thread_safe`` are left alone, because other threads may change them meanwhile.
    """

    def __init__(self, dataset: Any) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        for _, part in parts_of(dataset, follow=is_own):
            if isinstance(part, list | deque) and len(part) <= _SHORT:
                self._lists.append((part, list(part)))
            attributes = part if type(part) is dict else vars_of(part) if is_own(part) else None
            if isinstance(attributes, dict) and len(attributes) <= _SHORT:
                plain = {key: value for key, value in attributes.items() if isinstance(value, _PLAIN)}
                self._dicts.append((attributes, plain))

    def restore(self) -> None:
        """Put back the values that have changed."""
        for attributes, before in self._dicts:
            for key, value in before.items():
                if isinstance(now := attributes.get(key), _PLAIN) and now is not value:
                    attributes[key] = value
        for items, before_items in self._lists:
            if len(items) != len(before_items) or any(map(operator.is_not, items, before_items)):
                items.clear()
                items.extend(before_items)

    def __enter__(self) -> "_KeptState":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


_PATIENCE_S = 60.0
_SHORT = 1000
_PLAIN = (*_SMALL, list, tuple, dict, set, deque)

_REMEDY = (
    "Put random steps into transform=, which runs after the cache; set everything that samples depend on before CachedDataset. "
    "on_change='keep' serves the cached samples."
)


def _choose(indices: Sequence[int], cache: Any, count: int, others_too: bool) -> Iterator[int]:
    """Yield ``count`` cached samples: of those that are wanted, and else of the others."""
    if not count:
        return
    states = cache.aux_array.numpy()
    known = (int(idx) for idx in indices if isinstance(idx, int | np.integer) and 0 <= idx < len(states))
    found = list(islice((idx for idx in known if states[idx] == 1), count))
    yield from found
    if others_too and len(found) < count:
        others = np.flatnonzero(states == 1)
        step = max(1, len(others) // (count - len(found)))
        yield from others[::step][: count - len(found)].tolist()


def _small_attributes(dataset: object) -> dict[str, Any]:
    """Return numbers and short texts among the attributes of a dataset and of the objects in it, by their names."""
    found = {}
    for name, part in parts_of(dataset):
        if isinstance(part, _SMALL) and not (isinstance(part, str | bytes) and len(part) > _LONGEST):
            found[name] = part
    return found


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name, value in now.items() if name in before and repr(before[name]) != repr(value)]


def _holder_of(name: str) -> str:
    return name.partition("[")[0]


def _enter_child() -> None:
    for audit in list(_live):
        audit._lock = threading.RLock()
        audit._enter_process()


here.at_fork(after_in_child=_enter_child)
