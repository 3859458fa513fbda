"""The classes whose code runs for a cached batch are the classes on the page of the package."""

import os
import re
import sys
from collections import deque
from itertools import islice

import pytest
import torch

from stocache import CachedDataset, DataLoader
from tests.support.house import PACKAGE

if sys.version_info < (3, 11):
    pytest.skip("code has no qualified name", allow_module_level=True)

WARM, SEEN = 4, 8  # batches of an epoch that go before, and that are looked at
NEW_BUFFER = {"Extents", "FileLocks", "Layout"}  # which reserve and map a buffer that is used for the first time


def of_page():
    text = (PACKAGE / "README.md").read_text()
    rows = re.search(r"a batch meets these classes.*?\n\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def met():
    """The classes of stocache whose methods run for some batches of a warm epoch, in the workers and here."""
    images = [(torch.full((3, 64, 64), idx, dtype=torch.uint8), idx) for idx in range(256)]
    looks, (found, into), noted = torch.zeros(1).share_memory_(), os.pipe(), set()

    def note(frame, event, argument):
        owner, _, name = frame.f_code.co_qualname.partition(".")
        is_ours = event == "call" and frame.f_globals.get("__name__", "").startswith("stocache.")
        if is_ours and looks.numpy()[0] and name and owner[0].isupper() and owner not in noted:
            noted.add(owner)
            os.write(into, f"{owner} ".encode())

    with CachedDataset(images, "64MB", audit=0) as cached:
        cached.warm(progress=False)
        workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader = DataLoader(cached, 16, shuffle=True, worker_init_fn=lambda number: sys.setprofile(note), **workers)
        for _ in range(3):
            deque(loader, 0)
        batches = iter(loader)
        deque(islice(batches, WARM), 0)
        looks.fill_(1)
        sys.setprofile(note)
        deque(islice(batches, SEEN), 0)
        sys.setprofile(None)
        looks.fill_(0)
        deque(batches, 0)
        del batches, loader
    os.close(into)
    with open(found) as names:
        return {*names.read().split()}


@pytest.mark.linux
def test_a_cached_batch_meets_the_classes_that_the_page_lists():
    usual = met() & met()  # not what a batch meets that came late, say
    assert usual - NEW_BUFFER ^ of_page() == set()
