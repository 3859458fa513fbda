"""Draw seeds for the random pipes, ranks and workers of a graph.

A seed is a pure function of the generator's own seed, the purpose, and the number of seeds drawn before. It comes from numpy's
SeedSequence. So seeds depend neither on the number of workers nor on which process draws first.
"""

import contextlib
import copy
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stocache.reading.graph.graph import DataPipe, is_random, is_sharding, list_dps, pipes_of, traverse_dps
from stocache.system.generators import GENERATOR_TYPES
from stocache.system.walking import parts_of

_SHARED, _OWN, _EPOCH = range(3)
_LIMIT = 1 << 64

_PLAIN = (type, ModuleType, str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray)
_MOST = 10_000  # references to follow in one function


class SeedGenerator:
    """Seeds for the random pipes of a graph: shared seeds are equal in all ranks and workers, own seeds differ.

    Args:
        seed: in ``[0, 2**64)``; None draws a seed from torch's global generator.

    Source: the interface of torchdata 0.9.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._path: tuple[int, ...] = ()
        self.seed(seed)

    def seed(self, seed: int | None = None) -> None:
        """Begin again with a seed. The rank and the worker of this generator stay.

        Raises:
            ValueError: the seed is outside ``[0, 2**64)``.
        """
        self._seed = random_seed() if seed is None else check_seed(seed)
        self._shared = self._own = 0

    def generate_shared_seed(self) -> int:
        """Return the next shared seed, in ``[0, 2**64)``: the same in all ranks and workers."""
        self._shared += 1
        return self._number(_SHARED, self._shared)

    def generate_seed(self) -> int:
        """Return the next seed, in ``[0, 2**64)``, of this rank and worker only."""
        self._own += 1
        return self._number(_OWN, *self._path, self._own)

    def spawn(self, worker_id: int, inplace: bool = False) -> "SeedGenerator":
        """Return the generator of a rank, or of a worker in it, with the same shared seeds; changes this one if ``inplace``.

        Raises:
            ValueError: ``worker_id`` is negative.
        """
        if worker_id < 0:
            raise ValueError(f"worker_id={worker_id} is negative.")
        spawned = self if inplace else copy.copy(self)
        spawned._path, spawned._own = (*self._path, worker_id), 0
        return spawned

    def _number(self, *key: int) -> int:
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1, np.uint64)[0])


def random_seed() -> int:
    """Return a seed from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def check_seed(seed: Any) -> int:
    """Return a seed that was checked.

    Raises:
        ValueError: it is not an integer in ``[0, 2**64)``.
    """
    if not isinstance(seed, int) or not 0 <= seed < _LIMIT:
        raise ValueError(f"seed={seed!r} must be an integer in [0, 2**64).")
    return seed


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch."""
    return int(np.random.SeedSequence(seed, spawn_key=(_EPOCH, epoch)).generate_state(1, np.uint64)[0])


def set_graph_random_seed(datapipe: DataPipe, seed_generator: SeedGenerator) -> DataPipe:
    """Seed each random pipe of a graph: with a shared seed before sharding or dispatching, with an own seed after it.

    Returns:
        The same graph.
    """
    seeding = Seeding(datapipe)
    seeding.divide()
    seeding.draw(seed_generator)
    return datapipe


class Seeding:
    """Draws the seeds of a graph's random pipes, in an order that does not depend on how the graph is divided."""

    def __init__(self, datapipe: DataPipe) -> None:
        self._shared, self._all = shared_pipes(datapipe), random_pipes(datapipe)

    def divide(self, *parts: DataPipe) -> None:
        """Set the parts of the graph that other processes run, by their last pipes."""
        self._parts = [random_pipes(part) for part in parts]
        elsewhere = {id(pipe) for pipes in self._parts for pipe in pipes}
        self._here = [pipe for pipe in self._all if id(pipe) not in elsewhere]

    def draw(self, seed_generator: SeedGenerator) -> list[list[int | None]]:
        """Seed the pipes that run here, and return the seeds of each part: None for a pipe that draws its own."""
        seeds = {id(pipe): seed_generator.generate_shared_seed() for pipe in self._shared}
        for pipe in self._here:
            pipe.set_seed(seeds[id(pipe)] if id(pipe) in seeds else seed_generator.generate_seed())
        return [[seeds.get(id(pipe)) for pipe in pipes] for pipes in self._parts]


def random_pipes(datapipe: DataPipe) -> list[Any]:
    """Return the pipes of a graph that take seeds, in the order in which they are seeded."""
    return [pipe for pipe in pipes_of(datapipe) if is_random(pipe)]


def shared_pipes(datapipe: DataPipe) -> list[Any]:
    """Return the random pipes before sharding or dispatching, which must do the same in all ranks and workers."""
    graph = traverse_dps(datapipe)
    own = {id(pipe) for pipe in list_dps(graph, exclude_dps=[pipe for pipe in list_dps(graph) if is_sharding_point(pipe)])}
    return [pipe for pipe in random_pipes(datapipe) if id(pipe) not in own]


def is_sharding_point(datapipe: DataPipe) -> bool:
    """Whether a pipe divides elements among workers, by sharding or dispatching."""
    return is_sharding(datapipe) or is_dispatching(datapipe)


def is_dispatching(datapipe: DataPipe) -> bool:
    """Whether one process runs all before a pipe, and sends the elements out; for stocache's pipe and torchdata's."""
    return type(datapipe).__name__ == "ShardingRoundRobinDispatcherIterDataPipe"


def dist_share_seed(seed: int, process_group: Any = None) -> int:
    """Return the seed of rank 0 of a torch.distributed process group."""
    shared = torch.tensor(seed - _LIMIT // 2, dtype=torch.int64, device="cpu")
    dist.broadcast(shared, src=0, group=process_group)
    return int(shared.item()) + _LIMIT // 2


def holds_no_generator(fn: object) -> bool:
    """Whether a function, with all objects it refers to, holds no random number generator."""
    found = [part for _, part in parts_of(fn, inner=_inner_parts, most=_MOST, levels=_MOST)]
    return len(found) < _MOST and not any(isinstance(part, GENERATOR_TYPES) for part in found)


def _inner_parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what an object, a container or a function refers to, besides plain values."""
    parts = [getattr(value, each, None) for each in ("__dict__", "__self__", "__func__", "func", "args", "keywords")]
    if isinstance(value, dict | list | tuple | set | frozenset):
        parts += value.values() if isinstance(value, dict) else value
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            parts.append(cell.cell_contents)
    return [(name, part) for part in parts if not isinstance(part, _PLAIN)]
