"""Objects of classes in C, which hold more than their attributes, or hide these."""

import asyncio
import random
from contextlib import closing

import numpy as np
import pytest
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader
from stocache.system.describe import describe


def test_what_a_class_in_c_holds_besides_attributes_is_compared():
    one, same, other = (describe([random.Random(seed)]) for seed in (1, 1, 2))
    assert one == same != other


def test_it_does_not_matter_where_an_array_lies(tmp_path):
    mapped = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(3, 2))
    assert describe(mapped[1]) == describe(mapped[1].copy()) == describe(np.array(mapped[1]).view(np.memmap))


class Handles(Dataset):
    def __init__(self, loop):
        self.handle = asyncio.Future(loop=loop)  # vars() of it raises TypeError, as for an object of SWIG's

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        return {"handle": self.handle, "idx": idx}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_method": "thread"}])
def test_datasets_and_samples_hold_objects_that_hide_their_attributes(options, caplog):
    with closing(asyncio.new_event_loop()) as loop, CachedDataset(Handles(loop), 1) as cached:
        batches = list(DataLoader(cached, batch_size=2, collate_fn=list, **options))
    assert [sample["idx"] for batch in batches for sample in batch] == [0, 1, 2, 3]
    assert "is a Future, which has no bytes of its own" in caplog.text
