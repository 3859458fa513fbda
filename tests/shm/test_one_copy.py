"""Ranks of one job share a cache without a name, if they cache the same; else each is right, within the limit of all."""

import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Subset

from stocache import CachedDataset, LocalityDistributedSampler, Placement, RaggedCache, SharedCache, SharedCacheDDP
from stocache.cache import allocate
from stocache.errors import BusyError
from stocache.shm import job, layout, registry, siblings
from stocache.shm.ring.ring import Ring
from stocache.system import limits
from tests.support import lookalikes as vision
from tests.support.equality import same
from tests.support.pairs import pairs
from tests.support.processes import in_child, run_python, stop, wait_until

with contextlib.suppress(ImportError):
    from PIL import Image

N = 64
RANKS = 3
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


def as_rank(rank, target, queue, meet, *arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), WORLD_SIZE=str(RANKS))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("stocache").addHandler(handler)
    try:
        queue.put((rank, target(rank, meet, *arguments), records))
        meet()  # else the first to end would leave others without its cache
    except BaseException as error:
        queue.put((rank, error, records))
        raise
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)


def run(target, *arguments, ranks=RANKS):
    """Return what ``target(rank, meet, *arguments)`` returns in each rank, and what each has logged. ``meet`` waits for all."""
    queue, barrier = CONTEXT.Queue(), CONTEXT.Barrier(ranks, timeout=50)
    started = [CONTEXT.Process(target=as_rank, args=(rank, target, queue, barrier.wait, *arguments)) for rank in range(ranks)]
    for process in started:
        process.start()
    found = sorted((queue.get(timeout=60) for _ in started), key=lambda item: item[0])
    for process in started:
        process.join(60)
        process.kill()
        process.join()
        process.close()
    queue.close()
    queue.join_thread()
    for _, result, _ in found:
        if isinstance(result, BaseException):
            raise result
    return [result for _, result, _ in found], [" ".join(records) for _, _, records in found]


def inode_of(cache):
    return os.fstat(cache._segment.fd).st_ino


def read_all(dataset, offset=0, seed=0):
    """Read all samples in an order of our own; return how many are wrong."""
    order = random.Random(seed).sample(range(len(dataset)), len(dataset))
    return sum(int((dataset[idx] != idx + offset).any()) for idx in order)


def cached(rank, meet, log, varying, options):
    dataset = CachedDataset(Photos(log, varying=varying), "10MB", audit=0, **options)
    meet()
    wrong = sum(read_all(dataset, seed=rank + epoch) for epoch in range(2))
    meet()
    stats = dataset.stats()
    if rank == 0 and "fingerprint" in options:
        rows = json.loads(run_python("-m", "stocache", "info", "--json").stdout)["caches_without_a_name"]
        assert RANKS in [row["ranks"] for row in rows if "test_one_copy.py" in row["place"]]
    result = inode_of(dataset.cache), wrong, stats.ranks, stats.total.filled, repr(dataset.cache)
    meet()
    return result


@pytest.mark.parametrize(
    ("varying", "options"),
    [(False, {}), (True, {}), (True, {"probe": 0, "fingerprint": "v1"}), (False, {"example": Photos()[0]})],
    ids=repr,
)
def test_ranks_have_one_copy_and_read_each_sample_once(varying, options, tmp_path):
    found, logged = run(cached, str(tmp_path / "reads"), varying, options)
    assert len({inode for inode, *_ in found}) == 1
    assert [rest[:3] for _, *rest in found] == [[0, RANKS, N]] * RANKS
    assert all("shared by 3 ranks of this job" in text for *_, text in found)
    probed = 9 * RANKS if not options else RANKS
    assert N <= len((tmp_path / "reads").read_text().split()) <= N + probed + 8
    assert not any("different" in text for text in logged)


def both_sets(rank, meet):
    order = [("training", 0), ("validation", 1000)]
    sets = {}
    for name, offset in reversed(order) if rank == 1 else order:  # in another order; another time
        time.sleep(0.02 * rank)
        sets[name] = CachedDataset(Photos(offset=offset), "10MB")
    if rank == 2:
        more = [CachedDataset(Photos(), "10MB") for _ in range(2)]  # only here, and in a loop
        assert not any(read_all(each) for each in more)
    meet()
    wrong = read_all(sets["training"]) + read_all(sets["validation"], 1000)
    meet()
    return inode_of(sets["training"].cache), inode_of(sets["validation"].cache), wrong


def test_each_cache_is_found_whatever_the_order_and_whoever_makes_more():
    found, _ = run(both_sets)
    assert len(set(found)) == 1
    assert found[0][0] != found[0][1]
    assert found[0][2] == 0


def worker_makes_it(rank, meet):
    class Lazy(Dataset):
        cache = None

        def __len__(self):
            return N

        def __getitem__(self, idx):
            if self.cache is None:
                self.cache = SharedCache("1MB", N, (2,), torch.int64)
            return self.cache.get_or_load(idx, lambda idx: torch.full((2,), idx))

    loader = torch.utils.data.DataLoader(Lazy(), 8, num_workers=2)
    return [batch[:, 0].tolist() for _ in range(2) for batch in loader]


class Flipped(Photos):
    """Images, with a random transform behind a deterministic one."""

    def __init__(self):
        super().__init__()
        steps = [vision.CenterCrop(6), vision.RandomHorizontalFlip(), vision.PILToTensor()]
        self.transform = vision.Compose(steps)

    def __getitem__(self, idx):
        pixels = np.random.default_rng(idx).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels))


def in_epochs(rank, meet, options, samples):
    make = Flipped if samples == "split" else Photos
    dataset = CachedDataset(make(), "10MB", **options)
    kind = LocalityDistributedSampler if samples == "by place" else DistributedSampler
    batch_size = {"batch_size": 8} if samples == "by place" else {}
    batches = []
    for data in (dataset, make()):
        sampler = kind(data, num_replicas=RANKS, rank=rank, **batch_size)
        meet()
        for epoch in range(3):
            if samples != "without set_epoch":
                sampler.set_epoch(epoch)
            torch.manual_seed(epoch)
            batches.append(list(torch.utils.data.DataLoader(data, 8, sampler=sampler)))
            meet()
    stats = dataset.stats()
    requests = [epoch.hits + epoch.misses for epoch in stats.epochs]
    result = same(batches[:3], batches[3:]), inode_of(dataset.cache), requests[:3], stats.total.filled
    meet()
    return result


@pytest.mark.parametrize(("options", "samples"), [
    ({"admission": "cost"}, "of one size"),
    ({"codec": "zstd"}, "without set_epoch"),
    ({"cut": "latest"}, "split"),  # whatever the times of the ranks
    ({"placement": Placement("scattered")}, "by place"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_admission_codecs_splits_and_samplers_work_on_the_shared_copy(options, samples):
    if samples == "split":
        pytest.importorskip("PIL")
    if "codec" in options:
        pytest.importorskip("zstandard")
    found, _ = run(in_epochs, options, samples)
    assert [equal for equal, *_ in found] == [True] * RANKS
    assert len({inode for _, inode, *_ in found}) == 1
    assert all(filled == N for *_, filled in found)
    in_an_epoch = RANKS * -(-N // RANKS)
    assert all(sum(requests) >= 2 * in_an_epoch for _, _, requests, _ in found)


def other(rank, meet, what):
    offset = 1000 * rank if what == "samples" else 0
    photos = Photos(offset=offset, length=N + rank * (what == "length"))
    if what == "parts":
        photos = Subset(Photos(), range(rank, N, RANKS))
    elif what == "alike":  # all that is probed
        photos = Photos(offset=rank)
        one = lambda self, idx: torch.tensor(self.offset * (idx % 9 == 1))
        photos.__class__ = type("Alike", (Photos,), {"__getitem__": one})
    elif what == "labels":
        photos = Photos(offset=-10)
        photos.__class__ = type("Labels", (Photos,), {"__getitem__": lambda self, idx: torch.tensor(self.labels[idx])})
        photos.labels = [rank if idx % 9 else 0 for idx in range(N)]
    if what == "transform" and rank:
        photos.transform = lambda sample: sample + rank
        photos.__class__ = type("Transformed", (Photos,), {"__getitem__": lambda s, i: s.transform(Photos.__getitem__(s, i))})
    with_limit = CachedDataset(photos, "20KB")
    meet()
    expected = [photos[idx] for idx in range(len(photos))]
    wrong = sum(not torch.equal(with_limit[idx], expected[idx]) for idx in list(range(len(photos))) * 2)
    meet()
    total = with_limit.stats().total
    return inode_of(with_limit.cache), wrong, total.reserved_bytes


@pytest.mark.parametrize("what", ["samples", "length", "parts", "labels", "alike", "transform"])
def test_ranks_with_other_samples_have_a_cache_each_and_a_part_of_the_limit(what):
    found, logged = run(other, what)
    inodes, wrong, reserved = zip(*found, strict=True)
    assert wrong == (0,) * RANKS
    if what == "transform":  # it runs after the cache
        return
    assert len(set(inodes)) == RANKS
    assert sum(reserved) <= 3 * 64 * 1024  # an extent may be larger than a part of this limit
    assert sum("the ranks of this job cannot share a cache in" in text for text in logged) == RANKS - 1
    assert "share_ranks=False" in "".join(logged)
    assert not re.search("[0-9a-f]{16}", "".join(logged))  # digests


def bare(rank, meet, cls, fill):
    arguments = () if cls is RaggedCache else ((2,), torch.int64)
    cache = cls("20MB", N, *arguments)
    value = lambda idx: torch.full((2,), idx + 1000 * rank * (cls is not SharedCacheDDP))
    meet()
    if fill == "ahead":
        for idx in range(N):
            cache.set_slot(idx, value(idx))
        meet()  # another rank may still be writing what this one found claimed
        found = [cache.get_slot(idx, allow_empty_slot=False) for idx in range(N)]
        rows, mask = cache.get_slots(range(N))
        assert mask.all()
        assert all(torch.equal(row, value(idx)) for idx, row in enumerate(rows))
    loads = []
    for epoch in range(3):
        for idx in random.Random(rank + epoch).sample(range(N), N):
            sample = cache.get_slot(idx)
            if sample is None:
                loads.append(idx)
                sample = value(idx)
                cache.set_slot(idx, sample)
            assert torch.equal(sample, value(idx))
    found = cache.get_or_load_many(range(N), lambda indices: [value(idx) for idx in indices])
    assert all(torch.equal(sample, value(idx)) for idx, sample in enumerate(found))
    meet()
    result = inode_of(cache), len(loads), cache.ranks, cache.serves_ranks
    meet()
    return result


@pytest.mark.parametrize(("cls", "fill"), [*pairs([SharedCache, RaggedCache, SharedCacheDDP], ["ahead", "as they come"])])
def test_a_cache_without_a_name_or_a_fingerprint_is_of_one_rank_unless_the_class_says_that_samples_are_equal(cls, fill):
    found, logged = run(bare, cls, fill)
    shares = cls is SharedCacheDDP
    assert len({inode for inode, *_ in found}) == (1 if shares else RANKS)
    assert [rest for _, _, *rest in found] == [[RANKS if shares else 1, shares]] * RANKS
    loads = sum(loads for _, loads, *_ in found)
    assert loads <= (0 if fill == "ahead" else N * (2 if shares else RANKS))  # ranks that miss a sample together all load it
    assert not any("different samples" in text for text in logged)


def without_a_number_of_ranks(rank, meet):
    allocate.job_here = lambda: job.Job(f"of {os.getppid()}", True, 1)
    for turn in range(RANKS):
        if turn == rank:
            cache = RaggedCache("30MB", N)
        meet()
    for idx in range(N):
        cache.set_slot(idx, bytes(1_000_000))
    meet()
    return inode_of(cache), cache.stats().reserved_bytes


def test_caches_of_ranks_alone_are_within_one_limit_also_if_the_number_of_ranks_is_unknown():
    found, logged = run(without_a_number_of_ranks)
    assert len({inode for inode, _ in found}) == RANKS
    assert all(reserved > 0 for _, reserved in found)
    assert sum(reserved for _, reserved in found) <= 30e6
    assert not any("is not shared" in text or "different samples in" in text for text in logged)


def with_fingerprint(rank, meet):
    cache = SharedCache("1MB", N, (2,), torch.int64, fingerprint="v1")
    meet()
    if rank == 0:
        cache.set_slots(range(N), torch.arange(N)[:, None].expand(N, 2).contiguous())
    meet()
    result = [cache.get_slot(idx)[0].item() for idx in range(N)]
    meet()
    return result


def changed_in_one(rank, meet):
    dataset = CachedDataset(Photos(), "1MB", admission="cost")  # keeps no probed samples
    meet()
    if rank == 0:
        dataset.offset = 500
    meet()
    wrong = read_all(dataset, 500 * (rank == 0), seed=rank) + read_all(dataset, 500 * (rank == 0))
    meet()
    return wrong


def apart(rank, meet):
    dataset = CachedDataset(Photos(), f"{RANKS * (N + 20 * 3 * 8 * 8 * 2)}B", share_ranks=False)
    meet()
    wrong = read_all(dataset)
    meet()
    return inode_of(dataset.cache), len(dataset.cache), wrong, dataset.stats().ranks


def test_without_sharing_each_rank_has_its_part_of_the_limit():
    found, _ = run(apart)
    assert len({inode for inode, *_ in found}) == RANKS
    assert [rest for _, *rest in found] == [[20, 0, 1]] * RANKS


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


def cleared(rank, meet):
    cache = SharedCacheDDP("1MB", N, (2,), torch.int64)
    meet()
    if rank == 0:
        with pytest.raises(BusyError, match="clear: other ranks of this job use the cache"):
            cache.clear()
    meet()


RIGHT = {  # what runs in each rank, and what it returns
    "workers make caches themselves": (worker_makes_it, [list(range(at, at + 8)) for at in range(0, N, 8)] * 2),
    "a fingerprint says that samples are the same": (with_fingerprint, list(range(N))),
    "an attribute that one rank sets is not seen by others": (changed_in_one, 0),
    "a cache that other ranks use is not cleared": (cleared, None),
}


@pytest.mark.parametrize("claim", RIGHT)
def test_what_holds_in_each_rank(claim):
    target, expected = RIGHT[claim]
    assert run(target)[0] == [expected] * RANKS


def holder(rank, queue, log):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
    dataset = CachedDataset(Photos(log), "1MB", audit=0)
    queue.put((read_all(dataset), inode_of(dataset.cache), dataset.stats().total.filled))
    signal.pause()


def test_a_restart_finds_the_cache_if_one_rank_lived_else_it_begins_anew(tmp_path):
    queue, log, ranks, found = CONTEXT.Queue(), str(tmp_path / "reads"), [], []

    def start(rank):
        ranks.append(CONTEXT.Process(target=holder, args=(rank, queue, log)))
        ranks[-1].start()
        found.append(queue.get(timeout=60))

    def kill(number):
        os.kill(ranks[number].pid, signal.SIGKILL)
        ranks[number].join()

    start(0)
    start(1)
    kill(0)
    start(0)
    reads = len((tmp_path / "reads").read_text().split())
    assert found == [(0, found[0][1], N)] * 3
    assert N <= reads <= N + 3 * 9
    kill(1)
    kill(2)
    start(0)
    assert found[3][::2] == (0, N)
    assert len((tmp_path / "reads").read_text().split()) >= reads + N  # nothing was left
    kill(3)
    for process in ranks:
        process.close()
    queue.close()
    queue.join_thread()


def of_other_version(rank, meet):
    if rank == 1:
        layout._VERSION += 1
    dataset = CachedDataset(Photos(), "1MB")
    meet()
    wrong = read_all(dataset)
    meet()
    return wrong, inode_of(dataset.cache)


def test_a_rank_with_another_version_has_a_copy_of_its_own():
    found, _ = run(of_other_version)
    assert [wrong for wrong, _ in found] == [0] * RANKS
    assert found[0][1] == found[2][1] != found[1][1]


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


def test_a_file_that_its_process_closes_while_it_is_opened_leaves_no_descriptor(monkeypatch):
    def closed_meanwhile(path):
        raise FileNotFoundError(path)

    pid = os.fork()
    if pid == 0:
        kept = SharedCache("1MB", N, (2,))  # noqa: F841
        stop()
    os.waitpid(pid, os.WUNTRACED)
    monkeypatch.setattr(registry, "backing_of", closed_meanwhile)
    before = os.listdir("/proc/self/fd")
    with registry.attaching, siblings.siblings() as found:
        assert not found
    assert os.listdir("/proc/self/fd") == before
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def in_containers(rank, meet):
    allocate.job_here = lambda: job.Job(f"{rank}", False, RANKS, alone=True)
    sets = [CachedDataset(Photos(offset=offset), f"{RANKS * (N + 20 * 384)}B") for offset in (0, 9)]
    return [len(each.cache) for each in sets]


def test_ranks_in_containers_of_their_own_say_so_once():
    found, logged = run(in_containers)
    assert found == [[20, 20]] * RANKS
    assert [text.count("run in containers of their own") for text in logged] == [1] * RANKS


def without(rank, meet, what):
    if what == "a directory":
        registry.directory_of = lambda uid=None: "/no/such/place/stocache-0"
    else:
        registry.listed_locks = lambda: iter(())
    dataset = CachedDataset(Photos(), f"{RANKS * (N + 20 * 384)}B")
    return len(dataset.cache), read_all(dataset)


@pytest.mark.parametrize("what", ["a directory", "a list of locks"])
def test_without_a_directory_for_the_lock_or_a_list_of_locks_each_rank_has_its_part(what):
    found, logged = run(without, what)
    assert found == [(20, 0)] * RANKS
    assert all("The cache is not shared: this process has its own part of the limit" in text for text in logged)


def test_the_ring_of_a_loader_takes_nothing_from_auto():
    def takes_nothing():
        before = registry.run_attaching(siblings.promised_bytes)
        ring = Ring(2, 8)
        assert ring.begin()
        return registry.run_attaching(siblings.promised_bytes) == before

    wait_until(takes_nothing)  # another process may make or drop a cache meanwhile
