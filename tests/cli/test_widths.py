"""The screens of the command line on terminals of several widths."""

import re
import sys

import pytest

from stocache import SharedCacheDDP
from stocache.cache.stats import CacheStats
from stocache.cli import doctor, output, top
from stocache.cli.app import app
from stocache.cli.listing import Holder, NamedCache
from tests.support.terminals import in_terminal, shown

WIDTHS = [50, 80, 200]
LONG = "imagenet-train-256-px-augmented-by-the-team-of-the-second-flo"  # 60 letters and one


def a_cache(name=LONG, filled=1281167, **options):
    stats = CacheStats(10**7, 1281167, filled, 0, 0, 0, 0, 1281167, 1281167, filled, 3072, 3072 * 1281167, 3072 * 1281167)
    options = {"memory_bytes": 4 * 10**9, "alive": True, "created": 1.0, "stats": stats} | options
    return NamedCache(
        name, "somebody", f"/dev/shm/{name}", holders=[Holder(123456, "python " + "train.py " * 30)] * 3, **options
    )


CACHES = [
    a_cache(),
    a_cache("short", 5000),
    NamedCache("broken", "root", "/dev/shm/broken", problem="/dev/shm/broken is a symbolic link, so it is not used."),
]


def headings(line):
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("caches", [CACHES, CACHES[1:], []])
@pytest.mark.parametrize("width", range(50, 241, 3))
def test_tables_are_never_wider_than_the_terminal(width, caches):
    rates = {cache.path: 12345.6 for cache in caches}
    for view in (
        top.table(caches, width),
        top.table(caches, width, users=True),
        top.live_table(caches, rates, width),
    ):
        lines = shown(view, width)
        assert max(map(len, lines)) <= width
        named = [line for line in lines if re.match(r"(\w+ +)?(imagenet|short|broken)", line)]
        states = [re.search(r"\b(live|bad)\b", line).group() for line in named]
        assert sorted(states) == sorted(cache.state for cache in caches)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (50, ["name", "memory", "filled", "hit rate", "state"]),
        (80, ["name", "memory", "filled", "hit rate", "state", "held by"]),
        (200, ["name", "memory", "filled", "samples", "hit rate", "state", "keep", "age", "held by"]),
    ],
)
def test_ls_leaves_out_columns_that_have_no_room(width, expected):
    heading, _, *rows = shown(top.table(CACHES, width), width)
    assert headings(heading) == expected
    assert len(rows) == 3 + (width == 80)  # the problem takes two lines
    name = rows[0].split()[0]
    assert name == LONG if width == 200 else re.fullmatch("imagenet.*….*flo", name)
    assert rows[1].split()[:2] == ["short", "3.7"]
    if "held by" in expected:
        assert "123456 (+2) python" in rows[0]
        assert rows[0].endswith("…")
        assert "is a symbolic link" in " ".join(rows[2:])


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (50, ["name", "full", "hit rate", "hits/s", "state"]),
        (80, ["name", "memory", "bar", "full", "hit rate", "hits/s", "processes", "state"]),
        (200, ["name", "memory", "samples", "bar", "full", "hit rate", "hits/s", "misses", "processes", "state"]),
    ],
)
def test_top_leaves_out_columns_that_have_no_room(width, expected):
    title, heading, _, first, *_ = shown(top.live_table(CACHES, {cache.path: 9.0 for cache in CACHES}, width), width)
    assert title == "stocache top: quit with q"
    assert headings(heading) == expected
    assert first.startswith("broken")  # of equal rates, by name
    assert "no named caches" in " ".join(shown(top.live_table([], {}, width), width))


@pytest.mark.parametrize(
    ("text", "width", "expected"), [("abcdefgh", 8, "abcdefgh"), ("abcdefgh", 7, "abc…fgh"), ("abcdefgh", 4, "ab…h")]
)
def test_names_are_shortened_in_the_middle(text, width, expected):
    assert top._shorten(text, width) == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_screens_of_a_real_terminal(width):
    with SharedCacheDDP(1, 10, (4,), name=LONG):
        for arguments in (["ls"], ["info"], ["doctor", "--size-limit-gib", "32"], ["stat", "nothing"], ["rm"]):
            for line in in_terminal(width, *arguments):
                assert len(line) <= width or " " not in line.strip(), (arguments, line)  # a path may be longer
        name = re.escape(LONG) if width == 200 else r"imagenet.*….*flo"
        assert any(re.search(name, line) for line in in_terminal(width, "top", until=r"flo.* live"))


@pytest.mark.parametrize("width", WIDTHS)
def test_help_shows_whole_summaries(width):
    lines = in_terminal(width, "--help")
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for command in app.registered_commands:
        sentence = " ".join(command.callback.__doc__.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
        assert f"{command.callback.__name__} {sentence}." in words
    lines = in_terminal(width, "bench", "--help")
    assert max(map(len, lines)) <= width
    assert any(re.match("  --batch-size N  +Samples in a batch", line) for line in lines)


class Terminal:
    """Stands for standard output that is a terminal."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self._stream, name)


def test_rows_are_broken_between_words_on_a_terminal_only(monkeypatch, capsys):
    rows = [("plan", "one two three"), ("path", "/a/path/that-is/too-long"), ("info", "")]
    output.print_rows(rows)
    assert capsys.readouterr().out == "plan  one two three\npath  /a/path/that-is/too-long\ninfo  \n"
    monkeypatch.setenv("COLUMNS", "14")
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    output.print_rows(rows)
    assert capsys.readouterr().out == "plan  one two\n      three\npath  /a/path/that-is/too-long\ninfo  \n"


def test_bench_prints_narrow_tables_for_a_narrow_terminal():
    bench = pytest.importorskip("stocache.cli.bench", reason="needs the extra bench")
    rows = [bench.Row(0.0, 2.0, 2.0, 5.0, 5.0, 10, 10, 0.0, 0.0), bench.Row(1.0, 2.2, 0.5, 4.5, 20.0, 10, 0, 1.0, 0.1)]
    whole = bench.format_table(rows)
    assert bench.format_table(rows, 200) == whole
    for width in (1, 50, 80):
        tables = [table.splitlines() for table in bench.format_table(rows, width).split("\n\n")]
        cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table] for table in tables]
        assert all(table[0][0] == "cached" and len(table) == 4 for table in cells)
        joined = [[cells[0][row][0], *(cell for table in cells for cell in table[row][1:])] for row in (0, 2, 3)]
        lines = whole.splitlines()
        assert joined == [[cell.strip() for cell in lines[row].split("|")[1:-1]] for row in (0, 2, 3)]
        assert width == 1 or max(len(line) for table in tables for line in table) <= width


def test_doctor_names_a_path_once(monkeypatch):
    monkeypatch.setattr(doctor.listing, "find", lambda: [CACHES[2], NamedCache("?", "x", "/dev/shm/x", problem="is closed.")])
    whats = [finding.what for finding in doctor.examine() if "/dev/shm/broken" in finding.what or "is closed" in finding.what]
    assert whats == ["/dev/shm/broken is a symbolic link, so it is not used.", "/dev/shm/x: is closed."]
