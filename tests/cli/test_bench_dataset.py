"""stocache bench module:function."""

import csv
import sys

import pytest
import torch
from torch.utils.data import Dataset
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="needs the extra bench")
from stocache.cli.app import app
from stocache.cli.bench import sweep_dataset
from stocache.cli.dataset import PartlyCached

MODULE = """
import torch
from torch.utils.data import IterableDataset, TensorDataset
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
    def __iter__(self):
        yield 1

class NoLength:
    def __getitem__(self, idx):
        return idx

class BadLength(NoLength):
    def __len__(self):
        raise ValueError("no index file")

def raises():
    raise FileNotFoundError("no folder photos\\nhere")

def leaves():
    raise SystemExit("usage: train.py DATA")

def needs(argument):
    pass

numbers, few, one, empty = lambda: Numbers(40), lambda: Numbers(3), lambda: Numbers(1), lambda: Numbers(0)
broken, a_list, nothing, a_path = lambda: Numbers(40, 7), lambda: [1, 2, 3], lambda: None, lambda: "photos/train"
endless, no_length, bad_length, keys = Endless, NoLength, BadLength, lambda: {"train": [1]}
cached = lambda: CachedDataset([1, 2], 1)
seven, tensors = 7, [torch.zeros(2, 4)]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in a folder with modules, which are forgotten afterwards."""
    (tmp_path / "own_data.py").write_text(MODULE)
    (tmp_path / "bad_syntax.py").write_text("def f(:")
    (tmp_path / "bad_import.py").write_text("import not_there_at_all")
    (tmp_path / "bad_main.py").write_text("raise SystemExit('usage: bad_main.py')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])
    for name in ("own_data", "bad_syntax", "bad_import", "bad_main"):
        sys.modules.pop(name, None)


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("workers", [0, 2])
def test_the_experiment_runs_on_a_dataset(run, tmp_path, workers):
    options = ("--workers", workers, "--batch-size", 7, "--fractions", "0,25,100", "--out", "new/results")
    result = run("own_data:numbers", *options)
    assert result.exit_code == 0, result.output
    assert "40 samples of own_data:numbers, Numbers, files left in the page cache" in result.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if line.startswith("|")]
    assert [(line[0], *line[5:8]) for line in lines[2:]] == [
        ("0%", "40", "40", "0.0%"), ("25%", "40", "30", "25.0%"), ("100%", "40", "0", "100.0%"),
    ]  # fmt: skip
    with (tmp_path / "new" / "results" / "stocache-bench.csv").open() as file:
        assert [float(row["warm_hit_rate"]) for row in csv.DictReader(file)] == [0.0, 0.25, 1.0]
    assert (tmp_path / "new" / "results" / "stocache-bench.png").stat().st_size > 5000


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize(("function", "samples"), [("few", "3 samples of"), ("one", "1 sample of"), ("a_list", "3 samples of")])
def test_a_dataset_smaller_than_a_batch_works(run, function, samples):
    result = run(f"own_data:{function}", "--workers", 1, "--fractions", "0,50,100")
    assert result.exit_code == 0, result.output
    assert samples in result.output


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere_at_all:f", "module 'nowhere_at_all' cannot be imported: ModuleNotFoundError: No module named"),
        ("bad_syntax:f", "module 'bad_syntax' cannot be imported: SyntaxError: "),
        ("bad_import:f", "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all' (bad_import.py, line 1)"),
        ("bad_main:f", "module 'bad_main' cannot be imported: SystemExit: usage: bad_main.py"),
        (":f", "':f' is not module:function"),
        ("own_data:", "'own_data:' is not module:function"),
        ("own_data:f", "own_data.py does not exist."),
        ("own_data:seven", "own_data.py is not a function but 7 (int)."),
        ("own_data:tensors", "own_data.py is not a function but [tensor([[0., 0., 0., 0.], [0., 0., 0., 0.]"),
        ("own_data:raises", "own_data:raises raised FileNotFoundError: no folder photos here (own_data.py, line "),
        ("own_data:leaves", "own_data:leaves raised SystemExit: usage: train.py DATA"),
        ("own_data:needs", "own_data:needs raised TypeError: needs() missing 1 required positional argument"),
        ("own_data:nothing", "own_data:nothing returned None: NoneType has no samples by number"),
        ("own_data:a_path", "own_data:a_path returned 'photos/train' (str). Return a map-style dataset"),
        ("own_data:endless", "(Endless): Endless has no samples by number, which a cache needs. Return a map-style dataset"),
        ("own_data:no_length", "(NoLength): NoLength has no length"),
        ("own_data:bad_length", "returned BadLength, whose __len__ raised ValueError: no index file"),
        ("own_data:keys", "returned {'train': [1]} (dict): dict is a mapping with the keys ['train']"),
        ("own_data:cached", "returned a CachedDataset. Return the dataset in it"),
        ("own_data:empty", "own_data:empty returned Numbers of length 0. There is nothing to measure."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, where, message):
    result = run(where)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line
    assert "(dataset.py, line" not in line  # where this command called it


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fractions", ["0", "100"])
def test_a_sample_that_cannot_be_loaded_is_said_in_one_line(run, workers, fractions):
    result = run("own_data:broken", "--workers", workers, "--fractions", fractions)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "own_data:broken: a sample cannot be loaded or cached: ValueError: sample 7 is broken" in last
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", [("--size", 8), ("--repeat-folder", 2), ("--photos", 9), ("--warm-pages",)])
def test_options_for_photos_are_refused(run, option):
    result = run("own_data:numbers", *option)
    assert (result.exit_code, result.stderr) == (2, f"{option[0]} is for photos. Leave it out for a dataset of yours.\n")


class Varying(Dataset):
    """Samples of varying size."""

    def __len__(self):
        return 30

    def __getitem__(self, idx):
        return torch.arange(idx), "x" * idx


def test_batches_that_torch_does_not_collate_remain_lists():
    epochs = sweep_dataset(Varying(), (0.5, 1), workers=2, batch_size=4)
    assert [(epoch.fraction, epoch.phase, epoch.samples, epoch.reads) for epoch in epochs] == [
        (0.5, "cold", 30, 30), (0.5, "warm", 30, 15), (1, "cold", 30, 30), (1, "warm", 30, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_a_partly_cached_dataset_has_the_samples_of_the_dataset(share):
    partly = PartlyCached(Varying(), share)
    for epoch in range(2):
        samples, reads = zip(*[partly[idx] for idx in range(len(partly))], strict=True)
        for sample, expected in zip(samples, Varying(), strict=False):
            assert torch.equal(sample[0], expected[0])
            assert sample[1] == expected[1]
        if epoch:
            assert sum(reads) == 30 - round(30 * share)
    assert partly.count_cached() == round(30 * share)
    partly.close()
