"""Sharing by name: one copy for all ranks, each sample read once for all jobs, a warm start.

python -m benchmark sharing ranks     # torchrun x 4 ranks x 4 workers x 2 jobs over one cache: memory
python -m benchmark sharing jobs      # K jobs at once: reads of the source
python -m benchmark sharing lists     # 8 workers over a dataset with a list of paths: memory, and the first batch
python -m benchmark sharing warm      # a second run over a persisted cache: reads, and the time to attach to 4 GiB
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from benchmark.support.measuring import pss, settle
from stocache import SharedCache, SharedCacheDDP, share
from stocache.shm import named
from stocache.tools.cli import listing

CLAIM = "All ranks and jobs of a machine hold one copy, read each sample once, and restart warm."
NEEDS = (("stocaching", "--no-deps stocaching==0.2.1", "ranks", "warm"),)

DIMS = (3, 224, 224)
SLOT_BYTES = 3 * 224 * 224
MIB = 2**20
RANKS, WORKERS, JOBS = 4, 4, 2


def load(idx: int) -> torch.Tensor:
    """Return the sample of an index, of random bytes, as read from a source."""
    return torch.randint(0, 256, DIMS, dtype=torch.uint8, generator=torch.Generator().manual_seed(idx))


class Source(Dataset[torch.Tensor]):
    """Samples through a cache, or not: ``bypass`` is shared with the workers."""

    def __init__(self, cache: Any, samples: int) -> None:
        self.cache, self.samples = cache, samples
        self.bypass = torch.zeros(1, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, idx: int) -> torch.Tensor:
        if self.bypass:
            return load(idx)
        value: torch.Tensor | None = self.cache.get_slot(idx)
        if value is None:
            value = load(idx)
            self.cache.set_slot(idx, value)
        return value


class Indices(Sampler[int]):
    """The indices that it is given."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def rank(library: str, samples: int, folder: Path, job: int) -> None:
    """One rank under torchrun: all samples past the cache; then two epochs through it; then all samples again, compared."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    number = torch.distributed.get_rank()
    if library == "stocaching":
        from stocaching import SharedCache as Peer

        cache = Peer(size_limit_gib=4, dataset_len=samples, data_dims=DIMS, dtype=torch.uint8)
    elif library == "stocache":
        cache = SharedCacheDDP(4, samples, DIMS, name="benchmark-ranks", fingerprint="1")
    else:
        cache = SharedCache(0, samples, DIMS)
    dataset, sampler = Source(cache, samples), Indices()
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=WORKERS, persistent_workers=True)

    def read(indices: Iterable[int]) -> str:
        sampler.indices = list(indices)
        checksum = 0
        for batch in loader:
            checksum = zlib.crc32(batch.numpy(), checksum)
        return f"{checksum:08x}"

    dataset.bypass[0] = True
    expected = read(range(samples))
    _meet(folder, "started", job, number)
    dataset.bypass[0] = False
    shard: DistributedSampler[Any] = DistributedSampler(dataset, RANKS, number, seed=job)
    for epoch in range(2):
        shard.set_epoch(epoch)
        read(shard)
        torch.distributed.barrier()
    assert read(range(samples)) == expected
    (folder / f"checksum-{job}-{number}").write_text(expected)
    _meet(folder, "filled", job, number)
    torch.distributed.destroy_process_group()


def _meet(folder: Path, moment: str, job: int, number: int) -> None:
    (folder / f"{moment}-{job}-{number}").touch()
    while not (folder / f"go-{moment}").exists():
        time.sleep(0.05)


def ranks(mib: int) -> None:
    """Two torchrun jobs at once, with stocache and with stocaching: memory before and after."""
    samples = mib * MIB // SLOT_BYTES
    size = samples * SLOT_BYTES
    print(f"{samples} samples of 3x224x224 uint8, {size / MIB:.0f} MiB; {JOBS} jobs x {RANKS} ranks x {WORKERS} workers")
    print("| cache | PSS before filling, MiB | after, MiB | grows by | more than without a cache | ranks with equal bytes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    control = 0
    for library in ("none", "stocache", "stocaching"):
        settle(2 * size)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port"]
            jobs = [
                subprocess.Popen(
                    [*run, str(29600 + job), "-m", "benchmark.sharing", "rank", library, str(samples), name, str(job)],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                )
                for job in range(JOBS)
            ]
            before = _at(folder, "started", jobs)
            after = _at(folder, "filled", jobs)
            assert [job.wait() for job in jobs] == [0] * JOBS
            checksums = [path.read_text() for path in folder.glob("checksum-*")]
        control = control or after
        within, beyond = (after - before) / size, (after - control) / size
        print(
            f"| {library} | {before / MIB:.0f} | {after / MIB:.0f} | {within:.3f} x cached | {beyond:.3f} x cached "
            f"| {checksums.count(checksums[0])} of {JOBS * RANKS} |",
            flush=True,
        )
    print(f"named caches left: {listing.find()}")


def _at(folder: Path, moment: str, jobs: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have reached a point, take the sum of their memory, and let them continue."""
    while len(list(folder.glob(f"{moment}-*"))) < JOBS * RANKS:
        assert all(job.poll() is None for job in jobs), "a job failed"
        time.sleep(0.1)
    total = sum(pss(job.pid) for job in jobs)
    (folder / f"go-{moment}").touch()
    return total


# ---------------------------------------------------------------------------------------------------- jobs


def _jobs_cache(fraction: float, samples: int) -> SharedCacheDDP:
    limit = f"{samples + int(fraction * samples) * 64}B"
    return SharedCacheDDP(limit, samples, (64,), name="benchmark-jobs", placement="scattered")


def _job(fraction: float, samples: int, seed: int, single_flight: bool, load_ms: float) -> None:
    """One job of two processes in a random order; waits for its start, then reads an epoch for each line of stdin."""
    cache = _jobs_cache(fraction, samples)

    def slow(idx: int) -> torch.Tensor:
        time.sleep(load_ms / 1000)
        return torch.full((64,), idx % 256, dtype=torch.uint8)

    generator = torch.Generator().manual_seed(seed)
    print("ready", flush=True)
    for _ in sys.stdin:
        order = torch.randperm(samples, generator=generator).tolist()
        pids = []
        for half in (order[::2], order[1::2]):
            pid = os.fork()
            if pid == 0:
                for idx in half:
                    if single_flight:
                        value = cache.get_or_load(idx, slow)
                    else:
                        value = cache.get_slot(idx)
                        if value is None:
                            value = slow(idx)
                            cache.set_slot(idx, value)
                    assert value[0] == idx % 256
                os._exit(0)
            pids.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
        print("epoch", flush=True)


def jobs(samples: int, load_ms: float) -> None:
    """K jobs at once over one cold cache: how often they read the source, together."""
    print(f"{samples} samples, {load_ms} ms to load one, jobs of 2 processes")
    print("| jobs | cached | order | call | epoch | reads | of cN + K(1-c)N | without sharing |")
    print("| ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for count, fraction, order in ((2, 1.0, "own"), (4, 1.0, "own"), (4, 0.5, "own"), (4, 1.0, "same")):
        for single_flight in (False, True):
            keeper = _jobs_cache(fraction, samples)
            command = [sys.executable, "-m", "benchmark.sharing", "job", str(fraction), str(samples), str(load_ms)]
            command.append(str(int(single_flight)))
            seeds = range(count) if order == "own" else [0] * count
            processes = [subprocess.Popen([*command, str(seed)], stdin=-1, stdout=-1, text=True) for seed in seeds]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for epoch in range(2):
                before = keeper.stats().misses
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                for process in processes:
                    assert process.stdout is not None
                    assert process.stdout.readline() == "epoch\n"
                reads = keeper.stats().misses - before
                resident = len(keeper)
                bound = (resident if epoch == 0 else 0) + count * (samples - resident)
                call = "get_or_load" if single_flight else "get_slot, set_slot"
                share = f"{reads / bound:.4f}" if bound else str(reads)
                print(f"| {count} | {fraction:.0%} | {order} | {call} | {epoch + 1} | {reads} | {share} | {count * samples} |")
            for process in processes:
                process.communicate()
            keeper.close()


# ---------------------------------------------------------------------------------------------------- warm


def warm(gib: int) -> None:
    """A run that fills and persists, and a second one that finds it: reads of its first epoch, milliseconds to attach."""
    samples = gib * 1024 * MIB // SLOT_BYTES
    settle(gib * 1024 * MIB)
    print("| cached | run | attaching, ms | first epoch: reads | (1-c)N |")
    print("| ---: | --- | ---: | ---: | ---: |")
    image = torch.zeros(DIMS, dtype=torch.uint8)
    for fraction in (1.0, 0.5):
        for number in (1, 2):
            code = f"""
import json, time, torch
from stocache import SharedCacheDDP
began = time.perf_counter()
cache = SharedCacheDDP("{samples + int(fraction * samples) * SLOT_BYTES}B", {samples}, {DIMS}, name="benchmark-warm",
                       persist=True, fingerprint="1", placement="scattered")
attached = time.perf_counter() - began
image, reads = torch.zeros({DIMS}, dtype=torch.uint8), 0
for idx in torch.randperm({samples}).tolist():
    if cache.get_slot(idx, copy=False) is None:
        reads += 1
        cache.set_slot(idx, image)
print(json.dumps([attached * 1000, reads, len(cache)]))
"""
            output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            ms, reads, slots = json.loads(output)
            run = f"{number}: {'makes it' if number == 1 else 'finds it'}"
            print(f"| {fraction:.0%} | {run} | {ms:.1f} | {reads} | {samples - slots} |", flush=True)
        for cache in listing.find():
            named.remove(cache.path)
    del image
    began = time.perf_counter()
    SharedCache(gib, samples, DIMS).close()
    print(f"making an anonymous cache of {gib} GiB: {(time.perf_counter() - began) * 1000:.1f} ms")
    try:
        from stocaching import SharedCache as Peer
    except ImportError:
        return
    began = time.perf_counter()
    Peer(size_limit_gib=gib, dataset_len=samples, data_dims=DIMS, dtype=torch.uint8)
    print(
        f"stocaching, which finds nothing of an earlier run, makes {gib} GiB in {(time.perf_counter() - began) * 1000:.0f} ms"
    )


class Paths(Dataset[int]):
    """A dataset that reads its list, and gives the length of a path."""

    def __init__(self, paths: Any) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> int:
        return len(self.paths[idx])


def _lists(way: str, method: str, count: int) -> None:
    """Read the whole list with 8 workers; print the memory at its peak, and the seconds until the first batch."""
    paths: Any = [f"data/train/class{number % 1000:04}/{number:010}.jpg" for number in range(count)]
    if way == "numpy strings":
        paths = np.array(paths, dtype=np.bytes_)
    dataset: Dataset[int] = Paths(paths)
    if way == "share":
        dataset = share(dataset)
    del paths
    loader = DataLoader(dataset, 50_000, shuffle=True, num_workers=8, multiprocessing_context=method)
    began, first_s, most = time.perf_counter(), 0.0, 0
    for number, _ in enumerate(loader):
        first_s = first_s or time.perf_counter() - began
        if number % max(1, len(loader) // 10) == 0 or number == len(loader) - 2:
            most = max(most, pss(os.getpid()))
    print(json.dumps({"bytes": most, "first_s": first_s}))


def lists(count: int) -> None:
    """Print the memory of 8 workers and their parent, for each way to keep a list of paths."""
    print("| list | workers | memory of all, GiB | first batch, s |\n| --- | --- | ---: | ---: |")
    code = "from benchmark.sharing import _lists; import sys; _lists(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    for method in ("fork", "spawn"):
        for way in ("list", "numpy strings", "share"):
            command = [sys.executable, "-W", "ignore", "-c", code, way, method, str(count)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout)
            print(f"| {way} | {method} | {found['bytes'] / 2**30:.2f} | {found['first_s']:.1f} |", flush=True)


def main() -> None:
    """Run one of the experiments."""
    if sys.argv[1:2] == ["rank"]:
        library, samples, folder, job = sys.argv[2:]
        rank(library, int(samples), Path(folder), int(job))
        return
    if sys.argv[1:2] == ["job"]:
        fraction, samples, load_ms, single_flight, seed = sys.argv[2:]
        _job(float(fraction), int(samples), int(seed), single_flight == "1", float(load_ms))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["ranks", "jobs", "lists", "warm"])
    parser.add_argument("--mib", type=int, default=1024, help="ranks: size of the dataset")
    parser.add_argument("--samples", type=int, default=2000, help="jobs: size of the dataset")
    parser.add_argument("--load-ms", type=float, default=2.0, help="jobs: how long loading a sample takes")
    parser.add_argument("--paths", type=int, default=10_000_000, help="lists: length of the list")
    parser.add_argument("--gib", type=int, default=4, help="warm: size of the dataset")
    arguments = parser.parse_args()
    if arguments.experiment == "ranks":
        ranks(arguments.mib)
    elif arguments.experiment == "jobs":
        jobs(arguments.samples, arguments.load_ms)
    elif arguments.experiment == "lists":
        lists(arguments.paths)
    else:
        warm(arguments.gib)


if __name__ == "__main__":
    main()
