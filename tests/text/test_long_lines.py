"""Lines of text that are too long, and bytes that are not lines, take bounded memory."""

import bz2
import functools
import gzip
import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import zstandard

from stocache import CsvFormat, CustomFormat, FixedWidthFormat, JsonLinesFormat, StreamError, StreamLoader

READING = """
import json, pickle, sys
import torch
from stocache import StreamLoader

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

if __name__ == "__main__":
    before, found = peak(), []
    for form, num_workers in pickle.loads(bytes.fromhex(sys.argv[2])):
        rows, skipped, error = 0, None, None
        try:
            with StreamLoader(sys.argv[1], 2, 1000, format=form, num_workers=num_workers, drop_last=False) as loader:
                for batch in loader:
                    rows += len(batch if torch.is_tensor(batch) else batch[0])
                skipped = loader.stats().skipped
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append([rows, skipped, error])
    print(json.dumps([*found, (peak() - before) // 1024]))
"""


def read_in_a_child(path, *formats, num_workers=0):
    """Return rows, skipped lines and the error of a reading in each format, and the MiB of memory that they took at most."""
    readings = [(form, num_workers) for form in formats]
    command = [sys.executable, "-c", READING, str(path), pickle.dumps(readings).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout)


def write_bomb(path, text, times, before=b"", after=b"\n"):
    """Write ``text`` so many times; compressed as the name of the file says."""
    open_one = {
        ".gz": functools.partial(gzip.open, compresslevel=1),
        ".bz2": functools.partial(bz2.open, compresslevel=1),
        ".zst": functools.partial(zstandard.open, cctx=zstandard.ZstdCompressor(level=1)),
        ".csv": open,
    }[path.suffix]
    with open_one(path, "wb") as file:
        file.write(b"1,2,0\n3,4,1\n" + before)
        for _ in range(times):
            file.write(text)
        file.write(after + b"5,6,2\n")
    return path


MIB = 1 << 20

CSV = CsvFormat(",")

BOMBS = {"row": b"x" * MIB, "blank": b" " * MIB, "comment": b"#" + b"x" * (MIB - 1), "numbers": b"12345678" * (MIB // 8)}


@pytest.mark.parametrize(
    ("content", "name", "mib"),
    [
        ("row", "a.zst", 600),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("blank", "a.zst", 600),
                ("comment", "a.zst", 600),
                ("numbers", "a.zst", 600),
                ("row", "a.csv", 300),
                ("row", "a.gz", 200),
                ("blank", "a.bz2", 100),
            ]
        ),
    ],
)
def test_a_line_that_is_too_long_is_refused_in_bounded_memory(tmp_path, content, name, mib):
    path = write_bomb(tmp_path / name, BOMBS[content], mib)
    refused, skipped, grown = read_in_a_child(path, CSV, CsvFormat(",", on_error="skip", max_line_bytes="8MiB"))
    assert re.search(rf"StreamError: .*{name}, line 3: the line is longer than 16 MiB\. Raise max_line_bytes", refused[2])
    assert skipped == [3, 1, None]
    assert grown < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "num_workers"),
    [
        (CustomFormat(functools.partial(np.loadtxt, delimiter=",", ndmin=2)), 0),
        (CSV, 1),
        (CsvFormat(",", skip_header=3), 0),
        (JsonLinesFormat(skip_header=2, comments="1", label_columns=None), 0),
    ],
    ids=["parsed", "workers", "header", "jsonl"],
)
def test_long_lines_are_refused_however_they_would_be_read(tmp_path, form, num_workers):
    text = b"[" if isinstance(form, JsonLinesFormat) else b"x"
    path = write_bomb(tmp_path / "a.zst", text * MIB, 600)
    (rows, _, error), grown = read_in_a_child(path, form, num_workers=num_workers)
    assert "line 3: the line is longer than 16 MiB" in error
    assert rows == 0
    assert grown < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [b"\n" * MIB, b"#\n" * (MIB // 2), b" \n" * (MIB // 2), b"7,8,1\n" + b"\n" * (MIB - 6)],
    ids=["empty", "#", "blank", "rare"],
)
def test_lines_that_are_not_rows_take_no_memory_however_many(tmp_path, text):
    path = write_bomb(tmp_path / "a.zst", text, 100, after=b"")
    found, grown = read_in_a_child(path, CSV)
    assert found == [3 + text.count(b"7,8") * 100, 0, None]
    assert grown < 300


def test_a_kib_of_zstd_is_not_decompressed_at_once(tmp_path):
    block = (MIB // 8) << 3 | 0b010  # one byte, 128 Ki times
    frame = zstandard.compress(b"1,2,0\n" * 9, level=1)[:4] + b"\x00\x70" + (block.to_bytes(3, "little") + b"x") * 16000
    (tmp_path / "a.zst").write_bytes(frame)
    (_, _, error), grown = read_in_a_child(tmp_path / "a.zst", CsvFormat(",", label_columns=None))
    assert "line 1: the line is longer than 16 MiB" in error
    assert grown < 300


@pytest.mark.parametrize("workers", [0, 1])
def test_what_max_line_bytes_may_be(tmp_path, workers):
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n" + "3,4" + " " * 2000 + ",1\n5,6,2\n")
    for limit in (3000, "3000", "3KB", "2.5KiB"):
        form = CsvFormat(",", max_line_bytes=limit)
        with StreamLoader(path, 1, 1, format=form, num_workers=workers) as loader:
            assert [y.item() for _, y in loader] == [0, 1, 2]
    for limit in (2004, "2kb", "1KiB"):
        form = CsvFormat(",", max_line_bytes=limit)
        with (
            StreamLoader(path, 1, 1, format=form, num_workers=workers) as loader,
            pytest.raises(StreamError, match=r"a\.csv, line 2: the line is longer than"),
        ):
            list(loader)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None, "0MiB", b"1"])
def test_max_line_bytes_is_at_least_1(limit):
    with pytest.raises(StreamError, match=r"max_line_bytes=.* must be at least 1 byte"):
        CsvFormat(",", max_line_bytes=limit)


def test_long_lines_are_left_out_counted_and_reported_once(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{n},{n},{n}{' ' * 500 * (n % 10 == 3)}\n" for n in range(40)))
    form = CsvFormat(",", on_error="skip", max_line_bytes=100)
    with StreamLoader(path, 3, 9, format=form, drop_last=False, size_limit_gib=0.01) as loader:
        for _ in range(2):  # the second time out of the cache
            assert [n for _, y in loader for n in y.tolist()] == [n for n in range(40) if n % 10 != 3]
        assert loader.stats().skipped == 8
    assert caplog.text.count("line 4: the line is longer than 100 bytes") == 1


@pytest.mark.slow
def test_a_line_in_fixed_widths_that_is_longer_than_others_does_not_widen_them(tmp_path):
    path = write_bomb(tmp_path / "a.csv", b"1 2 0\n", 100_000, before=b"1 2 0" + b" " * 8 * MIB + b"\n", after=b"")
    path.write_bytes(path.read_bytes().replace(b",", b" "))
    found, grown = read_in_a_child(path, FixedWidthFormat([2, 2, 1]))
    assert found == [100_004, 0, None]
    assert grown < 400
