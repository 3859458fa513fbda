"""A few of the seeded kills of benchmark/sigkill.py, benchmark/filling.py and benchmark/named_kill.py, which run a thousand."""

import pytest

from benchmark.filling import EXPECTED, VARYING, by_block, by_get_or_load_many, by_set_slots
from benchmark.named_kill import trial as trial_of_named
from benchmark.sigkill import slot_by_slot, trial


@pytest.mark.parametrize("make", [slot_by_slot, by_set_slots, by_get_or_load_many])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(4)
def test_a_kill_in_the_middle_of_filling_leaves_whole_samples_only(seed, make):
    trial(10_000 + seed, make)


@pytest.mark.parametrize("samples", [EXPECTED, VARYING], ids=["to slots", "to records"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled(3)
def test_so_does_a_kill_in_the_middle_of_admitting_blocks(seed, samples, tmp_path):
    trial(10_000 + seed, by_block(tmp_path, samples), 0.03)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(3)
def test_kills_among_makers_users_and_removers_leave_nothing_wrong(seed):
    trial_of_named(10_000 + seed)
