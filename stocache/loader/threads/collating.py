"""The global random number generators of a worker, and its collate function, as a worker process has them.

NOTE [ Collating in threads ]
    A collate function may draw random numbers, count its calls, or make a generator at its first call. A worker process has a
    copy of it, calls it for the batches of this worker in their order, and draws from global generators of its own. So each
    *stream*, the batches that one worker process would make, has a `Collator` with a copy of the function. It takes the batches
    of the stream in order, whichever thread has made their samples.

    Threads share the global generators with the training step, which does not draw while it waits for a batch. So the loop
    itself collates then, with the generators of the worker in the place of its own, and puts these back. Functions of torch
    that draw nothing are called by any thread.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state  # torch's seed for numpy in worker processes

from stocache.loader.threads.info import Generators, WorkerRng, worker_info
from stocache.system.generators import read, restore_all


class WorkerGlobals:
    """The global generators of a worker. A ``with`` block puts them in the place of those of this process.

    Attributes:
        generators: those of the worker for `thread_safe_generator`, which in a worker process is torch's global generator.
    """

    def __init__(self, base_seed: int, number: int, generators: Generators) -> None:
        self._base_seed, self._number, self.generators = base_seed, number, generators
        self._states: dict[int, Any] | None = None
        self._mine: dict[int, Any] = {}  # of this process, in a block

    def __enter__(self) -> None:
        self._mine = read()
        if self._states is None:  # as torch's worker process begins
            random.seed(self._base_seed + self._number)
            np.random.seed(_generate_state(self._base_seed, self._number))  # type: ignore[no-untyped-call]
        else:
            restore_all(self._states)
        torch.default_generator.set_state(self.generators.torch_generator.get_state())

    def __exit__(self, *exception: object) -> None:
        self._states = read()
        self.generators.torch_generator.set_state(torch.default_generator.get_state())
        restore_all(self._mine)


class CollateRng(WorkerRng):
    """The ``rng`` of a collate function: its torch generator is the global one."""

    __slots__ = ()

    @property
    def torch_generator(self) -> torch.Generator:
        """torch's generator of the CPU."""
        return torch.default_generator


class Collator:
    """Collates the batches of one stream, in the loop; see NOTE [ Collating in threads ].

    Args:
        collate_fn: a copy of the function.
        states: the global generators of the worker.
        make_info: returns the worker info with an ``rng``.
    """

    def __init__(
        self, collate_fn: Callable[[Any], object], states: WorkerGlobals, make_info: Callable[[WorkerRng], object]
    ) -> None:
        self._collate_fn, self._states, self._make_info, self._rng = collate_fn, states, make_info, CollateRng()

    def __call__(self, samples: object) -> Any:
        """Return the batch of some samples."""
        self._rng.draws = self._states.generators
        with worker_info(self._make_info(self._rng)), self._states:
            return self._collate_fn(samples)
