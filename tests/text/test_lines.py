"""Rows cut out of text files: against a plain reading of the same bytes."""

import bz2
import gzip
import io
import os
import pickle
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stocache import DamagedError, StreamError
from stocache.text import lines
from stocache.text.files import find_files
from stocache.text.lines import Lines

COMPRESSIONS = {
    "plain": lambda data: data,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: zstandard.compress(data),
}


def write(folder, *contents, compression="plain"):
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{number:03}.txt"
        path.write_bytes(COMPRESSIONS[compression](content))
        paths.append(str(path))
    return paths


def lines_of(paths, buffer_size=3, skip_header=0, comments="#", rank=0, world_size=1, **options):
    return Lines(find_files(paths), buffer_size, skip_header, comments, None, rank, world_size, **options)


def buffers_of(found):
    """All buffers of a share, as lists of rows."""
    buffers, position = [], found.begin
    while True:
        pieces, end = found.read(position)
        rows = [row for piece in pieces for row in piece.data.split(b"\n")[:-1]]
        assert len(rows) == end.rows - position.rows == sum(piece.rows for piece in pieces)
        if not rows:
            return buffers
        buffers.append(rows)
        position = end


def oracle(contents, skip_header=0, comments="#"):
    """The rows of all files, read in the plainest way."""
    rows = []
    for content in contents:
        found = io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")).read().split(b"\n")
        for line in found[skip_header:]:
            text = line.strip(b" \t\r\x0b\x0c")
            if text and not (comments and text.startswith(comments.encode())):
                rows.append(line)
    return rows


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "contents",
    [
        [b"1\n2\n3\n4\n5\n6\n7\n"],
        [b"1\n2\n3\n4\n5\n6"],
        [b"1\r\n2\r\n\r\n3\r\n4"],
        [b"\n\n# all\n1\n \t\n  # more\n2\n\n3\n4\n\n\n"],
        [b"\xef\xbb\xbf1\n2\n", b"\xef\xbb\xbf3\n4\n5", b"6\n7\n8\n9\n"],
        [b"1", b"2", b"3", b"4", b"5\n", b"\n\n", b"6"],
        ["ä\nöß\nü€\n😀😀😀\n".encode() * 5],
        [b"x" * 300_000 + b"\n1\n" + b"y" * 200_000],
    ],
    ids=["newline", "no newline", "CRLF", "blank", "BOM", "one line each", "UTF-8", "long"],
)
def test_every_row_comes_once_and_in_order(tmp_path, contents, compression):
    found = lines_of(write(tmp_path, *contents, compression=compression))
    buffers = buffers_of(found)
    assert [row for buffer in buffers for row in buffer] == oracle(contents)
    assert all(len(buffer) == 3 for buffer in buffers[:-1])
    assert found.count() == len(oracle(contents))
    found.close()


LINE = st.sampled_from([b"1", b"22", b"333\r", b"", b" ", b"# no", b"\t#", b"4 # yes", "ü€".encode(), b"5" * 40])
FILE = st.tuples(st.lists(LINE, max_size=12), st.booleans(), st.booleans()).map(
    lambda parts: (b"\xef\xbb\xbf" if parts[2] else b"") + b"\n".join(parts[0]) + (b"\n" if parts[1] else b"")
)


@given(
    contents=st.lists(FILE, min_size=1, max_size=4),
    buffer_size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    skip_header=st.integers(0, 2),
    comments=st.sampled_from(["#", None, "# "]),
    compression=st.sampled_from(["plain", "plain", "gz"]),
)
def test_the_shares_of_all_ranks_are_the_whole(
    tmp_path_factory, contents, buffer_size, world_size, skip_header, comments, compression
):
    contents = [content for content in contents if content]
    if not contents:
        return
    paths = write(tmp_path_factory.mktemp("share"), *contents, compression=compression)
    wanted = oracle(contents, skip_header, comments)
    shares = [lines_of(paths, buffer_size, skip_header, comments, rank, world_size) for rank in range(world_size)]
    got = []
    for share in shares:
        got.append(buffers_of(share)[share.first :: share.step])
        share.close()
    if shares[0].step == 1:
        assert [row for buffers in got for buffer in buffers for row in buffer] == wanted
    else:  # every so manyth buffer of the whole
        assert sorted(row for buffers in got for buffer in buffers for row in buffer) == sorted(wanted)
    for rank, share in enumerate(shares):
        same = shares[-1].share_of(rank, world_size)
        assert (same.begin, same.end, same.first, same.step) == (share.begin, share.end, share.first, share.step)
        same.close()
    shares[-1].close()


def test_lines_that_are_read_piecemeal_come_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_HEAD", 7)  # bytes at a time
    contents = [b"h1\nheader\n" + b"".join(b"%d\n" % 10**n for n in range(30)) for _ in range(3)]
    for world_size in (1, 2, 3, 7, 50):
        got = []
        for rank in range(world_size):
            share = lines_of(write(tmp_path, *contents), 4, 2, "#", rank, world_size)
            got += [row for buffer in buffers_of(share) for row in buffer]
            assert share.header() == "header"
            share.close()
        assert got == oracle(contents, 2)


def test_compressed_files_are_shared_out_whole_where_there_are_enough(tmp_path):
    paths = write(tmp_path, *[b"%d\n" % n * 100 for n in range(6)], compression="gz")
    shares = [lines_of(paths, 10, rank=rank, world_size=3) for rank in range(3)]
    assert [share.step for share in shares] == [1, 1, 1]
    assert [{row for buffer in buffers_of(share) for row in buffer} for share in shares] == [
        {b"0", b"1"}, {b"2", b"3"}, {b"4", b"5"},
    ]  # fmt: skip
    for share in shares:
        share.close()


@pytest.mark.parametrize("compression", ["gz", "bz2", "zst"])
def test_going_back_in_compressed_text_begins_again(tmp_path, compression):
    content = b"".join(b"%06d\n" % n for n in range(50_000))
    (path,) = write(tmp_path, content, compression=compression)
    (file,) = find_files(path)
    opened = file.open()
    for offset in (0, 300_000, 100, 349_990, 7, 7, 350_000, 400_000, 200_001):
        assert opened.read_at(offset, 20) == content[offset : offset + 20]
    opened.close()


@pytest.mark.parametrize("compression", ["gz", "bz2", "zst"])
@pytest.mark.parametrize("keep", [0.5, 0.97, -1])
def test_cut_compressed_text_gives_what_is_there_and_says_why_it_ends(tmp_path, compression, keep):
    rows = [os.urandom(8).hex().encode() for _ in range(20_000)]
    data = COMPRESSIONS[compression](b"\n".join(rows))
    data = data[:keep] if keep < 0 else data[: int(len(data) * keep)]
    (tmp_path / "cut").write_bytes(data)
    found = lines_of(str(tmp_path / "cut"), 1000)
    got, position, damage = [], found.begin, None
    while damage is None:
        pieces, position = found.read(position)
        got += [row for piece in pieces for row in piece.data.split(b"\n")[:-1]]
        damage = pieces[-1].damage
    assert got == rows[: len(got)]
    assert len(got) >= (0 if compression == "bz2" else keep % 1 * 0.5 * len(rows))  # bzip2 has large blocks
    assert ("gzip" if compression == "gz" else "zstd" if compression == "zst" else "bz2") in damage
    found.close()


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_compressed_files_may_have_several_members(tmp_path, compression):
    compress = COMPRESSIONS[compression]
    (tmp_path / "many").write_bytes(b"".join(compress(b"%d\n" % n) for n in range(9)))
    found = lines_of(str(tmp_path / "many"))
    assert [row for buffer in buffers_of(found) for row in buffer] == [b"%d" % n for n in range(9)]
    found.close()


def test_damaged_compressed_text_says_so(tmp_path):
    data = bytearray(gzip.compress(b"".join(b"%d\n" % n for n in range(10_000))))
    data[-6] ^= 255  # of the checksum
    (tmp_path / "bad.gz").write_bytes(data)
    found = lines_of(str(tmp_path / "bad.gz"), 100_000)
    pieces, _ = found.read(found.begin)
    assert "gzip data is damaged" in pieces[-1].damage
    found.close()


def test_where_counts_all_lines_of_the_file(tmp_path):
    content = b"header\n# comment\n1\n\n2\n3\n# last\n4\n"
    found = lines_of(write(tmp_path, content), 2, skip_header=1)
    (first,), position = found.read(found.begin)
    (second,), _ = found.read(position)
    assert found.where(first.location(0)).endswith("000.txt, line 3")
    assert found.where(first.location(1)).endswith("000.txt, line 5")
    assert found.where(second.location(1)).endswith("000.txt, line 8")
    found.close()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "long", [b"x" * 1001, b" " * 1001, b"# " + b"x" * 999, b"x" * 500_000], ids=["row", "blank", "comment", "far"]
)
def test_a_line_that_is_too_long_is_an_error_with_its_number(tmp_path, long, compression):
    path, other = write(tmp_path, b"1\n2\n# 3\n" + long + b"\n5\n6\n", b"7\n" + long, compression=compression)
    for which, number in ((path, 4), (other, 2)):
        found = lines_of(which, 100, max_line_bytes=1000)
        with pytest.raises(
            StreamError, match=rf"00.\.txt, line {number}: the line is longer than 1000 bytes\. Raise max_line_bytes"
        ):
            found.read(found.begin)
        with pytest.raises(StreamError, match=f"line {number}: the line is longer"):
            found.count()
        assert [piece.rows for piece in found.read(found.begin, 1)[0]] == [1]  # what comes before is not at fault
        found.close()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_line_may_be_as_long_as_the_limit(tmp_path, compression):
    content = b"1\n" + b"x" * 1000 + b"\n" + b"# " + b"x" * 998 + b"\n2\n" + b"y" * 1000
    found = lines_of(write(tmp_path, content, compression=compression), max_line_bytes=1000)
    assert [row for buffer in buffers_of(found) for row in buffer] == oracle([content])
    found.close()


@given(
    contents=st.lists(FILE, min_size=1, max_size=3), limit=st.integers(1, 45), world_size=st.integers(1, 4), gz=st.booleans()
)
def test_long_lines_that_are_left_out_count_as_rows(tmp_path_factory, contents, limit, world_size, gz):
    contents = [content for content in contents if content]
    if not contents:
        return
    paths = write(tmp_path_factory.mktemp("long"), *contents, compression="gz" if gz else "plain")
    wanted = []
    for content in contents:
        found = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        wanted += [b"" if len(line) > limit else line for line in found if len(line) > limit or oracle([line])]
    got = []
    for rank in range(world_size):
        share = lines_of(paths, 3, rank=rank, world_size=world_size, max_line_bytes=limit, skip_long=True)
        for number, pieces in enumerate(_buffers(share)):
            if number % share.step == share.first:
                got += [row for piece in pieces for row in (piece.data.split(b"\n")[: piece.rows])]
                assert all(bool(piece.fault) == (piece.data == b"") for piece in pieces)
        share.close()
    assert sorted(got) == sorted(wanted)


def _buffers(found):
    position = found.begin
    while True:
        pieces, end = found.read(position)
        if end.rows == position.rows:
            return
        assert end.rows - position.rows == sum(piece.rows for piece in pieces) <= found.buffer_size
        yield pieces
        position = end


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_header_that_is_too_long_is_an_error(tmp_path, compression):
    paths = write(tmp_path, b"x" * 500_000 + b"\n1\n2\n", compression=compression)
    for skip_long in (False, True):
        with pytest.raises(StreamError, match=r"000\.txt, line 1: the line is longer than 1536 bytes"):
            lines_of(paths, skip_header=1, max_line_bytes=1536, skip_long=skip_long)


def test_ranks_stop_looking_for_a_line_end(tmp_path):
    paths = write(tmp_path, b"1\n" * 1000 + b"x" * 500_000)
    for rank in (0, 1):
        with pytest.raises(StreamError, match=r"000\.txt, line 1001: the line is longer than 1000 bytes"):
            lines_of(paths, rank=rank, world_size=2, max_line_bytes=1000)
    shares = [lines_of(paths, 1000, rank=rank, world_size=2, max_line_bytes=1000, skip_long=True) for rank in (0, 1)]
    assert [share.count() for share in shares] == [1001, 0]
    for share in shares:
        share.close()


def test_deep_indentation_is_looked_through_like_any(tmp_path):
    for delimiter in (None, "\t"):
        blank, tabs, text = b" " * 3000, b" " * 200 + b"\t" + b" " * 90, b" " * 100_000 + b"1"
        content = b"\n".join([blank, tabs, text, b"2", b" " * 77 + b"# no", b" " * 64, b" " * 63, b" " * 65 + b"\r", b"3"])
        found = Lines(find_files(write(tmp_path, content)), 10, 0, "#", delimiter, 0, 1)
        assert buffers_of(found) == [[tabs, text, b"2", b"3"] if delimiter else [text, b"2", b"3"]]
        (piece,), _ = found.read(found.begin)
        assert [piece.location(row)[2] for row in range(piece.rows + 1)] == [*([1, 2, 3, 8] if delimiter else [2, 3, 8]), 9]
        found.close()


def test_pieces_are_of_bounded_size_and_keep_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_CHUNK", 4096)
    monkeypatch.setattr("stocache.text.rows._BLOCK", 512)
    content = b"".join(b"%d\n" % n + b"# much to say\n" * 50 + b"\n" * (n % 300) for n in range(500))
    for compression in COMPRESSIONS:
        found = lines_of(write(tmp_path, content, compression=compression), 200)
        pieces, _ = found.read(found.begin)
        assert sum(len(piece.data) for piece in pieces) == len(b"".join(b"%d\n" % n for n in range(200)))
        assert max(piece.nbytes for piece in pieces) <= 4096
        rows = [row for buffer in buffers_of(found) for row in buffer]
        assert rows == oracle([content])
        numbers = [number for number, line in enumerate(content.split(b"\n")) if line.isdigit()][:200]
        wanted = [f"line {number + 1}" for number in numbers]
        got = [found.where(piece.location(row)) for piece in pieces[::40] for row in range(piece.rows)]
        assert got
        assert all(any(line.endswith(f", {one}") for one in wanted) for line in got)
        found.close()


def test_zstd_frames_of_any_kind_are_read_as_they_were_written(tmp_path):
    text = b"".join(b"%d,%d\n" % (n, n * n) for n in range(40_000))
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    blocks = b"".join(
        stream.compress(text[at : at + 999]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for at in range(0, len(text), 999)
    )
    frames = {
        "of small blocks": (blocks + stream.flush(), text),
        "raw": (zstandard.compress(os.urandom(300_000).replace(b"\n", b"")), None),
        "of one byte": (zstandard.compress(b"7" * 10_000_000), b"7" * 10_000_000),
        "empty": (zstandard.compress(b""), b""),
        "skippable": (b"\x53\x2a\x4d\x18\x05\0\0\0hello", b""),
    }
    data = b"".join(frame for frame, _ in frames.values())
    (tmp_path / "all.zst").write_bytes(data)
    (file,) = find_files(tmp_path / "all.zst")
    opened = file.open()
    wanted = b"".join(zstandard.decompress(frame) if content is None else content for frame, content in frames.values())
    assert opened.read_at(0, 1 << 28) == wanted
    assert opened.damage is None
    opened.close()
    for cut in range(1, 20):
        (tmp_path / "cut.zst").write_bytes(data[:-cut] if cut < 13 else blocks[:-cut])
        opened = find_files(tmp_path / "cut.zst")[0].open()
        opened.read_at(0, 1 << 28)
        assert opened.damage == "its zstd data is cut: the last frame is not complete"
        opened.close()


def test_a_zstd_frame_that_wants_much_memory_is_refused(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "wide.zst").write_bytes(stream.compress(b"1\n") + stream.flush())
    found = lines_of(str(tmp_path / "wide.zst"))
    pieces, _ = found.read(found.begin)
    assert pieces[-1].damage == "its zstd data is damaged: a frame wants 256 MiB of memory, 128 MiB are allowed"
    found.close()


# ---------------------------------------------------------------------------------------------------- files


def test_globs_are_sorted_and_paths_keep_their_order(tmp_path):
    for name in ("b.csv", "a.csv", "c.txt", "sub.csv/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    found = find_files([tmp_path / "c.txt", str(tmp_path / "*.csv")])
    assert [os.path.basename(file.path) for file in found] == ["c.txt", "a.csv", "b.csv"]
    assert [os.path.basename(file.path) for file in find_files(str(tmp_path / "**" / "*.csv"))] == ["a.csv", "b.csv", "d.csv"]
    (tmp_path / "x[1].csv").write_text("1\n")
    assert len(find_files(tmp_path / "x[1].csv")) == 1


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches .*\*\.csv"):
        find_files(tmp_path / "*.csv")
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        find_files(tmp_path / "none.csv")
    with pytest.raises(StreamError, match="at least one file, got none"):
        find_files([])
    (tmp_path / "wide.txt").write_bytes("1\n".encode("utf-16"))
    with pytest.raises(StreamError, match=r"wide\.txt is UTF-16\. Convert it"):
        find_files(tmp_path / "wide.txt")
    with pytest.raises(StreamError, match=r"cannot be opened: .*stocache\[remote\]"):
        find_files("nothing-like-it://bucket/file")


def test_zstd_needs_its_library(tmp_path, monkeypatch):
    (path,) = write(tmp_path, b"1\n", compression="zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(StreamError, match=r"compressed with zstd\. pip install 'stocache\[codecs\]'"):
        find_files(path)[0].open()


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path):
    (path,) = write(tmp_path, b"1\n2\n3\n4\n")
    found = lines_of(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DamagedError, match=r"000\.txt has changed while it was being read"):
        found.read(found.begin)
    found.close()
    found = lines_of(path)
    _, end = found.read(found.begin)
    found.check(found.begin, end)
    os.unlink(path)
    with pytest.raises(DamagedError, match=r"000\.txt is gone"):
        found.check(found.begin, end)
    found.close()


def test_changes_at_either_end_are_seen(tmp_path):
    (path,) = write(tmp_path, b"1\n" * 200_000)
    before = find_files(path)
    facts = os.stat(path)
    for at in (0, 399_998):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"2")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as if it had not been written
        after = find_files(path)
        assert after != before
        before = after


def test_a_forked_child_reads_at_its_own_place(tmp_path):
    (path,) = write(tmp_path, b"".join(b"%06d\n" % n for n in range(100_000)))
    found = lines_of(path, 1000)
    _, position = found.read(found.begin)
    pid = os.fork()
    if pid == 0:
        rows = buffers_of(found)
        os._exit(0 if len(rows) == 100 else 1)
    got = [row for _ in range(99) for row in _next(found, position)]
    assert os.waitpid(pid, 0)[1] == 0
    assert got == [b"%06d" % n for n in range(1000, 2000)] * 99
    again = pickle.loads(pickle.dumps(found))
    assert buffers_of(again) == buffers_of(found)
    again.close()
    found.close()


def _next(found, position):
    (piece,), _ = found.read(position)
    return piece.data.split(b"\n")[:-1]


@pytest.mark.parametrize(
    "content",
    [b"1\n" + b"# much to say\n" * 400_000 + b"2\n3\n", b"1\r2\r3\r" * 500_000, b"1\n" * 10 + b"9" * 5_000_000 + b"\n2\n"],
    ids=["comments", "CR", "one long line"],
)
@pytest.mark.parametrize("compression", ["plain", "gz"])
def test_files_of_odd_proportions_take_no_more_memory_than_they_have(tmp_path, monkeypatch, content, compression):
    found = lines_of(write(tmp_path, content, content, compression=compression), 65536)
    largest = []
    monkeypatch.setattr(lines.FileReader, "read_at", _noting(lines.FileReader.read_at, largest))
    assert [row for buffer in buffers_of(found) for row in buffer] == oracle([content, content])
    assert max(largest) <= (3 * len(content) if compression == "plain" else lines._LONGEST)
    found.close()


def _noting(read_at, sizes):
    def noting(self, number, offset, nbytes):
        sizes.append(nbytes)
        return read_at(self, number, offset, nbytes)

    return noting


def test_control_characters_are_data(tmp_path):
    content = b"1\n\x00\n2\n\x01\x02\n3\n\x1a"
    found = lines_of(write(tmp_path, content), 2)
    assert buffers_of(found) == [[b"1", b"\x00"], [b"2", b"\x01\x02"], [b"3", b"\x1a"]]
    found.close()
