"""Explain how a worker process of a DataLoader died, or why none can start.

NOTE [ Deaths of workers ]
    torch raises RuntimeError for a dead worker wherever it notices it: in `next`, while it starts workers, or, by its SIGCHLD
    handler, wherever the main thread is. `WorkerGroup.explanation` finds what the user needs: which process died, how, and at
    which batch. A worker that has no work left exits with code 0. So code 0 is a death only if torch still expected batches.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling

from stocache.errors import WorkerError
from stocache.loader.order import Order
from stocache.shm.ring.ring import Ring
from stocache.system.loading.children import signal_name
from stocache.system.waiting import wait_until


@dataclass(eq=False)
class WorkerGroup:
    """The worker processes of an iterator.

    Attributes:
        order: the order of the batches.
        ring: the ring, in which workers record their current batch; None if they do not.
        start_method: of the workers; "" without workers.
        persistent: whether the workers serve several epochs.
        workers: all processes that were started.
        dead: whether the death of a worker was raised.
        busy: whether the iterator is being advanced, or begins an epoch; it stays so if an interrupt ends that.
    """

    order: Order
    ring: Ring | None = None
    start_method: str = ""
    persistent: bool = False
    workers: tuple[BaseProcess, ...] = ()
    dead: bool = False
    busy: bool = False

    @property
    def is_unfit(self) -> bool:
        """Whether an interrupt left it busy, or a worker has died, perhaps between two loops, without an error so far."""
        return self.busy or self.dead or self.death() is not None

    def death(self, missed: Sequence[int] = ()) -> str | None:
        """Return how a worker died; None if none did.

        Exit code 0 counts as a death if workers are persistent, or if torch misses the worker: its pid is in ``missed``.
        """
        ended = [worker for worker in self.workers if worker.exitcode is not None]
        for worker in sorted(ended, key=lambda worker: not worker.exitcode):
            if worker.exitcode or worker.pid in missed or self.persistent:
                return self._death_of(worker.pid or 0, worker.exitcode or 0)
        return None

    def _death_of(self, pid: int, code: int) -> str:
        ring = self.ring if self.ring is not None and self.ring.works else None
        number = None if ring is None else ring.last_request_of(pid)
        batch = "" if number is None else f" at work on batch {number} of the epoch"
        if ring is not None and number is None:
            batch = " before its first batch"
        if code < 0:
            name = signal_name(-code)
            how, hint = f"was killed by signal {-code} ({name})", _HINTS.get(name, "Another process or the system ended it.")
        elif code == 1 and number is None and self.start_method != "fork":
            how, hint = "exited with code 1", "Its output says why."
        else:
            ending = "." if code else ": os._exit, sys.exit, or a KeyboardInterrupt."
            how = f"exited with code {code}"
            hint = f"Code in the dataset, collate_fn or worker_init_fn ended the process{ending}"
        return f"DataLoader worker (pid {pid}) {how}{batch}. {hint}"

    def expects(self, error: Exception) -> bool:
        """Whether a worker, the sampler or the timeout raised ``error``, and not a signal handler, which may do so anywhere."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if error is self.order.error:  # an interrupt also ends the generator of the order
            codes = {frame.f_code for frame in frames}
            handlers = (getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals())
            return frames[-1].f_globals.get("__name__", "").partition(".")[0] != "stocache" and codes.isdisjoint(handlers)
        return is_timeout(error) or frames[-1].f_code is ExceptionWrapper.reraise.__code__

    def watch(self) -> None:
        """Explain deaths also when torch raises them during the user's training step."""
        _groups.add(self)
        _explain_in_handler()

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Raise WorkerError instead of torch's error when a worker dies, or cannot start."""
        try:
            yield
        except Exception as error:
            message = self.explanation(error)
            if message is None:
                raise
            raise WorkerError(message) from error

    def explanation(self, error: Exception, sure: bool = False) -> str | None:
        """Return the message that replaces an error of torch or multiprocessing; None for any other error.

        ``sure``: return None also if no worker of this iterator is known to be dead.
        """
        if isinstance(error, WorkerError) and self.dead:  # raised by the signal handler below
            return str(error)
        message = self._explanation(error, sure) if self.start_method else None
        self.dead = self.dead or message is not None
        return message

    def _explanation(self, error: Exception, sure: bool) -> str | None:
        message = _text_of(error)
        if isinstance(error, RuntimeError) and (found := _DEATH.match(message)):
            death = self.death([int(pid) for pid in found[1].split(",")])
            if death is None and found[2]:  # it died during the start, before its process was known here
                death = self._death_of(int(found[1]), int(found[2]))
            return death if death or sure else message
        if isinstance(error, OSError | EOFError | ImportError) and (modules := _multiprocessing_in(error)):
            if self.workers:  # a worker died before it passed on the descriptor of a batch
                wait_until(lambda: any(worker.exitcode is not None for worker in self.workers), _EXIT_S)
                return self.death([worker.pid or 0 for worker in self.workers])
            no_semaphore = "multiprocessing.synchronize" in modules or isinstance(error, ImportError)
            hint = "They need semaphores in /dev/shm. Check that it is mounted and writable." if no_semaphore else ""
            message = f"the DataLoader cannot start its worker processes ({type(error).__name__}: {error})."
            return f"{message} With num_workers=0 this process loads all batches. {hint}".rstrip()
        return None


# torch raises a plain RuntimeError for a dead worker and for a timeout, and a dataset may raise one too. Only the text
# distinguishes them. Tests check both patterns against the installed torch.
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly(?: with exit code (\d+))?|is killed by signal)"
)
_TIMEOUT = re.compile(r"DataLoader timed out after ")


def is_timeout(error: Exception) -> bool:
    """Whether torch raised ``error`` because no batch came within the loader's ``timeout``."""
    return isinstance(error, RuntimeError) and _TIMEOUT.match(_text_of(error)) is not None


def _text_of(error: Exception) -> str:
    with contextlib.suppress(Exception):  # of a class of the user
        return str(error)
    return ""


_HINTS = {
    "SIGKILL": "Often the kernel does this when memory runs out (see dmesg). Use fewer workers or smaller batches.",
    "SIGSEGV": "A library that the dataset uses crashed. num_workers=0 with python -X faulthandler shows where.",
    "SIGBUS": "It wrote to shared memory that the machine does not have. Raise the size of /dev/shm.",
}


_groups: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()


def _explain_in_handler() -> None:
    """Let torch's SIGCHLD handler, which raises RuntimeError for a dead worker, raise WorkerError."""
    if not hasattr(signal, "SIGCHLD"):  # as on Windows
        return
    handler = signal.getsignal(signal.SIGCHLD)
    here = threading.current_thread() is threading.main_thread()
    if not here or getattr(handler, "__module__", None) != signal_handling.__name__ or not callable(handler):
        return

    def explain(signum: int, frame: Any) -> None:
        try:
            handler(signum, frame)
        except RuntimeError as error:
            for group in list(_groups):
                if (message := group.explanation(error, sure=True)) is not None:
                    raise WorkerError(message) from error
            raise

    signal.signal(signal.SIGCHLD, explain)


_EXIT_S = 5.0  # a worker stops serving its descriptors before it has ended: the time between the two
_proven: set[str] = set()  # start methods that started a process, although the script seems to have no guard
_PATIENCE_S = 60.0  # wait for such a process


def preload() -> None:
    """Let multiprocessing's fork server import the modules of workers, once for all; else each worker does it, for seconds.

    The modules of the user stay first. It has no effect if the server runs already, and it is not done if the server might
    find other modules than this process: it looks in the current directory first.
    """
    if os.path.realpath(sys.path[0]) == os.getcwd():
        modules = [name for name in _SERVER._preload_modules if name not in _PRELOADED]
        _SERVER.set_forkserver_preload([*modules, *_PRELOADED])


_SERVER: Any = forkserver._forkserver
_PRELOADED = ("stocache.loader.dataloader", "stocache.shm.ring.in_server")


def try_to_start(context: Any) -> None:
    """Raise, before torch makes an iterator, what it would raise if no process can start; WorkerError without a guard.

    A script without the ``__main__`` guard starts processes whenever it is imported, so a spawned process dies at once. The
    parent then waits for ever, if it has more than 64 KiB to send: it holds the other end of the pipe itself. So this function
    first starts one process that is sent nothing.
    """
    context.Lock()
    method = context.get_start_method()
    if method == "forkserver":
        preload()
    if method == "fork" or method in _proven or not (hint := _guard_hint()):
        return
    process = context.Process(daemon=True)  # without a target it does nothing
    process.start()
    process.join(_PATIENCE_S)
    if process.exitcode:
        raise WorkerError(
            f"the worker processes of the DataLoader cannot start: one exited with code {process.exitcode}. {hint}"
        )
    process.kill()
    _proven.add(method)


def _multiprocessing_in(error: BaseException) -> set[str]:
    """Return the modules of multiprocessing in the traceback of an error; empty if the error comes from pickling."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    found = {name for name in modules if name.startswith("multiprocessing.")}
    return set() if "multiprocessing.reduction" in found else found


def _guard_hint() -> str:
    """Return advice for a main script without the ``__main__`` guard; "" if it has one."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        guarded = path is None or "__main__" in Path(path).read_text(errors="replace")
    except OSError:
        guarded = True
    if guarded:
        return ""
    return (
        f"Worker processes that are spawned import {path}, and so run it once more. Put the code that starts it under "
        'if __name__ == "__main__":'
    )
