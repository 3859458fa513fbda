"""The worker processes of a DataLoader: what one died of, and why none can start, in words.

NOTE [ Deaths of workers ]
    torch raises a death as a RuntimeError, where it notices it: in `next`, while it starts workers, or (by its handler of
    SIGCHLD) wherever the main thread is. `WorkerGroup.explanation` turns that into what the user needs: which process, how it
    ended, at which batch. A worker that has nothing left to do ends with code 0, so that is a death only where torch misses it.
"""

import contextlib
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import signal_handling

from stocache.errors import WorkerError
from stocache.loader.order import Order
from stocache.loader.ring import Ring
from stocache.system.children import signal_name


@dataclass(eq=False)
class WorkerGroup:
    """The worker processes that make the batches of an iterator.

    Attributes:
        order: of the batches.
        ring: where workers note which batch they make; None where they do not.
        start_method: of the workers.
        persistent: whether they live until they are message to end.
        workers: all that were started.
        dead: whether the death of one was raised.
    """

    order: Order
    ring: Ring | None = None
    start_method: str = ""
    persistent: bool = False
    workers: tuple[BaseProcess, ...] = ()
    dead: bool = False

    def death(self, missed: Sequence[int] = ()) -> str | None:
        """Return what a worker died of; None when none did.

        A worker that has nothing left to do exits with code 0, too. So that is a death where it is to persist, or where torch
        has missed it: a process of these numbers.
        """
        ended = [worker for worker in self.workers if worker.exitcode is not None]
        ended.sort(key=lambda worker: not worker.exitcode)
        for worker in ended:
            if worker.exitcode or worker.pid in missed or self.persistent:
                return self._death_of(worker.pid or 0, worker.exitcode or 0)
        return None

    def _death_of(self, pid: int, code: int) -> str:
        knows = self.ring is not None and self.ring.works
        number = self.ring.last_request_of(pid) if self.ring is not None and knows else None
        at_work = (
            f" at work on batch {number} of the epoch" if number is not None else " before its first batch" if knows else ""
        )
        if code < 0:
            how, hint = (
                f"was killed by signal {-code} ({signal_name(-code)})",
                _HINTS.get(-code, "It was ended from outside of Python."),
            )
        else:
            how = f"exited with code {code}"
            hint = "Something in the dataset, collate_fn or worker_init_fn ends the process" + (_ENDINGS if not code else ".")
            if code == 1 and number is None and self.start_method != "fork":
                hint = f"What it printed says why. {_guard_hint()}"
        return f"DataLoader worker (pid {pid}) {how}{at_work}. {hint}"

    def watch(self) -> None:
        """Have deaths in the midst of the user's training step explained, too."""
        _groups.add(self)
        _explain_in_handler()

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Surround what torch does with workers: raise WorkerError where one dies, or cannot start."""
        try:
            yield
        except Exception as error:
            message = self.explanation(error)
            if message is None:
                raise
            raise WorkerError(message) from error

    def explanation(self, error: Exception, sure: bool = False) -> str | None:
        """Return what to say instead of an error of torch's or multiprocessing's; None where it is another.

        ``sure``: also None unless a worker of this iterator is known to have died.
        """
        if isinstance(error, WorkerError) and self.dead:  # by the handler, below
            return str(error)
        message = self._explanation(error, sure) if self.start_method else None
        self.dead = self.dead or message is not None
        return message

    def _explanation(self, error: Exception, sure: bool) -> str | None:
        message = str(error)
        if isinstance(error, RuntimeError) and (found := _DEATH.match(message)):
            death = self.death([int(pid) for pid in found[1].split(",")])
            if death is None and found[2]:  # while it was being started, so its process is not known here
                death = self._death_of(int(found[1]), int(found[2]))
            return death if death or sure else message
        if isinstance(error, OSError | EOFError | ImportError) and (modules := _multiprocessing_in(error)):
            if self.workers:  # a batch lay in memory of which its worker could not hand over the descriptor
                wait([worker.sentinel for worker in self.workers], _POLL_S)
                return self.death([worker.pid or 0 for worker in self.workers])
            if "multiprocessing.synchronize" in modules or isinstance(error, ImportError):
                hint = "They need semaphores, which take room in /dev/shm: is it mounted, and may it be written to?"
            else:
                hint = _guard_hint() if self.start_method != "fork" else ""
            message = f"the DataLoader cannot start its worker processes ({type(error).__name__}: {error})."
            return f"{message} num_workers=0 loads in this process. {hint}".rstrip()
        return None


# torch raises RuntimeError for the death of a worker, for a timeout, and again what a dataset raised in a worker. It has no
# class for any of them, so their texts must tell them apart. Tests hold both patterns against the installed torch.
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly(?: with exit code (\d+))?|is killed by signal)"
)
_TIMEOUT = re.compile(r"DataLoader timed out after ")


def is_timeout(error: Exception) -> bool:
    """Whether torch raised ``error`` because no batch came within the loader's ``timeout``."""
    return isinstance(error, RuntimeError) and _TIMEOUT.match(str(error)) is not None


_ENDINGS = ": os._exit, sys.exit, or a KeyboardInterrupt."
_HINTS: dict[int, str] = {
    signal.SIGKILL: "Often that is the kernel, out of memory (see dmesg): use fewer workers or smaller batches.",
    signal.SIGSEGV: "A library that the dataset uses crashed: num_workers=0 and python -X faulthandler show where.",
    signal.SIGBUS: "It wrote to shared memory that the machine does not have: raise the size of /dev/shm.",
}


_groups: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()


def _explain_in_handler() -> None:
    """Let the handler of torch's that raises a worker's death, wherever the main thread is, raise a WorkerError."""
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


_POLL_S = 1.0  # from a worker's sockets being closed to its end
_proven: set[str] = set()  # start methods by which a script that seems not to be guarded could start a process
_PATIENCE_S = 60.0  # for such a process


def try_to_start(context: Any) -> None:
    """Raise what torch would raise where processes cannot start, before its iterator is half made; WorkerError without a guard.

    A spawned process that dies at once, as the main module starts processes when it is imported, leaves a parent that has more
    than 64 KiB to send to it waiting for ever: it holds the pipe's other end itself. So one is tried that is sent nothing.
    """
    context.Lock()
    method = context.get_start_method()
    if method == "fork" or method in _proven or not (hint := _guard_hint()):
        return
    process = context.Process(target=_do_nothing, daemon=True)
    process.start()
    process.join(_PATIENCE_S)
    if process.exitcode:
        raise WorkerError(
            f"the worker processes of the DataLoader cannot start: one exited with code {process.exitcode}. {hint}"
        )
    process.kill()
    _proven.add(method)


def _do_nothing() -> None:
    pass


def _multiprocessing_in(error: BaseException) -> set[str]:
    """Return the modules of multiprocessing that raised an error; none where it comes from what they pickle."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    found = {name for name in modules if name.startswith("multiprocessing.")}
    return set() if "multiprocessing.reduction" in found else found


def _guard_hint() -> str:
    """Say what a script lacks whose processes are spawned; nothing where it has that."""
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
