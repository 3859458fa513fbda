"""stocache bench module:function, and stocache advise module:function."""

import csv
import sys
from unittest.mock import ANY

import pytest
import torch
from torch._utils import ExceptionWrapper

from stocache.errors import LimitError
from stocache.tools import advise
from stocache.tools.bench import PartlyCached, sweep
from stocache.tools.cli.dataset import describe_error

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

class BadLength:
    __getitem__ = None
    def __len__(self):
        raise ValueError("no index file")

def raises():
    raise FileNotFoundError("no folder photos\\nhere")

def leaves():
    raise SystemExit("usage: train.py DATA")

def needs(argument):
    pass

numbers, one, empty, broken = lambda: Numbers(40), lambda: Numbers(1), lambda: Numbers(0), lambda: Numbers(40, 7)
nothing, a_path, cached = lambda: None, lambda: "photos/train", lambda: CachedDataset([1, 2], 1)
endless, bad_length = Endless, BadLength
tensors = [torch.zeros(2, 4)]
sparse = lambda: [torch.eye(3).to_sparse() * number for number in range(40)]

def stack(samples):
    with open("batches", "a") as file:
        file.write(f"{len(samples)} ")
    return torch.stack(samples)

def refuse(samples):
    raise ValueError("of no use")
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    """Be in a folder with modules, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    syntax, imports, exits = "def f(:", "import not_there_at_all", "raise SystemExit('usage: bad_main.py')"
    modules = {"own_data": MODULE, "bad_syntax": syntax, "bad_import": imports, "bad_main": exits}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for name in modules:
        sys.modules.pop(name, None)


def test_advise_measures_as_it_is_told_and_prints_what_it_finds(run, monkeypatch):
    given = []

    def measure(dataset, **options):
        given.append((len(dataset), options))
        return "Numbers\n  DataLoader(...)"

    monkeypatch.setattr(advise, "advise", measure)
    result = run("advise", "own_data:numbers", "--step-ms", 40, "--batch-size", 7, "--batch-size", 8, "--time-limit-s", 9)
    assert (result.exit_code, result.stdout) == (0, "Numbers\n  DataLoader(...)\n")
    assert run("advise", "own_data:one").exit_code == 0
    assert given == [
        (40, {"step_ms": 40, "batch_size": [7, 8], "time_limit_s": 9, "allow_pickle": False}),
        (1, {"step_ms": 0, "batch_size": 32, "time_limit_s": 60, "allow_pickle": False}),
    ]


@pytest.mark.leaves_descriptors
def test_samples_are_pickled_and_batched_as_the_loader_of_the_user_does_it(run, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(advise, "advise", lambda dataset, **options: given.append(options) or "")
    own = ("--allow-pickle", "--collate-fn", "own_data:stack")
    assert run("advise", "own_data:sparse", *own).exit_code == 0
    assert given == [{"step_ms": 0, "batch_size": 32, "time_limit_s": 60, "allow_pickle": True, "collate_fn": ANY}]
    assert given[0]["collate_fn"].__name__ == "stack"
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    options = ("--workers", 0, "--batch-size", 7, "--fractions", "100")
    rows = {}
    for more in ((), own):
        assert run("bench", "own_data:sparse", *options, *more).exit_code == 0
        with (tmp_path / "stocache-bench.csv").open() as file:
            rows[more] = [float(row["warm_hit_rate"]) for row in csv.DictReader(file)]
    assert rows == {(): [0.0], own: [1.0]}
    assert (tmp_path / "batches").read_text() == "7 7 7 7 7 5 " * 2
    result = run("bench", "own_data:numbers", *options, "--collate-fn", "own_data:refuse")
    assert (result.exit_code, "ValueError: of no use (own_data.py, line " in result.stderr) == (2, True)
    result = run("advise", "own_data:numbers", "--collate-fn", "own_data:padd")
    assert (result.exit_code, result.stderr.endswith("own_data.py does not exist.\n")) == (2, True)
    result = run("bench", "--allow-pickle")
    expected = "--allow-pickle is for a dataset of yours. Leave it out for photos.\n"
    assert (result.exit_code, result.stderr) == (2, expected)


def test_what_cannot_be_advised_is_said_in_one_line(run, monkeypatch):
    result = run("advise", "own_data:broken")
    assert (result.exit_code, result.stdout) == (2, "")
    message = "own_data:broken: a sample cannot be loaded or cached: ValueError: sample 7 is broken (own_data.py, line "
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr

    def measure(dataset, **options):
        raise LimitError("step_ms must\nbe finite.")

    monkeypatch.setattr(advise, "advise", measure)
    result = run("advise", "own_data:numbers", "--step-ms", "nan")
    assert (result.exit_code, result.output) == (2, "step_ms must be finite.\n")


@pytest.mark.linux
def test_a_function_that_gives_no_dataset_is_named_in_one_line(run):
    for where, message in (
        ("nowhere_at_all:f", "module 'nowhere_at_all' cannot be imported: ModuleNotFoundError: No module named"),
        ("bad_syntax:f", "module 'bad_syntax' cannot be imported: SyntaxError: "),
        ("bad_import:f", "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all' (bad_import.py, line 1)"),
        ("bad_main:f", "module 'bad_main' cannot be imported: SystemExit: usage: bad_main.py"),
        (":f", "':f' is not module:function"),
        ("own_data:", "'own_data:' is not module:function"),
        ("own_data:f", "own_data.py does not exist."),
        ("own_data:tensors", "own_data.py is not a function but [tensor([[0., 0., 0., 0.], [0., 0., 0., 0.]"),
        ("own_data:raises", "own_data:raises raised FileNotFoundError: no folder photos here (own_data.py, line "),
        ("own_data:leaves", "own_data:leaves raised SystemExit: usage: train.py DATA"),
        ("own_data:needs", "own_data:needs raised TypeError: needs() missing 1 required positional argument"),
        ("own_data:nothing", "own_data:nothing returned None: NoneType has no samples by number"),
        ("own_data:a_path", "own_data:a_path returned 'photos/train' (str): it is text. Return a map-style dataset"),
        ("own_data:endless", "(Endless): Endless has no samples by number, which a cache needs. Return a map-style dataset"),
        ("own_data:bad_length", "returned BadLength, whose __len__ raised ValueError: no index file"),
        ("own_data:cached", "returned a CachedDataset. Return the dataset in it"),
        ("own_data:empty", "own_data:empty returned Numbers of length 0. There is nothing to measure."),
    ):
        result = run("advise", where)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert message in line
        assert "(dataset.py, line" not in line  # where this command called it


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("workers", [0, 1])
def test_bench_measures_a_dataset(run, tmp_path, workers):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    options = ("--workers", workers, "--batch-size", 7, "--fractions", "0,25,100", "--out", "new/results")
    result = run("bench", "own_data:numbers", *options)
    assert result.exit_code == 0, result.output
    assert "40 samples of own_data:numbers, Numbers, files left in the page cache" in result.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if line.startswith("|")]
    reads = [("0%", "40", "40", "0.0%"), ("25%", "40", "30", "25.0%"), ("100%", "40", "0", "100.0%")]
    assert [(line[0], *line[5:8]) for line in lines[2:]] == reads
    with (tmp_path / "new" / "results" / "stocache-bench.csv").open() as file:
        assert [float(row["warm_hit_rate"]) for row in csv.DictReader(file)] == [0.0, 0.25, 1.0]
    assert "1 sample of own_data:one, " in run("bench", "own_data:one", *options).output


def test_the_error_of_a_worker_is_described_by_its_last_line():
    try:
        raise KeyError("photos\n7")
    except KeyError:
        expected = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(KeyError, match="Original Traceback") as caught:
        expected.reraise()
    assert describe_error(caught.value) == r"KeyError: 'photos\n7'"


def test_what_bench_cannot_load_or_take_is_one_line(run):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    for fractions in ("0", "100"):
        result = run("bench", "own_data:broken", "--workers", 0, "--fractions", fractions)
        last = result.stderr.splitlines()[-1]
        assert "own_data:broken: a sample cannot be loaded or cached: ValueError: sample 7 is broken" in last
        assert (result.exit_code, "Traceback" in result.output) == (2, False)
    for option in (("--size", 8), ("--photos", 9), ("--warm-pages",)):
        result = run("bench", "own_data:numbers", *option)
        expected = f"{option[0]} is for photos. Leave it out for a dataset of yours.\n"
        assert (result.exit_code, result.stderr) == (2, expected)
    result = run("bench", "own_data:empty")
    assert (result.exit_code, "returned Numbers of length 0" in result.stderr) == (2, True)


VARYING = [(torch.arange(idx), "x" * idx) for idx in range(30)]


def test_batches_that_torch_does_not_collate_remain_lists():
    epochs = sweep(VARYING, (0.5, 1), workers=1, batch_size=4)
    assert [(epoch.fraction, epoch.phase, epoch.samples, epoch.reads) for epoch in epochs] == [
        (0.5, "cold", 30, 30), (0.5, "warm", 30, 15), (1, "cold", 30, 30), (1, "warm", 30, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0, 0.1, 1])
def test_a_partly_cached_dataset_has_the_samples_of_the_dataset(share):
    partly = PartlyCached(VARYING, share)
    for _epoch in range(2):
        samples = [partly[idx] for idx in range(len(partly))]
        assert all(torch.equal(sample[0], torch.arange(idx)) for idx, sample in enumerate(samples))
        assert [sample[1] for sample in samples] == ["x" * idx for idx in range(30)]
    assert partly.count_reads(2) == 30 + 30 - round(30 * share)
    partly.close()
