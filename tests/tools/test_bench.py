"""stocache bench, on photographs and on a dataset of yours, and stocache advise: what they measure, and what they say."""

import csv
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from stocache.tools import advise, bench
from stocache.tools.bench import EpochTiming, PartlyCached, SweepRow, sweep
from stocache.tools.cli import app
from tests.support.terminals import shown

image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
pytest.importorskip("matplotlib", reason="needs the extra bench")
pytestmark = pytest.mark.usefixtures("modules")


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 JPEGs, some of them in another, and a file that is none."""
    folder = tmp_path / "photos"
    (folder / "a").mkdir(parents=True)
    for number in range(12):
        bench.photo_like(number, 32).save(folder / "a" / f"{number}.JPEG" if number % 2 else folder / f"{number}.jpg")
    (folder / "notes.txt").write_text("not a photo")
    return folder


def table_of(result):
    """The cells of the table that a command prints."""
    assert result.exit_code == 0, result.output
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def hit_rates(folder):
    with (folder / "stocache-bench.csv").open() as file:
        return [float(row["warm_hit_rate"]) for row in csv.DictReader(file)]


@pytest.mark.leaves_descriptors
def test_bench_prints_a_table_and_writes_csv_and_plot(run, folder, tmp_path):
    small = ("bench", folder, "--size", 8, "--workers", 0, "--out", tmp_path)
    result = run(*small, "--fractions", "100,0,50")
    assert [(line[0], line[6]) for line in table_of(result)] == [("0%", "12"), ("50%", "6"), ("100%", "0")]
    assert "12 photos" in result.output
    assert "dropped from the page cache before each epoch" in result.output
    assert hit_rates(tmp_path) == [0.0, 0.5, 1.0]
    with image.open(tmp_path / "stocache-bench.png") as opened:
        assert opened.size[0] > 500
    assert "left in the page cache" in run(*small, "--fractions", "0", "--warm-pages").output


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("workers", [0, 1])
def test_bench_measures_a_dataset(run, tmp_path, workers):
    options = ("--workers", workers, "--batch-size", 7, "--fractions", "0,25,100", "--out", "new/results")
    result = run("bench", "own_data:numbers", *options)
    reads = [("0%", "40", "40", "0.0%"), ("25%", "40", "30", "25.0%"), ("100%", "40", "0", "100.0%")]
    assert [(line[0], *line[5:8]) for line in table_of(result)] == reads
    assert "40 samples of own_data:numbers, Numbers, files left in the page cache" in result.output
    assert hit_rates(tmp_path / "new" / "results") == [0.0, 0.25, 1.0]
    assert "1 sample of own_data:one, " in run("bench", "own_data:one", *options).output


PICTURES = {
    "a/b": "a/b/stocache-bench.png", "c/x.csv": "c/x.png", "d/x.png": "d/x.png", "f/x.svg": "f/x.svg",
    "e.1": "e.1/stocache-bench.png",
}  # fmt: skip


def test_bench_makes_the_folder_of_its_results():
    for out, picture in PICTURES.items():
        assert app._result_paths(Path(out)) == (Path(picture).with_suffix(".csv"), Path(picture))
        assert Path(picture).parent.is_dir()


def test_bench_names_the_extra_it_needs(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench")
    assert (result.exit_code, "pip install 'stocache[bench]'" in result.output) == (2, True)


def test_photos_are_generated_once_and_are_photo_like(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bench.photo_folder(3, 128)
    paths = bench.find_jpegs(folder)
    stamps = [path.stat().st_mtime_ns for path in paths]
    assert bench.photo_folder(3, 128) == folder
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    pixels = bench.load_jpeg(paths[0], 128).float()
    assert (len(paths), pixels.shape, pixels.std() > 20) == (3, (3, 128, 128), True)
    assert pixels.diff(dim=1).abs().mean() < pixels.std() / 2  # neighbours are alike, unlike in noise


@pytest.mark.parametrize("workers", [0, 1])
def test_sweep_reads_exactly_what_is_not_resident(folder, workers):
    paths = bench.find_jpegs(folder)
    assert (len(paths), paths) == (12, sorted(paths))
    epochs = sweep(bench.JpegFolder(paths, 16), (0, 0.25, 1), workers=workers, batch_size=5, repeats=2)
    assert [epoch.fraction for epoch in epochs[::2]] == [0, 0.25, 1, 1, 0.25, 0]
    assert {(e.fraction, e.phase): e.reads for e in epochs} == {
        (0, "cold"): 12, (0, "warm"): 12, (0.25, "cold"): 12, (0.25, "warm"): 9, (1, "cold"): 12, (1, "warm"): 0,
    }  # fmt: skip
    assert all(epoch.samples == 12 and epoch.seconds > 0 for epoch in epochs)


def test_summarize_takes_medians_and_the_table_is_markdown_and_never_wider_than_the_terminal():
    epochs = [EpochTiming(0, "cold", s, 10, 10) for s in (1.0, 2.0, 9.0)] + [EpochTiming(0, "warm", 2.0, 10, 10)]
    epochs += [EpochTiming(1, "cold", 2.2, 10, 10), EpochTiming(1, "warm", 0.5, 10, 0)]
    rows = bench.summarize(epochs)
    assert rows[0] == SweepRow(0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown(bench.table(rows), 120) if line]
    assert lines[0] == ["cached", "cold s", "warm s", "cold /s", "warm /s", "cold reads", "warm reads", "hit rate", "1st epoch"]
    assert all(set(cell) <= {"-"} for cell in lines[1])
    assert lines[3] == ["100%", "2.20", "0.50", "5", "20", "10", "0", "100.0%", "+10.0%"]
    narrow = shown(bench.table(rows), 80)
    assert max(map(len, narrow)) <= 80
    assert all(cell in " ".join(narrow) for cell in lines[3])


VARYING = [(torch.arange(idx), "x" * idx) for idx in range(30)]


def test_batches_that_torch_does_not_collate_remain_lists():
    epochs = sweep(VARYING, (0.5, 1), workers=1, batch_size=4)
    assert [epoch[:2] + epoch[3:] for epoch in epochs] == [
        (0.5, "cold", 30, 30), (0.5, "warm", 30, 15), (1, "cold", 30, 30), (1, "warm", 30, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0, 0.1, 1])
def test_a_partly_cached_dataset_has_the_samples_of_the_dataset(share):
    partly = PartlyCached(VARYING, share)
    for _epoch in range(2):
        samples = sorted([partly[idx] for idx in range(len(partly))], key=lambda sample: len(sample[1]))
        assert all(torch.equal(sample[0], torch.arange(idx)) for idx, sample in enumerate(samples))
        assert [sample[1] for sample in samples] == ["x" * idx for idx in range(30)]
    assert partly.count_reads(2) == 30 + 30 - round(30 * share)
    partly.close()


def test_advise_measures_as_it_is_told_and_prints_what_it_finds(run, monkeypatch):
    given = []

    def measure(dataset, **options):
        given.append((len(dataset), options))
        return "Numbers\n  DataLoader(...)"

    monkeypatch.setattr(advise, "advise", measure)
    result = run("advise", "own_data:numbers", "--step-ms", 40, "--batch-size", 7, "--batch-size", 8, "--time-limit-s", 9)
    assert (result.exit_code, result.stdout) == (0, "Numbers\n  DataLoader(...)\n")
    assert run("advise", "own_data:one", "--allow-pickle", "--collate-fn", "own_data:stack").exit_code == 0
    assert given == [
        (40, {"step_ms": 40, "batch_size": [7, 8], "time_limit_s": 9, "allow_pickle": False}),
        (1, {"step_ms": 0, "batch_size": 32, "time_limit_s": 60, "allow_pickle": True, "collate_fn": ANY}),
    ]
    assert given[1][1]["collate_fn"].__name__ == "stack"


@pytest.mark.leaves_descriptors
def test_samples_are_pickled_and_batched_as_the_loader_of_the_user_does_it(run, tmp_path):
    options = ("--workers", 0, "--batch-size", 7, "--fractions", "100")
    for more, rate in (((), 0.0), (("--allow-pickle", "--collate-fn", "own_data:stack"), 1.0)):
        assert run("bench", "own_data:sparse", *options, *more).exit_code == 0
        assert hit_rates(tmp_path) == [rate]
    assert (tmp_path / "batches").read_text() == "7 7 7 7 7 5 " * 2
