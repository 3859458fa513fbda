"""What samples look like: a few are loaded in a child process before the user's loop, and what that reads and draws is noted.

NOTE [ What a sample is made of ]
    The first sample is loaded twice. If it differs the second time, or random numbers were drawn for it, something random runs
    before the cache, which keeps its first outcome. The second time, the attributes of the dataset that are read for it are
    noted: those are what cached samples were made with, so they must not be changed afterwards. Attributes that loading itself
    sets (a file that is opened when it is first needed) are not among them.
"""

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stocache.errors import SampleError, WorkerError
from stocache.samples.indices import spread
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import PackedRecord, pack_sample
from stocache.system.children import (
    ChildError,
    Description,
    describe,
    in_children,
    loads_only_here,
    noted,
    rebuild,
    warn_of_this_process,
)
from stocache.system.rng import RngMonitor, kept

logger = logging.getLogger("stocache")

_BUDGET_S = 20.0  # after which no more samples are begun, once there are two
_PATIENCE_S = 120.0  # for one sample; then do without

_WAYS = (
    "This is the probe, which loads some samples in a child process before your loop, to see what they look like. If the "
    "dataset is made ready later (by worker_init_fn), give CachedDataset example=sample, one as the dataset returns it; or "
    "probe=0, and samples are kept as ones of varying size"
)


@dataclass
class Probe:
    """What was found out.

    Attributes:
        samples: those that could be loaded, by index.
        example: a sample that the user gave in place of these, or None.
        reads: attributes of the dataset that samples are made with.
        loaded_here: whether they were loaded in this process, as a child could not; None where none was loaded.
    """

    samples: dict[int, Any] = field(default_factory=dict)
    example: Any = None
    reads: frozenset[str] = frozenset()
    loaded_here: bool | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The samples by the names they have in errors."""
        return (
            {f"sample {idx}": sample for idx, sample in self.samples.items()}
            if self.example is None
            else {"example": self.example}
        )


class _Began(NamedTuple):
    """What a child says first: which sample it loads now."""

    idx: int


class _Loaded(NamedTuple):
    """What a child sends of a sample: its record; or else what the dataset ``raised``, or why it cannot be cached."""

    idx: int
    record: PackedRecord | None = None
    error: Description = (None, "", "")
    raised: bool = False
    drawn: bool = False


class _Again(NamedTuple):
    """What a child sends of a sample that it has loaded twice."""

    idx: int
    differs: bool
    reads: frozenset[str]


def probe_samples(dataset: Any, length: int, count: int, load: Callable[[int], Any] | None = None) -> Probe:
    """Load ``count`` samples, evenly spread, in a child process; those that fail are left for later.

    Args:
        load: called in place of ``dataset.__getitem__``, where cached samples are made in another way.

    Raises:
        WorkerError: the child died before it had loaded one.
        Exception: what the dataset raises, when all fail, with a message that says so.
    """
    indices = spread(length, count)
    if not indices:
        return Probe()
    found, at = Probe(), None
    load = partial(operator.getitem, dataset) if load is None else load
    errors: list[tuple[int, Exception, bool]] = []
    drawn: list[int] = []
    differing: list[int] = []
    try:
        with contextlib.closing(in_children([partial(_load_all, dataset, load, indices)], dataset, _PATIENCE_S)) as items:
            for item in items:
                if isinstance(item, _Began):
                    at = item.idx
                elif isinstance(item, _Again):
                    found.reads = item.reads
                    differing += [item.idx] * item.differs
                elif item.record is not None:
                    found.samples[item.idx] = _sample(item.record)
                    drawn += [item.idx] * item.drawn
                else:
                    errors.append((item.idx, rebuild(item.error), item.raised))
    except ChildError as error:
        if at is None:
            return _probe_here(dataset, load, indices, error)
        logger.warning("sample %d is not loaded after %.0f s. %s.", at, _PATIENCE_S, _WAYS)
    except WorkerError as error:
        if not found.samples:
            raise WorkerError(f"probing sample {at}: {error} {_WAYS}.") from None
        logger.warning("probing sample %s: %s", at, str(error))
    if errors and not found.samples:
        idx, problem, raised = errors[0]
        if not raised:
            raise problem
        if loads_only_here(lambda: load(idx), problem):
            return _probe_here(dataset, load, indices, problem)
        raise noted(problem, f"probing sample {idx} of {type(dataset).__name__}. {_WAYS}. It raised")
    _warn_of_randomness(differing, drawn)
    found.loaded_here = False if found.samples else None
    return found


def _probe_here(dataset: Any, load: Callable[[int], Any], indices: list[int], reason: Exception) -> Probe:
    warn_of_this_process(reason)
    found, failure = Probe(loaded_here=True), None
    with kept():
        for idx in indices:
            try:
                found.samples[idx] = load(idx)
            except Exception as error:  # it is raised again when the sample is asked for
                failure = noted(error, f"probing sample {idx} of {type(dataset).__name__}. {_WAYS}. It raised")
    if failure is not None and not found.samples:
        raise failure
    return found


def _warn_of_randomness(differing: list[int], drawn: list[int]) -> None:
    if not differing and not drawn:
        return
    what = "was different the second time it was loaded" if differing else "was made with random numbers"
    logger.warning(
        "sample %d %s; every epoch will see the first version. Put random transforms into transform=.",
        (differing or drawn)[0], what,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- in the child


def _load_all(dataset: Any, load: Callable[[int], Any], indices: list[int]) -> Iterator[_Began | _Loaded | _Again]:
    began, loaded = time.monotonic(), 0
    for idx in indices:
        if loaded > 1 and time.monotonic() - began > _BUDGET_S:
            return
        yield _Began(idx)
        before, watch = dict(_attributes(dataset)), RngMonitor()
        try:
            sample = load(idx)
        except Exception as error:
            yield _Loaded(idx, error=describe(error), raised=True)
            continue
        drawn = watch.drawn()
        try:
            record = pack_sample(sample, f"sample {idx}")
        except SampleError as error:
            yield _Loaded(idx, error=describe(error))
            continue
        yield _Loaded(idx, record, drawn=drawn)
        loaded += 1
        if loaded == 1:
            # see NOTE [ What a sample is made of ]
            del sample
            anew = {name for name, value in _attributes(dataset).items() if before.get(name, before) is not value}
            yield _load_again(dataset, load, idx, record, anew)


def _load_again(dataset: Any, load: Callable[[int], Any], idx: int, first: PackedRecord, anew: set[str]) -> _Again:
    reads, differs = _noted_reads(dataset), False
    with contextlib.suppress(Exception):  # then it cannot be told
        second = pack_sample(load(idx), f"sample {idx}")
        differs = not first.has_pickles and second != first
    return _Again(idx, differs, frozenset(reads - anew))


def _noted_reads(dataset: Any) -> set[str]:
    """Return the names of attributes of the dataset that are read from now on; in a child that goes on to nothing else."""
    reads: set[str] = set()
    cls: Any = type(dataset)
    original, own = cls.__getattribute__, getattr(dataset, "__dict__", None)

    def __getattribute__(self: Any, name: str) -> Any:
        if not name.startswith("__") and (
            self is dataset or (own is not None and original(self, "__dict__") is own)
        ):  # its twin
            reads.add(name)
        return original(self, name)

    with contextlib.suppress(TypeError):  # of a built-in class, whose instances have none
        cls.__getattribute__ = __getattribute__
    return reads


def _attributes(dataset: Any) -> dict[str, Any]:
    return getattr(dataset, "__dict__", {})


def _sample(record: PackedRecord) -> Any:
    treedef, data, integers = record
    address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
    return RecordReader(treedef, True).read(data, address, 0, len(data), tuple(integers), True)
