"""Blocks written by the tasks of a Ray cluster (extra ``ray``).

NOTE [ Blocks as tasks ]
    What writes blocks, with the dataset in it, is pickled and put into Ray's store of objects once, and each worker process
    unpickles it once, for all its tasks. Not by way of Ray, whose arrays are shared by all processes of a machine: a dataset
    could not write to them. A task is one block, and returns what the index is to say of it.

    A worker or a node that is killed costs the blocks it was at: Ray runs these tasks again elsewhere, and a block that is
    written twice has the same bytes and the same name. After an error, tasks that have not begun are cancelled, those that have
    are interrupted, and the end of them all is waited for.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from stocache.errors import StorageError, WorkerError
from stocache.storage.manifest import Entry

_RETRIES = 3  # of a block whose worker has died
_AHEAD = 2  # tasks for each CPU, so that none waits for the next one; more than there are have an autoscaler add nodes

Write: TypeAlias = Callable[..., Entry]
RayJob: TypeAlias = tuple[Any, list[str]]
"""The pickle of what writes the blocks, as a reference within a tuple, which Ray leaves to us to follow; and ``sys.path``."""

_loaded: tuple[str, Write] | None = None
"""In a worker: what writes the blocks of the preparation it was last at."""


@contextlib.contextmanager
def connected(address: str | None, num_workers: int) -> Iterator[None]:
    """Have a Ray: the one this process has already; else that at ``address``, or $RAY_ADDRESS; else one of our own.

    Args:
        address: as for ``ray.init``.
        num_workers: the CPUs of one that is started here; 0 for all.

    Raises:
        StorageError: it cannot be connected to, or started.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"num_cpus": num_workers or None, "include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            _check_listening(address)
            ray.init(address, **options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # of many types
            what = "be started here" if options else f"be connected to at {address}"
            raise StorageError(f"Ray cannot {what}: {type(error).__name__}: {error}") from error
        yield
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray has set its own


def _check_listening(address: str) -> None:
    """Raise an error at once, which Ray does after a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def entries(write: Write, calls: Iterable[tuple[Any, ...]], num_workers: int) -> Generator[Entry, None, None]:
    """Call ``write`` in the cluster, and give what it returns, in order; see NOTE [ Blocks as tasks ].

    Args:
        write: writes a block, and returns its entry.
        calls: its arguments for each block, of which the first is the block's number.
        num_workers: blocks to be at, at one time; 0 for what the cluster can do.

    Raises:
        WorkerError: a worker died, and those that tried again, too.
        Exception: what ``write`` raises.
    """
    job = ray.put(cloudpickle.dumps(write)), [os.path.abspath(path) for path in sys.path]
    coming = iter(calls)
    tasks: deque[tuple[int, Any]] = deque()  # those whose entries are not given yet
    running: list[Any] = []
    try:
        while True:
            for call in islice(coming, max(0, _most(num_workers) - len(running))):
                running.append(_begun(job, write, call))
                tasks.append((call[0], running[-1]))
            if not tasks:
                return
            _, running = ray.wait(running)
            while tasks and tasks[0][1] not in running:
                yield _entry(*tasks.popleft())
    finally:
        with contextlib.suppress(Exception):  # of a Ray that is gone
            for task in running:
                ray.cancel(task)
            while running:
                _, running = ray.wait(running)


def _most(num_workers: int) -> int:
    """Return how many tasks there may be: asked again and again, since nodes come and go."""
    return num_workers or max(1, int(_AHEAD * ray.cluster_resources().get("CPU", 0)))


def _begun(job: RayJob, write: Write, call: tuple[Any, ...]) -> Any:
    try:
        sent = cloudpickle.dumps(call)
    except Exception:  # samples that do not pickle; here it is said what is wrong with them, if anything is
        return ray.put(write(*call))
    return _task.remote(job, sent)


def _entry(number: int, task: Any) -> Entry:
    try:
        entry: Entry = ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise WorkerError(
            f"block {number} was not written: its Ray worker died, and so did those that tried again ({type(error).__name__}: "
            f"{reason}). What is whole stays, and preparing again goes on from there."
        ) from error
    return entry


# ---------------------------------------------------------------------------------------------------- in a worker


def _run(job: RayJob, call: bytes) -> Entry:
    """Write a block."""
    global _loaded
    pickled, paths = job
    try:
        if _loaded is None or _loaded[0] != pickled.hex():
            _loaded = None  # the memory of what was before is free now
            sys.path += [path for path in paths if path not in sys.path]  # where the driver finds its modules
            _loaded = pickled.hex(), cloudpickle.loads(ray.get(pickled))
        return _loaded[1](*cloudpickle.loads(call))
    except Exception as error:
        if _pickles(error):
            raise
        raise WorkerError(f"{type(error).__name__}: {error}") from error  # Ray would have the worker end (2.9)


def _pickles(error: Exception) -> bool:
    try:
        return type(cloudpickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False


# Not by a decorator, which would take the function's name: it is pickled by that, and so finds this module's globals
_task = ray.remote(max_retries=_RETRIES)(_run)
