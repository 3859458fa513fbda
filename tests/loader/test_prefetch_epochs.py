"""``prefetch_epochs``: the first batches of the next epoch are made during this one, and nothing else changes."""

import pytest
import torch

from stocache import DataLoader
from tests.support.disturbed import BATCH, LENGTH, SAMPLERS, Draws, play
from tests.support.processes import wait_until

pytestmark = pytest.mark.linux


class Counts(Draws):
    """Counts the samples that all processes have loaded, and fails at some."""

    def __init__(self, failing=()):
        super().__init__()
        self.loaded, self.failing = torch.zeros(LENGTH, dtype=torch.int64).share_memory_(), failing

    def __getitem__(self, idx):
        self.loaded[idx] += 1
        if idx in self.failing and self.loaded[idx] > 1:
            raise ValueError(f"sample {idx} is gone")
        return torch.tensor([idx])


@pytest.mark.parametrize("seed", [{}, {"sample_seed": 3}], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_and_random_numbers_and_states_are_as_without(sampler, seed):
    assert play(sampler, 2, 12, prefetch_epochs=True, **seed) == play(sampler, 2, 12, **seed)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sample_seed": 3}, {"prefetch_epochs": False}], ids=str)
def test_the_first_batches_of_the_next_epoch_are_made_during_this_one(options):
    dataset = Counts()
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_epochs": True} | options
    loader = DataLoader(dataset, BATCH, **options)
    for epoch in range(1, 4):
        assert sum(1 for _ in loader) == 6
        made = epoch * LENGTH + 2 * 2 * BATCH * options["prefetch_epochs"]
        assert wait_until(lambda made=made: int(dataset.loaded.sum()) == made), (dataset.loaded, made)
    del loader


def test_an_error_of_a_batch_made_ahead_is_raised_in_its_epoch():
    dataset = Counts(failing=[5])
    loader = DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True, prefetch_epochs=True)
    assert sum(1 for _ in loader) == 6
    batches = iter(loader)
    assert next(batches).flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="sample 5 is gone"):
        next(batches)
    assert [batch[0].item() for batch in batches] == [8, 12, 16, 20]
    del loader, batches
