"""Marks of tests that need what not every supported torch has."""

import inspect

import pytest
from torch.utils.data import DataLoader

needs_in_order = pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="torch before 2.6 has no in_order"
)
