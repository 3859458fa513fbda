"""Ranks of one job share a cache without a name, if they cache the same; else each is right, within the limit of all."""

import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch.utils.data import Dataset, Subset

from stocache import CachedDataset, RaggedCache, SharedCache, SharedCacheDDP
from stocache.cache import allocate
from stocache.errors import BusyError
from stocache.shm import job, registry, siblings
from stocache.system import limits
from tests.support.equality import same
from tests.support.processes import in_child, run_python, stopped

N = 64
RANKS = 3
LIMIT = f"{RANKS * (N + 20 * 3 * 8 * 8 * 2)}B"  # a part of it is 20 samples
CONTEXT = multiprocessing.get_context("fork")


class Photos(Dataset):
    """Samples of one size, or of several, that note each read in a file."""

    def __init__(self, log=None, offset=0, length=N, varying=False):
        self.log, self.offset, self.length, self.varying = log, offset, length, varying

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{idx}\n")
        return torch.full((3, 8, 8 + self.varying * (idx % 5)), idx + self.offset, dtype=torch.int16)


def begin(*shared):
    """Keep in each process what the ranks meet at, and what they run."""
    global barrier, target, arguments
    barrier, target, arguments = shared


def as_rank(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), WORLD_SIZE=str(RANKS))
    result, records, handler = None, [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("stocache").addHandler(handler)
    for result in target(rank, *arguments):  # noqa: B007
        barrier.wait()
    return result, " ".join(records)


def run(target, *arguments):
    """Run a generator ``target(rank, *arguments)`` in each rank. At each ``yield`` a rank waits for all others.

    Return what each has yielded last, and what each has logged.
    """
    shared = CONTEXT.Barrier(RANKS, timeout=50), target, arguments
    with ProcessPoolExecutor(RANKS, CONTEXT, begin, shared) as ranks:
        return zip(*ranks.map(as_rank, range(RANKS)), strict=True)


def inode_of(cache):
    return os.fstat(cache._segment.fd).st_ino


def read_all(dataset, offset=0, seed=0):
    """Read all samples in an order of our own; return how many are wrong."""
    order = random.Random(seed).sample(range(len(dataset)), len(dataset))
    return sum(int((dataset[idx] != idx + offset).any()) for idx in order)


def cached(rank, log, varying, options):
    dataset = CachedDataset(Photos(log, varying=varying), "10MB", audit=0, **options)
    yield
    wrong = sum(read_all(dataset, seed=rank + epoch) for epoch in range(2))
    yield
    stats = dataset.stats()
    if rank == 0 and "fingerprint" in options:
        rows = json.loads(run_python("-m", "stocache", "info", "--json").stdout)["caches_without_a_name"]
        assert RANKS in [row["ranks"] for row in rows if "test_one_copy.py" in row["place"]]
    yield inode_of(dataset.cache), wrong, stats.ranks, stats.total.filled, repr(dataset.cache)


@pytest.mark.parametrize(("varying", "options"), [
    (False, {}), (True, {"probe": 0, "fingerprint": "v1"}), (False, {"example": Photos()[0]}),
], ids=["probed", "fingerprint", "example"])  # fmt: skip
def test_ranks_have_one_copy_and_read_each_sample_once(varying, options, tmp_path):
    found, logged = run(cached, str(tmp_path / "reads"), varying, options)
    assert len({inode for inode, *_ in found}) == 1
    assert [rest[:3] for _, *rest in found] == [[0, RANKS, N]] * RANKS
    assert all("shared by 3 ranks of this job" in text for *_, text in found)
    probed = 9 * RANKS if not options else RANKS
    assert N <= len((tmp_path / "reads").read_text().split()) <= N + probed + 8
    assert not any("different" in text for text in logged)


def both_sets(rank):
    order = [("training", 0), ("validation", 1000)]
    sets = {}
    for name, offset in reversed(order) if rank == 1 else order:  # in a different order; another time
        time.sleep(0.02 * rank)
        sets[name] = CachedDataset(Photos(offset=offset), "10MB")
    if rank == 2:
        more = [CachedDataset(Photos(), "10MB") for _ in range(2)]  # only here, and in a loop
        assert not any(read_all(each) for each in more)
    yield
    wrong = read_all(sets["training"]) + read_all(sets["validation"], 1000)
    yield inode_of(sets["training"].cache), inode_of(sets["validation"].cache), wrong


def test_each_cache_is_found_whatever_the_order_and_whoever_makes_more():
    found, _ = run(both_sets)
    assert len(set(found)) == 1
    assert found[0][0] != found[0][1]
    assert found[0][2] == 0


class Alike(Photos):
    """Samples that differ between ranks, but for all that are probed."""

    def __getitem__(self, idx):
        return torch.tensor(self.offset * (idx % 9 == 1))


DIFFERENT = {
    "samples": lambda rank: Photos(offset=1000 * rank),
    "parts": lambda rank: Subset(Photos(), range(rank, N, RANKS)),
    "alike": lambda rank: Alike(offset=rank),
}


def different(rank, what):
    photos = DIFFERENT[what](rank)
    with CachedDataset(photos, "20KB") as dataset:
        yield
        expected = [photos[idx] for idx in range(len(photos))]
        wrong = sum(not torch.equal(dataset[idx], expected[idx]) for idx in list(range(len(photos))) * 2)
        yield
        yield inode_of(dataset.cache), wrong, dataset.stats().total.reserved_bytes


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_other_samples_have_a_cache_each_and_a_part_of_the_limit(what):
    found, logged = run(different, what)
    inodes, wrong, reserved = zip(*found, strict=True)
    assert wrong == (0,) * RANKS
    assert len(set(inodes)) == RANKS
    assert sum(reserved) <= 3 * 64 * 1024  # an extent may be larger than a part of this limit
    assert sum("the ranks of this job cannot share a cache in" in text for text in logged) == RANKS - 1
    assert "share_ranks=False" in "".join(logged)
    assert not re.search("[0-9a-f]{16}", "".join(logged))  # digests


def bare(rank, cls, options, is_shared):
    cache = cls("20MB", N, *(() if cls is RaggedCache else ((2,), torch.int64)), **options)
    value = lambda idx: torch.full((2,), idx + 1000 * rank * (not is_shared))
    loads = []
    yield
    for epoch in range(2):
        for idx in random.Random(rank + epoch).sample(range(N), N):
            assert torch.equal(cache.get_or_load(idx, lambda idx: loads.append(idx) or value(idx)), value(idx))
    yield
    assert same(list(cache.get_slots(range(N))[0]), [value(idx) for idx in range(N)])
    yield inode_of(cache), len(loads), cache.ranks, cache.serves_ranks


@pytest.mark.parametrize(("cls", "options", "is_shared"), [
    (SharedCache, {}, False), (RaggedCache, {}, False), (SharedCache, {"fingerprint": "v1"}, True), (SharedCacheDDP, {}, True),
])  # fmt: skip
def test_a_bare_cache_is_of_one_rank_unless_a_fingerprint_or_its_class_says_that_samples_are_equal(cls, options, is_shared):
    found, logged = run(bare, cls, options, is_shared)
    inodes, loads, ranks, serves = zip(*found, strict=True)
    assert len(set(inodes)) == (1 if is_shared else RANKS)
    assert sum(loads) == (N if is_shared else N * RANKS)
    assert (ranks, serves) == ((RANKS if is_shared else 1,) * RANKS, (is_shared,) * RANKS)
    assert not any("different samples" in text for text in logged)


NOT_SHARED = "The cache is not shared: this process has its own part of the limit"
ALONE = {  # what a rank does first, the options of its caches, what it says, and how often
    "share_ranks=False": (int, {"share_ranks": False}, NOT_SHARED, 0),
    "in containers": (
        lambda: setattr(allocate, "job_here", lambda: job.Job(f"{os.getpid()}", False, RANKS, alone=True)), {},
        "run in containers of their own", 1,
    ),
    "no directory for the lock": (
        lambda: setattr(registry, "directory_of", lambda uid=None: "/no/such/place/stocache-0"), {}, NOT_SHARED, 2
    ),
}  # fmt: skip


def alone(rank, how):
    begin, options, _, _ = ALONE[how]
    begin()
    sets = [CachedDataset(Photos(offset=offset), LIMIT, **options) for offset in (0, 9)]
    yield
    yield [(inode_of(each.cache), len(each.cache), read_all(each, each.offset), each.stats().ranks) for each in sets]


@pytest.mark.parametrize("how", ALONE)
def test_ranks_that_cannot_or_must_not_share_have_parts_of_the_limit(how):
    found, logged = run(alone, how)
    _, _, message, count = ALONE[how]
    caches = [cache for rank in found for cache in rank]
    assert len({inode for inode, *_ in caches}) == 2 * RANKS
    assert [rest for _, *rest in caches] == [[20, 0, 1]] * 2 * RANKS
    assert [text.count(message) for text in logged] == [count] * RANKS


def test_auto_promises_no_more_than_the_machine_has(monkeypatch):
    have = limits.Memory(1 << 34, 1 << 33)
    monkeypatch.setattr(limits, "memory", lambda: have)
    monkeypatch.setattr(limits, "shm_free", lambda: 1 << 34)
    monkeypatch.setattr(siblings, "siblings", lambda job=None: contextlib.nullcontext([]))  # what else runs on this machine
    before = registry.run_attaching(siblings.promised_bytes)
    caches = [RaggedCache("auto", N) for _ in range(4)]
    assert 0 < registry.run_attaching(siblings.promised_bytes) - before <= have.available
    promised = [cache.stats().capacity_bytes for cache in caches]
    assert promised == sorted(promised, reverse=True)
    for cache in caches:
        cache.close()
    assert registry.run_attaching(siblings.promised_bytes) == before


def test_auto_leaves_room_for_others_where_the_samples_are_small():
    with CachedDataset(Photos(varying=True)) as training, CachedDataset(Photos(varying=True, offset=9)) as validation:
        first, second = (dataset.stats().total.capacity_bytes for dataset in (training, validation))
        assert first <= 0.55 * limits.recommended_limit()
        assert second > first / 4


def one_changes_and_clears(rank):
    dataset, cache = CachedDataset(Photos(), "1MB", admission="cost"), SharedCacheDDP("1MB", N, (2,), torch.int64)
    yield
    if rank == 0:
        dataset.offset = 500
        with pytest.raises(BusyError, match="clear: other ranks of this job use the cache"):
            cache.clear()
    yield
    yield read_all(dataset, 500 * (rank == 0), seed=rank) + read_all(dataset, 500 * (rank == 0))


def test_what_one_rank_sets_is_not_seen_by_others_and_what_others_use_it_cannot_clear():
    found, _ = run(one_changes_and_clears)
    assert [*found] == [0] * RANKS


def test_a_restart_finds_the_cache_if_one_rank_lived_else_it_begins_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(allocate, "job_here", lambda: job.Job("restarted", True, 2))
    reads, results = tmp_path / "reads", tmp_path / "results"

    def rank():
        dataset = CachedDataset(Photos(reads), "1MB", audit=0)
        with results.open("a") as file:
            file.write(f"{read_all(dataset)} {dataset.stats().total.filled} {inode_of(dataset.cache)}\n")
        return dataset

    with contextlib.ExitStack() as first:
        first.enter_context(stopped(rank))
        with stopped(rank):
            first.close()  # which kills it
            with stopped(rank):
                before = len(reads.read_text().split())
    with stopped(rank):
        pass
    *found, last = results.read_text().splitlines()
    assert found == [f"0 {N} {found[0].split()[2]}"] * 3
    assert N <= before <= N + 3 * 9
    assert last.startswith(f"0 {N} ")
    assert len(reads.read_text().split()) >= before + N  # nothing was left


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_rank_of_another_user_is_not_found(monkeypatch):
    monkeypatch.setattr(allocate, "job_here", lambda: job.Job("the same", True, 2))

    def find():
        with registry.attaching, siblings.siblings("the same") as found:
            assert not found
        assert inode_of(SharedCache("1MB", N, (2,), fingerprint="x")) != kept

    with SharedCache("1MB", N, (2,), fingerprint="x") as cache:
        kept = inode_of(cache)
        assert in_child(find, uid=12345) == 0
