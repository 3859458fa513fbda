"""Matrices of tests, thinned: each pair of values of two axes occurs in at least one row."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def pairs(*axes: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    """Return few rows of the product of the axes that hold each pair of values of two axes, for `pytest.mark.parametrize`.

    Each row is the one that holds most of the pairs still missing, the first of equals: the same rows in each run.
    """

    def held(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(row), min(2, len(axes))))

    rows = {row: held(row) for row in itertools.product(*(range(len(axis)) for axis in axes))}
    missing = set().union(*rows.values())
    while missing:
        row = max(rows, key=lambda row: len(rows[row] & missing))
        missing -= rows.pop(row)
        yield tuple(axis[at] for axis, at in zip(axes, row, strict=True))
