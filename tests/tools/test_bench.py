"""stocache bench, on photographs and on a dataset of yours, and stocache advise: what they measure, and what they say."""

import csv
import sys
from unittest.mock import ANY

import pytest

from stocache.tools import advise, bench
from stocache.tools.bench import EpochTiming, SweepRow
from tests.support.terminals import shown

image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
pytest.importorskip("matplotlib", reason="needs the extra bench")
pytestmark = pytest.mark.usefixtures("modules")


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 JPEGs, some of them in a different folder, and a file that is none."""
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


def test_bench_names_the_extra_it_needs(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench")
    assert (result.exit_code, "pip install 'stocache[bench]'" in result.output) == (2, True)


def test_photos_are_generated_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bench.photo_folder(3, 128)
    paths = bench.find_jpegs(folder)
    stamps = [path.stat().st_mtime_ns for path in paths]
    assert bench.photo_folder(3, 128) == folder
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    assert (len(paths), bench.load_jpeg(paths[0], 128).shape) == (3, (3, 128, 128))


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
