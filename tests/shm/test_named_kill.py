"""A few of the seeded kills of benchmark/named_kill.py, which runs a thousand."""

import pytest

from benchmark.named_kill import trial


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(4)
def test_kills_among_makers_users_and_removers_leave_nothing_wrong(seed):
    trial(10_000 + seed)
