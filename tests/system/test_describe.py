"""Where two descriptions differ, in words that a reader can use."""

import pytest
import torch

from stocache.system.describe import describe, difference


@pytest.mark.parametrize(("one", "other", "says"), [
    (torch.zeros(3), torch.ones(3), "other values"),
    ({"image": torch.zeros(3), "id": 1}, {"image": torch.ones(3), "id": 1}, "in 'image': other values"),
    (b"abc", b"abd", "other values"),
    (("a",), ("b",), ".1.0.1: 'a' is not 'b'"),
    (torch.zeros(3), torch.zeros(4), ".2.0: 3 is not 4"),
    (torch.zeros(3), torch.zeros(3), None),
])  # fmt: skip
def test_a_difference_names_values_and_no_digests(one, other, says):
    assert difference(describe(one), describe(other)) == says
