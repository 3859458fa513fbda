"""Orders that are computed: permutations, and as random as those of randperm."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Permutation

pytestmark = pytest.mark.quick


def orders(n, count=300):
    """Return orders of ``range(n)`` from as many keys, and those of torch."""
    generator = torch.Generator().manual_seed(7)
    yield np.stack([Permutation(n, 7, epoch).at(np.arange(n)) for epoch in range(count)])
    yield torch.stack([torch.randperm(n, generator=generator) for _ in range(count)]).numpy()


@given(st.integers(0, 3000), st.lists(st.integers(0, 2**70), max_size=4))
def test_every_number_has_one_place(n, key):
    order = Permutation(n, *key)
    numbers = order.at(np.arange(n))
    assert sorted(numbers) == list(range(n)) == list(range(len(order)))
    assert (order.places(numbers) == np.arange(n)).all()
    assert (Permutation(n, *key).at(np.arange(n)) == numbers).all()


@pytest.mark.parametrize("n", [2**24 + 1, 2**32 + 1, 2**62])
def test_large_orders_are_computed_anywhere(n):
    places = np.random.default_rng(0).integers(0, n, 40_000)
    order = Permutation(n, 1)
    numbers = order.at(places)
    assert numbers.min() >= 0
    assert numbers.max() < n
    assert (order.places(numbers) == places).all()
    assert (order.at(places[77:99]) == numbers[77:99]).all()
    assert abs(numbers.mean() / n - 0.5) < 0.01


def excess(counts, expected):
    """Return by how many standard deviations chi-square is above its mean."""
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_neighbours_and_places_are_as_frequent_as_in_randperm():
    for order in orders(100):
        cell, counts = order * 16 // 100, np.zeros((16, 16))
        share = np.bincount(np.arange(100) * 16 // 100)
        for first, second in pairwise(cell.T):
            np.add.at(counts, (first, second), 1)
        together = np.outer(share, share) - np.diag(share)  # a number is not its own neighbour
        assert excess(counts, together * len(order) / 100) < 5
    for order in orders(32, 1000):
        counts = np.zeros((32, 32))
        np.add.at(counts, (np.broadcast_to(np.arange(32), order.shape), order), 1)
        assert excess(counts, np.full((32, 32), 1000 / 32)) < 5


def test_keys_that_differ_little_make_orders_that_have_nothing_in_common():
    n = 10_000
    made = [Permutation(n, *key).at(np.arange(n)) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0), (2**32,)]]
    for number, one in enumerate(made):
        for other in made[:number]:
            assert (one == other).sum() < 12  # one is expected
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_numbers_and_keys_out_of_range_are_errors():
    for wrong in (-1, 2.5, 2**62 + 1):
        with pytest.raises(LimitError, match="n must be between 0 and 2\\*\\*62"):
            Permutation(wrong)
    for wrong in (-1, "a", 0.5):
        with pytest.raises(LimitError, match="key must be integers of 0 or more"):
            Permutation(5, wrong)
