"""A few of the seeded kills of benchmark/sigkill.py, which runs a thousand."""

import pytest

from benchmark.sigkill import trial


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(2)
def test_a_kill_in_the_middle_of_filling_leaves_whole_samples_only(seed):
    trial(10_000 + seed)
