"""If a system shares no memory between processes, a cache is memory of one process, and nothing is served wrongly.

The programs run on Linux in processes from which `tests/system/platform/portable` hides what only Linux has.
"""

import os
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, script_runner

HIDING = os.pathsep.join([str(Path(__file__).parent / "portable"), str(ROOT)])

BEGIN = """
import logging, os, pickle, sys, torch
import stocache
from stocache import *
from stocache.system.platform import here
assert not here.SHARES_MEMORY
logging.basicConfig(format="%(message)s")

class Numbers(torch.utils.data.Dataset):
    loads = 0
    def __len__(self):
        return 60
    def __getitem__(self, idx):
        type(self).loads += 1
        return torch.full((3, 20, 20), idx, dtype=torch.uint8), idx

def check(loader):
    images, numbers = map(torch.cat, zip(*loader))
    assert numbers.tolist() == list(range(60)) and (images[:, 0, 0, 0] == numbers).all()
"""

PROGRAMS = {
    "worker threads are the default, and fill the cache": """
dataset = CachedDataset(Numbers(), "10MB", audit=0)
loader = DataLoader(dataset, batch_size=7, num_workers=2)
assert loader.worker_method == "thread"
for epoch in range(3):
    check(loader)
assert dataset.stats().epochs[-1].hit_rate == 1
assert loader.stats().epochs[-1].hits == 60
""",
    "worker processes serve right samples, forked and spawned": """
if __name__ == "__main__":
    dataset = CachedDataset(Numbers(), "10MB")
    check(DataLoader(dataset, batch_size=7))
    for method in ("fork", "spawn"):
        loader = DataLoader(dataset, 7, num_workers=2, worker_method="multiprocessing", multiprocessing_context=method)
        for epoch in range(2):
            check(loader)
    assert dataset.cache.stats().filled == 60
""",
    "every module can be imported": """
import importlib, pkgutil
for module in pkgutil.walk_packages(stocache.__path__, "stocache."):
    others = "platform.linux", "copy_kernel", "integrations.zarr", "preparation.ray", "__main__", "spawned"
    try:
        module.name.endswith(others) or importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # of an extra
        assert not error.name.startswith("stocache"), error
""",
    "a limit above the memory is lowered, and a name is refused": """
import psutil, pytest
cache = SharedCache(10 * psutil.virtual_memory().total / 2**30, 1 << 20, (1 << 20,), torch.uint8)
assert 0 < len(cache) < 1 << 20
with pytest.raises(stocache.errors.CacheNameError, match="Linux only. Leave the name out"):
    CachedDataset(Numbers(), "1MB", name="numbers")
""",
}


COMMANDS = {  # and what they print
    "info": "shared memory  none on this system", "doctor --json": "[]", "ls": "no named caches",
}  # fmt: skip


@pytest.fixture(scope="module")
def run_hidden():
    with script_runner(PYTHONPATH=HIDING, PYTHONWARNINGS="ignore") as run:
        yield run


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_work(name, run_hidden, tmp_path):
    status, _, stderr = run_hidden(tmp_path, BEGIN + PROGRAMS[name])
    assert status == 0, stderr
    assert ("worker_method='thread': on this system" in stderr) == name.startswith("worker threads")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work(command, run_hidden, tmp_path):
    script = f"import sys\nfrom stocache.tools.cli import main\nsys.argv[1:] = {command.split()}\nmain()"
    status, stdout, stderr = run_hidden(tmp_path, script)
    assert (status, COMMANDS[command] in stdout) == (0, True), stdout + stderr
