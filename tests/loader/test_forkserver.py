"""The fork server of multiprocessing, which imports what workers need."""

import pytest

from tests.support.processes import run_python

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
        return [*HAD, torch.cuda.is_initialized()]

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
    done = run_python("-W", "ignore", tmp_path / "script.py", cwd=tmp_path)
    assert done.stdout == f"{[[True, True, True, False]] * 4}\n[2, 2, 2]\n"
