"""Fixtures of all tests of the command."""

import shutil
import sys

import pytest
from typer.testing import CliRunner

from stocache.tools.cli.app import app
from tests.support.records import FOLDER

MODULE = """
import torch
from torch.utils.data import IterableDataset
from stocache import CachedDataset

class Numbers:
    def __init__(self, length, breaks=None):
        self.length, self.breaks = length, breaks
    def __len__(self):
        return self.length
    def __getitem__(self, idx):
        if idx == self.breaks:
            raise ValueError(f"sample {idx}\\nis broken")
        return {"x": torch.full((3,), float(idx)), "label": idx}

class Endless(IterableDataset):
    __iter__ = None

def raises():
    raise FileNotFoundError("no folder photos\\nhere")

numbers, one, empty, broken = lambda: Numbers(40), lambda: Numbers(1), lambda: Numbers(0), lambda: Numbers(40, 7)
nothing, a_path, cached = lambda: None, lambda: "photos/train", lambda: CachedDataset([1, 2], 1)
endless, loader = Endless, lambda: torch.utils.data.DataLoader(numbers())
tensors = [torch.zeros(2, 4)]
sparse = lambda: [torch.eye(3).to_sparse() * number for number in range(40)]

def stack(samples):
    with open("batches", "a") as file:
        file.write(f"{len(samples)} ")
    return torch.stack(samples)

def refuse(samples):
    raise ValueError("of no use")
"""
MODULES = {
    "own_data": MODULE, "bad_syntax": "def f(:", "bad_import": "import not_there_at_all",
    "bad_main": "raise SystemExit('usage: bad_main.py')",
}  # fmt: skip


@pytest.fixture
def run():
    """The command: call it with its arguments."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def clean():
    """Remove afterwards what a test leaves in the directory."""
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Be in a folder with modules, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
