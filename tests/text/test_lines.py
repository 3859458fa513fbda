"""Rows cut out of text files: against a plain reading of the same bytes."""

import contextlib
import gzip
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocache import StreamError
from stocache.text import lines
from stocache.text.files import find_files
from stocache.text.lines import Lines
from tests.support.texts import COMPRESSIONS, zstd

opened = contextlib.ExitStack()
opening = lambda file: opened.enter_context(contextlib.closing(file))


@pytest.fixture(autouse=True)
def _closed():
    yield
    opened.close()


def write(folder, *contents, compression="plain"):
    for number, content in enumerate(contents):
        (folder / f"{number:03}.txt").write_bytes(COMPRESSIONS[compression](content))
    return [str(folder / f"{number:03}.txt") for number in range(len(contents))]


def lines_of(paths, buffer_size=3, skip_header=0, comments="#", rank=0, world_size=1, delimiter=None, **options):
    return opening(Lines(find_files(paths), buffer_size, skip_header, comments, delimiter, rank, world_size, **options))


def open_file(path):
    return opening(find_files(path)[0].open())


def buffers_of(found):
    """All buffers of a share, as lists of rows; a line that was left out is b""."""
    buffers, position = [], found.begin
    while True:
        pieces, end = found.read(position)
        rows = [row for piece in pieces for row in piece.data.split(b"\n")[: piece.rows]]
        assert len(rows) == end.rows - position.rows == sum(piece.rows for piece in pieces) <= found.buffer_size
        assert all(bool(piece.fault) == (piece.data == b"") for piece in pieces)
        if not rows:
            return buffers
        buffers.append(rows)
        position = end


def rows_of(found):
    return [row for buffer in buffers_of(found) for row in buffer]


def oracle(contents, skip_header=0, comments="#", limit=1 << 30):
    """The rows of all files, read in the plainest way."""
    rows = []
    for content in contents:
        for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")[skip_header:]:
            text = line.strip(b" \t\r\x0b\x0c")
            if len(line) > limit:
                rows.append(b"")
            elif text and not (comments and text.startswith(comments.encode())):
                rows.append(line)
    return rows


TEXTS = [b"1", b"22", b"333\r", b"", b" ", b"# no", b"\t#", b"4 # yes", "ü€".encode(), b"\x00", b"\x01\x1a", b"5" * 40]
LINE = st.sampled_from(TEXTS)
FILE = st.tuples(st.lists(LINE, max_size=12), st.booleans(), st.booleans()).map(
    lambda parts: (b"\xef\xbb\xbf" if parts[2] else b"") + b"\n".join(parts[0]) + (b"\n" if parts[1] else b"")
)


@settings(max_examples=50)
@given(
    st.lists(FILE.filter(bool), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(1, 5),
    st.one_of(st.integers(0, 2), st.integers(3, 45)),
    st.sampled_from(["#", None, "# "]),
    st.sampled_from(["plain", "plain", "gz"]),
    st.sampled_from([7, 1 << 16]),
)
def test_the_shares_of_all_ranks_are_the_whole(
    tmp_path_factory, contents, buffer_size, world_size, header_or_limit, comments, compression, at_a_time
):
    paths = write(tmp_path_factory.mktemp("share"), *contents, compression=compression)
    header, limit = (header_or_limit, 1 << 20) if header_or_limit < 3 else (0, header_or_limit - 2)
    options, got = {"max_line_bytes": limit, "skip_long": True}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_HEAD", at_a_time)
        shares = [lines_of(paths, buffer_size, header, comments, rank, world_size, **options) for rank in range(world_size)]
        for rank, share in enumerate(shares):
            buffers = buffers_of(share)
            assert all(len(buffer) == buffer_size for buffer in buffers[:-1])
            assert share.count() == sum(map(len, buffers))
            got += [row for buffer in buffers[share.first :: share.step] for row in buffer]
            same = opening(shares[-1].share_of(rank, world_size))
            assert (same.begin, same.end, same.first, same.step) == (share.begin, share.end, share.first, share.step)
    opened.close()
    wanted = oracle(contents, header, comments, limit)
    assert got == wanted if shares[0].step == 1 else sorted(got) == sorted(wanted)  # else each takes every R-th buffer


def test_compressed_files_are_shared_out_whole_where_there_are_enough(tmp_path):
    paths = write(tmp_path, *[b"%d\n" % n * 100 for n in range(6)], compression="gz")
    for rank in range(3):
        share = lines_of(paths, 10, rank=rank, world_size=3)
        assert (share.step, set(rows_of(share))) == (1, {b"%d" % (2 * rank), b"%d" % (2 * rank + 1)})


@pytest.mark.parametrize("compression", ["plain", "gz"])
def test_pieces_are_of_bounded_size_hold_rows_alone_and_know_their_lines(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(lines, "_CHUNK", 4096)
    monkeypatch.setattr("stocache.text.rows._BLOCK", 512)
    content = b"".join(b"%d\n" % n + b"# much to say\n" * 50 + b"\n" * (n % 300) for n in range(200))
    (path,) = write(tmp_path, content, compression=compression)
    found = lines_of(path, 60)
    pieces, _ = found.read(found.begin)
    assert b"".join(piece.data for piece in pieces) == b"".join(b"%d\n" % n for n in range(60))
    assert max(piece.nbytes for piece in pieces) <= 4096
    assert rows_of(found) == oracle([content])
    wanted = [number for number, line in enumerate(content.split(b"\n"), 1) if line.isdigit()][:60]
    got = [found.where(piece.location(row)) for piece in pieces for row in range(piece.rows)]
    assert got == [f"{path}, line {number}" for number in wanted]


@pytest.mark.parametrize("compression", ["gz", "bz2", "zst"])
def test_compressed_text_is_read_anywhere(tmp_path, compression):
    content = random.randbytes(170_000).hex().encode()
    file = open_file(*write(tmp_path, content, compression=compression))
    for offset in (0, 300_000, 100, 339_990, 7, 7, len(content), 400_000, 200_001):  # going back begins again
        assert file.read_at(offset, 20) == content[offset : offset + 20]


def test_damaged_compressed_text_and_a_zstd_frame_that_wants_much_memory_are_refused(tmp_path):
    data = bytearray(gzip.compress(b"".join(b"%d\n" % n for n in range(10_000))))
    data[-6] ^= 255  # of the checksum
    found = lines_of(write(tmp_path, data), 100_000)
    assert "its gzip data is damaged" in found.read(found.begin)[0][-1].damage
    parameters = zstd().ZstdCompressionParameters(window_log=28, write_content_size=False)
    stream = zstd().ZstdCompressor(compression_params=parameters).compressobj()
    found = lines_of(write(tmp_path, stream.compress(b"1\n") + stream.flush()))
    assert "a frame wants more than the 128 MiB of memory that are allowed" in found.read(found.begin)[0][-1].damage


def test_globs_are_sorted_and_paths_keep_their_order(tmp_path):
    for name in ("b.csv", "a.csv", "c.txt", "x[1].csv", "sub.csv/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    names = lambda paths: [os.path.basename(file.path) for file in find_files(paths)]
    assert names([tmp_path / "c.txt", str(tmp_path / "?.csv")]) == ["c.txt", "a.csv", "b.csv"]
    assert names(str(tmp_path / "**" / "*.csv")) == ["a.csv", "b.csv", "d.csv", "x[1].csv"]
    assert names(tmp_path / "x[1].csv") == ["x[1].csv"]


def test_files_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "wide.txt").write_bytes("1\n".encode("utf-16"))
    os.mkfifo(tmp_path / "pipe")
    for paths, error, message in (
        (tmp_path / "*.csv", FileNotFoundError, r"no file matches .*\*\.csv"),
        (tmp_path / "none.csv", FileNotFoundError, r"none\.csv"),
        ([], StreamError, "at least one file, got none"),
        (tmp_path / "wide.txt", StreamError, r"wide\.txt is UTF-16\. Convert it"),
        (tmp_path / "pipe", StreamError, "pipe is not a regular file, so it cannot be read twice"),
        ("nothing-like-it://bucket/file", StreamError, r"cannot be opened: .*stocache\[remote\]"),
    ):
        with pytest.raises(error, match=message):
            find_files(paths)
