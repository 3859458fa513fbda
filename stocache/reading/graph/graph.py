"""Walk, change and copy graphs of DataPipes.

NOTE [ How the graph is walked ]
    The sources of a pipe are the pipes among its attributes, also inside lists, tuples, dicts and the like. The walk reads
    attributes only: it pickles, calls and changes nothing. It skips a container of a million strings by the types inside. It
    visits each pipe once, so shared pipes cost nothing extra, and several threads may walk at the same time. (torch's own walk
    pickles the pipes, with hooks on their classes.)
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from stocache.cache.base import SampleCache
from stocache.errors import GraphError

DataPipe: TypeAlias = IterDataPipe[Any] | MapDataPipe[Any]
DataPipeGraph: TypeAlias = "dict[int, tuple[DataPipe, DataPipeGraph]]"
Adapt: TypeAlias = Callable[[DataPipe], DataPipe]
"""A function that takes a graph, and returns it, changed or replaced."""

_PIPES = (IterDataPipe, MapDataPipe)
_DATA = (torch.Tensor, np.ndarray, SampleCache)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def traverse_dps(datapipe: DataPipe) -> DataPipeGraph:
    """Return the graph that ends with a pipe: ``{id: (pipe, graph of its sources)}``.

    A shared pipe has one graph, which appears at each place. A pipe that leads back to itself appears once.

    Raises:
        GraphError: ``datapipe`` is not a DataPipe.
    """
    if not isinstance(datapipe, _PIPES):
        raise GraphError(f"expected an IterDataPipe or MapDataPipe, got {type(datapipe).__name__}.")
    return {id(datapipe): (datapipe, _traversed(datapipe, {}))}


def _traversed(pipe: DataPipe, known: "dict[int, DataPipeGraph | None]") -> DataPipeGraph:
    # Not a closure that calls itself: that is a cycle, which keeps pipes and caches alive until the garbage is collected
    known[id(pipe)] = None  # on the path
    below: DataPipeGraph = {}
    for source in sources(pipe):
        graph = known[id(source)] if id(source) in known else _traversed(source, known)
        if graph is not None:
            below[id(source)] = source, graph
    known[id(pipe)] = below
    return below


def list_dps(graph: DataPipeGraph, exclude_dps: DataPipe | list[DataPipe] | None = None) -> list[DataPipe]:
    """Return all pipes of a graph, each once, breadth first from its end.

    Args:
        exclude_dps: pipes to leave out, together with all pipes before them.
    """
    excluded = [exclude_dps] if isinstance(exclude_dps, _PIPES) else exclude_dps or []
    seen = {id(pipe) for left_out in excluded for pipe in list_dps(traverse_dps(left_out))}
    found: list[DataPipe] = []
    waiting = deque(graph.items())
    while waiting:
        number, (pipe, below) = waiting.popleft()
        if number not in seen:
            seen.add(number)
            found.append(pipe)
            waiting.extend(below.items())
    return found


def find_dps(graph: DataPipeGraph, dp_type: type[object]) -> list[DataPipe]:
    """Return the pipes of a graph whose type is exactly ``dp_type``."""
    return [pipe for pipe in list_dps(graph) if type(pipe) is dp_type]


def replace_dp(graph: DataPipeGraph, old_datapipe: DataPipe, new_datapipe: DataPipe) -> DataPipeGraph:
    """Replace a pipe in all pipes that read from it, and return the new graph."""
    return traverse_dps(replaced(_end_of(graph), old_datapipe, new_datapipe))


def remove_dp(graph: DataPipeGraph, datapipe: DataPipe) -> DataPipeGraph:
    """Remove a pipe, so that its readers read from its source, and return the new graph.

    Raises:
        GraphError: the pipe has no source, or several.
    """
    return traverse_dps(removed(_end_of(graph), datapipe))


def _end_of(graph: DataPipeGraph) -> DataPipe:
    ((end, _),) = graph.values()
    return end


def replaced(datapipe: DataPipe, old: DataPipe, new: DataPipe) -> Any:
    """Return the last pipe of a graph in which ``new`` takes the place of ``old``; ``new`` may read from ``old``."""
    if old is datapipe:
        return new
    for pipe in pipes_of(datapipe):
        relink(pipe, old, new)
    return datapipe


def removed(datapipe: DataPipe, pipe: DataPipe) -> Any:
    """Return the last pipe of a graph in which the readers of ``pipe`` read from its source.

    Raises:
        GraphError: the pipe has no source, or several.
    """
    below = sources(pipe)
    if len(below) != 1:
        raise GraphError(f"{pipe} has {len(below)} sources, and only a pipe with one can be removed.")
    return replaced(datapipe, pipe, below[0])


def pipes_of(datapipe: DataPipe) -> list[Any]:
    """Return a pipe and all pipes before it, breadth first."""
    return list_dps(traverse_dps(datapipe))


def sources(datapipe: DataPipe) -> list[DataPipe]:
    """Return the pipes that a pipe reads from, each once."""
    return _pipes_in(vars(datapipe).values())


def _pipes_in(values: Iterable[object]) -> list[DataPipe]:
    # see NOTE [ How the graph is walked ]
    found: dict[int, DataPipe] = {}
    seen: set[int] = set()
    level: list[Any] = [list(values)]
    while level:
        kinds = set(map(type, _contents(level)))
        if any(issubclass(kind, _PIPES) for kind in kinds):
            found |= {id(value): value for value in _contents(level) if isinstance(value, _PIPES)}
        if not any(issubclass(kind, _CONTAINERS) for kind in kinds):
            break
        containers = {id(value): value for value in _contents(level) if isinstance(value, _CONTAINERS) and value}
        for number in containers.keys() & seen:
            del containers[number]
        seen |= containers.keys()
        level = list(containers.values())
    return list(found.values())


def _contents(containers: Iterable[Any]) -> Iterable[Any]:
    """Return the contents of all containers, one after the other."""
    return chain.from_iterable(chain(each.keys(), each.values()) if isinstance(each, dict) else each for each in containers)


def relink(holder: DataPipe, old: DataPipe, new: DataPipe) -> None:
    """Replace ``old`` by ``new`` in the attributes of a pipe."""
    if any(pipe is old for pipe in sources(holder)):
        for name, value in list(vars(holder).items()):
            setattr(holder, name, _relinked(value, old, new))


def _relinked(value: object, old: DataPipe, new: DataPipe) -> Any:
    """Return a value with ``new`` for ``old``. Lists, dicts and sets are changed in place; tuples are rebuilt."""
    if value is old:
        return new
    if not isinstance(value, _CONTAINERS) or not any(pipe is old for pipe in _pipes_in([value])):
        return value
    if isinstance(value, dict):
        for key, content in list(value.items()):
            value[key] = _relinked(content, old, new)
        return value
    contents = [_relinked(content, old, new) for content in value]
    if isinstance(value, list | deque):
        for at, content in enumerate(contents):
            value[at] = content
        return value
    if isinstance(value, set):
        value.clear()
        value.update(contents)
        return value
    return value._make(contents) if hasattr(value, "_make") else type(value)(contents)


def clone(datapipe: DataPipe) -> DataPipe:
    """Return a copy of a graph, which may be changed and iterated without effect on the original.

    Tensors, arrays, caches and functions are shared, not copied. So is the data of an IterableWrapper, which copies it
    itself. If the pipes hold something that cannot be copied, such as an open file, all their contents are shared.
    """
    memo: dict[int, Any] = {}
    for pipe in pipes_of(datapipe):
        shared: list[Any] = [pipe.iterable] if isinstance(pipe, IterableWrapper) else []
        shared += [value for value in vars(pipe).values() if isinstance(value, _DATA) or callable(value)]
        memo |= {id(value): value for value in shared}
    try:
        return copy.deepcopy(datapipe, memo)
    except Exception:  # copying may raise anything
        return _clone_pipes(datapipe)


def _clone_pipes(datapipe: DataPipe) -> DataPipe:
    """Return a copy with new pipes, which share all contents except each other."""
    pipes = pipes_of(datapipe)
    copies: dict[int, DataPipe] = {}
    for pipe in pipes:
        twin = object.__new__(type(pipe))  # copy.copy calls __getstate__, which may refuse
        vars(twin).update({name: _unshared(value) for name, value in vars(pipe).items()})
        copies[id(pipe)] = twin
    for twin in copies.values():
        for source in sources(twin):
            if id(source) in copies:
                relink(twin, source, copies[id(source)])
    return copies[id(datapipe)]


def _unshared(value: object) -> Any:
    """Return a copy of a container, and of those inside it that hold pipes; other values unchanged."""
    if not isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, dict):
        return copy.copy(value) if not _pipes_in([value]) else {key: _unshared(content) for key, content in value.items()}
    if isinstance(value, list) and _pipes_in([value]):
        return [_unshared(content) for content in value]
    return copy.copy(value)


def is_random(datapipe: DataPipe) -> bool:
    """Whether a pipe draws random numbers from a seed that it gets."""
    return _has_method(datapipe, "set_seed")


def is_sharding(datapipe: DataPipe) -> bool:
    """Whether a pipe passes on only a share of its elements."""
    return _has_method(datapipe, "apply_sharding")


def is_replicable(datapipe: DataPipe) -> bool:
    """Whether each worker may have its own copy of a pipe; otherwise the main process has the only one."""
    return not _has_method(datapipe, "is_replicable") or bool(datapipe.is_replicable())


def _has_method(datapipe: DataPipe, name: str) -> bool:
    return callable(getattr(type(datapipe), name, None))
