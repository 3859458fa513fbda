"""Where two descriptions differ, in words that a reader can use."""

import torch

from stocache.system.describe import describe, difference


def test_a_difference_names_values_and_no_digests():
    for one, other, says in (
        ({"image": torch.zeros(3), "id": 1}, {"image": torch.ones(3), "id": 1}, "in 'image': other values"),
        (b"abc", b"abd", "other values"), (("a",), ("b",), ".1.0.1: 'a' is not 'b'"),
        (torch.zeros(3), torch.zeros(4), ".2.0: 3 is not 4"), (torch.zeros(3), torch.zeros(3), None),
    ):  # fmt: skip
        assert difference(describe(one), describe(other)) == says
