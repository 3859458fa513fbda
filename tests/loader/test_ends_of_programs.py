"""Programs begin with a fork server, and end without an error, whatever their variables hold and whichever thread trains."""

import itertools
import json
from importlib.util import find_spec

import pytest

from tests.support.processes import run_python

RUN = """
import atexit, ctypes, gc, json, os, signal, sys, threading, time, warnings
import torch, stocache
from stocache.reading import DataLoader2
from stocache.system import background
from torch.utils.data.datapipes.iter import IterableWrapper

warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored

class Data(torch.utils.data.Dataset):
    stuck = None
    def __len__(self):
        return 48
    def __getitem__(self, idx):
        if idx == self.stuck:
            os.kill(os.getpid(), signal.SIGINT)
            ctypes.CDLL(None).sleep(60)
        return torch.full((8, 8), idx), idx

class Busy(Data):
    def __getitem__(self, idx):
        rows, end = torch.full((200, 500), float(idx)), time.monotonic() + 3 * (idx == 12)
        while (rows := rows.sin()) is not None and time.monotonic() < end:
            pass
        return rows

gc.freeze()  # or each program would look through all of torch at its end
ends, folder = {}, sys.argv[2]
for name, program in json.loads(open(sys.argv[1]).read()).items():
    data, said = f"{folder}/data-{len(ends)}", f"{folder}/said-{len(ends)}"
    child = os.fork()  # which ends as any program does, and need not import torch
    if not child:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        break
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), open(said).read()
else:
    print(json.dumps(ends))
    sys.exit()
exec(program)
"""

CACHED = "dataset = stocache.CachedDataset(Data(), 0.01); "
LOADERS = {
    "threads": CACHED + "loader = stocache.DataLoader(dataset, 8, num_workers=2, worker_method='thread')",
    "processes": CACHED + "loader = stocache.DataLoader(dataset, 8, num_workers=2)",
    "graph": "loader = DataLoader2(IterableWrapper(range(48)).shuffle().prefetch(4).sharding_filter())",
    "on disk": """dataset = stocache.CachedDataset(Data(), '8KB', disk=data, disk_limit='1MB', fingerprint='1')
loader = stocache.DataLoader(dataset, 8)""",
    "text": """open(data, 'w').write('1 2 3\\n' * 48)
read = stocache.ReadOptions(progress=False)
loader = stocache.StreamLoader(data, 4, 8, delimiter=' ', size_limit_gib=0.01, read=read)""",
}
if find_spec("pyarrow") is None:
    del LOADERS["text"]
ENDINGS = {
    "in a thread": """
def train():
    threading.main_thread().join()
    global batches, iterator
    batches = [len(list(loader)) for epoch in range(2)]
    iterator = iter(loader)
    batch = next(iterator)
    assert batches[0] == batches[1] > 5
threading.Thread(target=train).start()""",
    "at exit": "batches = list(loader); iterator = iter(loader); next(iterator)\natexit.register(lambda: next(iterator))",
    "within an epoch, forked": "iterator = iter(loader); batch = next(iterator)\nif not os.fork(): os._exit(0)\nos.wait()",
    "epochs": "for epoch in range(2):\n    for batch in loader: pass",
}
BUSY = """
loader = stocache.DataLoader(Busy(), 2, num_workers=8, worker_method='thread', persistent_workers=True)
iterator = iter(loader); next(iterator), next(iterator)"""
STUCK = """
background._TASK_S = 0.1
Data.stuck = 7
list(stocache.DataLoader(Data(), 2, num_workers=2, worker_method='thread'))"""


def bad_ends(programs, folder):
    """Run programs; return the status of programs that do not end well, and what they have written to stderr."""
    (folder / "programs").write_text(json.dumps(programs))
    ends = json.loads(run_python("-c", RUN, folder / "programs", folder, timeout_s=300).stdout)
    assert ends.keys() == programs.keys()
    return {name: end for name, end in ends.items() if end != [0, ""]}


def programs(number):
    """A program of each loader with an ending."""
    pairs = zip(LOADERS, itertools.islice(itertools.cycle(ENDINGS), number, None), strict=False)
    return {f"{loader}, {ending}": f"{LOADERS[loader]}\n{ENDINGS[ending]}" for loader, ending in pairs}


def test_programs_end_without_an_error_and_ctrl_c_works_while_a_worker_is_stuck(tmp_path):
    some = dict([*programs(0).items()][::2])
    ends = bad_ends({"stuck": STUCK, "busy": BUSY} | some, tmp_path)
    code, said = ends.pop("stuck")
    assert (code in (1, -2), said.count("Traceback"), said.split()[-1]) == (True, 1, "KeyboardInterrupt")
    assert ends == {}


@pytest.mark.slow
def test_each_loader_with_other_endings_ends_without_an_error(tmp_path):
    assert bad_ends(programs(1) | programs(3), tmp_path) == {}


SCRIPT = """
import sys
HAD = [name in sys.modules for name in ("torch", "stocache.loader.dataloader", "json.tool")]  # before this process imports any

import multiprocessing
import random
import numpy as np
import torch
import stocache

class Had:
    def __len__(self):
        return 4
    def __getitem__(self, idx):
        return HAD

def draw(queue):
    queue.put((random.random(), np.random.rand(), torch.rand(1).item()))

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["json.tool"])
    print(list(stocache.DataLoader(Had(), None, num_workers=2, multiprocessing_context="forkserver")))
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    for process in [context.Process(target=draw, args=(queue,)) for _ in range(2)]:
        process.start()
    print([len({*numbers}) for numbers in zip(queue.get(), queue.get())])
"""


@pytest.mark.slow
def test_workers_find_their_modules_and_those_of_the_user_imported_and_draw_their_own_numbers(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("-W", "ignore", tmp_path / "script.py", cwd=tmp_path, timeout_s=120)
    assert done.stdout == f"{[[True, True, True]] * 4}\n[2, 2, 2]\n"
