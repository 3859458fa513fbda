"""Shuffled batches by torch's samplers come from another iterator: the same batches, and the same random numbers."""

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stocache.loader import order


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("count", "samples", "size"), [(10, None, 3), (9, None, 3), (2, None, 5), (7, 4, 3), (7, 20, 3), (3, 20, 5), (7, 14, 7)]
)
def test_shuffled_batches_are_those_of_torch(count, samples, size, drop_last):
    sampler = BatchSampler(RandomSampler(range(count), num_samples=samples), size, drop_last)
    for seed in range(20):
        torch.manual_seed(seed)
        expected, after = list(sampler), torch.get_rng_state()
        torch.manual_seed(seed)
        batches = order.begin(sampler)
        assert type(batches).__name__ == "generator"
        assert batches.gi_code is order._shuffled.__code__
        assert list(batches) == expected
        assert torch.equal(torch.get_rng_state(), after)


def test_nothing_is_drawn_before_the_first_batch():
    state = torch.get_rng_state()
    batches = order.begin(BatchSampler(RandomSampler(range(4)), 2, False))
    assert torch.equal(torch.get_rng_state(), state)
    next(batches)
    assert not torch.equal(torch.get_rng_state(), state)


def seed(sampler):
    (getattr(sampler, "generator", None) or torch).manual_seed(3)


class Reversed(RandomSampler):
    def __iter__(self):
        return iter(range(len(self))[::-1])


@pytest.mark.parametrize(
    "inner",
    [
        Reversed(range(7)),
        SequentialSampler(range(7)),
        RandomSampler(range(7), replacement=True),
        RandomSampler(range(7), generator=torch.Generator()),
    ],
    ids=["subclass", "sequential", "replacement", "generator"],
)
def test_other_samplers_are_asked(inner):
    sampler = BatchSampler(inner, 3, False)
    batches = order.begin(sampler)
    assert getattr(batches, "gi_code", None) is not order._shuffled.__code__
    seed(inner)
    found = list(batches)
    seed(inner)
    assert found == list(sampler)


def test_a_sampler_that_was_patched_is_asked(monkeypatch):
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter(range(len(self))))
    assert list(order.begin(BatchSampler(RandomSampler(range(5)), 2, False))) == [[0, 1], [2, 3], [4]]
