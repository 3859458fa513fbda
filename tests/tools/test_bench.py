"""stocache bench on photographs: what it measures, and how it shows the results."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stocache.tools import bench
from stocache.tools.bench import EpochTiming, SweepRow
from stocache.tools.cli import app
from tests.support.terminals import shown

image = pytest.importorskip("PIL.Image", reason="needs the extra bench")
ROWS = [SweepRow(0.0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0), SweepRow(1.0, 2.2, 0.5, 4.5, 20.0, 10, 0, 1.0, 0.1)]


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 JPEGs, some of them in another, and a file that is none."""
    folder = tmp_path / "photos"
    (folder / "a").mkdir(parents=True)
    for number in range(12):
        bench.photo_like(number, 32).save(folder / "a" / f"{number}.JPEG" if number % 2 else folder / f"{number}.jpg")
    (folder / "notes.txt").write_text("not a photo")
    return folder


@pytest.mark.leaves_descriptors
def test_bench_prints_a_table_and_writes_csv_and_plot(run, folder, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    small = ("bench", folder, "--size", 8, "--workers", 0, "--out", tmp_path)
    result = run(*small, "--fractions", "100,0,50")
    assert result.exit_code == 0, result.output
    assert "12 photos" in result.output
    assert "dropped from the page cache before each epoch" in result.output
    lines = [line.split("|") for line in result.stdout.splitlines() if line.startswith("|")]
    assert [(line[1].strip(), line[7].strip()) for line in lines[2:]] == [("0%", "12"), ("50%", "6"), ("100%", "0")]
    assert (tmp_path / "stocache-bench.csv").read_text().count("\n") == 4
    with image.open(tmp_path / "stocache-bench.png") as opened:
        assert opened.size[0] > 500
    result = run(*small, "--fractions", "0,100", "--warm-pages")
    assert "left in the page cache" in result.output


def test_bench_makes_the_folder_of_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures = {
        "a/b": "a/b/stocache-bench.png", "c/x.csv": "c/x.png", "d/x.png": "d/x.png", "f/x.svg": "f/x.svg",
        "e.1": "e.1/stocache-bench.png",
    }  # fmt: skip
    for out, picture in pictures.items():
        assert app._result_paths(Path(out)) == (Path(picture).with_suffix(".csv"), Path(picture))
        assert Path(picture).parent.is_dir()


def test_bench_explains_what_it_cannot_do_and_names_the_extra_it_needs(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    monkeypatch.chdir(tmp_path)
    messages = {
        "/nonexistent": "is not a folder", ".": "holds no .jpg or .jpeg files",
        "--fractions many": "write percentages such as 0,25,50,75,100",
        "--fractions 0,101": "percentages lie between 0 and 100", "--fractions nan": "percentages lie between 0 and 100",
        "--out /dev/null/results": "--out /dev/null/results: /dev/null/results cannot be made: Not a directory.",
        "--workers -1": "Invalid value for '--workers'", "": "pip install 'stocache[bench]'",
    }  # fmt: skip
    for arguments, message in messages.items():
        if not arguments:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        result = run("bench", *arguments.split())
        assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), arguments


def test_load_jpeg_gives_three_channels(tmp_path):
    for mode in ("RGB", "L", "CMYK"):
        image.new(mode, (50, 30)).save(tmp_path / "x.jpg")
        loaded = bench.load_jpeg(tmp_path / "x.jpg", 16)
        assert (loaded.shape, loaded.dtype, loaded.is_contiguous()) == ((3, 16, 16), torch.uint8, True)


def test_photos_are_generated_once_and_are_photo_like(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bench.photo_folder(3, 128)
    paths = bench.find_jpegs(folder)
    stamps = [path.stat().st_mtime_ns for path in paths]
    assert bench.photo_folder(3, 128) == folder
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    with image.open(paths[0]) as opened:
        pixels = np.asarray(opened, np.float32)
    assert (len(paths), pixels.shape) == (3, (128, 128, 3))
    assert pixels.std() > 20
    assert abs(pixels[1:] - pixels[:-1]).mean() < pixels.std() / 2  # neighbours are alike, unlike in noise


@pytest.mark.parametrize("workers", [0, 1])
def test_sweep_reads_exactly_what_is_not_resident(folder, workers):
    paths = bench.find_jpegs(folder)
    assert (len(paths), paths) == (12, sorted(paths))
    epochs = bench.sweep(bench.JpegFolder(paths, 16), (0, 0.25, 1), workers=workers, batch_size=5, repeats=2)
    assert [epoch.fraction for epoch in epochs[::2]] == [0, 0.25, 1, 1, 0.25, 0]
    assert {(e.fraction, e.phase): e.reads for e in epochs} == {
        (0, "cold"): 12, (0, "warm"): 12, (0.25, "cold"): 12, (0.25, "warm"): 9, (1, "cold"): 12, (1, "warm"): 0,
    }  # fmt: skip
    assert all(epoch.samples == 12 and epoch.seconds > 0 for epoch in epochs)


def test_summarize_takes_medians_and_compares_with_no_cache():
    epochs = [EpochTiming(0, "cold", s, 10, 10) for s in (1.0, 2.0, 9.0)] + [EpochTiming(0, "warm", 2.0, 10, 10)]
    epochs += [EpochTiming(1, "cold", 2.2, 10, 10), EpochTiming(1, "warm", 0.5, 10, 0)]
    first, last = bench.summarize(epochs)
    assert first == SweepRow(0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0)
    assert (last.warm_per_s, last.warm_reads, last.warm_hit_rate) == (20.0, 0, 1.0)
    assert last.first_epoch_overhead == pytest.approx(0.1)


def test_the_table_is_markdown_and_never_wider_than_the_terminal():
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown(bench.table(ROWS), 120) if line]
    assert lines[0] == ["cached", "cold s", "warm s", "cold /s", "warm /s", "cold reads", "warm reads", "hit rate", "1st epoch"]
    assert all(set(cell) <= {"-"} for cell in lines[1])
    assert lines[3] == ["100%", "2.20", "0.50", "4", "20", "10", "0", "100.0%", "+10.0%"]
    narrow = shown(bench.table(ROWS), 80)
    assert max(map(len, narrow)) <= 80
    assert all(cell in " ".join(narrow) for cell in lines[3])
