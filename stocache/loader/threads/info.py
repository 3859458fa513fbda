"""Let `torch.utils.data.get_worker_info` and `torch.random.thread_safe_generator` answer in worker threads.

NOTE [ Worker info of a thread ]
    torch keeps the `WorkerInfo` of a worker in a variable of its module, one for the process. So the first worker thread of a
    process puts a different ``get_worker_info`` in the place of torch's, in all modules that have it. It asks for the info of
    the calling thread, and then torch's function. The limit: torch's function that a program has kept elsewhere than in a
    module, such as in a default argument, returns None in worker threads.

    default_collate asks, too: in a worker it makes batches in shared memory, to send them to another process. A thread sends
    nothing, so it stacks there as without workers; see `extend_default_collate`.
"""

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info and the class of its results

from stocache.system.generators import Kept


class _InfoHere(threading.local):
    info: Any = None


_here = _InfoHere()
_OF_TORCH: Any = (torch_worker.get_worker_info,)  # in a tuple, in which it is not replaced


@functools.wraps(_OF_TORCH[0])
def _get_worker_info() -> Any:
    return _OF_TORCH[0]() if _here.info is None else _here.info


def answer_in_threads() -> None:
    """Have `get_worker_info` return the info of the calling thread; see NOTE [ Worker info of a thread ]."""
    if torch_worker.get_worker_info is _get_worker_info:
        return
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is _OF_TORCH[0]:
                setattr(module, name, _get_worker_info)


def set_worker_info(info: object) -> None:
    """Set what `get_worker_info` returns in this thread."""
    _here.info = info


@contextmanager
def worker_info(info: object) -> Iterator[None]:
    """Have `get_worker_info` return ``info`` in this thread, in a ``with`` block."""
    before, _here.info = _here.info, info
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
        self._numbers, self._due = (python, numpy, torch), [True, True, True]

    def kept_now(self) -> "KeptGenerators":
        """Return the states of the generators, to restore them."""
        return KeptGenerators(self)

    def each(self) -> tuple[Any, ...]:
        """Return the generators, seeded or not."""
        return self._python, self._numpy, self._torch

    def itself(self) -> "Generators":
        """Return these generators: the ``draws`` of a `WorkerRng` whose samples need not wait."""
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


class KeptGenerators(Kept):
    """The states of `Generators` at one moment. A generator that was not used is seeded again when it is."""

    def __init__(self, generators: Generators) -> None:
        self._of, self._due = generators, list(generators._due)
        super().__init__([each for each, due in zip(generators.each(), self._due, strict=True) if not due], global_too=False)

    def restore(self) -> None:
        """Set the generators back."""
        super().restore()
        self._of._due[:] = self._due


class WorkerRng:
    """The ``rng`` of a `WorkerInfo`: its generators are the generators of the sample that the thread makes now.

    Attributes:
        draws: returns the generators from which the running code may draw. It may wait until it is the turn of the code.
        own: generators of the thread.
    """

    __slots__ = ("draws", "own")
    draws: Callable[[], Generators]

    def __init__(self) -> None:
        self.own = Generators()
        self.draws = self.own.itself

    random_generator = property(lambda self: self.draws().random_generator, doc="Python's generator.")
    numpy_generator = property(lambda self: self.draws().numpy_generator, doc="numpy's generator.")
    torch_generator = property(lambda self: self.draws().torch_generator, doc="torch's generator of the CPU.")


class CollateRng(WorkerRng):
    """The ``rng`` of a collate function: its torch generator is the global one."""

    __slots__ = ()
    torch_generator = property(lambda self: torch.default_generator, doc="torch's generator of the CPU.")
