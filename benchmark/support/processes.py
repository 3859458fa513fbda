"""Processes that call a function or play a role, and waiting for them."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from stocache.shm import segment

Result = TypeVar("Result")


def calling(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the command of a new interpreter that calls a function of a module, and prints the result; all values are JSON."""
    of = f"from {function.__module__} import {function.__name__} as function"
    code = f"import json, sys; {of}; print(json.dumps(function(*json.loads(sys.argv[1]))))"
    return [sys.executable, "-c", code, json.dumps(arguments)]


def start_ranks(count: int, port: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Start torchrun, whose ranks on this machine, ``count`` of them, call a function of a module.

    ``options``: more options of torchrun.
    """
    options |= {"nproc_per_node": count, "master_port": port}
    command = [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
    command += ["--no-python", *calling(function, *arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True)


def in_interpreter(function: Callable[..., Any], *arguments: Any, before: Sequence[str] = (), **options: Any) -> Any:
    """Return what a function of a module returns in a new interpreter. Its arguments and its result are values of JSON.

    Args:
        function: of a module; what it prints before it returns is dropped.
        arguments: of the function.
        before: a command that starts the interpreter, as ``unshare --mount``.
        options: of `subprocess.run`.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    options = {"check": True, "cwd": Path(__file__).parents[2]} | options
    done = subprocess.run([*before, *calling(function, *arguments)], stdout=subprocess.PIPE, text=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


def in_fork(work: Callable[[], Result]) -> Result:
    """Return what a function returns in a forked process, whose maps, threads, open files and memory are gone after it."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(work()))
    process.start()
    sending.close()
    try:
        result: Result = receiving.recv()
    finally:
        process.join()
    return result


def fork(role: Callable[[], object]) -> int:
    """Fork a process that plays a role; return its pid. It exits with 0 if the role returns or is interrupted, else with 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.suppress(KeyboardInterrupt):  # before the role has begun, or after it
                torch.set_num_threads(1)  # as in a DataLoader's worker: it would wait for threads that only the parent has
                role()
            segment._leave_all()  # as at the exit of an interpreter
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def wait(pid: int, patience_s: float = 60) -> int:
    """Return the status of a child when it has ended; AssertionError if it takes too long."""
    deadline = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        assert time.monotonic() < deadline, f"process {pid} hangs"
        time.sleep(0.0005)
