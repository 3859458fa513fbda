"""Wait for another process for a limited time, and find and describe the process that holds a lock.

NOTE [ Stalled processes ]
    A fork copies the memory of a process, and only one of its threads. A lock that another thread held stays locked in the
    child, and the tasks of a pool wait for threads that do not exist there. /proc shows it: all threads of the child wait in
    a futex that is private to the process, so nobody can wake them. Without a timeout they wait for ever. With one, they may
    also poll for an event that never comes, so such a wait counts as a stall only after some seconds. Threads that
    sleep, or wait for a file, a pipe, a socket or another process, are in other system calls. A lock between processes is in
    a futex that is not private.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

FileKey = tuple[int, int]  # device and inode: they identify a file whatever its name

LOCK_TIMEOUT_S = 5.0
"""Seconds to wait for a lock that another process usually holds for microseconds."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_SHORTEST_S, _LONGEST_S = 0.0001, 0.01  # between two calls of ready

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_PRIVATE = 128  # FUTEX_PRIVATE_FLAG
_LIMITS_S = 600.0, 3.0, 1.0  # without CPU time: in any wait, in private futexes, and in those without a timeout
_IDLE = 0.01  # the share of a CPU that a process which only polls may use


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Call ``ready`` until it returns True. Return True then, or False when the time is over."""
    pause_s, deadline = _SHORTEST_S, time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return True


def status_of(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` in /proc behind its name; none if it has ended, or is not visible from here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if that has ended, or is not visible from here."""
    fields = status_of(pid)
    return int(fields[1]) if fields else 0


def cpu_seconds(pids: Iterable[int | None]) -> float:
    """Return the CPU seconds of processes so far, of all their threads."""
    total_s = 0.0
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    total_s += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
        except OSError:
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total_s += times.user + times.system
    return total_s


class StallWatch:
    """Checks whether a process and its children can still go on; see NOTE [ Stalled processes ]."""

    def __init__(self, pid: int) -> None:
        self._pid, self._cpu_s, self._looked = pid, -1.0, 0.0
        self._since = [0.0] * len(_LIMITS_S)  # for how long each of the limits applies

    def is_stalled(self) -> bool:
        """Check the process. Return whether it is stalled, as far as all checks so far show."""
        now, pids = time.monotonic(), list(process_tree(self._pid))
        cpu_s, wait = cpu_seconds(pids), max(map(_wait_of, pids))
        if self._cpu_s < 0 or abs(cpu_s - self._cpu_s) > _IDLE * (now - self._looked):
            wait = -1
        self._since[wait + 1 :] = [now] * (len(_LIMITS_S) - wait - 1)
        self._cpu_s, self._looked = cpu_s, now
        return any(now - since >= limit_s for since, limit_s in zip(self._since, _LIMITS_S, strict=True))


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its children, if the kernel lists them."""
    yield pid
    for path in _of_threads(pid, "children"):
        with suppress(OSError):  # the thread has ended
            for child in path.read_text().split():
                yield from process_tree(int(child))


def _of_threads(pid: int, name: str) -> list[Path]:
    """Return a file of each thread of a process; none if the process has ended."""
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").glob(f"*/{name}"))
    return []


def _wait_of(pid: int) -> int:
    """Return the kind of wait that all threads of a process are in, as an index into `_LIMITS_S`."""
    waits = []
    for path in _of_threads(pid, "syscall"):
        with suppress(OSError):  # the thread has ended, or may not be looked at
            call, *arguments = path.read_text().split()
            futex = call == _FUTEX and int(arguments[1], 16) & _PRIVATE
            waits.append(0 if not futex else 1 if int(arguments[3], 16) else 2)
    return min(waits, default=0)


def is_at_work(pid: int) -> bool:
    """Whether a process is visible from here, and is not stopped."""
    try:
        return psutil.Process(pid).status() not in _STOPPED
    except (psutil.Error, OSError):  # it has ended, belongs to another user, or /proc is hidden
        return False


def describe_first(pids: list[int]) -> str:
    """Return `describe_process` of the first of some processes."""
    return describe_process(pids[0] if pids else None)


def describe_process(pid: int | None) -> str:
    """Return a text by which a person can find a process: "process 17 (python train.py), which is stopped".

    None and 0 stand for a process that is not visible from here.
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
    """Return a text with unprintable characters as escapes: a file name may hold codes that control a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


def identify(fd: int) -> FileKey:
    """Return the key of the file that a descriptor has open."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def flock_owners(fd: int) -> list[int]:
    """Return the processes that hold a flock of a file, as far as `listed_locks` shows them."""
    key = identify(fd)
    return sorted({pid for kind, _, pid, file, _ in listed_locks() if kind == "FLOCK" and file == key})


def listed_locks() -> Iterator[tuple[str, str, int, FileKey, int]]:
    """Yield each lock of a file: its kind, READ or WRITE, its process, the file, and the first locked byte.

    The source is /proc/locks, which leaves out processes of other containers.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) == 8:  # longer lines are processes that wait
            major, minor, inode = fields[5].split(":")
            key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield fields[1], fields[3], int(fields[4]), key, int(fields[6])
