"""Programs end without an error, whatever their global variables still hold, and whichever thread trains last."""

import subprocess
import sys

import pytest

HEAD = """
import atexit, os, sys, threading, warnings
import torch, stocache
from stocache.reading import DataLoader2
from torch.utils.data.datapipes.iter import IterableWrapper
warnings.simplefilter("ignore")
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, idx):
        return torch.full((8, 8), idx), idx
"""

CACHED = "dataset = stocache.CachedDataset(Data(), 0.01); "
LOADERS = {
    "no workers": CACHED + "loader = stocache.DataLoader(dataset, 8)",
    "gathered ahead": CACHED + "loader = stocache.DataLoader(dataset, 8, prefetch_factor=2)",
    "processes": CACHED + "loader = stocache.DataLoader(dataset, 8, num_workers=2)",
    "threads": CACHED + "loader = stocache.DataLoader(dataset, 8, num_workers=2, worker_method='thread')",
    "of torch": CACHED + "loader = torch.utils.data.DataLoader(dataset, 8, num_workers=2)",
    "on disk": (
        "dataset = stocache.CachedDataset(Data(), '8KB', disk=sys.argv[1], disk_limit='1MB', fingerprint='1')\n"
        "loader = stocache.DataLoader(dataset, 8)"
    ),
    "text": (
        "open(sys.argv[1], 'w').write('1 2 3\\n' * 48)\n"
        "read = stocache.ReadOptions(progress=False)\n"
        "loader = stocache.StreamLoader(sys.argv[1], 4, 8, delimiter=' ', size_limit_gib=0.01, read=read)"
    ),
    "graph": "loader = DataLoader2(IterableWrapper(range(48)).shuffle().prefetch(4).sharding_filter())",
}
ENDINGS = {
    "epochs": "for epoch in range(2):\n    for batch in loader: pass",
    "within an epoch, forked": "iterator = iter(loader); batch = next(iterator)\nif not os.fork(): os._exit(0)\nos.wait()",
    "at exit": "batches = list(loader); iterator = iter(loader); next(iterator)\natexit.register(lambda: next(iterator))",
    "in a thread": """
def train():
    threading.main_thread().join()
    global batches, iterator
    batches = [len(list(loader)) for epoch in range(2)]
    iterator = iter(loader)
    batch = next(iterator)
    assert batches[0] == batches[1] > 5
threading.Thread(target=train).start()""",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.sampled(5)
def test_a_program_ends_without_an_error(loader, ending, tmp_path):
    program = f"{HEAD}\n{LOADERS[loader]}\n{ENDINGS[ending]}"
    command = [sys.executable, "-c", program, tmp_path / "data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
