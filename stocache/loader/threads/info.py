"""Let `torch.utils.data.get_worker_info` and `torch.random.thread_safe_generator` answer in worker threads.

NOTE [ Worker info of a thread ]
    torch keeps the `WorkerInfo` of a worker in a variable of its module, one for the process, and its function
    ``get_worker_info`` returns that. Users import the function before we do. So this module gives the function another body,
    which asks first for the info of the calling thread. default_collate asks too: in a worker it makes batches in shared
    memory, to send them to another process. A thread sends nothing, so for default_collate it is not a worker.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info, whose variable has no public counterpart

_COLLATE = "torch.utils.data._utils.collate"


class _InfoHere(threading.local):
    info: Any = None


_here = _InfoHere()


def _info_here() -> Any:
    """Return the `WorkerInfo` of this thread; None in a thread that is not a worker, and for default_collate."""
    info = _here.info
    return None if info is None or sys._getframe(2).f_globals.get("__name__") == _COLLATE else info


def _get_worker_info() -> Any:  # the body that torch's function gets: its names are those of torch's module
    return _stocache_info_here() or _worker_info  # type: ignore[name-defined]  # noqa: F821


def set_worker_info(info: object) -> None:
    """Set what `get_worker_info` returns in this thread.

    Raises:
        RuntimeError: torch's ``get_worker_info`` is not the function that this module knows.
    """
    function: Any = torch_worker.get_worker_info
    code = function.__code__  # read once: another thread may set it now
    if code is not _get_worker_info.__code__:
        if code.co_names != ("_worker_info",):
            raise RuntimeError("this torch has another get_worker_info. Use worker_method='multiprocessing'.")
        torch_worker._stocache_info_here = _info_here  # type: ignore[attr-defined]
        function.__code__ = _get_worker_info.__code__
    _here.info = info


@contextmanager
def worker_info(info: object) -> Iterator[None]:
    """Have `get_worker_info` return ``info`` in this thread, in a ``with`` block."""
    before = _here.info
    set_worker_info(info)
    try:
        yield
    finally:
        _here.info = before


class Generators:
    """Generators of Python, numpy and torch that belong to a worker. Each is seeded at its first use."""

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()
        self._due = [False, False, False]
        self._python, self._torch, self._numpy = random.Random(), torch.Generator(), np.random.default_rng(0)

    def seed(self, python: int, numpy: int, torch: int) -> None:
        """Seed all generators."""
        self._numbers = python, numpy, torch
        self.rewind()

    def rewind(self) -> None:
        """Seed all generators with the same numbers again."""
        self._due = [True, True, True]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Seed all generators with the same numbers again after a ``with`` block."""
        try:
            yield
        finally:
            self.rewind()

    @property
    def were_asked(self) -> bool:
        """Whether a generator was used since they were seeded."""
        return not all(self._due)

    def generators(self) -> "Generators":
        """Return these generators: they are the `GeneratorPolicy` of a sample that need not wait."""
        return self

    @property
    def random_generator(self) -> random.Random:
        """Python's generator."""
        if self._due[0]:
            self._due[0] = False
            self._python.seed(self._numbers[0])
        return self._python

    @property
    def numpy_generator(self) -> np.random.Generator:
        """numpy's generator."""
        if self._due[1]:
            self._due[1] = False
            self._numpy = np.random.default_rng(self._numbers[1])
        return self._numpy

    @property
    def torch_generator(self) -> torch.Generator:
        """torch's generator of the CPU."""
        if self._due[2]:
            self._due[2] = False
            self._torch.manual_seed(self._numbers[2])
        return self._torch


class GeneratorPolicy(Protocol):
    """Decides from which generators the running code may draw."""

    def generators(self) -> Generators:
        """Return them. May wait until it is the turn of the code."""


class WorkerRng:
    """The ``rng`` of a `WorkerInfo`: its generators are those of the sample that the thread makes now.

    Attributes:
        draws: set before each sample.
        own: generators of the thread.
    """

    __slots__ = ("draws", "own")
    draws: GeneratorPolicy

    def __init__(self) -> None:
        self.own = Generators()
        self.draws = self.own

    @property
    def random_generator(self) -> random.Random:
        """Python's generator."""
        return self.draws.generators().random_generator

    @property
    def numpy_generator(self) -> np.random.Generator:
        """numpy's generator."""
        return self.draws.generators().numpy_generator

    @property
    def torch_generator(self) -> torch.Generator:
        """torch's generator of the CPU."""
        return self.draws.generators().torch_generator


def make_worker_info(number: int, count: int, seed: int, dataset: object, rng: WorkerRng) -> Any:
    """Return a `WorkerInfo` for worker thread ``number`` of ``count``."""
    facts: dict[str, Any] = {"id": number, "num_workers": count, "seed": seed, "dataset": dataset}
    return torch_worker.WorkerInfo(**facts, rng=rng, worker_method="thread")  # type: ignore[arg-type]
