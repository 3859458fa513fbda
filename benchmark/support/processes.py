"""Child processes that play a role, and waiting for them."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable

from stocache.shm import segment


def fork(role: Callable[[], None]) -> int:
    """Fork a process that plays a role; return its pid. It exits with 0 if the role returns or is interrupted, else with 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.suppress(KeyboardInterrupt):  # before the role has begun, or after it
                role()
            segment._leave_all()  # as at the exit of an interpreter
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def wait(pid: int, deadline: float, message: str) -> int:
    """Return the status of a child when it has ended; AssertionError with the message if that is after ``deadline``."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        assert time.monotonic() < deadline, message
        time.sleep(0.0005)
