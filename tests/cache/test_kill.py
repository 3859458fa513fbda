"""A few of the seeded kills of benchmark/sigkill.py and benchmark/moments.py, which run a thousand."""

import signal

import pytest

from benchmark import moments
from benchmark.sigkill import SAMPLES, VARYING, WAYS, by_block, trial


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(4)
def test_a_kill_in_the_middle_of_filling_leaves_whole_samples_only(seed, way):
    trial(WAYS[way], 10_000 + seed)


@pytest.mark.parametrize("samples", [SAMPLES, VARYING], ids=["to slots", "to records"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled(3)
def test_so_does_a_kill_in_the_middle_of_admitting_blocks(seed, samples, tmp_path):
    trial(by_block(tmp_path, samples), 10_000 + seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(3)
def test_kills_among_makers_users_and_removers_leave_nothing_wrong(seed):
    moments.trial(signal.SIGKILL, 10_000 + seed)
