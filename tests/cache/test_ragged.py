"""RaggedCache: what it does beyond the contract of all caches."""

import functools
import os
import pickle
import signal
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stocache import RaggedCache
from stocache.cache import arena
from stocache.cache.records import LATER, NEVER, YES, CostAdmission, admission_bytes
from stocache.cache.stats import SlotState
from stocache.errors import MismatchError, SampleError, SampleIndexError, SegmentError, SlotError
from stocache.tools.cli.app import app
from tests.support.equality import same
from tests.support.makers import codec
from tests.support.processes import in_child

N = 60


def sample(idx):
    """Samples of several kinds and sizes."""
    generator = torch.Generator().manual_seed(idx)
    image = torch.randint(0, 256, (3, 4 + idx % 7, 5 + idx % 3), generator=generator, dtype=torch.uint8)
    boxes = torch.rand(idx % 5, 4, generator=generator)
    detection = {"image": image, "boxes": boxes, "caption": "x" * idx, "tokens": [idx] * idx}
    return ((image, idx), detection, [image.numpy(), None, (str(idx), float(idx))])[idx % 3]


def fill(cache, indices=range(N)):
    for idx in indices:
        assert same(cache.get_or_load(idx, sample), sample(idx))


def fill_by_batches(cache):
    for begin in range(0, N, 12):
        part = range(begin, begin + 12)
        assert same(list(cache.get_or_load_many(part, lambda missing: map(sample, missing))), list(map(sample, part)))


@pytest.mark.parametrize("fill", [fill, fill_by_batches])
@pytest.mark.parametrize("limit", [1000, 5000, 100_000])
def test_the_limit_is_kept_and_what_found_no_room_is_outside(limit, fill):
    with RaggedCache(f"{limit}B", N) as cache:
        fill(cache)
        stats = cache.stats()
        assert stats.filled == stats.fills == int((cache.aux_array == SlotState.SET).sum())
        assert (cache.aux_array != SlotState.EMPTY).all()
        assert stats.capacity_bytes + arena.control_bytes(N) == limit
        assert stats.filled_bytes <= stats.reserved_bytes <= stats.capacity_bytes
        reads = cache.counts()[1]
        fill(cache)
        assert cache.counts()[1] - reads == N - stats.filled  # exactly
        assert (stats.filled == N) == (limit == 100_000)


def test_many_at_once_and_overwriting():
    with RaggedCache("4000B", N) as cache:
        cache.set_slots(torch.arange(3), [sample(idx) for idx in range(3)])
        assert same(cache.get_slots([2, 3, 0])[0], [sample(2), None, sample(0)])
        for indices, error, message in (([3, 4], SampleError, "1 values for 2 indices"), ([N], SampleIndexError, "indices")):
            with pytest.raises(error, match=f"set_slots: {message}"):
                cache.set_slots(indices, ["x"])
        cache.set_slot(0, "new", allow_overwrite=True)
        assert cache.get_slot(0) == "new"
        cache.set_slot(0, "x" * 4000, allow_overwrite=True)  # which has no room
        assert cache.get_slot(0) == "new"


@pytest.mark.linux
def test_kinds_of_samples_survive_a_clear_by_another_process():
    def clear_and_refill():
        cache.clear()
        cache.set_slots([1, 0], [[2, "x"], (3.0, 4)])

    with RaggedCache("1MB", N) as cache:
        cache.set_slots([0, 1], [{"a": 1}, "text"])
        assert in_child(clear_and_refill) == 0
        assert cache.get_slots([0, 1])[0] == [(3.0, 4), [2, "x"]]
        with pickle.loads(pickle.dumps(cache)) as fresh:  # as another process, it reads what it needs from the cache
            values = [{"a": 1}, "text", (3.0, 4)]
            cache.set_slots([2, 3, 4], values)
            assert cache.get_slots([2, 3, 4])[0] == fresh.get_slots([2, 3, 4])[0] == values


@pytest.mark.linux
def test_the_next_run_finds_what_a_killed_one_left_and_other_options_are_refused():
    make = functools.partial(RaggedCache, dataset_len=N, name="ragged", fingerprint="1")

    def run():
        cache = make("2MB")
        fill(cache)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(run) == signal.SIGKILL
    with make("2MB") as cache:
        fill(cache)
        assert cache.counts() == (N, 0, 0)
        with pytest.raises(MismatchError, match="admission 'all', now 'cost'"):
            make("2MB", admission="cost")
        with pytest.raises(MismatchError, match="bytes 1999392, now 2999392"):
            make("3MB")
        make("auto").close()  # takes what is there
        shown = CliRunner().invoke(app, ["stat", "ragged"]).stdout
        assert "60 of any size" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_compressed_samples_take_less_and_what_does_not_shrink_takes_no_more(name):
    flat, noise = torch.arange(50_000) // 100, torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    with RaggedCache("1MB", 2, codec=codec(name)) as cache:
        cache.set_slot(0, flat)
        before = cache.stats().filled_bytes
        assert before < flat.nbytes / 10
        cache.set_slot(1, noise)
        assert cache.stats().filled_bytes - before <= noise.nbytes + 64
        cache.get_slot(0, copy=False).zero_()  # which what is compressed does not have: a copy
        assert same(cache.get_slots([0, 1])[0], [flat, noise])


@pytest.mark.parametrize("place", [1 << 62, 200 << 20], ids=["beyond all", "not reserved"])
def test_a_treedef_outside_of_the_memory_is_an_error(place):
    with RaggedCache("512MiB", 4) as cache:
        cache.set_slot(0, "text")
        cache._store.arena._words[2] = place  # of the newest treedef
        with pickle.loads(pickle.dumps(cache)) as fresh:
            with pytest.raises(SegmentError, match="the structure of its samples lies outside of its memory"):
                fresh.get_slot(0)


def test_what_is_not_worth_it_is_refused_for_good_once_all_is_measured():
    admission = CostAdmission(memoryview(bytearray(admission_bytes(100))), 100, 10_000)  # with no memory behind it
    first, second = ([admission.decide(idx, 1.0 if idx < 5 else 1e-3, 1000) for idx in range(100)] for _ in range(2))
    assert (set(first[:31]), NEVER in first, second[:5], set(second)) == ({LATER}, False, [YES] * 5, {YES, NEVER})


@pytest.mark.parametrize(("cost_s", "nbytes"), [
    (lambda idx: 1e-3 if idx % 5 else 1.0, lambda idx: 1000), (lambda idx: 0.01, lambda idx: 3000 if idx % 5 else 500),
], ids=["the costly", "the small"])  # fmt: skip
def test_the_cache_measures_loads_and_keeps_what_is_worth_most(cost_s, nbytes, monkeypatch):
    """With a clock that only loading moves: 40 of 200 samples take much longer than the others, or are much smaller."""
    now = [0.0]
    monkeypatch.setattr("stocache.cache.base.time.perf_counter", lambda: now[0])
    n, best = 200, set(range(0, 200, 5))

    def load(idx):
        now[0] += cost_s(idx)
        return torch.full((nbytes(idx),), idx % 256, dtype=torch.uint8)

    with RaggedCache("60KB", n, admission="cost") as cache:
        for epoch in range(3):
            order = np.random.default_rng(epoch).permutation(n).tolist()
            if epoch == 1:
                cache.get_or_load_many(order, lambda indices: map(load, indices))
            for idx in order * (epoch != 1):
                assert (cache.get_or_load(idx, load) == idx % 256).all()
        kept = set(torch.nonzero(cache.aux_array == SlotState.SET).flatten().tolist())
        assert len(best - kept) <= 1  # the first epoch's guess may have let in one too many of the others
        assert cache.stats().filled_bytes + 3100 > cache.stats().capacity_bytes  # as many as fit
        assert (cache.aux_array != SlotState.EMPTY).all()
        cache.clear()  # what samples cost stays known
        for idx in range(n):
            cache.get_or_load(idx, load)
        assert cache.stats().filled == len(kept)


def late_scan(idx):
    """Import the module of a sample's class when the sample is loaded, as datasets do that a worker makes ready."""
    import late_scans

    return late_scans.Scan(idx)


@pytest.mark.linux
def test_a_sample_of_a_class_that_is_not_imported_is_a_miss_that_says_once_what_to_import(tmp_path, monkeypatch, caplog):
    def read():  # in a process that has not imported late_scans
        assert [cache.get_or_load(idx, late_scan).idx for idx in range(4)] == list(range(4))
        assert not caplog.records  # for loading the first of them imports the module

    (tmp_path / "late_scans.py").write_text("from collections import namedtuple\n\nScan = namedtuple('Scan', 'idx')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RaggedCache("1MB", 4) as cache:
        for _ in range(2):
            assert in_child(read) == 0
        assert [cache.get_slot(idx) for idx in range(4)] == cache.get_slots(range(4))[0] == [None] * 4
        assert cache.get_or_load(1, str) == "1"
        assert list(cache.get_or_load_many(range(4), lambda indices: map(str, indices))) == ["0", "1", "2", "3"]
        (record,) = caplog.records
        assert "Import late_scans first" in record.message
        with pytest.raises(SlotError, match=r"the cache holds samples that cannot be read here.* Import late_scans first"):
            cache.get_slot(0, allow_empty_slot=False)
    assert "late_scans" not in sys.modules
