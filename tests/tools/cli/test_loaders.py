"""The records of loaders over named caches: found and read, kept apart from caches, and removed when they are dead."""

import json
import os

from stocache import CachedDataset, DataLoader, SharedCacheDDP
from stocache.observe.recording import record
from stocache.observe.recording.record import LOAD_NS, SAMPLES_MADE, TIMING_ROW_WORDS, WAIT_NS, TimingRecord
from stocache.tools.cli import doctor, listing
from tests.support.records import SQUARES, forge, leave_loader_behind


def test_a_loader_over_a_named_cache_is_found_with_its_counts():
    with CachedDataset(SQUARES, 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        assert [len(batch) for batch in loader] == [4] * 6
        (found,) = listing.find_loaders()
        assert (found.cache, found.rank, found.pid, found.state) == ("squares", 0, os.getpid(), "live")
        assert found.name == f"squares.loader-{os.getpid()}-0"
        assert found.counted.rows.shape == (5, TIMING_ROW_WORDS)
        assert (found.counted.sum(SAMPLES_MADE), found.counted.batches) == (24, 6)
        assert found.counted.distribution(WAIT_NS) == loader.stats().wait
        assert found.counted.distribution(LOAD_NS) == loader.stats().load
        assert [cache.name for cache in listing.find()] == ["squares"]
        assert listing.find_loaders(count=False)[0].counted is None
        del loader
    assert listing.find_loaders() == []


def test_a_file_is_a_loader_by_the_name_that_a_record_gets_and_by_what_it_says(clean):
    with SharedCacheDDP(1, 4, (2,), name="x.loader-1-0"):
        assert [cache.name for cache in listing.find()] == ["x.loader-1-0"]
        assert listing.find_loaders() == []
    forge("c\x1b[31m.loader-1-0")
    assert listing.find_loaders() == []
    (bad,) = listing.find()
    assert (bad.name, bad.state) == ("c\\x1b[31m.loader-1-0", "bad")
    assert "its name is not that of one" in bad.problem
    with SharedCacheDDP(1, 4, (2,), name="a" * 100):
        kept = TimingRecord(0, False, "a" * 100, 3)
        (found,) = listing.find_loaders()
        assert found.name == f"{'a' * 60}{record.SUFFIX}{os.getpid()}-0"
        assert (found.cache, found.rank) == ("a" * 100, 3)
        del kept


def test_rm_dead_removes_the_records_of_killed_processes_only(run, clean):
    leave_loader_behind("c", rank=1)
    kept = TimingRecord(0, False, "d")
    dead, live = listing.find_loaders()
    assert (dead.state, dead.rank, dead.counted.sum(WAIT_NS), live.state) == ("dead", 1, 5, "live")
    expected = f"left behind by processes that were killed: c.loader-{dead.pid}-0 ("
    assert expected in next(doctor._named()).what
    assert json.loads(run("ls", "--json").stdout) == []
    assert f"there is no cache '{live.name}'" in run("stat", live.name).output
    result = run("rm", "--dead")
    assert (result.exit_code, "0 dead caches and 1 dead loader, " in result.output) == (0, True)
    assert [loader.name for loader in listing.find_loaders()] == [live.name]
    del kept


def identity(**changes):
    return {"identity": {"loader": "c", "cache": "c", "rank": 0, "pid": 1} | changes}


def test_a_file_that_is_not_a_record_is_a_problem_of_that_file_alone(clean):
    kept = TimingRecord(0, False, "d")
    for forged, problem in (
        ({"size": 70000}, "is damaged: it has 70000 bytes"),
        ({"size": 0}, "is not a segment of stocache"),
        ({"control": b"x" * 100}, "is not the record of a loader"),
        ({"facts": {"dataset_len": 0, "capacity": 0, "rows": 10**30}}, "its descriptor says 1000"),
        (identity(rank=[]), "has a header with another"),
        *((identity(**wrong), "not that of a loader") for wrong in ({"rank": "0"}, {"rank": True}, {"pid": -1}, {"cache": 7})),
    ):
        path = forge(**forged)
        bad, good = listing.find_loaders()
        assert (bad.state, bad.counted) == ("bad", None)
        assert problem in bad.problem
        assert (good.state, good.problem) == ("live", "")
        assert listing.find() == []
        path.unlink()
    del kept


def test_a_record_that_is_cut_meanwhile_is_named(clean, monkeypatch):
    path = forge(rows=5)
    pread = os.pread

    def cut_first(fd, nbytes, at):
        if nbytes == 5 * TIMING_ROW_WORDS * 8:
            os.truncate(path, 100000)
        return pread(fd, nbytes, at)

    monkeypatch.setattr(os, "pread", cut_first)
    assert "is damaged: it was cut." in listing.find_loaders()[0].problem
