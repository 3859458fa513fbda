"""Waiting for another process: never without end, and at the end it is said who was waited for."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

FileKey = tuple[int, int]  # device and inode: what a file is, whatever its name

PATIENCE_S = 5.0
"""Seconds to wait for another process that holds what it usually holds for microseconds."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_SHORTEST_S, _LONGEST_S = 0.0001, 0.01  # between two looks


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Call ``ready`` again and again, until it returns True (then return True) or the time is over (False)."""
    pause_s, deadline = _SHORTEST_S, time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return True


def is_at_work(pid: int) -> bool:
    """Whether a process can be seen from here, and is not stopped."""
    try:
        return psutil.Process(pid).status() not in _STOPPED
    except (psutil.Error, OSError):  # it has ended, or is not ours to look into, or /proc is hidden
        return False


def describe_first(pids: list[int]) -> str:
    """Return what `describe_process` tells of the first of some processes."""
    return describe_process(pids[0] if pids else None)


def describe_process(pid: int | None) -> str:
    """Return what a person needs to know to find a process: "process 17 (python train.py), which is stopped".

    None, or 0, is a process that cannot be seen from here.
    """
    if not pid:
        return "a process of another container"
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        stopped = ", which is stopped" if process.status() in _STOPPED else ""
    except (psutil.Error, OSError):
        return f"process {pid}"
    return f"process {pid} ({printable(command)[:60]}){stopped}"


def printable(text: str) -> str:
    """Return a text with whatever could control a terminal written as an escape: a name may hold an ESC byte."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


# ---------------------------------------------------------------------------------------------------- locks of files


def try_flock(fd: int) -> bool:
    """Take the exclusive flock of a file, or return False."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def identify(fd: int) -> FileKey:
    """Return what the file of a descriptor is."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def flock_owners(fd: int) -> list[int]:
    """Return the processes that took the flock of a file which is held now; as far as `listed_locks` tells."""
    key = identify(fd)
    return sorted({pid for kind, _, pid, its, _ in listed_locks() if kind == "FLOCK" and its == key})


def listed_locks() -> Iterator[tuple[str, str, int, FileKey, int]]:
    """Yield the kind, READ or WRITE, process, file and first byte of all locks that processes have.

    As /proc/locks tells, which leaves out processes of other containers.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) == 8:  # else it is waited for
            major, minor, inode = fields[5].split(":")
            key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield fields[1], fields[3], int(fields[4]), key, int(fields[6])
