"""A pytest plugin: every test leaves /dev/shm, the descriptor table, the mappings and the child processes as it found them.

Only what this test run makes in /dev/shm counts, so that other programs cannot fail a test. Where the process may mount, it
gets a /dev/shm of its own, and every name in it counts. Elsewhere a name counts by its prefix and owner, and if no process
outside this process tree has the file open or mapped. Files of other programs that have ended cannot be distinguished there.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from stocache.system.limits import memory

SHM = "/dev/shm"
PREFIXES = ("torch_", "sem.", "stocache-", "pymp-", "psm_")  # of torch, multiprocessing and stocache
SEGMENTS = ("/memfd:stocache", "/dev/shm/#", "/dev/shm/stocache")  # as they are called where they are mapped
LEAST_BYTES = 1 << 30  # of a /dev/shm of our own; it takes memory as it fills
LEAST_MEMORY = 3 << 30  # bytes for two processes that run tests, with their children
PATIENCE_S = 10.0  # for processes that end after their test
LEFT: set[str] = set()  # by tests marked leaves_descriptors; it may end in a later test

CLONE_NEWNS, MS_REC, MS_SLAVE = 1 << 17, 1 << 14, 1 << 19  # of linux/sched.h and linux/mount.h

private = False
"""Whether /dev/shm is mounted for this process and its children alone."""


def pytest_configure() -> None:
    """Mount a /dev/shm of our own, as large as the one that is there, or larger."""
    global private
    private = mount_private()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run the tests in two processes, or in one if two would meet each other's files in /dev/shm, or fill the memory."""
    pytest_configure()
    return 2 if private and memory().total >= LEAST_MEMORY else 0


def mount_private() -> bool:
    """Mount an empty /dev/shm that only this process and its children see; False if that is not allowed."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    size = max(os.statvfs(SHM).f_blocks * os.statvfs(SHM).f_frsize, LEAST_BYTES)
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None) == 0  # or others would see the mount
        and libc.mount(b"tmpfs", SHM.encode(), b"tmpfs", 0, f"mode=1777,size={size}".encode()) == 0
    )


def shm_names() -> set[str]:
    """Return the paths of the files and empty folders that may be ours."""
    found = set()
    for name in os.listdir(SHM) if os.path.isdir(SHM) else ():
        if private or name.startswith(PREFIXES):
            found.add(f"{SHM}/{name}")
            for folder, folders, files in os.walk(f"{SHM}/{name}"):
                if folders or files:  # it goes with them
                    found.discard(folder)
                found |= {f"{folder}/{each}" for each in (*folders, *files)}
    return found


def names_that_stay(before: set[str]) -> set[str]:
    """Return which names are new and stay."""
    deadline = time.monotonic() + PATIENCE_S
    new = shm_names() - before
    while new:
        new = {path for path in new & shm_names() if private or not is_foreign(path)}
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return new


def is_foreign(path: str) -> bool:
    """Whether another user owns a file, or a process outside this process tree has it open or mapped."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    try:
        status = os.lstat(path)
    except OSError:  # removed meanwhile
        return False
    if os.geteuid() not in (0, status.st_uid):
        return True
    file = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "  # a semaphore had a different name
    for pid in set(psutil.pids()) - ours:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if file in Path(f"/proc/{pid}/maps").read_text():
                return True
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), status):
                    return True
    return False


def holdings() -> set[str]:
    """Return what this process holds, as texts: children, signal handlers, mapped segments, and descriptors but the one that
    lists them.
    """
    held = {f"child {child.pid}" for child in multiprocessing.active_children()}
    held |= {f"handler of {number!r}: {signal.getsignal(number)}" for number in (signal.SIGINT, signal.SIGTERM)}
    if sys.platform == "linux":
        maps = Path("/proc/self/maps").read_text()  # thousands of lines, in most tests without a segment
        names = [name for name in SEGMENTS if name in maps]
        held |= {f"mapped segment {line}" for line in maps.splitlines() if any(map(line.count, names))} if names else set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them is closed
                held.add(f"descriptor {fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
    return held


def changes(before: set[str]) -> list[str]:
    """Say what is held now and was not before, and what is not any more. Wait for a while until nothing is: threads may end."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := differences(holdings(), before)) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    return found


def differences(now: set[str], before: set[str]) -> list[str]:
    """Say what is held now and was not before, and what is not any more."""
    return sorted(f"new {item}" for item in now - before) + sorted(f"gone {item}" for item in before - now - LEFT)


held: set[str] | None = None
"""What was held after the last test; None if that is not known, or may have changed since."""


def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    """Forget what was held if a fixture of several tests begins."""
    global held
    if fixturedef.scope != "function":
        held = None


pytest_fixture_post_finalizer = pytest_fixture_setup  # or ends


@pytest.fixture(autouse=True)
def leaves_no_trace(request: pytest.FixtureRequest):
    """Compare what is held after the test with what was held before it."""
    global held
    if held is None:
        gc.collect()
        held = holdings()
    before, names, threads = held, shm_names(), {*threading.enumerate()}
    held = None
    gc.freeze()  # or each collection after the test would walk through all that has been imported
    yield
    request.node.funcargs.clear()  # pytest would keep the fixtures' values until later
    gc.collect()  # a DataLoader that is gone closes its queues, but waits for none of the threads that feed them
    for thread in {*threading.enumerate()} - threads:
        if thread.name.startswith(("QueueFeederThread", "stocache worker")):  # one that was stopped may have a task still
            thread.join(20)
    if request.node.get_closest_marker("leaves_descriptors"):
        LEFT.update(holdings() - before)
    elif (now := holdings()) == before:
        held = now
    else:
        assert not changes(before)
    assert not names_that_stay(names)
