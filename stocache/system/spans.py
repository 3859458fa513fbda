"""Name the steps of loading in a trace of torch's profiler.

The ranges exist only while a profiler is on: `torch.profiler.profile`, or `torch.autograd.profiler.emit_nvtx`, which passes
them on to NVTX. A profiler sees the process in which it is on, and of its threads the one that started it.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

WAIT = "stocache: wait for a batch"
LOAD = "stocache: load samples that are not cached"
GATHER = "stocache: gather cached samples"
COLLATE = "stocache: collate"
RECEIVE = "stocache: receive a batch from a worker"

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context whose code has a name in a trace, if a profiler is on."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def in_spans(name: str, values: Iterable[object]) -> Iterable[Any]:
    """Return an iterable of the same values, each made within `span`. A list is complete already, and is returned unchanged."""
    return _in_spans(name, values) if profiler._is_profiler_enabled and not isinstance(values, list) else values


def _in_spans(name: str, values: Iterable[object]) -> Iterator[Any]:
    iterator = iter(values)
    while True:
        with span(name):
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield value
