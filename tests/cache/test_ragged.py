"""RaggedCache: what it does beyond the contract of all caches."""

import json
import logging.handlers
import math
import os
import pickle
import signal
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stocache import CachedDataset, RaggedCache
from stocache.cache import arena
from stocache.cache.records import LATER, NEVER, YES, CostAdmission, admission_bytes
from stocache.cache.stats import SlotState
from stocache.errors import CodecError, LimitError, MismatchError, SampleError, SampleIndexError, SegmentError, SlotError
from stocache.system import limits
from stocache.system.limits import GIB, Memory
from stocache.tools.cli import listing
from stocache.tools.cli.app import app
from tests.support.equality import same
from tests.support.faults import claimed, misplace, no_shared_memory
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


@pytest.mark.parametrize("limit", [1000, 5000, 100_000])
def test_the_limit_is_kept_and_what_found_no_room_is_outside(limit):
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


def test_wrong_arguments_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for options, error, message in (
        ({"size_limit_gib": "500B"}, LimitError, "=500B leaves 0 bytes after the 608-byte state array. Raise"),
        ({"admission": "lru"}, LimitError, "admission='lru' is unknown. Use 'all' or 'cost'"),
        ({"codec": "rar"}, CodecError, "codec='rar' is unknown. Use 'zstd' or 'lz4', or None"),
        ({"codec": "zstd"}, CodecError, r"needs a package that is not installed: pip install 'stocache\[codecs\]'"),
    ):
        with pytest.raises(error, match=message):
            RaggedCache(**{"size_limit_gib": 1, "dataset_len": N} | options)


@pytest.mark.linux
def test_caches_without_a_limit_samples_or_memory_hold_nothing(monkeypatch, caplog):
    with RaggedCache(0, N) as cache, RaggedCache(1, 0) as empty:
        for _ in range(2):
            fill(cache)
            cache.clear()
        assert cache.counts() == (0, 2 * N, 0)
        assert empty.get_slots([])[0] == []
    no_shared_memory(monkeypatch)
    with RaggedCache(1, N) as cache, pickle.loads(pickle.dumps(cache)) as copy:
        for each in (cache, copy):
            fill(each)
            assert (each.aux_array == SlotState.OOB).all()
    (record,) = caplog.records
    assert "no shared memory: /no/such/dir cannot be written" in record.message


def test_samples_stay_uncached_when_memory_runs_low_and_get_another_chance(monkeypatch, caplog):
    with RaggedCache("40MB", N) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(limits, "memory", lambda: Memory(GIB, 0))
            fill(cache)
            assert cache.stats().refused == N
            with claimed(cache, 1):  # nobody waits for what cannot be kept
                cache.get_or_load(1, sample, timeout_s=1000)
        assert len(caplog.records) == 1
        assert "cache stops growing at 0 B of 38." in caplog.text
        cache.clear()
        fill(cache)
        assert cache.stats().filled == N


def test_many_at_once_and_overwriting():
    with RaggedCache("4000B", N) as cache:
        cache.set_slots(torch.arange(3), [sample(idx) for idx in range(3)])
        assert same(cache.get_slots([2, 3, 0])[0], [sample(2), None, sample(0)])
        for indices, error, message in (([3, 4], SampleError, "1 values for 2 indices"), ([N], SampleIndexError, "indices")):
            with pytest.raises(error, match=f"set_slots: {message}"):
                cache.set_slots(indices, ["x"])
        cache.set_slot(0, "new", allow_overwrite=True)
        assert cache.get_slot(0) == "new"
        cache.set_slot(0, "x" * 4000, allow_overwrite=True)  # for which there is no room
        assert cache.get_slot(0) == "new"


def share_work(number, cache, count):
    fill(cache, [(idx + number * N // count) % N for idx in range(N)])
    fill(cache)


@pytest.mark.linux
@pytest.mark.parametrize(("start_method", "options"), [
    ("fork", {}), ("fork", {"admission": "cost", "name": "ragged"}), ("forkserver", {"codec": "lz4"}),
], indirect=["start_method"], ids=str)  # fmt: skip
def test_processes_share_what_each_has_loaded(run_processes, options):
    if "codec" in options:
        codec("lz4")
    with RaggedCache("1MB", N, **options) as cache, RaggedCache("1MB", N, codec=options.get("codec")) as alone:
        run_processes(3, share_work, cache, 3)
        fill(cache)
        fill(alone)
        stats = cache.stats()
        assert stats.filled == stats.fills == N
        assert stats.slot_bytes == alone.stats().slot_bytes  # each kind of samples is stored once


@pytest.mark.linux
def test_kinds_of_samples_survive_a_clear_by_another_process():
    def clear_and_refill():
        cache.get_or_load(0, lambda idx: {"a": 1})
        cache.clear()
        cache.get_or_load(1, lambda idx: [2, "x"])
        cache.get_or_load(0, lambda idx: (3.0, 4))

    with RaggedCache("1MB", N) as cache:
        cache.set_slots([0, 1], [{"a": 1}, "text"])
        assert in_child(clear_and_refill) == 0
        assert cache.get_slot(0) == (3.0, 4)
        assert cache.get_slot(1) == [2, "x"]
        with pickle.loads(pickle.dumps(cache)) as fresh:  # as another process, it reads what it needs from the cache
            for idx, value in ((2, {"a": 1}), (3, "text"), (4, (3.0, 4))):
                cache.set_slot(idx, value)
                assert cache.get_slot(idx) == fresh.get_slot(idx) == value


@pytest.mark.linux
def test_the_next_run_finds_them_and_others_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", sys)  # it is not used, but must be there

    def make(**options):
        return RaggedCache(**{"size_limit_gib": 1, "dataset_len": N, "name": "ragged", "fingerprint": "1"} | options)

    def run():
        cache = make()
        fill(cache)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(run) == signal.SIGKILL
    with make() as cache:
        assert cache.stats().filled == N
        fill(cache)
        assert cache.counts() == (N, 0, 0)
        for options, difference in [
            ({"codec": "zstd"}, "codec None, now 'zstd'"), ({"admission": "cost"}, "admission 'all', now 'cost'"),
            ({"allow_pickle": True}, "allow_pickle False, now True"), ({"fingerprint": "2"}, "fingerprint '1', now '2'"),
            ({"size_limit_gib": 2}, "bytes 1073741216, now 2147483040"),
        ]:  # fmt: skip
            with pytest.raises(MismatchError, match=difference):
                make(**options)
        make(size_limit_gib="auto").close()  # takes what is there
        (found,) = listing.find()
        assert found.stats == cache.stats()
        shown = CliRunner().invoke(app, ["stat", "ragged"]).stdout
        assert "60 of any size" in " ".join(shown.split())
        assert json.loads(CliRunner().invoke(app, ["stat", "ragged", "--json"]).stdout)["stats"]["filled"] == N
    assert not os.path.exists(f"/dev/shm/stocache-{os.geteuid()}/ragged")


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


@pytest.mark.parametrize("forge", [
    lambda words, memory: words.__setitem__(2, 1 << 62),  # where the newest treedef is
    lambda words, memory: words.__setitem__(2, 200 << 20),  # in memory that is not reserved
    lambda words, memory: memory.__setitem__(slice(words[2] + 11, words[2] + 15), b"\xff" * 4),  # its length
], ids=["beyond all", "not reserved", "too long"])  # fmt: skip
def test_a_treedef_or_a_record_outside_of_the_memory_is_an_error(forge):
    with RaggedCache("512MiB", 4) as cache:
        cache.set_slot(0, "text")
        forge(cache._store.arena._words, cache._segment.view(0, 4096))
        with pickle.loads(pickle.dumps(cache)) as fresh:
            with pytest.raises(SegmentError, match="the structure of its samples lies outside of its memory"):
                fresh.get_slot(0)
        misplace(cache, 0, 2**40)
        with pytest.raises(SegmentError, match="the cache is damaged: the record of sample 0") as caught:
            cache.get_slot(0)
        del caught  # whose traceback would hold the memory


def admission_of(n, capacity):
    return CostAdmission(memoryview(bytearray(admission_bytes(n))), n, capacity)


def simulate(sizes, costs, capacity):
    """Return the share of requests served in each of 3 epochs, were each sample stored in as many bytes as it has."""
    admission, kept, used, shares = admission_of(len(sizes), capacity), set(), 0, []
    for epoch in range(3):
        shares.append(len(kept) / len(sizes))
        for idx in np.random.default_rng(epoch).permutation(len(sizes)).tolist():
            if idx not in kept and admission.decide(idx, costs[idx], sizes[idx]) == YES and used + sizes[idx] <= capacity:
                kept.add(idx)
                used += sizes[idx]
    return shares


def test_of_log_normal_sizes_the_smallest_are_kept_and_what_is_not_worth_it_is_refused_for_good_once_all_is_measured():
    n, sizes = 1000, (np.random.default_rng(7).lognormal(0, 1, 1000) * 1000).astype(int)
    capacity = int(sizes.sum() * 0.2)
    best = np.searchsorted(np.cumsum(np.sort(sizes)), capacity) / n  # Phi(1 + Phi^-1(0.2)) = 0.563 of an endless dataset
    _, second, third = simulate(sizes, [0.01] * n, capacity)
    assert third > best - 0.02
    assert second > 0.8 * best * (1 - 32 / n)  # what came before the first verdict is missing
    assert simulate([1000] * 500, [1e-3] * 500, 1000 * 500) == [0, 1 - 31 / 500, 1.0]  # all fit
    n, admission = 100, admission_of(100, 10_000)
    costs = [1.0 if idx < 5 else 1e-3 for idx in range(n)]
    first = [admission.decide(idx, costs[idx], 1000) for idx in range(n)]
    assert set(first[:31]) == {LATER}
    assert NEVER not in first  # until it is asked again
    second = [admission.decide(idx, costs[idx], 1000) for idx in range(n)]
    assert second[:5] == [YES] * 5
    assert (first + second).count(YES) == 10
    assert set(second) == {YES, NEVER}
    for cost in (0.0, 1e-12, 1e9, math.inf):
        admission = admission_of(1, 10)
        admission.decide(0, min(cost, 1e300), 10**12 if cost else 1)
        assert admission.decide(0, 1.0, 1) in (YES, NEVER)  # any cost has a bin


def test_the_cache_measures_loads_and_keeps_the_costly(monkeypatch):
    """With a clock that only loading moves: 40 of 200 samples take 1000 times as long as the others."""
    now = [0.0]
    monkeypatch.setattr("stocache.cache.base.time.perf_counter", lambda: now[0])
    n, costly = 200, set(range(0, 200, 5))

    def load(idx):
        now[0] += 1.0 if idx in costly else 1e-3
        return torch.full((1000,), idx % 256, dtype=torch.uint8)

    with RaggedCache("60KB", n, admission="cost") as cache:
        for epoch in range(3):
            order = np.random.default_rng(epoch).permutation(n).tolist()
            if epoch == 1:
                cache.get_or_load_many(order, lambda indices: map(load, indices))
            for idx in order * (epoch != 1):
                assert (cache.get_or_load(idx, load) == idx % 256).all()
        kept = set(torch.nonzero(cache.aux_array == SlotState.SET).flatten().tolist())
        assert len(costly - kept) <= 1  # the first epoch's guess may have let in one too many of the others
        assert len(kept) == 52  # as many as fit
        assert (cache.aux_array != SlotState.EMPTY).all()
        cache.clear()  # what samples cost stays known
        for idx in range(n):
            cache.get_or_load(idx, load)
        assert cache.stats().filled == 52


class LateScans:
    """Imports the module of its samples when the first is loaded, as datasets do that a worker makes ready."""

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        import late_scans

        return late_scans.Scan(torch.full((3, idx), idx), idx)


@pytest.fixture
def scans(tmp_path, monkeypatch):
    (tmp_path / "late_scans.py").write_text("from collections import namedtuple\n\nScan = namedtuple('Scan', 'image idx')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with CachedDataset(LateScans(), "1MB", probe=0) as dataset:
        yield dataset


def read_scans_in_a_child(dataset):
    """Read samples in a process that has not imported late_scans."""

    def check():
        assert "late_scans" not in sys.modules
        warnings = logging.handlers.BufferingHandler(100)
        logging.getLogger("stocache").addHandler(warnings)
        assert [(scan.idx, scan.image.tolist()) for scan in map(dataset.__getitem__, range(8))] == [
            (idx, [[idx] * idx] * 3) for idx in range(8)
        ]
        assert not warnings.buffer  # for loading the first of them imports the module

    assert in_child(check) == 0


@pytest.mark.linux
@pytest.mark.parametrize(("use", "found"), [
    (lambda cache: [cache.get_slot(idx) for idx in range(4)], [None] * 4),
    (lambda cache: [*cache.get_slots(range(4))[0], cache.get_slots([3])[1].item()], [None] * 4 + [False]),
    (lambda cache: [cache.get_or_load(idx, str) for idx in range(4)], ["0", "1", "2", "3"]),
    (lambda cache: cache.get_or_load_many(range(4), lambda indices: map(str, indices)), ["0", "1", "2", "3"]),
])  # fmt: skip
def test_a_sample_of_a_class_that_is_not_imported_is_a_miss_that_says_once_what_to_import(scans, use, found, caplog):
    read_scans_in_a_child(scans)
    for _ in range(2):
        assert use(scans.cache) == found
    (record,) = caplog.records
    assert "Import late_scans first" in record.message
    with pytest.raises(SlotError, match=r"the cache holds samples that cannot be read here.* Import late_scans first"):
        scans.cache.get_slot(0, allow_empty_slot=False)
    assert "late_scans" not in sys.modules
