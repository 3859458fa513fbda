"""Records of loaders over named caches: left by killed processes, and forged."""

import json
import os
import signal
from pathlib import Path

import torch

from stocache.observe.recording.record import TIMING_ROW_WORDS, WAIT_NS, TimingRecord
from stocache.shm import layout, registry
from tests.support.processes import in_child

FOLDER = Path(registry.directory_of())


SQUARES = [torch.tensor([idx, idx * idx]) for idx in range(24)]


def leave_behind(make):
    """Have a killed process leave what a function makes."""

    def act():
        kept = make()  # noqa: F841  # not closed
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(act) == signal.SIGKILL


def leave_loader_behind(cache_name, rank=0):
    """Have a killed process leave the record of a loader."""

    def make():
        record = TimingRecord(0, False, cache_name, rank)
        record.main.add(WAIT_NS, 5)
        return record

    leave_behind(make)


def forge(name="c.loader-1-0", identity=None, facts=None, rows=1, control=None, size=None):
    """Write the file of a loader as another process might, and cut it to a size; return its path."""
    identity = {"loader": name, "cache": "c", "rank": 0, "pid": 1} if identity is None else identity
    facts = {"dataset_len": 0, "capacity": 0, "rows": rows} if facts is None else facts
    descriptor = json.dumps({"identity": identity, "facts": facts, "created": 1.0}).encode()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    path = FOLDER / name
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    plan = layout.Layout.for_sizes(rows * TIMING_ROW_WORDS * 8 if control is None else len(control), 0, descriptor)
    plan.allocate(fd)
    os.pwrite(fd, control or b"", plan.control_at)
    if size is not None:
        os.ftruncate(fd, size)
    os.close(fd)
    return path
