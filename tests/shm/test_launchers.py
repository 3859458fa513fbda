"""Ranks that real launchers have started share one copy."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.support import launched
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
PROGRAM = launched.__file__
STARTS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", PROGRAM, "LOG", "0"],
    "spawn": [PROGRAM, "LOG", "2"],
    "Lightning": [PROGRAM, "LOG", "2", "lightning"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STARTS)
def test_ranks_share_one_copy_whatever_has_started_them(launcher, tmp_path):
    if launcher == "Lightning" and not importlib.util.find_spec("lightning"):
        pytest.skip("needs lightning")
    log = tmp_path / "reads"
    arguments = [str(log) if argument == "LOG" else argument for argument in STARTS[launcher]]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run_python(*arguments, env=os.environ | environment, timeout_s=200)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("reads-*")]
    assert len(found) == 2
    assert found[0] == found[1] == {"wrong": 0, "inode": found[0]["inode"]}
    assert launched.N <= len(log.read_text().split()) <= launched.N + 18  # nine for the probe of each rank
