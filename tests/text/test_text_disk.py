"""Buffers on a local disk: batches as without a cache, and later runs neither read nor parse the text."""

import gzip
import itertools
import os

import numpy as np
import pytest
import torch

from stocache import CacheOptions, CsvFormat, StreamLoader
from stocache.text.buffers import Buffers
from stocache.text.lines import Lines
from tests.support.texts import epochs, numbers, ours, rows, run_ranks

BUFFERS = 21  # full ones in the text; 17 rows are left


class Work:
    """Counts, in this process and those forked later, how often buffers are read and how many are parsed."""

    def __init__(self, monkeypatch):
        self.counts = torch.zeros(4096, 2, dtype=torch.int64).share_memory_()  # a row for each process: += is not atomic
        for which, (kind, name) in enumerate([(Lines, "read"), (Buffers, "_parse")]):
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name), which))

    def _counted(self, original, which):
        def counted(owner, *arguments):
            if len(arguments) == 1:  # else it is the first row that is read
                self.counts[os.getpid() % 4096, which] += 1
            return original(owner, *arguments)

        return counted

    def taken(self):
        """Return the numbers since the last call: of buffers that were read, and of buffers that were parsed."""
        found = tuple(self.counts.sum(0).tolist())
        self.counts.zero_()
        return found


work = pytest.fixture(lambda monkeypatch: Work(monkeypatch), name="work")
folder = pytest.fixture(lambda tmp_path: tmp_path / "disk", name="folder")


def on(folder, memory=0, limit="4MB", **options):
    return CacheOptions(memory, disk=folder, disk_limit=limit, **options)


WAYS = {  # options, and the memory before the disk: for nothing, for a quarter of the buffers, or for all
    "in order": ({}, "4KB"),
    "shuffled": ({"shuffle": True, "window": 3, "drop_last": False}, 0),
    "buffers": ({"shuffle": "buffers"}, "4MB"),
    "counted": ({"count_rows": True, "drop_last": "batch"}, "4KB"),
    "gzip": ({"drop_last": "batch"}, "4KB"),
}


@pytest.mark.linux
@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_two_runs_of_two_epochs_read_and_parse_the_text_once(way, numbered, folder, work):
    options, memory = WAYS[way]
    if way == "gzip":
        numbered.write_bytes(gzip.compress(rows()))
    expected = epochs(numbered, **options)
    work.taken()
    assert epochs(numbered, cache=on(folder, memory), **options) == expected
    reads, parsed = work.taken()
    assert parsed == BUFFERS + ("drop_last" in options)
    assert reads == BUFFERS + 1 + (parsed if way in ("buffers", "counted") else 0)  # to be counted, then to be parsed
    assert epochs(numbered, cache=on(folder, memory), **options) == expected
    assert work.taken() == (0, 0)


@pytest.mark.linux
def test_two_ranks_read_and_parse_the_text_once(numbered, tmp_path, work):
    options, parsed = {"drop_last": "batch", "count_rows": True}, BUFFERS + 1
    numbered.write_bytes(gzip.compress(rows()))
    expected = [epochs(numbered, rank=rank, world_size=2, **options) for rank in range(2)]
    work.taken()
    for run in range(2):
        found = run_ranks(numbered, tmp_path, 2, cache=on(tmp_path / "disk", "10KB"), **options)
        assert [rank[:2] for rank in found] == expected
        reads_and_parsed = work.taken()
        assert reads_and_parsed[1] == parsed if run == 0 else reads_and_parsed == (0, 0)
    assert not ours()


OTHERS = {
    "fingerprint": {"fingerprint": "2"}, "parser": {"format": CsvFormat("\t", comments=None)},
    "buffers": {"buffer_size": 40}, "ranks": {"world_size": 1}, "row": {},
}  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize("other", OTHERS)
def test_for_another_text_or_parser_the_folder_is_made_new(other, numbered, folder, work, caplog):
    def run(fingerprint="1", cached=True, **options):
        cache = on(folder, fingerprint=fingerprint) if cached else None
        return epochs(numbered, 1, cache=cache, **{"rank": 0, "world_size": 2, "drop_last": False} | options), work.taken()[1]

    run()
    if other == "row":
        numbered.write_bytes(rows(0, 100) + rows(101, 102) + rows(100, 101) + rows(102))
    uncached, parsed = run(cached=False, **OTHERS[other])
    assert "was left behind" not in caplog.text
    assert [run(**OTHERS[other]) for _ in range(2)] == [(uncached, parsed), (uncached, 0)]
    assert caplog.text.count("was left behind for other data") == 1


def damage(folder, which):
    """Change a bit of a sample, or of each in the folder."""
    entries = np.frombuffer((folder / "index").read_bytes(), "<u8").reshape(-1, 2).tolist()
    with open(folder / "samples", "r+b") as file:
        for at, nbytes in {"buffer": entries[7:8], "positions": entries[-1:], "all": entries}[which]:
            if at:
                byte = os.pread(file.fileno(), 1, at + nbytes // 2)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1]), at + nbytes // 2)


@pytest.mark.parametrize(("which", "shuffle"), [("buffer", False), ("positions", "buffers"), ("all", True), ("all", "buffers")])
def test_what_is_damaged_is_parsed_again_and_kept(which, shuffle, numbered, folder, work, caplog):
    expected = epochs(numbered, shuffle=shuffle, cache=on(folder))
    work.taken()
    damage(folder, which)
    with StreamLoader(numbered, 10, 20, shuffle=shuffle, cache=on(folder)) as loader:
        assert [numbers(loader) for _ in range(2)] == expected
        assert loader.stats().disk.damaged == (BUFFERS + 1 if which == "all" else 1)
    assert caplog.text.count("has lost samples") == 1
    counted = BUFFERS + 1 if shuffle == "buffers" else 1  # where the last 17 rows begin is known from the buffers
    assert work.taken() == {"buffer": (1, 1), "positions": (counted, 0), "all": (BUFFERS + counted, BUFFERS)}[which]
    assert epochs(numbered, shuffle=shuffle, cache=on(folder)) == expected
    assert work.taken() == (0, 0)


def test_the_run_after_one_that_was_broken_off_reads_on_behind_it(numbered, folder, work):
    with StreamLoader(numbered, 10, 20, cache=on(folder)) as loader:
        list(itertools.islice(loader, 9))
    before = work.taken()[1]
    assert 5 <= before < BUFFERS
    for wanted in ((BUFFERS + 1 - before, BUFFERS - before), (0, 0)):
        assert epochs(numbered, 1, cache=on(folder)) == [list(range(420))]
        assert work.taken() == wanted
