"""SIGKILLs while a disk cache is filled: the others go on, and no sample is wrong."""

import pytest

from tests.support.diskkills import WAYS, kill_trial
from tests.support.disks import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_any_moment_leaves_no_wrong_sample(tmp_path, way, kind):
    trials = [kill_trial(seed, tmp_path / str(seed), way, kind) for seed in range(12)]
    assert any(trial.midway for trial in trials)
