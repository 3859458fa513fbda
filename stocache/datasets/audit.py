"""Check, while samples are served, that the dataset would give them now: `Audit`.

NOTE [ The audit ]
    A sample may depend on more than its index: on random numbers, an epoch, a mode, a size that was set in place, an edited
    file. Nobody declares these. So in each epoch each process, before it serves or fills the cache, loads a sample that is
    cached from the dataset as well, and compares the two bit for bit. A few more samples follow in the epoch, as long
    as all this takes at most a share of the time.

    One value may change a few samples only: a mode, a size, the labels in a table. So small values, in attributes and in
    variables of modules, are compared for each batch (`HeldValues`), and digests of tables when an epoch begins, and later if
    there is time. If one differs, a child process loads some samples, and notes which attributes they read, and which names
    are in the lines that run.

    A loop over a `stocache.DataLoader` raises a version in memory that all processes share. A process that sees a different
    version than at its last audit, or has served as many samples as its share of the dataset, audits again. Calls that may
    change the dataset of one process (``set_epoch``, an attribute that is set, a method that is looked up) have that process
    audit again.

    Only samples that the program has requested are loaded, and only the part of them that is cached. So a generator that
    nobody knows, say one of a module, moves as it does without a cache; a stream loses nothing. Further loads are made in a
    child process.

    A load for the cache, or for an audit, must not draw random numbers, even if the sample does not depend on them: a
    cached sample draws none, and the numbers that follow would be others than without a cache.

    The generators that the dataset holds, and the global ones, are put back after an audit: cached samples draw no numbers. If
    a sample differs, no process serves cached samples of this dataset any more: the dataset makes them itself.
"""

import logging
import operator
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stocache.cache.disk.tiers import LoadMany
from stocache.cache.options import AuditOptions, OnChange
from stocache.cache.stats import MISSING
from stocache.datasets.tables import table_digests, used_by_loads
from stocache.datasets.values import HeldValues
from stocache.errors import DatasetError
from stocache.samples.indices import spread
from stocache.shm.segment import Segment
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, in_worker_thread
from stocache.system.loading.children import in_children
from stocache.system.loading.code import own_generators
from stocache.system.platform import here
from stocache.system.walking import attribute_in

logger = logging.getLogger("stocache")


_VERSION, _CHANGED, _COMPARED, _WORDS = range(4)  # words that all processes share
_STRIDE = 5  # samples of a batch, by which the one that is compared moves on
_MANY = 8  # samples that a child process loads to find out what they read
_EXTRA = 20  # samples in an epoch, besides the first

_live: "weakref.WeakSet[Audit]" = weakref.WeakSet()


class Audit:
    """Decides when a process compares cached samples with the samples of the dataset, and remembers whether one differed.

    Args:
        dataset: makes the samples.
        length: how many samples it has.
        options: see `CachedDataset`.

    Slots hide its attributes from libraries that walk through a dataset and seed the objects that they find (MONAI).
    """

    __slots__ = (
        "__weakref__", "_began", "_dataset", "_doubted", "_extra", "_has_loaded", "_left",
        "_length", "_looks_left", "_next", "_own", "_requests", "_said", "_seen",
        "_shared", "_tables", "_took_s", "finding", "is_paused", "on_change", "set_by_loads", "share", "values",
    )  # fmt: skip

    _length: int
    set_by_loads: set[str]  # names of tables
    share: float

    def __init__(self, dataset: Any, length: int, options: AuditOptions) -> None:
        self.__setstate__((dataset, length, options.audit, options.on_change, _SharedWords.new(), {}, set()))
        self._tables = self._digests()

    def __getstate__(self) -> tuple[Any, ...]:
        state = self._dataset, self._length, self.share, self.on_change, self._shared, self._tables
        return *state, self.set_by_loads

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._dataset, self._length, self.share, on_change, self._shared, self._tables, self.set_by_loads = state
        self.on_change: OnChange = on_change
        self.is_paused = False  # whether nothing is compared now: another thread may be loading from the dataset
        self.finding: str | None = None  # what samples depend on, if this process has found it
        self._said: set[str] = set()  # kinds of messages
        self._looks_left = 3  # at loads that seem to draw
        self.values = HeldValues(self._dataset, self._is_off)
        self._enter_process()
        _live.add(self)

    def _enter_process(self) -> None:
        self._has_loaded, self._own = False, own_generators(self._dataset, self.values.variables)
        self._seen, self._doubted = -1, False  # the version at the last audit, and whether the dataset may have changed since
        self._requests = self._next = self._extra = 0  # samples wanted in this epoch, when to look, and further audits
        self._left = 0  # cached samples to compare, of the samples that are wanted next
        self._began, self._took_s = time.monotonic(), 0.0

    def close(self) -> None:
        """Release the shared memory. May be called twice."""
        self._shared.close()

    @property
    def _is_off(self) -> bool:
        """Whether no sample is compared."""
        return not self.share or self.on_change == "keep"

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
        self.finding = finding
        self.leave()
        logger.warning(
            "%s. From now on %s makes each sample itself. %s", finding.rstrip("."), type(self._dataset).__name__, _REMEDY
        )

    def leave(self) -> None:
        """Serve no cached samples from now on, in any process."""
        self._shared.words[_CHANGED] = 1
        self._shared.words[_VERSION] += 1

    def check_values(self, load: Callable[[int], object]) -> None:
        """Find values that were set in this process, which the next workers do not know."""
        finding = None if self.changed else self._changed_value((), load, with_tables=False)
        if finding is not None:
            self.change(finding)

    def _digests(self) -> dict[str, str]:
        """Return the digests of the tables that samples may be made with."""
        return {} if self._is_off else table_digests(self._dataset, self.values.variables)

    def is_due(self, count: int) -> bool:
        """Return whether to call `allows` before ``count`` samples are served."""
        self._requests += count
        if self.is_paused:
            return bool(self.values.new(transforms=True)) or self.changed
        try:
            return self._is_due(0) or not all(map(operator.le, *self.values.views))  # 50 ns for each value that is the same
        except Exception:  # a value does not compare
            return True

    def will_compare(self, count: int) -> bool:
        """Return whether `allows` will load samples among the next ``count``, if some of them are cached."""
        if self._is_off or self.changed or not self._is_due(count):
            return False
        return self._left > 0 or self._doubted or self._begins(count) or self._has_time()

    def _is_due(self, count: int) -> bool:
        asked = self._left > 0 or self._doubted or self._requests + count > self._next
        return asked or bool(self._shared.words[_VERSION] != self._seen)

    def _begins(self, count: int = 0) -> bool:
        """Return whether an epoch of this process begins with the next ``count`` samples: its first is compared in any case."""
        return bool(self._shared.words[_VERSION] != self._seen) or self._requests + count > self._own_length()

    def _has_time(self) -> bool:
        """Return whether the audits of this epoch were few, and have taken at most their share of the time."""
        return self._extra < _EXTRA and self._took_s <= self.share * (time.monotonic() - self._began)

    def allows(self, indices: Sequence[int], cached: Any, load: Callable[[int], object] | None = None) -> bool:
        """Return whether samples of the cache may be served, after comparing some when it is time to.

        Args:
            indices: of the samples that are wanted. Only these are loaded.
            cached: the cache, which has the samples and their states.
            load: makes a sample as the cache keeps it; None for the sample of the dataset.

        Raises:
            DatasetError: one differs, and ``on_change`` is "raise".
        """
        if self.changed or self.is_paused:
            return not self.changed
        if self._is_off:
            self._next, self._seen, self._doubted = sys.maxsize, self._shared.words[_VERSION], False
            return True
        version, began, begins, doubted = self._shared.words[_VERSION], time.monotonic(), self._begins(), self._doubted
        if begins:
            self._requests, self._extra, self._own = len(indices), 0, own_generators(self._dataset, self.values.variables)
            self._left, self._began, self._took_s = 1, began, 0.0
        elif not self._left and (self._has_time() or (doubted and self._extra < _EXTRA)):
            self._left, self._extra = 1, self._extra + 1
        self._doubted = False
        at = self.compared * _STRIDE % max(1, len(indices))  # not the same sample in each epoch
        chosen = _cached_among([*indices[at:], *indices[:at]], cached, self._left)
        self._left, self._seen = self._left - len(chosen), version  # now: another thread may ask meanwhile
        self._next = min(max(self._requests + 8, self._requests * 5 // 4), max(self._requests, self._own_length()))
        load = load or partial(operator.getitem, self._dataset)
        finding = self._changed_value(indices, load, with_tables=begins or self._has_time())
        for idx in chosen:
            finding = finding or self._compare(idx, cached.peek, load)
        self._took_s += time.monotonic() - began
        if finding is not None:
            self.change(finding)
        return finding is None

    def _own_length(self) -> int:
        """Return how many samples this process serves in an epoch, if all workers serve equally many."""
        worker = get_worker_info()
        return self._length if worker is None else -(-self._length // worker.num_workers)

    def _changed_value(self, indices: Sequence[int], load: Callable[[int], object], with_tables: bool) -> str | None:
        """Return that a value which samples are made with was set, or a table changed in place; None if none was."""
        now = self._digests() if with_tables else self._tables
        tables = [name for name in now if name not in self.set_by_loads and self._tables.get(name, now[name]) != now[name]]
        values = self.values.new()
        if not tables and not values:
            return None
        wanted = {*map(int, indices[:1]), *spread(self._length, _MANY)}
        job = partial(used_by_loads, self._dataset, load, wanted, self.values.variables)
        changed, reads, names = self._in_child(job, (set(), set(), set()))
        self.set_by_loads |= changed
        for name in (*tables, *values):
            if name not in changed and _is_read(name, name in tables, reads, names):
                was = "changed in place" if name in tables else "set"
                return f"{name} of {type(self._dataset).__name__} was {was}: its samples are made with it"
        self._tables = now  # loads do not read what has changed
        self.values.drop(values)
        return None

    def _compare(self, idx: int, peek: Callable[[int], object], load: Callable[[int], object]) -> str | None:
        """Return how a sample differs from the one that is cached; None if it does not."""
        with Kept(self._own, global_too=not in_worker_thread()) as kept:  # the training loop may draw from these meanwhile
            try:
                self._shared.words[_COMPARED] += 1
                fresh = load(idx)
                self._note_first_load()
            except Exception as error:
                text = "sample %d of %s, which is cached, cannot be loaded any more: %s"
                self._say_once(logging.WARNING, text, idx, type(self._dataset).__name__, repr(error))
                return None
            drawn = kept.drawn()
        if (cached := peek(idx)) is MISSING:  # it is of a class that is not imported here
            return None
        place = difference(describe(cached, strides=False), describe(fresh, strides=False))
        if place is None:
            return self._draws(partial(map, load), [idx]) if drawn else None
        if self._is_of_one_thread(idx, cached, fresh, load):
            return None
        cause = ", and random numbers are drawn for it" * drawn
        return f"sample {idx} of {type(self._dataset).__name__} differs from the cached sample{cause} ({place:.300})"

    def _is_of_one_thread(self, idx: int, cached: Any, fresh: Any, load: Callable[[int], object]) -> bool:
        """Return whether a sample differs by rounding, because torch has more threads here than in child processes."""
        threads = torch.get_num_threads()
        if threads == 1 or in_worker_thread():
            return False
        try:
            torch.testing.assert_close(fresh, cached, rtol=1e-3, atol=1e-3, equal_nan=True)
        except Exception:  # or it has parts that are not numbers
            return False
        first = describe(cached, strides=False)
        if self._in_child(partial(_load_again, load, idx, first), "no child process can load it") is not None:
            return False
        text = (
            "sample %d of %s differs in its last digits by the number of torch's threads: it was cached by a process with "
            "one, as workers have, and this process has %d."
        )
        self._say_once(logging.INFO, text, idx, type(self._dataset).__name__, threads)
        return True

    def depends_on_type(self, idx: Any) -> bool:
        """Return whether a sample is different for an index of this class than for an int."""
        finds = bool(self._in_child(partial(_differs_by_type, self._dataset, idx), False))
        if finds:
            text = "samples of %s are different for an index of class %s, and not cached then. Have the sampler yield int."
            self._say_once(logging.WARNING, text, type(self._dataset).__name__, type(idx).__name__)
        return finds

    def _say_once(self, level: int, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(level, text, *values)

    def watch(self, load_many: LoadMany, indices: list[int]) -> Iterable[Any]:
        """Load samples for the cache, and notice if they depend on random numbers."""
        if self._is_off or not self._looks_left:
            return load_many(indices)
        before, samples = Kept(self._own), load_many(indices)
        if not isinstance(samples, list):
            return self._watch_each(before, load_many, indices, samples)
        self._note_load(before, load_many, indices)
        return samples

    def _watch_each(self, before: Kept, load_many: LoadMany, indices: list[int], samples: Iterable[object]) -> Iterator[Any]:
        for number, sample in enumerate(samples, 1):
            if number == len(indices):  # who takes the samples does not ask for more
                self._note_load(before, load_many, indices)
            yield sample

    def _note_first_load(self) -> None:
        """Note the tables after the first load of this process, which may have changed them (``options.pop()``)."""
        if not self._has_loaded:
            self._has_loaded, self._tables = True, self._digests()

    def _note_load(self, before: Kept, load_many: LoadMany, indices: Sequence[int]) -> None:
        """Note what a load has done besides returning samples."""
        self._note_first_load()
        finding = self._draws(load_many, indices) if self._looks_left and before.drawn() else None
        if finding is not None:
            self.change(finding)

    def _draws(self, load_many: LoadMany, indices: Sequence[int]) -> str | None:
        """Return that random numbers are drawn to load samples. A generator may have moved for another thread."""
        self._looks_left = max(0, self._looks_left - 1)
        idx = self._in_child(partial(_find_draws, self._dataset, load_many, indices), indices[0])
        return None if idx is None else f"random numbers are drawn to load sample {idx} of {type(self._dataset).__name__}"

    def _in_child(self, job: Callable[[], Iterator[object]], otherwise: Any) -> Any:
        """Return the result of a job that runs in a child process; if there is none, ``otherwise``."""
        try:
            with closing(in_children([job], self._dataset, _PATIENCE_S)) as results:
                return next(results, otherwise)
        except Exception:  # of the dataset, or no child process can be made
            return otherwise


def _is_read(name: str, is_table: bool, reads: set[str], names: set[str]) -> bool:
    """Whether loads read a value: attributes of the dataset are in ``reads``, others among all ``names`` in their code."""
    attribute, last = attribute_in(name), name.partition("[")[0].rpartition(".")[2]
    if attribute is not None and (is_table or attribute == last):
        return not reads or attribute in reads
    return not names or last in {"dataset", *names}


def _differs_by_type(dataset: Any, idx: Any) -> Iterator[bool]:
    """Yield whether a sample is different for an index than for the same int. For a child."""
    descriptions, kept = list[Any](), Kept(own_generators(dataset))
    for each in (idx, int(idx)):
        kept.restore()
        descriptions.append(describe(dataset[each], strides=False))
    yield difference(*descriptions) is not None


def _load_again(load: Callable[[int], object], idx: int, first: object) -> Iterator[str | None]:
    yield difference(first, describe(load(idx), strides=False))


def _find_draws(dataset: object, load_many: LoadMany, indices: Iterable[int]) -> Iterator[int | None]:
    """Yield the first sample that draws from a generator while it is loaded; None if there is none. For a child."""
    for idx in indices:
        kept = Kept(own_generators(dataset))
        list(load_many([idx]))
        if kept.drawn():
            yield idx
    yield None


class _SharedWords:
    """Words that all processes and threads share, until they are closed."""

    thread_safe = True

    def __init__(self, segment: Segment | None) -> None:
        self._segment = segment
        self.words = memoryview(array("q", [0] * _WORDS)) if segment is None else segment.control.cast("q")

    @staticmethod
    def new() -> "_SharedWords":
        return _SharedWords(Segment.create(_WORDS * 8, 0))

    def __deepcopy__(self, memo: object) -> "_SharedWords":  # a copy of a dataset is changed by itself
        copied = _SharedWords.new()
        copied.words[:] = self.words
        return copied

    def __reduce__(self) -> Any:
        return _SharedWords, (self._segment,)

    def close(self) -> None:
        """Release the memory. The words stay the same here."""
        self.words, self._segment = memoryview(array("q", self.words)), None


_PATIENCE_S = 60.0  # for a sample that a child process loads

_REMEDY = (
    "Load first and draw random numbers later, or in transform=, which runs after the cache (on one part: transform={0: "
    "...}); set everything that samples depend on before CachedDataset. on_change='keep' serves the cached samples."
)


def _cached_among(indices: Sequence[int], cache: Any, count: int) -> list[int]:
    """Return up to ``count`` of the samples ``indices`` that are cached."""
    if not count:
        return []
    states = cache.aux_array.numpy()
    known = (int(idx) for idx in indices if isinstance(idx, int | np.integer) and 0 <= idx < len(states))
    return list(islice((idx for idx in known if states[idx] == 1), count))


def _enter_child() -> None:
    for audit in list(_live):
        audit._enter_process()


here.at_fork(after_in_child=_enter_child)
