"""Orders that are computed: permutations, and as random as those of randperm."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Permutation

KEYS = 600


def orders(n, count=KEYS):
    """Return orders of ``range(n)`` from as many keys, beside those of torch."""
    everything = np.arange(n)
    ours = np.stack([Permutation(n, 7, epoch).at(everything) for epoch in range(count)])
    generator = torch.Generator().manual_seed(7)
    return ours, torch.stack([torch.randperm(n, generator=generator) for _ in range(count)]).numpy()


@given(st.integers(0, 3000), st.lists(st.integers(0, 2**70), max_size=4))
def test_every_number_has_one_place(n, key):
    order = Permutation(n, *key)
    numbers = order.at(np.arange(n))
    assert sorted(numbers) == list(range(n)) == list(range(len(order)))
    assert (order.places(numbers) == np.arange(n)).all()
    assert (Permutation(n, *key).at(np.arange(n)) == numbers).all()


@pytest.mark.parametrize("n", [2**24 + 1, 10**9, 2**32 + 1, 2**62])
def test_large_orders_are_computed_anywhere(n):
    places = np.random.default_rng(0).integers(0, n, 100_000)
    order = Permutation(n, 1)
    numbers = order.at(places)
    assert numbers.min() >= 0
    assert numbers.max() < n
    assert (order.places(numbers) == places).all()
    assert (order.at(places[77:99]) == numbers[77:99]).all()
    assert abs(numbers.mean() / n - 0.5) < 0.01


def excess(counts, expected):
    """Return by how many standard deviations chi-square is above its mean."""
    possible = expected > 0
    assert not counts[~possible].any()
    degrees = possible.sum() - 1
    return (((counts - expected)[possible] ** 2 / expected[possible]).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("n", [16, 100, 257])
def test_pairs_are_as_frequent_as_in_randperm(n):
    cells = min(n, 16)
    for order in orders(n):
        cell = order * cells // n
        share = np.bincount(np.arange(n) * cells // n) / n
        counts = np.zeros((cells, cells))
        for first, second in pairwise(cell.T):  # neighbours in the order
            np.add.at(counts, (first, second), 1)
        together = np.outer(share, share) * n * n - np.diag(share * n)  # a number is not its own neighbour
        assert excess(counts, together * KEYS / n) < 5


@pytest.mark.parametrize("n", [64, 1000])
def test_displacements_are_those_of_randperm(n):
    for order in orders(n):
        displaced = np.abs(order - np.arange(n))
        expected = np.append(n, 2 * (n - np.arange(1, n))) / n * KEYS  # of n² pairs of places, so many are that far apart
        counts = np.bincount(displaced.ravel(), minlength=n)
        groups = np.arange(n) * 16 // n
        assert excess(np.bincount(groups, counts), np.bincount(groups, expected)) < 5


def test_places_are_as_frequent_for_each_number_as_in_randperm():
    for order in orders(32, 2000):
        counts = np.zeros((32, 32))
        np.add.at(counts, (np.broadcast_to(np.arange(32), order.shape), order), 1)
        assert excess(counts, np.full((32, 32), 2000 / 32)) < 5


def test_keys_that_differ_little_make_orders_that_have_nothing_in_common():
    n, everything = 10_000, np.arange(10_000)
    made = [Permutation(n, *key).at(everything) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0), (2**32,)]]
    for number, one in enumerate(made):
        for other in made[:number]:
            assert (one == other).sum() < 12  # one is expected
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


@pytest.mark.parametrize("arguments", [(-1,), (2.0,), (2**62 + 1,)])
def test_numbers_that_are_none_are_errors(arguments):
    with pytest.raises(LimitError, match="n must be between 0 and 2\\*\\*62"):
        Permutation(*arguments)


@pytest.mark.parametrize("key", [-1, "a", 0.5])
def test_keys_that_are_none_are_errors(key):
    with pytest.raises(LimitError, match="key must be integers of 0 or more"):
        Permutation(5, key)
