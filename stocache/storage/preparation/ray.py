"""Write blocks by the tasks of a Ray cluster (extra ``ray``).

NOTE [ Blocks as tasks ]
    The function that writes blocks holds the dataset. It is pickled and put into Ray's object store once, and each worker
    process unpickles it once, for all its tasks. Ray does not unpickle it: arrays that Ray unpickles are shared by all
    processes of a machine, and a dataset could not write to them. A task writes one block, and returns its number and its entry
    in the index (or the samples that cannot be loaded).

    If a worker or a node is killed, Ray runs its unfinished tasks again elsewhere. A block that is written twice has the same
    bytes and the same name. After an error, tasks that have not begun are cancelled, and the workers of the others are killed,
    which leaves no part of a block. An interruption would leave a worker behind that later tasks of the cluster get: one that
    was importing torch is of no use to them. The preparation then waits until all have ended.
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

_RETRIES = 3  # for a block whose worker died
_AHEAD = 2  # tasks for each CPU: no CPU waits for its next task, and an autoscaler sees that it could add nodes
_AGAIN_S = 5.0  # after which a task that still runs is cancelled again

Write: TypeAlias = Callable[..., tuple[int, Any]]
RayJob: TypeAlias = tuple[Any, list[str]]
"""A reference to the pickle of the function that writes blocks, and ``sys.path``. Ray does not fetch references in a tuple."""

_loaded: tuple[str, Write] | None = None
"""In a worker: the function that writes the blocks of its last preparation, and the reference that it came from."""


@contextlib.contextmanager
def connected(address: str | None, num_workers: int) -> Iterator[None]:
    """Connect this process to Ray: an existing connection, else ``address`` or $RAY_ADDRESS, else a Ray that is started here.

    Args:
        address: as for ``ray.init``.
        num_workers: CPUs of a Ray that is started here; 0 for all.

    Raises:
        StorageError: Ray cannot be connected to, or started.
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
        except Exception as error:  # Ray raises many types
            what = "be started here" if options else f"be connected to at {address}"
            raise StorageError(f"Ray cannot {what}: {type(error).__name__}: {error}") from error
        yield
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray replaced it


def _check_listening(address: str) -> None:
    """Raise OSError at once if no server listens at an address; Ray itself needs a quarter of an hour for that."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def written(write: Write, calls: Iterable[tuple[Any, ...]], num_workers: int) -> Generator[tuple[int, Any], None, None]:
    """Call ``write`` in the cluster, and yield its results in order; see NOTE [ Blocks as tasks ].

    Args:
        write: writes a block, and returns its number and its result, see `stocache.storage.preparation.blocks`.
        calls: its arguments for each block; the first is the block's number.
        num_workers: tasks at a time; 0 for as many as the cluster can run.

    Raises:
        WorkerError: a worker died, and so did the workers that tried again.
        Exception: whatever ``write`` raises.
    """
    job = ray.put(cloudpickle.dumps(write)), [os.path.abspath(path) for path in sys.path]
    coming = iter(calls)
    tasks: deque[tuple[int, Any]] = deque()  # tasks whose entries are not yielded yet
    running: list[Any] = []
    try:
        while True:
            for call in islice(coming, max(0, _most(num_workers) - len(running))):
                running.append(_start(job, write, call))
                tasks.append((call[0], running[-1]))
            if not tasks:
                return
            _, running = ray.wait(running)
            while tasks and tasks[0][1] not in running:
                yield _result(*tasks.popleft())
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            while running:
                for task in running:
                    ray.cancel(task, force=True)
                _, running = ray.wait(running, num_returns=len(running), timeout=_AGAIN_S)


def _most(num_workers: int) -> int:
    """Return how many tasks may run now: nodes may join and leave."""
    return num_workers or max(1, int(_AHEAD * ray.cluster_resources().get("CPU", 0)))


def _start(job: RayJob, write: Write, call: tuple[Any, ...]) -> Any:
    try:
        sent = cloudpickle.dumps(call)
    except Exception:  # samples that do not pickle: write them here, or raise the error that says why that fails
        return ray.put(write(*call))
    return _task.remote(job, sent)


def _result(number: int, task: Any) -> tuple[int, Any]:
    try:
        result: tuple[int, Any] = ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise WorkerError(
            f"block {number} was not written: its Ray worker died, and so did the workers that tried again "
            f"({type(error).__name__}: {reason}). Complete blocks stay, and preparing again continues from there."
        ) from error
    return result


def _run(job: RayJob, call: bytes) -> tuple[int, Any]:
    """Write a block."""
    global _loaded
    pickled, paths = job
    try:
        if _loaded is None or _loaded[0] != pickled.hex():
            _loaded = None  # free its memory first
            sys.path += [path for path in paths if path not in sys.path]  # the driver's modules are there
            _loaded = pickled.hex(), cloudpickle.loads(ray.get(pickled))
        return _loaded[1](*cloudpickle.loads(call))
    except Exception as error:
        if _pickles(error):
            raise
        raise WorkerError(f"{type(error).__name__}: {error}") from error  # else Ray (2.9) ends the worker


def _pickles(error: Exception) -> bool:
    try:
        return type(cloudpickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:
        return False


# Not a decorator: that would take the name of the function, which is pickled by name so that it finds this module's globals
_task = ray.remote(max_retries=_RETRIES)(_run)
