"""End daemon threads before the interpreter ends.

NOTE [ Threads at exit ]
    A daemon thread does not keep the program from ending. But before Python 3.14, a thread that requests the GIL of an
    interpreter that is shutting down is ended inside that request (see PyEval_RestoreThread in Python's documentation). If the
    request comes from C++ code, such as torch's, the whole process aborts: "terminate called without an active exception". So
    when the program ends, the threads of `start_daemon`, also those whose owner is gone, are stopped and joined. A thread that
    goes on with its work, such as a user's slow sample, is interrupted by a SystemExit. If the user's code catches that, a
    second exception follows, whose constructor sleeps: so the thread does not request the GIL any more. Only a thread in a
    single long call outlives the wait.

    The daemon thread of disk/writer.py is not one of these: a finalizer of multiprocessing waits for its writes.
"""

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_TASK_S = 1.0  # at exit, for the current task of a thread
_INTERRUPTED_S = 4.0  # after it was interrupted
_ASLEEP_S = 1.0  # for those that go on to fall asleep

_running: dict[threading.Thread, Callable[[], None]] = {}


def start_daemon(run: Callable[..., None], arguments: tuple[Any, ...], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a thread, which ``stop()`` ends when the program ends. Raises RuntimeError if it cannot be started."""

    def run_and_forget() -> None:
        try:
            run(*arguments)
        finally:
            del _running[thread]

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        del _running[thread]
        raise
    return thread


def join_all(threads: Iterable[threading.Thread], patience_s: float) -> None:
    """Wait for several threads, at most ``patience_s`` in all."""
    until = time.monotonic() + patience_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


@atexit.register
def _end_all() -> None:
    running = [(thread, stop) for thread, stop in list(_running.items()) if thread.is_alive()]  # forked children have none
    for _, stop in running:
        stop()
    threads = [thread for thread, _ in running]
    join_all(threads, _TASK_S)
    _interrupt(threads, SystemExit, _INTERRUPTED_S)
    _interrupt(threads, _Asleep, _ASLEEP_S)


class _Asleep(BaseException):
    """An exception whose constructor never returns: the thread in which it is raised sleeps."""

    def __init__(self) -> None:
        while True:
            time.sleep(3600)


def _interrupt(threads: Iterable[threading.Thread], error: type[BaseException], patience_s: float) -> None:
    """Raise an exception in the threads that live, and wait for them."""
    busy = [thread for thread in threads if thread.is_alive()]
    for thread in busy:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
    join_all(busy, patience_s)
