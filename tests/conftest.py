"""Every test leaves /dev/shm, the descriptor table, the mappings and the process table as it found them."""

import contextlib
import functools
import gc
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pyarrow.csv
import pytest
from hypothesis import settings

from stocache.cache.base import SampleCache, SlotState
from tests.support.processes import run_all

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network

settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("seeded")

START_METHODS = ("fork", "spawn", "forkserver")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `sampled` tests leave out."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("slow")
            seen[name] += 1


@pytest.fixture(scope="session", autouse=True)
def _servers():
    """Multiprocessing starts these once and keeps them; here before the first look at the descriptor table."""
    multiprocessing.set_forkserver_preload(["torch"])  # seconds for each process; what is spawned imports it itself
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    multiprocessing.Barrier(1)  # whose memory comes from a file it keeps
    pyarrow.csv.read_csv(pyarrow.BufferReader(b"1\n2\n"))  # which keeps a pipe


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    gc.collect()
    gc.freeze()  # what has been imported and kept so far, or each look at what is left would walk through all of it


def _in_shm() -> set[str]:
    """Names in /dev/shm of what torch, multiprocessing and stocache make there."""
    names = {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "sem.", "stocache", "pymp-"))}
    for folder in [name for name in names if name.startswith("stocache-")]:
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            names |= {f"{folder}/{name}" for name in os.listdir(f"/dev/shm/{folder}")}
    return names


def _stays_in_shm(before: set[str]) -> set[str]:
    """Return what is new in /dev/shm and stays; what other programs make there goes, in the end."""
    deadline = time.monotonic() + 10
    new = _in_shm() - before
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= _in_shm()
    return new


def _holdings() -> dict[str, object]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)},
        "segments mapped": [line for line in maps if re.search("memfd:stocache|/dev/shm/(#|stocache)", line)],
        "children": [child.pid for child in multiprocessing.active_children()],
    }


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")  # the directory's own descriptor is gone after listing it


@pytest.fixture(autouse=True)
def _leaves_no_trace(request: pytest.FixtureRequest):
    before, in_shm = _holdings(), _in_shm()
    yield
    request.node.funcargs.clear()  # pytest would keep the fixtures' values until later
    if not request.node.get_closest_marker("leaves_descriptors"):
        gc.collect()  # a DataLoader that is gone closes its queues, but waits for none of the threads that feed them
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(20)
        assert _holdings() == before
    assert not _stays_in_shm(in_shm)


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run_processes(start_method: str) -> Callable[..., None]:
    """Run ``target(number, *args)`` in ``count`` processes of the start method, and demand that each ends well."""

    return functools.partial(run_all, multiprocessing.get_context(start_method))


@pytest.fixture
def resident(cache: SampleCache) -> list[int]:
    """Indices of the samples that may be cached."""
    return [idx for idx, state in enumerate(cache.aux_array.tolist()) if state != SlotState.OOB]


@pytest.fixture
def outside(cache: SampleCache) -> list[int]:
    """Indices of the others."""
    return [idx for idx, state in enumerate(cache.aux_array.tolist()) if state == SlotState.OOB]
