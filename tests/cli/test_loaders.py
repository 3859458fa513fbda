"""The records of loaders over named caches: found and read, kept apart from caches, and removed when they are dead."""

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stocache import CachedDataset, DataLoader, SharedCacheDDP
from stocache.cli import doctor, listing
from stocache.cli.app import app
from stocache.shm import registry
from stocache.timing import record
from stocache.timing.record import LOAD_NS, ROW_WORDS, SAMPLES, WAIT_NS, Record
from tests.support.records import FOLDER, Squares, forge, leave_loader_behind


def test_a_loader_over_a_named_cache_is_found_with_its_counts():
    with CachedDataset(Squares(), 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        assert [len(batch) for batch in loader] == [4] * 6
        (found,) = listing.find_loaders()
        assert (found.cache, found.rank, found.pid, found.state) == ("squares", 0, os.getpid(), "live")
        assert found.name == f"squares.loader-{os.getpid()}-0"
        assert found.counted.rows.shape == (5, ROW_WORDS)
        assert (found.counted.sum(SAMPLES), found.counted.batches) == (24, 6)
        assert found.counted.distribution(WAIT_NS) == loader.stats().wait
        assert found.counted.distribution(LOAD_NS) == loader.stats().load
        assert [cache.name for cache in listing.find()] == ["squares"]
        assert listing.find_loaders(count=False)[0].counted is None
        del loader
    assert listing.find_loaders() == []


def test_a_cache_with_the_name_of_a_loader_is_a_cache():
    with SharedCacheDDP(1, 4, (2,), name="x.loader-1-0"):
        assert [cache.name for cache in listing.find()] == ["x.loader-1-0"]
        assert listing.find_loaders() == []


def test_names_of_loaders_are_those_that_a_record_gets():
    with SharedCacheDDP(1, 4, (2,), name="a" * 100):
        kept = Record(0, False, "a" * 100, 3)
        (found,) = listing.find_loaders()
        assert found.name == f"{'a' * 60}{record.SUFFIX}{os.getpid()}-0"
        assert (found.cache, found.rank) == ("a" * 100, 3)
        del kept


def test_the_commands_over_caches_leave_loaders_out(run):
    with SharedCacheDDP(1, 4, (2,), name="c"):
        kept = Record(1, False, "c")
        name = f"c{record.SUFFIX}{os.getpid()}-0"
        assert [cache["name"] for cache in json.loads(run("ls", "--json").stdout)] == ["c"]
        assert name not in run("ls").stdout
        assert f"there is no cache '{name}'" in run("stat", name).output
        assert "0 dead caches, " in run("rm", "--dead").output
        assert len(listing.find_loaders()) == 1
        del kept


def test_rm_dead_removes_the_records_of_killed_processes_only(run, clean):
    pid = leave_loader_behind("c", rank=1)
    kept = Record(0, False, "d")
    dead, live = listing.find_loaders()
    assert (dead.state, dead.pid, dead.rank, dead.counted.sum(WAIT_NS)) == ("dead", pid, 1, 5)
    assert live.state == "live"
    problem = doctor._named()
    assert f"left behind by processes that were killed: c.loader-{pid}-0 (" in next(problem).what
    result = run("rm", "--dead")
    assert result.exit_code == 0
    assert "0 dead caches and 1 dead loader, " in result.output
    assert [loader.name for loader in listing.find_loaders()] == [live.name]
    del kept


def test_a_record_that_ends_between_two_looks_is_left_out(clean):
    path = forge("c.loader-1-0")
    (found,) = listing.find_loaders(count=False)
    path.unlink()
    assert listing._count(found) is None


def cut(path):
    os.truncate(path, 70000)


def stretch(path):
    """Cut it and stretch it again: its size is right, its memory is gone."""
    size = os.path.getsize(path)
    os.truncate(path, 4096)
    os.truncate(path, size)


def flip(path):
    with open(path, "r+b") as file:
        file.seek(60)
        byte = file.read(1)
        file.seek(60)
        file.write(bytes([byte[0] ^ 1]))


HOSTILE = {
    "cut": (lambda: cut(forge("c.loader-1-0")), "is damaged: it has 70000 bytes"),
    "empty": (lambda: cut(forge("c.loader-1-0")) or os.truncate(FOLDER / "c.loader-1-0", 0), "is not a segment of stocache"),
    "stretched": (lambda: stretch(forge("c.loader-1-0")), "is damaged: it has 4.0 KiB of memory"),
    "flipped": (lambda: flip(forge("c.loader-1-0")), "has a damaged header"),
    "a link": (lambda: (FOLDER.mkdir(mode=0o700), (FOLDER / "c.loader-1-0").symlink_to("/etc/passwd")), "is a symbolic link"),
    "a pipe": (lambda: (FOLDER.mkdir(mode=0o700), os.mkfifo(FOLDER / "c.loader-1-0", 0o600)), "is a pipe"),
    "no rows": (lambda: forge("c.loader-1-0", control=b"x" * 100), "is not the record of a loader"),
    "other rows": (
        lambda: forge("c.loader-1-0", facts={"dataset_len": 0, "capacity": 0, "rows": 10**30}),
        "its descriptor says 1000",
    ),
    "rank a str": (lambda: forge("c.loader-1-0", {"loader": "c", "cache": "c", "rank": "0", "pid": 1}), "not that of a loader"),
    "rank true": (lambda: forge("c.loader-1-0", {"loader": "c", "cache": "c", "rank": True, "pid": 1}), "not that of a loader"),
    "rank a list": (
        lambda: forge("c.loader-1-0", {"loader": "c", "cache": "c", "rank": [], "pid": 1}),
        "has a header with another",
    ),
    "pid below 0": (lambda: forge("c.loader-1-0", {"loader": "c", "cache": "c", "rank": 0, "pid": -1}), "not that of a loader"),
    "no cache": (lambda: forge("c.loader-1-0", {"loader": "c", "rank": 0, "pid": 1}), "not that of a loader"),
    "cache a number": (lambda: forge("c.loader-1-0", {"loader": "c", "cache": 7, "rank": 0, "pid": 1}), "not that of a loader"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_not_a_record_is_a_problem_of_that_file_alone(clean, case):
    make, problem = HOSTILE[case]
    make()
    kept = Record(0, False, "d")
    bad, good = listing.find_loaders()
    assert (bad.state, bad.counted) == ("bad", None)
    assert problem in bad.problem
    assert (good.state, good.problem) == ("live", "")
    assert listing.find() == []
    del kept


def test_counts_that_were_forged_do_not_overflow(clean):
    forge("c.loader-1-0", rows=3, control=b"\xff" * 7 * 8 + b"\xff\xff\xff\xff\xff\xff\xff\x7f" * (3 * ROW_WORDS - 7))
    (found,) = listing.find_loaders()
    assert found.problem == ""
    assert found.counted.rows.min() >= 0
    assert found.counted.sum(SAMPLES) == 2 * (2**63 - 1)
    assert found.counted.counts(WAIT_NS).min() > 0


def test_texts_of_a_forged_record_are_printable_and_short(clean):
    forge("c.loader-1-0", {"loader": "c", "cache": "\x1b[31m\n\ud800" + "x" * 1000, "rank": 0, "pid": 1})
    (found,) = listing.find_loaders()
    assert found.cache.startswith("\\x1b[31m\\n\\ud800xxx")
    assert found.cache.isprintable()
    assert len(found.cache) == 400


def test_the_descriptor_of_a_loader_under_another_name_is_a_bad_file(clean):
    forge("c\x1b[31m.loader-1-0", {"loader": "c", "cache": "c", "rank": 0, "pid": 1})
    assert listing.find_loaders() == []
    (bad,) = listing.find()
    assert (bad.name, bad.state) == ("c\\x1b[31m.loader-1-0", "bad")
    assert "its name is not that of one" in bad.problem


def test_records_are_read_up_to_a_bound(clean, monkeypatch):
    for number in range(3):
        forge(f"c.loader-1-{number}", rows=2)
    bytes_each = listing.find_loaders()[0].memory_bytes
    monkeypatch.setattr(listing, "_MOST_BYTES", 2 * bytes_each)
    first, second, third = listing.find_loaders()
    assert (first.problem, second.problem) == ("", "")
    assert "is not read: the records of this user exceed" in third.problem


def test_a_file_that_is_cut_while_it_is_read_is_a_problem(clean, monkeypatch):
    path = forge("c.loader-1-0", rows=5)
    pread = os.pread

    def cut_first(fd, nbytes, at):
        if nbytes == 5 * ROW_WORDS * 8:
            os.truncate(path, 100000)
        return pread(fd, nbytes, at)

    monkeypatch.setattr(os, "pread", cut_first)
    (bad,) = listing.find_loaders()
    assert "is damaged: it was cut." in bad.problem


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_loaders_of_another_user():
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(12345)
        kept = Record(0, False, "theirs", 2)
        kept.main.add(WAIT_NS, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert listing.find_loaders() == []
    (found,) = listing.find_loaders(-1)
    assert (found.user, found.state, found.rank, found.counted.sum(WAIT_NS)) == ("12345", "dead", 2, 7)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(12346)
        os._exit(1 if listing.find_loaders(12345) else 0)  # `find` tells that the directory cannot be read
    assert os.waitpid(pid, 0)[1] == 0
    runner = CliRunner()
    assert runner.invoke(app, ["rm", "--dead", "--user", "12345", "--force"]).exit_code == 0
    assert not Path(registry.directory_of(12345)).exists()
