"""Lines that do not fit: each is named, or left out and counted; lines that are too long take bounded memory."""

import functools
import resource

import numpy as np
import pytest
import torch

from stocache import CacheOptions, CsvFormat, CustomFormat, DamagedError, JsonLinesFormat, StreamError, StreamLoader
from tests.support.processes import in_child
from tests.support.texts import COMPRESSIONS, SKIP, N, numbers, parse, rows, zstd

MIB = 1 << 20
CSV, TOO_LONG = CsvFormat(","), r"line {}: the line is longer than 16 MiB\. Raise max_line_bytes"
GOOD = b"1\t1\t1\n2\t2\t2\n3\t3\t3\n"


def refuses(path, message, error=StreamError, **options):
    with pytest.raises(error, match=message), StreamLoader(path, **{"batch_size": 1, "buffer_size": 2, **options}) as loader:
        list(loader)


def test_a_line_that_does_not_fit_is_named_or_left_out(tmp_path, caplog):
    (path := tmp_path / "bad.tsv").write_bytes(GOOD + b"4\tfour\t4\n")
    refuses(path, r"bad\.tsv, line 4: .*: column 1 is 'four', not a number; expected")
    path.write_bytes(GOOD + b"4\t4\n5\t5\t5\n\n# comment\n4\t4\n")
    refuses(path, r"bad\.tsv, line 4: '4\\t4': 2 fields; expected 3 fields split at '\\t'")
    disk = CacheOptions("4KB", disk=tmp_path / "disk", disk_limit="4MB")
    for cache in (None, CacheOptions(0.01), disk, disk):
        caplog.clear()
        with StreamLoader(path, 2, 2, format=SKIP, drop_last=False, cache=cache) as loader:
            for epoch in range(2):
                assert numbers(loader) == [1, 2, 3, 5]
                assert loader.stats().skipped == 2 * (epoch + 1)
        assert "bad.tsv, line 4" in caplog.text
        assert caplog.text.count("epoch 0: 2 of 6 lines were left out, and 0 good ones that then filled no batch") == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"header\n"])
def test_files_without_data(tmp_path, content):
    path, full, skip_header = tmp_path / "empty.tsv", tmp_path / "full.tsv", int(b"header" in content)
    path.write_bytes(content)
    full.write_bytes(b"header\n" * skip_header + GOOD)
    if content:
        refuses(path, r"empty\.tsv: no line holds data", skip_header=skip_header)
    else:
        refuses([path, full], r"empty\.tsv is empty: a file of at least one line was expected")
    form = CsvFormat("\t", skip_header=skip_header, on_error="raise" if content else "skip")
    with StreamLoader([path, full], 1, 1, format=form) as loader:
        assert numbers(loader) == [1, 2, 3]


@pytest.mark.parametrize("compression", ["gz", "bz2", "zst"])
def test_compressed_text_that_is_cut_ends_the_epoch_or_counts_as_a_bad_line(tmp_path, caplog, compression):
    data = COMPRESSIONS[compression](rows(0, 60_000))
    (path := tmp_path / "cut").write_bytes(data[:-1])
    refuses(path, r"cut, line \d+: its (gzip|bz2|zstd) data is cut", DamagedError, batch_size=1000, buffer_size=20_000)
    path.write_bytes(data[: len(data) * 97 // 100])
    with StreamLoader(path, 1000, 20_000, format=SKIP, drop_last=False) as loader:
        found = numbers(loader)
        assert found == list(range(len(found)))
        assert 20_000 < len(found) < 60_000  # bzip2 has large blocks
        assert loader.stats().skipped == 1
    assert "data is cut" in caplog.text


def test_where_a_header_does_not_fit_or_nothing_is_left_the_first_bad_line_is_named(tmp_path):
    (path := tmp_path / "bad.tsv").write_bytes(b"1\t2\t3\nx\ty\tz\n" + b"a\tb\tc\n" * 8)
    message = r"9 of 10 lines were left out, and the others fill no batch. The first: .*, line 2"
    refuses(path, message, batch_size=2, format=SKIP)
    (path := tmp_path / "wrong.csv").write_text("a,b,c,d\n1,2,3\n")
    form = CsvFormat(",", skip_header=1, columns=["a", "b"], label_columns="c")
    refuses(path, r"wrong\.csv: the header has 4 names, the first row 3 fields", format=form)
    refuses(path, r"line 1: 'a,b,c,d': column 0 is 'a', not a number; .*skip_header=1 leaves a header out", format=CSV)


def test_good_rows_that_fill_no_batch_are_counted(tmp_path, caplog):
    (path := tmp_path / "bad.tsv").write_bytes(rows(0, 20) + b"x\n" + rows(21, 40) + b"y\n" + rows(41, 60))
    for drop_last, delivered in ((True, 40), ("batch", 40), (False, 58)):
        with StreamLoader(path, 10, 20, format=SKIP, drop_last=drop_last) as loader:
            assert len(numbers(loader)) == delivered
            stats = loader.stats()
            assert (stats.rows, stats.skipped, stats.dropped) == (60, 2, 58 - delivered)
    assert "2 of 60 lines were left out, and 18 good ones that then filled no batch" in caplog.text


def test_a_parse_function_is_any_callable_that_returns_a_row_for_each_line(numbered):
    def refuse(found):
        raise ValueError("not these")

    refuses(numbered, r"numbered\.tsv, line 1: '0\\t0\\t0': ValueError: not these", format=CustomFormat(refuse))
    with StreamLoader(numbered, 10, 20, format=CustomFormat(functools.partial(parse)), shuffle=True, drop_last=False) as loader:
        tokens = torch.cat([batch["tokens"] for batch in loader])
        assert sorted(tokens[:, 0].tolist()) == list(range(N))
        assert torch.equal(tokens[:, 2], tokens[:, 0] + 2)


def test_json_that_is_nested_too_deep_is_a_bad_line(tmp_path):
    path, form = tmp_path / "a.jsonl", JsonLinesFormat(columns=["a"], label_columns="b")
    for bad in ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "b": 1}', '{"a": ' + "1" * 5000 + ', "b": 1}'):
        path.write_text('{"a": 1, "b": 1}\n' + bad + "\n[]\n")  # beside other bad lines: pyarrow reads the digits as inf
        refuses(path, r"a\.jsonl, line 2: ", format=form, buffer_size=3)
        path.write_text(bad + "\n")
        refuses(path, "the first row is not a JSON object", format=form)


def write_bomb(path, compression, text, times, after=b"\n5,6,2\n"):
    """Write two rows, then ``text`` that often, each time as a member of its own."""
    compress = COMPRESSIONS[compression]
    path.write_bytes(compress(b"1,2,0\n3,4,1\n") + compress(text) * times + compress(after))
    return path


def in_bounded_memory(action, mib=400):
    """Run an action in a child process, which takes less than some MiB of memory for it."""
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    def run():
        before = peak()
        action()
        assert peak() - before < mib

    assert in_child(run, timeout_s=120) == 0


BOMBS = {
    "row": (b"x" * MIB, "gz"), "blank": (b" " * MIB, "bz2"), "comment": (b"#" + b"x" * (MIB - 1), "zst"),
    "bracket": (b"[" * MIB, "gz"),
}  # fmt: skip


@pytest.mark.linux
def test_long_lines_are_refused_or_left_out_in_bounded_memory_however_they_would_be_read(tmp_path):
    bombs = {kind: write_bomb(tmp_path / kind, compression, text, 450) for kind, (text, compression) in BOMBS.items()}
    with open(hole := write_bomb(tmp_path / "hole", "plain", b"", 0, after=b""), "r+b") as file:
        file.truncate(450 * MIB)
    loadtxt = CustomFormat(functools.partial(np.loadtxt, delimiter=",", ndmin=2))
    json = JsonLinesFormat(skip_header=2, comments="1", label_columns=None)
    ways = [(hole, CSV), (bombs["row"], loadtxt), (bombs["row"], CsvFormat(",", skip_header=3)), (bombs.pop("bracket"), json)]

    def read():
        for path, form in (*ways, *((path, CSV) for path in bombs.values())):
            refuses(path, TOO_LONG.format(3), format=form)
        skip = CsvFormat(",", on_error="skip", max_line_bytes="8MiB")
        for path in bombs.values():
            with StreamLoader(path, 1, 2, format=skip, drop_last=False) as loader:
                assert [y.tolist() for _, y in loader] == [[0], [1], [2]]
                assert loader.stats().skipped == 1

    in_bounded_memory(read)


def test_a_kib_of_zstd_is_not_decompressed_at_once(tmp_path):
    block = (MIB // 8) << 3 | 0b010  # one byte, 128 Ki times
    frame = zstd().compress(b"1,2,0\n" * 9, level=1)[:4] + b"\x00\x70" + (block.to_bytes(3, "little") + b"x") * 16000
    (tmp_path / "a.zst").write_bytes(frame)
    in_bounded_memory(lambda: refuses(tmp_path / "a.zst", TOO_LONG.format(1), format=CsvFormat(",", label_columns=None)))
