"""Run functions in other processes, and wait for what they do."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path

import torch


def _fork(action, *arguments, uid=None):
    """Fork a child that runs an action, as another user if one is given; return its pid.

    The child ends without any clean-up, as a process does that is killed.
    """
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
    return pid


def in_child(action, *arguments, uid=None, timeout_s=60):
    """Run an action in a forked child, as another user if one is given; return its exit status, or "hangs"."""
    pid, deadline = _fork(action, *arguments, uid=uid), time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.0005)
    return os.waitpid(pid, 0)[1]


def run_all(context: BaseContext, count: int, target: Callable[..., None], *args: object, timeout_s: float = 60) -> None:
    """Run ``target(number, *args)`` in ``count`` processes, and demand that each ends well."""
    processes = [context.Process(target=target, args=(number, *args)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)  # on a busy machine, importing torch alone takes half of it
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    assert codes == [0] * count


def run_python(*arguments, ok=True, timeout_s=60, **options):
    """Run Python with arguments in a process of its own; a failure shows the end of what it has printed.

    Demand that it ends with status 0, unless ``ok`` is False. Return what `subprocess.run` returns.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"} | options
    with subprocess.Popen([sys.executable, *map(str, arguments)], **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            ok, process.returncode = True, f"no end after {timeout_s} s"
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    tail = "\n".join(f"{name}: …{text[-2000:]}" for name, text in (("stdout", stdout), ("stderr", stderr)) if text)
    assert done.returncode == 0 or not ok, f"{shlex.join(done.args)[-500:]} ended with {done.returncode}\n{tail}"
    return done


def leave_process_group():
    """Destroy the process group of torch, and wait until gloo's threads have let go of their last tensors.

    Something still refers to the group, so that its threads go on. If one of them frees a tensor of Python while the
    interpreter goes down, it is ended inside C++ code, and the process aborts, also in a program of torch alone.
    """
    torch.distributed.destroy_process_group()
    asleep = 0
    deadline = time.monotonic() + 20
    while asleep < 3 and time.monotonic() < deadline:
        time.sleep(0.005)  # and gives away the GIL
        asleep += 1
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                stat = (task / "stat").read_text()
                if "gloo_run" in stat and ") S" not in stat:
                    asleep = 0


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return True


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_in(run, after_s):
    """Fork a child that runs a function, and kill it when it has run for some seconds. It must not have failed by then."""
    begun, tell = os.pipe()

    def act():
        os.write(tell, b"x")
        run()

    pid = _fork(act)
    os.read(begun, 1)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(begun)
    os.close(tell)
    assert status in (0, signal.SIGKILL)


@contextlib.contextmanager
def stopped(action):
    """Fork a child that runs an action and is stopped in it or after it; give its pid.

    It holds all that it has taken until it is killed, at the end of the context at the latest.
    """

    def act():
        kept = action()
        stop()
        del kept

    pid = _fork(act)
    _, status = os.waitpid(pid, os.WUNTRACED)
    try:
        assert os.WIFSTOPPED(status), "the child did not stop"
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
