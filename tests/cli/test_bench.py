import csv
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra bench")
pytest.importorskip("matplotlib", reason="needs the extra bench")
from PIL import Image

from stocache.cli import bench
from stocache.cli.bench import EpochTiming, Row

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos"


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        path = tmp_path / "a" / f"{number}.JPEG" if number % 2 else tmp_path / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        bench.photo_like(number, 64).save(path)
    (tmp_path / "notes.txt").write_text("not a photo")
    return tmp_path


def test_find_jpegs_is_recursive_and_sorted(folder):
    paths = bench.find_jpegs(folder)
    assert len(paths) == 12
    assert paths == sorted(paths)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_load_jpeg_gives_three_channels(tmp_path, mode):
    Image.new(mode, (50, 30)).save(tmp_path / "x.jpg")
    image = bench.load_jpeg(tmp_path / "x.jpg", 16)
    assert (image.shape, image.dtype, image.is_contiguous()) == ((3, 16, 16), torch.uint8, True)


def test_photos_are_generated_once_and_are_photo_like(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bench.photo_folder(3, 128)
    paths = bench.find_jpegs(folder)
    assert len(paths) == 3
    stamp = paths[0].stat().st_mtime_ns
    assert bench.photo_folder(3, 128) == folder
    assert paths[0].stat().st_mtime_ns == stamp
    with Image.open(paths[0]) as image:
        pixels = np.asarray(image, np.float32)
    assert pixels.shape == (128, 128, 3)
    assert pixels.std() > 20
    assert abs(pixels[1:] - pixels[:-1]).mean() < pixels.std() / 2  # neighbours are alike, unlike in noise


@pytest.mark.parametrize("workers", [0, 2])
def test_sweep_reads_exactly_what_is_not_resident(folder, workers):
    paths = bench.find_jpegs(folder)
    epochs = bench.sweep(paths, (0, 0.25, 1), size=16, workers=workers, batch_size=5, repeats=2)
    assert len(epochs) == 12
    assert {(e.fraction, e.phase): e.reads for e in epochs} == {
        (0, "cold"): 12, (0, "warm"): 12, (0.25, "cold"): 12, (0.25, "warm"): 9, (1, "cold"): 12, (1, "warm"): 0,
    }  # fmt: skip
    assert all(epoch.samples == 12 and epoch.seconds > 0 for epoch in epochs)


def test_cached_photos_are_the_decoded_ones(folder):
    paths = bench.find_jpegs(folder)
    with bench.our_cache(10**6, len(paths), (3, 16, 16)) as cache:
        dataset = bench.JpegFolder(paths, 16, cache)
        for read in (1, 0):
            for idx, path in enumerate(paths):
                image, was_read = dataset[idx]
                assert was_read == read
                assert torch.equal(image, bench.load_jpeg(path, 16))


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="needs the folder of real photographs")
def test_real_photographs_of_all_sizes_go_through(tmp_path):
    paths = bench.find_jpegs(PHOTOS)
    assert len(paths) == 160
    epochs = bench.sweep(paths, (0.5,), size=64, workers=2)
    assert [(epoch.samples, epoch.reads) for epoch in epochs] == [(160, 160), (160, 80)]


def test_summarize_takes_medians_and_compares_with_no_cache():
    epochs = [EpochTiming(0, "cold", s, 10, 10) for s in (1.0, 2.0, 9.0)] + [EpochTiming(0, "warm", 2.0, 10, 10)]
    epochs += [EpochTiming(1, "cold", 2.2, 10, 10), EpochTiming(1, "warm", 0.5, 10, 0)]
    first, last = bench.summarize(epochs)
    assert first == Row(0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0)
    assert (last.warm_per_s, last.warm_reads, last.warm_hit_rate) == (20.0, 0, 1.0)
    assert last.first_epoch_overhead == pytest.approx(0.1)


def test_linearity_is_one_for_a_line_and_less_for_a_bend():
    def rows(seconds):
        return [Row(n / 2, 1, s, 1, 1, 1, 1, 0, 0) for n, s in enumerate(seconds)]

    assert bench.linearity(rows([3, 2, 1])) == pytest.approx(1)
    assert bench.linearity(rows([3, 3, 1])) == pytest.approx(0.75)


@pytest.mark.leaves_descriptors
def test_results_are_written_as_table_csv_and_plot(tmp_path):
    rows = [Row(0.0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0), Row(1.0, 2.2, 0.5, 4.5, 20.0, 10, 0, 1.0, 0.1)]
    lines = bench.format_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    headings = ["cached", "cold s", "warm s", "cold /s", "warm /s", "cold reads", "warm reads", "hit rate", "1st epoch"]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == headings
    cells = ["100%", "2.20", "0.50", "4", "20", "10", "0", "100.0%", "+10.0%"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == cells
    bench.write_csv(rows, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(row["warm_s"]) for row in read] == [2.0, 0.5]
    bench.plot(rows, tmp_path / "x.png", "title")
    with Image.open(tmp_path / "x.png") as image:
        assert image.size[0] > 500
