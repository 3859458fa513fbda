"""Preparation by Ray: the same bytes as in this process, also with workers that are killed half-way."""

import os
import sys
from pathlib import Path

import pytest

from stocache import StorageError
from tests.support.preparing import Images, content, prepare_quietly, prepared
from tests.support.processes import run_python


def test_a_ray_that_is_not_installed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StorageError, match=r"engine='ray' needs Ray, .*: pip install 'stocache\[ray\]'"):
        prepare_quietly(Images(), tmp_path / "a", engine="ray")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["in_a_real_ray", "in_its_own_ray"])
def test_a_real_ray_writes_the_same_bytes_whatever_fails_and_its_own_is_quiet_and_ends_with_the_preparation(tmp_path, function):
    pytest.importorskip("ray", reason="comes with the extra ray")
    # Its workers hardly run on a busy machine with the niceness of 15, Ray's own choice
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_worker_niceness": "0"}
    arguments = "-m", "tests.support.ray_programs", function, tmp_path
    done = run_python(*arguments, cwd=Path(__file__).parents[3], env=environment, timeout_s=240)
    if function == "in_its_own_ray":
        assert (done.stdout, done.stderr) == ("", "")
        assert content(tmp_path) == prepared(Images(), tmp_path / "here")
