"""RaggedCache: what it does beyond the contract of all caches."""

import json
import logging
import logging.handlers
import math
import multiprocessing
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stocache import (
    CachedDataset,
    CodecError,
    LimitError,
    MismatchError,
    RaggedCache,
    SampleError,
    SampleIndexError,
    SegmentError,
    SlotError,
    SlotState,
)
from stocache.cache import arena
from stocache.cache.admission import LATER, NEVER, YES, CostAdmission, control_bytes
from stocache.cli import listing
from stocache.cli.app import app
from stocache.system import limits
from stocache.system.limits import GIB, Memory
from tests.support.equality import same
from tests.support.faults import claimed, misplace, no_shared_memory

N = 60


def sample(idx):
    """Samples of several kinds and sizes."""
    generator = torch.Generator().manual_seed(idx)
    image = torch.randint(0, 256, (3, 4 + idx % 7, 5 + idx % 3), generator=generator, dtype=torch.uint8)
    if idx % 3 == 0:
        return image, idx
    if idx % 3 == 1:
        return {
            "image": image,
            "boxes": torch.rand(idx % 5, 4, generator=generator),
            "caption": "x" * idx,
            "tokens": [idx] * idx,
        }
    return [image.numpy(), None, (str(idx), float(idx))]


def fill(cache, indices=range(N)):
    for idx in indices:
        assert same(cache.get_or_load(idx, sample), sample(idx))


# ------------------------------------------------------------------------------------------------ the byte limit


@pytest.mark.parametrize("limit", [1000, 2000, 5000, 10_000, 100_000])
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


@pytest.mark.parametrize(
    "value",
    [
        (torch.zeros(3, 80, 80, dtype=torch.uint8), 7),
        {"image": torch.zeros(3, 480, 640, dtype=torch.uint8), "boxes": torch.zeros(7, 4), "labels": torch.zeros(7).long(),
         "area": torch.zeros(7), "iscrowd": torch.zeros(7).long(), "image_id": 3},
        {"input_ids": list(range(300)), "attention_mask": [1] * 300, "label": 1},
        ("a sentence of some words", 3),
        b"x",
        7,
    ],
)  # fmt: skip
def test_a_sample_takes_at_most_64_bytes_and_1_percent_more_than_its_own(value):
    own = nbytes(value)
    with RaggedCache("1GiB", 1000) as cache:
        for idx in range(1000):
            cache.set_slot(idx, value)
        taken = 1000 * (cache.stats().slot_bytes + 1) + arena.control_bytes(1000)
        assert taken <= 1000 * (own + 64 + own / 100)


def nbytes(value):
    if isinstance(value, dict | list | tuple):
        return sum(map(nbytes, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, str | bytes) else 8 if isinstance(value, int) else value.nbytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"size_limit_gib": "500B"},
            LimitError,
            "cache holds 0 bytes: size_limit_gib=500B leaves 0 bytes after the 608-byte state array. Raise",
        ),
        ({"size_limit_gib": "much"}, LimitError, "size_limit_gib='much' is not a size"),
        ({"dataset_len": -1}, LimitError, "dataset_len=-1 is negative"),
        ({"admission": "lru"}, LimitError, "admission='lru' is unknown. Use 'all' or 'cost'"),
        ({"codec": "rar"}, CodecError, "codec='rar' is unknown. Use 'zstd' or 'lz4', or None"),
        ({"persist": True}, ValueError, "persist and fingerprint are for caches with a name"),
    ],
)
def test_wrong_arguments_say_what_to_do(options, error, message):
    with pytest.raises(error, match=message):
        RaggedCache(**{"size_limit_gib": 1, "dataset_len": N} | options)


def test_a_codec_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CodecError, match=r"needs a package that is not installed: pip install 'stocache\[codecs\]'"):
        RaggedCache(1, N, codec="zstd")


def test_limit_zero_and_no_samples_are_caches_that_hold_nothing():
    with RaggedCache(0, N) as cache:
        fill(cache)
        cache.clear()
        fill(cache)
        assert cache.stats().filled == 0
        assert cache.counts() == (0, 2 * N, 0)
    with RaggedCache(1, 0) as cache:
        assert cache.get_slots([]) == ([], pytest.approx(torch.empty(0)))
        with pytest.raises(SampleIndexError, match="outside the dataset of 0 samples"):
            cache.get_slot(0)


def test_no_shared_memory_disables_the_cache(monkeypatch, caplog):
    no_shared_memory(monkeypatch)
    with RaggedCache(1, N) as cache:
        fill(cache)
        assert (cache.aux_array == SlotState.OOB).all()
    assert "no shared memory: /no/such/dir cannot be written" in caplog.text


def test_samples_stay_uncached_when_memory_runs_low_and_get_another_chance(monkeypatch, caplog):
    with RaggedCache("40MB", N) as cache:  # extents of 4 MB
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


def test_overwriting_keeps_the_old_sample_where_there_is_no_room_for_the_new():
    with RaggedCache("3000B", N) as cache:
        cache.set_slot(0, "old")
        cache.set_slot(0, "new", allow_overwrite=True)
        assert cache.get_slot(0) == "new"
        cache.set_slot(0, "x" * 3000, allow_overwrite=True)
        assert cache.get_slot(0) == "new"


def test_many_at_once():
    with RaggedCache(1, N) as cache:
        samples, mask = cache.get_slots(range(4))
        assert samples == [None] * 4
        assert mask.tolist() == [False] * 4
        cache.set_slots(torch.arange(3), [sample(idx) for idx in range(3)])
        samples, mask = cache.get_slots([2, 3, 0])
        assert mask.tolist() == [True, False, True]
        assert same(samples, [sample(2), None, sample(0)])
        with pytest.raises(SampleError, match="set_slots: 1 values for 2 indices"):
            cache.set_slots([3, 4], ["x"])
        with pytest.raises(SampleIndexError, match="set_slots: indices"):
            cache.set_slots([N], ["x"])


# ------------------------------------------------------------------------------------------------ several processes


def share_work(number, cache, count):
    fill(cache, [(idx + number * N // count) % N for idx in range(N)])
    fill(cache)


@pytest.mark.parametrize(
    ("start_method", "options"),
    [
        ("fork", {}),
        ("fork", {"codec": "lz4"}),
        ("fork", {"admission": "cost"}),
        ("fork", {"name": "ragged"}),
        ("forkserver", {"codec": "lz4", "name": "ragged"}),
        ("forkserver", {"admission": "cost"}),
    ],
    indirect=["start_method"],
    ids=str,
)
def test_processes_share_what_each_has_loaded(run_processes, options):
    with RaggedCache(1, N, **options) as cache:
        run_processes(4, share_work, cache, 4)
        fill(cache)
        stats = cache.stats()
        assert stats.filled == N
        assert stats.fills == N
    with RaggedCache(1, N, codec=options.get("codec")) as alone:
        fill(alone)
        assert stats.slot_bytes == alone.stats().slot_bytes  # each kind of samples is stored once


def clear_and_refill(number, cache):
    cache.get_or_load(0, lambda idx: {"a": 1})
    cache.clear()
    cache.get_or_load(1, lambda idx: [2, "x"])
    cache.get_or_load(0, lambda idx: (3.0, 4))


def test_kinds_of_samples_survive_a_clear_by_another_process(run_processes):
    with RaggedCache(1, N) as cache:
        cache.get_or_load(0, lambda idx: {"a": 1})
        cache.get_or_load(1, lambda idx: "text")
        run_processes(1, clear_and_refill, cache)
        assert cache.get_slot(0) == (3.0, 4)
        assert cache.get_slot(1) == [2, "x"]
        for idx, value in ((2, {"a": 1}), (3, "text"), (4, (3.0, 4))):
            cache.set_slot(idx, value)
            assert cache.get_slot(idx) == value


def test_writers_that_are_killed_cost_only_their_bytes():
    rng = random.Random(0)
    with RaggedCache(1, N) as cache:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                for idx in range(N):
                    cache.get_or_load(idx, sample)
                os._exit(0)
            signal.sigtimedwait([signal.SIGUSR1], rng.random() * 0.003)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        fill(cache)
        fill(cache)
        assert cache.stats().filled == N


def test_the_next_run_finds_them_and_others_are_refused():
    pid = os.fork()
    if pid == 0:
        cache = RaggedCache(1, N, name="ragged", fingerprint="1")
        fill(cache)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with RaggedCache(1, N, name="ragged", fingerprint="1") as cache:
        assert cache.stats().filled == N
        fill(cache)
        assert cache.counts() == (N, 0, 0)
        for options, difference in [
            ({"codec": "zstd"}, "codec None, now 'zstd'"),
            ({"admission": "cost"}, "admission 'all', now 'cost'"),
            ({"allow_pickle": True}, "allow_pickle False, now True"),
            ({"fingerprint": "2"}, "fingerprint '1', now '2'"),
        ]:
            with pytest.raises(MismatchError, match=difference):
                RaggedCache(1, N, name="ragged", **{"fingerprint": "1"} | options)
        with pytest.raises(MismatchError, match="bytes 1073741216, now 2147483040"):
            RaggedCache(2, N, name="ragged", fingerprint="1")
        RaggedCache("auto", N, name="ragged", fingerprint="1").close()  # takes what is there
    assert not os.path.exists("/dev/shm/stocache-0/ragged")


def test_the_commands_show_it():
    with RaggedCache(1, N, name="ragged") as cache:
        fill(cache, range(30))
        (found,) = listing.find()
        assert found.stats == cache.stats()
        shown = CliRunner().invoke(app, ["stat", "ragged"]).stdout
        assert "60 of any size" in " ".join(shown.split())
        assert json.loads(CliRunner().invoke(app, ["stat", "ragged", "--json"]).stdout)["stats"]["filled"] == 30


def test_a_damaged_entry_is_an_error(monkeypatch):
    with RaggedCache(1, N) as cache:
        cache.set_slot(0, "text")
        misplace(cache, 0, 2**40)
        with pytest.raises(SegmentError, match="the cache is damaged: the record of sample 0") as caught:
            cache.get_slot(0)
        del caught  # whose traceback would hold the memory


# ------------------------------------------------------------------------------------------------ codecs


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_samples_take_less_and_what_does_not_shrink_takes_no_more(codec):
    generator = torch.Generator().manual_seed(0)
    flat = torch.arange(50_000) // 100
    noise = torch.randint(0, 256, (50_000,), generator=generator, dtype=torch.uint8)
    with RaggedCache(1, 2, codec=codec) as cache:
        cache.set_slot(0, flat)
        before = cache.stats().filled_bytes
        assert before < flat.nbytes / 10
        cache.set_slot(1, noise)
        assert cache.stats().filled_bytes - before <= noise.nbytes + 64
        assert same(cache.get_slot(0), flat)
        assert same(cache.get_slot(1), noise)
        cache.get_slot(0).zero_()
        cache.get_slot(0, copy=False).zero_()  # which what is compressed does not have: a copy
        assert same(cache.get_slot(0), flat)


# ------------------------------------------------------------------------------------------------ admission by cost


def simulate(sizes, costs, capacity, order, epochs=3):
    """Return the share of requests served in each epoch, were each sample stored in as many bytes as it has."""
    n = len(sizes)
    admission, kept, used = CostAdmission(memoryview(bytearray(control_bytes(n))), n, capacity), set(), 0
    shares = []
    for epoch in range(epochs):
        hits = 0
        for idx in order(epoch):
            if idx in kept:
                hits += 1
            elif admission.decide(idx, costs[idx], sizes[idx]) == YES and used + sizes[idx] <= capacity:
                kept.add(idx)
                used += sizes[idx]
        shares.append(hits / n)
    return shares


def shuffled(n):
    return lambda epoch: np.random.default_rng(epoch).permutation(n).tolist()


@pytest.mark.parametrize("n", [200, 5000])
def test_of_log_normal_sizes_the_smallest_are_kept(n):
    sizes = (np.random.default_rng(7).lognormal(0, 1, n) * 1000).astype(int)
    capacity = int(sizes.sum() * 0.2)
    best = np.searchsorted(np.cumsum(np.sort(sizes)), capacity) / n  # Phi(1 + Phi^-1(0.2)) = 0.563 of an endless dataset
    _, second, third = simulate(sizes, [0.01] * n, capacity, shuffled(n))
    assert third > best - 0.02
    assert second > 0.8 * best * (1 - 32 / n)  # what came before the first verdict is missing


def test_with_costs_in_proportion_to_size_any_choice_is_as_good_and_none_is_refused_room():
    sizes = (np.random.default_rng(7).lognormal(0, 1, 1000) * 1000).astype(int)
    shares = simulate(sizes, sizes * 1e-6, sizes.sum() // 2, shuffled(1000))
    assert shares[2] > 0.4


def test_everything_is_admitted_when_everything_fits():
    n = 500
    assert simulate([1000] * n, [1e-3] * n, 1000 * n, shuffled(n)) == [0, 1 - 31 / n, 1.0]


def test_what_is_not_worth_it_is_refused_for_good_once_all_is_measured():
    n = 100
    admission = CostAdmission(memoryview(bytearray(control_bytes(n))), n, 10_000)
    costs = [1.0 if idx < 5 else 1e-3 for idx in range(n)]
    first = [admission.decide(idx, costs[idx], 1000) for idx in range(n)]
    assert set(first[:31]) == {LATER}
    second = [admission.decide(idx, costs[idx], 1000) for idx in range(n)]
    assert second[:5] == [YES] * 5
    assert (first + second).count(YES) == 10
    assert set(second) == {YES, NEVER}


@pytest.mark.parametrize("cost", [0.0, 1e-12, 1e9, math.inf])
def test_any_cost_has_a_bin(cost):
    admission = CostAdmission(memoryview(bytearray(control_bytes(1))), 1, 10)
    admission.decide(0, min(cost, 1e300), 10**12 if cost else 1)
    assert admission.decide(0, 1.0, 1) in (YES, NEVER)


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
            else:
                for idx in order:
                    assert same(cache.get_or_load(idx, load), torch.full((1000,), idx % 256, dtype=torch.uint8))
        kept = set(torch.nonzero(cache.aux_array == SlotState.SET).flatten().tolist())
        assert len(costly - kept) <= 1  # the first epoch's guess may have let in one too many of the others
        assert len(kept) == 52  # as many as fit
        assert (cache.aux_array != SlotState.EMPTY).all()


# ---------------------------------------------------------------------------------------------------- classes of late modules

LATE = """
from typing import NamedTuple
from dataclasses import dataclass

@dataclass
class Scan:
    image: object
    idx: int
"""


class LateScans:
    """Imports the module of its samples when the first is loaded, as datasets do that a worker makes ready."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        if self.folder not in sys.path:
            sys.path.append(self.folder)
        import late_scans

        return late_scans.Scan(torch.full((3, idx), idx), idx)


def read_scans(dataset, ways, results):
    """In a process that has not imported late_scans: read samples in several ways, and say what came of it."""
    assert "late_scans" not in sys.modules
    warnings = logging.handlers.BufferingHandler(100)
    logging.getLogger("stocache").addHandler(warnings)
    before = dataset.cache.stats()
    found = {"each": lambda: [dataset[idx] for idx in range(8)], "batch": lambda: dataset.__getitems__(list(range(8)))}[ways]()
    after = dataset.cache.stats()
    good = [scan.idx for scan in found] == list(range(8)) and all((scan.image == scan.idx).all() for scan in found)
    good = good and not warnings.buffer  # for loading the first of them imports the module
    results.put((good, after.hits - before.hits, after.misses - before.misses, after.fills - before.fills))


def get_scans(cache, results):
    """As users of `get_slot` do."""
    found = [cache.get_slot(idx) for idx in range(8)], cache.get_slots(range(8))
    try:
        cache.get_slot(0, allow_empty_slot=False)
    except SlotError as error:
        results.put((found[0] == [None] * 8, found[1][0] == [None] * 8, found[1][1].any().item(), str(error)))
    results.put("late_scans" in sys.modules)


@pytest.fixture
def scans(tmp_path):
    (tmp_path / "late_scans.py").write_text(LATE)
    with CachedDataset(LateScans(str(tmp_path)), "1MB", probe=0) as dataset:
        yield dataset


def in_new_process(target, *arguments):
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    process = context.Process(target=target, args=(*arguments, results))
    process.start()
    got = results.get(timeout=120)
    more = results.get(timeout=120) if target is get_scans else None
    process.join(120)
    assert process.exitcode == 0
    results.close()
    results.join_thread()
    return got if more is None else (*got, more)


@pytest.mark.parametrize("ways", ["each", "batch"])
def test_a_process_that_has_not_imported_the_class_of_a_sample_loads_it_again(scans, ways):
    assert in_new_process(read_scans, scans, ways) == (True, 0, 8, 8)
    good, hits, misses, fills = in_new_process(read_scans, scans, ways)
    assert (good, hits + misses, fills) == (True, 8, 0)
    assert misses >= 1  # the first is loaded, which imports the module
    assert hits >= (7 if ways == "each" else 0)


def test_a_sample_of_a_class_that_is_not_imported_is_a_miss_that_says_what_to_import(scans):
    assert in_new_process(read_scans, scans, "each")[0]
    empty, none, any_there, message, imported = in_new_process(get_scans, scans.cache)
    assert (empty, none, any_there, imported) == (True, True, False, False)
    assert message == "get_slot(0): the sample is of a class whose module is not imported here. Import it first."


def test_what_is_not_imported_is_warned_of_once(scans, caplog):
    assert in_new_process(read_scans, scans, "each")[0]
    with caplog.at_level("WARNING"):
        assert [scans.cache.get_slot(idx) for idx in range(8)] == [None] * 8
    (record,) = caplog.records
    assert "Import late_scans first" in record.message
    assert "late_scans" not in sys.modules


def test_a_load_that_does_not_import_the_class_of_what_is_cached_warns_once(scans, caplog):
    assert in_new_process(read_scans, scans, "each")[0]
    for ways in (
        lambda: [scans.cache.get_or_load(idx, str) for idx in range(4)],
        lambda: scans.cache.get_or_load_many(range(4), lambda indices: map(str, indices)),
    ):
        with caplog.at_level("WARNING"):
            assert ways() == ["0", "1", "2", "3"]
    (record,) = caplog.records
    assert "Import late_scans first" in record.message


@pytest.mark.parametrize(
    "forge",
    [
        lambda words, memory: words.__setitem__(2, 1 << 62),  # where the newest treedef is
        lambda words, memory: words.__setitem__(2, 200 << 20),  # in memory that is not reserved
        lambda words, memory: memory.__setitem__(slice(words[2] + 11, words[2] + 15), b"\xff" * 4),  # its length
    ],
    ids=["beyond all", "not reserved", "too long"],
)
def test_a_treedef_outside_of_the_memory_is_an_error(forge):
    with RaggedCache(1, 4) as cache:
        cache.set_slot(0, "text")
        forge(cache._store.arena._words, cache._segment.view(0, 4096))
        fresh = RaggedCache.__new__(RaggedCache)
        fresh.__setstate__(cache.__getstate__())
        with pytest.raises(SegmentError, match="the structure of its samples lies outside of its memory"):
            fresh.get_slot(0)
        fresh.close()
