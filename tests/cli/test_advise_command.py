"""stocache advise module:function."""

import sys

import pytest
from typer.testing import CliRunner

from stocache.cli.app import app

MODULE = """
import time
import torch

class Numbers:
    def __init__(self, length, breaks=None, load_s=0.0):
        self.length, self.breaks, self.load_s = length, breaks, load_s
    def __len__(self):
        return self.length
    def __getitem__(self, idx):
        if idx == self.breaks:
            raise ValueError(f"sample {idx}\\nis broken")
        time.sleep(self.load_s)
        return {"x": torch.full((3,), float(idx)), "label": idx}

numbers, one, empty = lambda: Numbers(40), lambda: Numbers(1), lambda: Numbers(0)
broken, nothing, slow = lambda: Numbers(40, 7), lambda: None, lambda: Numbers(500, load_s=10)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in a folder with a module, which is forgotten afterwards."""
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *arguments: CliRunner().invoke(app, ["advise", *map(str, arguments)])
    sys.modules.pop("own_data", None)


@pytest.mark.parametrize(("function", "samples"), [("numbers", "40 samples"), ("one", "1 sample")])
def test_it_prints_settings_and_their_code(run, function, samples):
    result = run(f"own_data:{function}", "--step-ms", 40, "--batch-size", 7, "--time-limit-s", 8)
    assert result.exit_code == 0, result.output
    assert f"Numbers: {samples}" in result.stdout
    assert "a step of 40 ms for 7 samples" in result.stdout
    assert result.stdout.count("DataLoader(") >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere_at_all:f",), "module 'nowhere_at_all' cannot be imported: ModuleNotFoundError"),
        (("own_data:nothing",), "own_data:nothing returned None: NoneType has no samples by number"),
        (("own_data:empty",), "own_data:empty returned Numbers of length 0. There is nothing to measure."),
        (("own_data:numbers", "--step-ms", "-1"), "step_ms=-1.0 must be a finite number of milliseconds, 0 or more."),
        (("own_data:numbers", "--step-ms", "nan"), "step_ms=nan must be a finite number of milliseconds, 0 or more."),
        (("own_data:numbers", "--batch-size", "0"), "batch_size=[0] must be a number of samples from 1 to"),
        (("own_data:numbers", "--time-limit-s", "-5"), "time_limit_s=-5.0 must be a positive number of seconds."),
        (
            ("own_data:broken",),
            "own_data:broken: a sample cannot be loaded: ValueError: sample 7 is broken (own_data.py, line ",
        ),
        (("own_data:slow", "--time-limit-s", "4"), "Numbers: no sample was loaded in 1 s"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.splitlines()[-1]
    assert message in line
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("samples", ["slow"])
def test_samples_of_10_s_end_within_a_minute(run, samples):
    result = run(f"own_data:{samples}")
    assert result.exit_code == 0, result.output
    assert "This rests on" in result.stdout
