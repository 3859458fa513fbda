"""Shuffled batches by torch's samplers come from another iterator: the same batches, and the same random numbers."""

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stocache.loader import order


def is_ours(batches):
    return getattr(batches, "gi_code", None) is order._shuffled.__code__


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (2, 5)])
def test_shuffled_batches_are_those_of_torch_and_nothing_is_drawn_before_the_first(count, size, drop_last):
    sampler = BatchSampler(RandomSampler(range(count)), size, drop_last)
    for seed in range(10):
        torch.manual_seed(seed)
        expected, after = list(sampler), torch.get_rng_state()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for as_arrays in (False, True):
            torch.set_rng_state(before)
            batches = order.begin(sampler, as_arrays)
            assert is_ours(batches)
            assert torch.equal(torch.get_rng_state(), before)
            found = list(batches)
            assert [batch.tolist() for batch in found] == expected if as_arrays else found == expected
            assert torch.equal(torch.get_rng_state(), after)


class Reversed(RandomSampler):
    def __iter__(self):
        return iter(range(len(self))[::-1])


def test_other_samplers_are_asked(monkeypatch):
    drawn, own = RandomSampler(range(7), True), RandomSampler(range(7), generator=torch.Generator())
    more, fewer = (RandomSampler(range(7), num_samples=samples) for samples in (20, 4))
    for inner in (drawn, own, more, fewer, Reversed(range(7)), SequentialSampler(range(7))):
        found = []
        for begin in (order.begin, iter):
            (getattr(inner, "generator", None) or torch).manual_seed(3)
            batches = begin(BatchSampler(inner, 3, False))
            assert not is_ours(batches)
            found.append(list(batches))
        assert found[0] == found[1]
    monkeypatch.setattr(RandomSampler, "__iter__", Reversed.__iter__)  # patched by the user
    assert list(order.begin(BatchSampler(RandomSampler(range(7)), 3, False))) == [[6, 5, 4], [3, 2, 1], [0]]
