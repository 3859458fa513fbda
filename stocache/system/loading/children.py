"""Run the user's code in forked child processes, and yield the items that it yields.

NOTE [ A child loads ]
    Some samples are needed before the user's own loop: by the probe, `warm` and `prepare`. A child process loads them. The
    files that the dataset opens there, the random numbers that it draws and the values that it keeps end with the child. The
    user's dataset object stays unchanged. A file opened in the parent would have one position for all workers forked later.

    The child works like a worker of torch's DataLoader: it has one thread, `get_worker_info()`, and no signal handlers of the
    parent. It is forked, whatever the start method of the DataLoader, so nothing is pickled and a script needs no `__main__`
    guard. It uses no semaphores and so no room in /dev/shm, and a daemonic process may have children of this kind. The kernel
    kills the child when its parent ends.

    A file that was open before the fork has one position for parent and child. So the child first opens all files that it may
    read again, under the same descriptors. After that it cannot move a position of the parent's.

    What a process reads from a pipe or a socket is lost for all others. So the child closes the streams of its parent; see
    NOTE [ Streams ].
"""

import contextlib
import ctypes
import gc
import logging
import os
import pickle
import random
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.random  # numpy would import it in each child
import torch
from torch.utils.data._utils import worker as torch_worker  # for get_worker_info, which has no public counterpart

from stocache.errors import DatasetError, WorkerError
from stocache.system.loading.streams import close_streams
from stocache.system.platform import here
from stocache.system.waiting import StallWatch, process_tree

logger = logging.getLogger("stocache")

_POLL_S = 0.5  # between checks of children that send nothing
_SLOW_S = 30.0  # for one item; then warn
_HELD_S = 30.0  # to wait for a thread that has a lock, before a fork
_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """A child process cannot be made, or does not answer. Users never see this error."""


class SlowError(ChildError):
    """Nothing came from the children for longer than the caller wants to wait."""


class StalledError(ChildError):
    """A child can never go on; see NOTE [ Stalled processes ]."""


def in_children(
    jobs: Sequence[Callable[[], Iterator[object]]], dataset: object, patience_s: float | None = None
) -> Generator[Any, None, None]:
    """Run each job in a child process of its own, and yield their items in the order in which they arrive.

    Args:
        jobs: functions that return iterators. They are called in the children; the items are pickled.
        dataset: the dataset that `get_worker_info` shows there.
        patience_s: seconds to wait for the next item; None waits as long as the children live.

    Raises:
        ChildError: a process cannot be forked, or numba has ended it.
        SlowError: nothing came for ``patience_s``.
        StalledError: a child is stalled, or was in an earlier call for this dataset.
        WorkerError: a child died.
        Exception: the error of a job, with the child's traceback as its cause; `DatasetError` if it does not pickle.

    When the generator ends, is closed or raises (also on Ctrl-C), it kills the children and waits until they are gone.
    """
    if has_stalled(dataset):
        raise StalledError("a child process was stalled before")
    children: list[_Child] = []
    try:
        for number, job in enumerate(jobs):
            children.append(_Child(job, dataset, number, len(jobs)))
        running = {child.pipe: child for child in children}
        since, said = time.monotonic(), False
        while running:
            ready: Any = wait(list(running), _POLL_S)
            for pipe in ready:
                message = running[pipe].receive()
                if message is None:
                    del running[pipe]
                else:
                    yield message[0]
                since = time.monotonic()
            for child in () if ready else running.values():
                child.check()
                if child.watch.is_stalled():
                    raise _stall(child.pid, dataset)
            waited_s = time.monotonic() - since
            if waited_s > _SLOW_S and not said:
                said = True
                pids = ", ".join(str(child.pid) for child in running.values())
                logger.warning("waited %.0f s for a sample so far, which the child process %s loads.", waited_s, pids)
            if patience_s is not None and waited_s > patience_s:
                raise SlowError(f"nothing came from the child process {children[0].pid} for {patience_s:.0f} s")
    finally:
        for child in children:
            child.end()


_stalled: dict[int, Callable[[], Any]] = {}  # weak references to datasets, by their ids


def has_stalled(dataset: object) -> bool:
    """Whether a child that loads samples of a dataset was stalled."""
    stalled = _stalled.get(id(dataset))
    return stalled is not None and stalled() is dataset


def _stall(pid: int, dataset: object) -> StalledError:
    """Record that a child was stalled, and warn: forked workers of a DataLoader would stall too."""
    with contextlib.suppress(TypeError):  # objects of some classes have no weak references
        _stalled[id(dataset)] = weakref.ref(dataset)
    reason = (
        f"a forked child process that loads samples of {type(dataset).__name__} waits for a lock or a thread which it does not "
        f"have: a fork copies the locks that other threads hold, but not the threads of a pool (of polars, dask, JAX, gRPC, "
        f"OpenMP, an executor)"
    )
    logger.warning(
        "%s. Samples that are needed before your loop are loaded in this process, from a copy of the dataset. Forked "
        "workers of a DataLoader stall in the same way: use num_workers=0, worker_method='thread' or "
        "multiprocessing_context='spawn', or use the pool only after the fork.",
        reason,
    )  # fmt: skip
    return StalledError(f"{reason} (process {pid})")


_fork_locks: dict[int, Any] = {}  # by process: in a forked child the lock of its parent may be held for ever


def fork_lock() -> Any:
    """Return the lock under which this process forks: filelock, which torch imports, raises when two threads fork at once."""
    return _fork_locks.setdefault(os.getpid(), threading.RLock())


def hold_to_fork(lock: Any) -> None:
    """Have this process take a lock before it forks, so that no other thread has it, and release it after.

    It forks without it if a thread does not release it for ``_HELD_S``.
    """
    held: list[bool] = []

    def before() -> None:
        held.append(lock.acquire(timeout=_HELD_S))

    def after() -> None:
        if held.pop():
            lock.release()

    here.at_fork(before=before, after_in_parent=after, after_in_child=after)


class _Child:
    """One forked process that runs a job."""

    def __init__(self, job: Callable[[], Iterator[object]], dataset: object, number: int, count: int) -> None:
        if not os.path.isdir(here.OPEN_FILES):
            raise ChildError("no child process can load samples here, as there is no /proc")
        for stream in (sys.stdout, sys.stderr):  # else the text in their buffers would be written twice
            with contextlib.suppress(Exception):
                stream.flush()
        parent = os.getpid()
        self.pipe, sender = Pipe(duplex=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of threads; the child does not need them
                with fork_lock():
                    self.pid = os.fork()
        except (OSError, RuntimeError) as error:  # RuntimeError: from Python 3.12 on, while the interpreter goes down
            self.pipe.close()
            sender.close()
            raise ChildError(f"no child process can be made: {error}") from error
        if self.pid == 0:
            self.pipe.close()
            _run(job, sender, parent, dataset, number, count)
        sender.close()
        self._status: int | None = None
        self.watch = StallWatch(self.pid)

    def receive(self) -> tuple[Any] | None:
        """Return the next item in a tuple; None at the end."""
        try:
            kind, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "error":
            raise unpack_error(content)
        return (content,) if kind == "item" else None

    def check(self) -> None:
        """Raise WorkerError if the child has ended. Its own children may keep the pipe open."""
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = status if pid else None
        if self._status is not None and not self.pipe.poll():
            raise self._death()

    def end(self) -> None:
        """Kill the child if it lives, and the processes that it has started, and wait until it is gone.

        A worker that is still starting would not notice that its parent is gone, and would live for ever.
        """
        if self._status is None:
            _, *started = process_tree(self.pid)
            for pid in (self.pid, *started):
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # other code may have waited for it
                self._status = os.waitpid(self.pid, 0)[1]
        self.pipe.close()

    def _death(self) -> Exception:
        how, code = "ended", 0
        with contextlib.suppress(ChildProcessError):  # other code has waited for it
            if self._status is None:
                self._status = os.waitpid(self.pid, 0)[1]
            code = os.waitstatus_to_exitcode(self._status)
            how = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGTERM and "numba.np.ufunc.omppool" in sys.modules:
            return ChildError(
                "numba ends a forked process that uses its threads of GNU OpenMP. Forked workers end, too: use num_workers=0, "
                "worker_method='thread', or numba.config.THREADING_LAYER = 'workqueue'"
            )
        return WorkerError(
            f"the child process {self.pid}, which loads samples, {how}. Something in the dataset, or from outside, ended it."
        )


def signal_name(number: int) -> str:
    """Return the name of a signal, also of a real-time one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _run(
    job: Callable[[], Iterator[object]], pipe: Connection, parent: int, dataset: object, number: int, count: int
) -> NoReturn:
    code = 1
    try:
        _become_worker(parent, dataset, number, count, pipe.fileno())
        try:
            for item in job():
                pipe.send_bytes(pickle.dumps(("item", item), 5))
        except Exception as error:
            pipe.send_bytes(pickle.dumps(("error", pack_error(error))))
        else:
            pipe.send_bytes(pickle.dumps(("end", None)))
        code = 0
    except SystemExit as error:  # of the user's code
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # the parent is gone, or does not read
        pass
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _become_worker(parent: int, dataset: Any, number: int, count: int, pipe: int) -> None:
    """Do what torch's DataLoader does in a worker before it loads; see NOTE [ A child loads ]."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGINT, signal.SIGTERM):  # handlers, say for a checkpoint, are for the parent
        if signal.getsignal(name) != signal.SIG_IGN:  # as after nohup: then Ctrl-C must not end the child alone
            signal.signal(name, signal.SIG_DFL)
    _leave_fork_server()
    gc.freeze()  # a collection would write to, and so copy, the memory of all objects of the parent
    _reopen_files()
    close_streams(pipe)
    util._run_after_forkers()  # type: ignore[attr-defined]  # of objects of multiprocessing: a proxy connects to its manager anew
    torch.set_num_threads(1)
    seed = (torch.initial_seed() + number) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)


def _leave_fork_server() -> None:
    """Forget the fork server of the parent: this process starts one of its own if it needs it, which `_Child.end` finds."""
    server: Any = forkserver._forkserver
    preloaded = server._preload_modules
    server.__init__()
    server.set_forkserver_preload(preloaded)


def _reopen_files() -> None:
    """Give this process its own position in every regular file that is open for reading."""
    for fd in map(int, os.listdir(here.OPEN_FILES)):
        with contextlib.suppress(OSError):  # the directory's own descriptor; files that may not be opened again
            flags = here.open_mode(fd)
            if fd <= 2 or flags & os.O_ACCMODE == os.O_WRONLY or not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            path = f"{here.OPEN_FILES}/{fd}"
            if flags & os.O_ACCMODE == os.O_RDWR and os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                continue  # our segments: they are mapped, never read by position, and closing one would drop its locks
            position = os.lseek(fd, 0, os.SEEK_CUR)
            again = os.open(path, (flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)) | os.O_CLOEXEC)
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, fd, inheritable=os.get_inheritable(fd))
            os.close(again)


PackedError: TypeAlias = tuple[bytes | None, str, str]
"""The pickle of an exception (None if it does not pickle), its type and message, and its traceback."""


class _ChildTraceback(Exception):
    """The traceback of an error in a child. It is shown as the cause of the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: Exception) -> PackedError:
    """Return a description from which `unpack_error` makes the exception in another process."""
    trace = "".join(traceback.format_exception(error))
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is not type(error):
            pickled = None
    except Exception:  # its class may do anything
        pickled = None
    return pickled, f"{type(error).__name__}: {_text(error)}", trace


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as other:
        return f"(its message raises {type(other).__name__})"


def unpack_error(description: PackedError) -> Exception:
    """Return the exception with its original traceback as its cause; a `DatasetError` if it does not pickle."""
    pickled, message, trace = description
    error: Exception = DatasetError(f"{message} (which does not pickle)") if pickled is None else pickle.loads(pickled)
    error.__cause__ = _ChildTraceback(trace)
    return error


def with_prefix(error: Exception, note: str) -> Exception:
    """Return an error of the same type whose message begins with ``note``; a `DatasetError` if its class forbids that."""
    message = f"{note}: {type(error).__name__}: {_text(error)}"
    try:
        again = type(error)(message)
        if message not in str(again):
            raise TypeError
    except Exception:  # its class may want other arguments
        again = DatasetError(message)
    again.__cause__ = error
    return again
