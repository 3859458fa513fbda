"""Actions in forked children that end without any clean-up, as processes do that are killed."""

import os
import signal
import sys
import time
import traceback


def in_child(action, *arguments, uid=None, timeout_s=60):
    """Run an action in a forked child, as another user if one is given; return its exit status, or "hangs"."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.settrace(None)
            if uid is not None and os.geteuid() != uid:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            action(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.0005)
    return os.waitpid(pid, 0)[1]
