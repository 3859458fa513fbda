"""The classes whose code runs for a cached batch are the classes on the page of the package."""

import json
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

WARM, SEEN = 8, 4  # batches of a worker that go before, and that are looked at
NEW_BUFFER = {"Extents", "FileLocks", "Layout"}  # which reserve and map a buffer that is used for the first time


class Met:
    """Notes the classes of stocache whose methods run in this thread, after some batches. A ``worker_init_fn``, too."""

    def __init__(self, path):
        self.path, self.classes, self.batches = str(path), set(), 0

    def __call__(self, number):
        if number == 0:
            sys.setprofile(self.note)

    def note(self, frame, event, argument):
        if event != "call" or not frame.f_globals.get("__name__", "").startswith("stocache."):
            return
        owner, _, name = frame.f_code.co_qualname.partition(".")
        if name == "__getitems__":
            self.batches += 1
            if self.batches == WARM + SEEN:
                with open(self.path, "w") as file:
                    json.dump(sorted(self.classes), file)
        if self.batches >= WARM and name and owner[0].isupper():
            self.classes.add(owner)


def of_page():
    text = (PACKAGE / "README.md").read_text()
    rows = re.search(r"a batch meets these classes.*?\n\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def met(path):
    """The classes that some batches of a warm epoch have met, in the worker and here."""
    images = [(torch.full((3, 64, 64), idx, dtype=torch.uint8), idx) for idx in range(256)]
    in_worker, here = Met(path), Met("")
    with CachedDataset(images, "64MB", audit=0) as cached:
        cached.warm(progress=False)
        workers = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": in_worker, "multiprocessing_context": "fork"}
        loader = DataLoader(cached, 16, shuffle=True, **workers)
        for _ in range(3):
            deque(loader, 0)
        batches = iter(loader)
        next(batches)
        here.batches = WARM
        sys.setprofile(here.note)
        try:
            deque(islice(batches, SEEN), 0)
        finally:
            sys.setprofile(None)
        deque(batches, 0)
        del batches, loader
    return here.classes | set(json.loads(path.read_text()))


@pytest.mark.linux
def test_a_cached_batch_meets_the_classes_that_the_page_lists(tmp_path):
    usual = met(tmp_path / "first") & met(tmp_path / "second")  # not what a batch meets that came late, say
    assert usual - NEW_BUFFER ^ of_page() == set()
