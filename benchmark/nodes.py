"""Training on several machines, beside torch's DistributedSampler with a cache on each.

    python -m benchmark nodes train [--workdir DIR]    # 2 and 4 "machines" on this one: reads, losses, batches
    python -m benchmark nodes scale                    # up to 1,024 nodes and 10^9 samples: planning, hit rates
    python -m benchmark nodes stragglers               # how much more than the mean the unluckiest rank reads
    python -m benchmark nodes ray FOLDER [--workdir DIR]    # preparation on a local Ray, also with a worker or a node killed

``train`` starts torchrun once for each machine, with --nnodes, over gloo. Where it runs as root and ``ip`` is installed, each
machine has a network namespace of its own, joined by a bridge, and a /dev/shm of its own.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from stocache import CachedDataset, DataLoader, LocalityDistributedSampler, Placement, SharedCache, prepare
from stocache.cache.placement import ordering_of, residency
from stocache.loader.samplers.assignment import EpochShape, ShuffledEpoch, StrataLayout, StratifiedEpoch, assign_ranks
from stocache.samples.spec import Structure
from stocache.storage.preparation.sources import open_source

CLAIM = "Several machines read only the surplus of random batches, with the batches and losses of DistributedSampler."
NEEDS = (("ray", '-e ".[ray]"', "ray"), ("PIL", '-e ".[bench]"', "ray"))

EPOCHS, BATCH = 4, 64
READ_S = 0.0005  # a sample from a source far away
WAYS = ("DistributedSampler", "Locality", "Locality, warm()", "Locality, stratify")


def bound(nodes: int, batch_size: int) -> float:
    """Return the mean surplus of random batches: the share of samples that nodes own beyond their part of a batch."""
    return math.sqrt((1 - 1 / nodes) / (2 * math.pi * batch_size))


# ---------------------------------------------------------------------------------------------------- train


class Far(Dataset[Any]):
    """Points in two classes; each takes a while to load."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(samples, 3, 16, 16, generator=generator)
        teacher = torch.randn(3 * 256, generator=generator)
        self.labels = (self.points.flatten(1) @ teacher > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, idx: int) -> Any:
        time.sleep(READ_S)
        return self.points[idx], self.labels[idx], idx


def rank_main(way: str, samples: int, share: float, out: str) -> None:
    """Train as one rank, and write its reads, batches and losses."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    source, placement = Far(samples), Placement.from_env()
    if way == "DistributedSampler":
        placement = Placement("scattered")  # each cache by itself
    slot_bytes = Structure.of(source[0]).nbytes
    limit = f"{int(share * samples) * slot_bytes + samples}B"
    name = f"node-{os.environ['GROUP_RANK']}-{os.environ['TORCHELASTIC_RUN_ID']}"
    with CachedDataset(source, limit, name=name, fingerprint="points", placement=placement, audit=0) as dataset:
        assert abs(len(dataset.cache) - share * samples) <= 1
        sampler: Any
        if way == "DistributedSampler":
            sampler = DistributedSampler(dataset, world_size, rank)
        else:
            sampler = LocalityDistributedSampler(dataset, BATCH, stratify=way.endswith("stratify"))
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        model = torch.nn.parallel.DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
        figures: dict[str, Any] = {"seen": [], "losses": [], "reads": [], "seconds": []}
        if way.endswith("warm()"):
            dataset.warm(progress=False)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            torch.distributed.barrier()
            before, began = dataset.cache.stats().misses, time.monotonic()
            for points, labels, numbers in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(points), labels)
                loss.backward()
                optimizer.step()
                total = loss.detach().clone()
                torch.distributed.all_reduce(total)
                figures["losses"].append(total.item() / world_size)
                figures["seen"].append(numbers.tolist())
            torch.distributed.barrier()
            figures["seconds"].append(time.monotonic() - began)
            figures["reads"].append(dataset.cache.stats().misses - before)
            torch.distributed.barrier()
        Path(out, f"{rank}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def machines(nodes: int) -> Iterator[list[list[str]]]:
    """Give, for each machine, the beginning of a command that runs there: in a network and a /dev/shm of its own."""
    if os.geteuid() or shutil.which("ip") is None:
        print("(not root, or no ip: the machines share network and /dev/shm)")
        yield [[] for _ in range(nodes)]
        return
    bridge = f"sc{os.getpid()}"

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    with contextlib.ExitStack() as stack:
        ip(f"link add {bridge} type bridge")
        stack.callback(ip, f"link del {bridge}")
        ip(f"link set {bridge} up")
        for node in range(nodes):
            space = f"{bridge}n{node}"
            ip(f"netns add {space}")
            stack.callback(ip, f"netns del {space}")
            ip(f"link add {space} type veth peer name eth0 netns {space}")
            ip(f"link set {space} master {bridge} up")
            ip(f"-n {space} addr add 10.213.7.{node + 1}/24 dev eth0")
            for device in ("lo", "eth0"):
                ip(f"-n {space} link set {device} up")
        mount = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
        yield [["ip", "netns", "exec", f"{bridge}n{node}", "sh", "-c", mount, "sh"] for node in range(nodes)]


def run_ranks(way: str, nodes: int, per_node: int, samples: int, share: float, workdir: Path) -> list[Any]:
    """Return the results of all ranks."""
    with tempfile.TemporaryDirectory(dir=workdir) as out, machines(nodes) as prefixes:
        apart = bool(prefixes[0])
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc_per_node={per_node}"]
        command += [f"--master_addr={'10.213.7.1' if apart else '127.0.0.1'}", f"--master_port={29000 + os.getpid() % 1000}"]
        command += [f"--rdzv_id={os.getpid()}"]
        arguments = ["-m", "benchmark.nodes", "rank", way, str(samples), str(share), out]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "eth0"} if apart else {})
        running = [
            subprocess.Popen(
                [*prefix, *command, f"--node_rank={node}", *arguments], env=environment, stderr=subprocess.PIPE, text=True
            )
            for node, prefix in enumerate(prefixes)
        ]
        errors = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise SystemExit("\n".join(errors))
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(nodes * per_node)]


def global_batches(figures: list[Any]) -> list[Counter[int]]:
    """Return the global batch of each step."""
    return [sum((Counter(seen) for seen in step), Counter()) for step in zip(*(its["seen"] for its in figures), strict=True)]


def train(arguments: argparse.Namespace) -> None:
    """Print reads, batches and losses of all ways to train."""
    heading = ["machines x ranks", "share of each cache", "sampler", "read in epochs 1 to 4, of all samples", "last epoch, s"]
    heading += ["global batches equal", "losses differ by up to", "of losses from, to"]
    print("| " + " | ".join(heading) + " |")
    print("| --- " * 4 + "| ---: | --- | ---: | --- |")
    samples = arguments.samples
    for nodes, per_node, share in ((2, 1, 0.5), (4, 1, 0.25), (2, 2, 0.5), (4, 1, 0.125)):
        reference: list[Any] = []
        for way in WAYS:
            figures = run_ranks(way, nodes, per_node, samples, share, arguments.workdir)
            reference = reference or figures
            reads = [sum(its["reads"][epoch] for its in figures[::per_node]) / samples for epoch in range(EPOCHS)]
            seconds = max(its["seconds"][-1] for its in figures)
            pairs = list(zip(global_batches(figures), global_batches(reference), strict=True))
            equal = sum(one == other for one, other in pairs)
            losses = zip(figures[0]["losses"], reference[0]["losses"], strict=True)
            differ = max(abs(one - other) for one, other in losses)
            row = [f"{nodes} x {per_node}", f"{share}", way, ", ".join(f"{read:.4f}" for read in reads)]
            row += [f"{seconds:.2f}", f"{equal} of {len(pairs)}", f"{differ:.1e}"]
            row += [f"{max(reference[0]['losses']):.3f}, {min(reference[0]['losses']):.4f}"]
            print("| " + " | ".join(row) + " |", flush=True)
        surplus = surpluses(global_batches(reference), nodes, samples)
        row = ["", "", "what these batches have too much", ", ".join(f"{its:.4f}" for its in surplus)]
        row += ["", "", f"in theory {bound(nodes, BATCH * per_node):.4f}", ""]
        print("| " + " | ".join(row) + " |", flush=True)


def surpluses(batches: list[Counter[int]], nodes: int, samples: int) -> list[float]:
    """Return the surplus of each epoch: the share of samples that nodes own beyond their room in a batch."""
    ordering = ordering_of(Placement("scattered", nodes=nodes), samples)
    found = []
    for batch in batches:
        positions = ordering.positions(np.array(sorted(batch.elements())))
        counts = np.histogram(positions, ordering.bounds)[0]
        found.append(np.maximum(0, counts - len(positions) // nodes).sum())
    return [float(sum(epoch)) / samples for epoch in np.array_split(found, EPOCHS)]


# ---------------------------------------------------------------------------------------------------- scale


def planned(plan: Any, steps: int, together: int) -> tuple[int, float, int]:
    """Plan the part of rank 0 of ``steps`` steps; return its samples, the seconds, and the bytes of memory."""
    samples = 0
    began = time.perf_counter()
    for begin in range(0, steps, together):
        samples += len(plan(0, begin, min(begin + together, steps)))
    seconds = time.perf_counter() - began
    tracemalloc.start()
    plan(0, 0, min(together, steps))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return samples, seconds, peak


BATCH_AT_SCALE = 256


def scale(arguments: argparse.Namespace) -> None:
    """Print the cost of planning and the hit rates, from 1 node to 1,024."""
    samples = arguments.samples
    heading = ["nodes", "share of each cache", "private", "shared out", "in theory", "in strata", "in theory"]
    heading += ["planning 10^7 samples of a rank, s: shared out", "in strata", "memory, MiB: shared out", "in strata"]
    print("| " + " | ".join(heading) + " |")
    print("| ---: " * len(heading) + "|")
    for nodes in (1, 4, 16, 64, 256, 1024):
        for filled in (0.5, 1.0):
            slots = int(filled * samples / nodes)
            ordering = ordering_of(Placement("scattered", nodes=nodes), samples)
            facts = EpochShape(samples, nodes, BATCH_AT_SCALE, -(-samples // nodes), 0, 0)
            shuffled, strata = ShuffledEpoch(facts, True), StratifiedEpoch(facts, StrataLayout(nodes, 1, slots), ordering)
            shared_out = partial(_shared_out, shuffled, ordering)
            hits: dict[str, list[float]] = {"shared out": [], "in strata": []}
            for node in np.random.default_rng(nodes).choice(nodes, min(nodes, 64), replace=False).tolist():
                held = residency(Placement("scattered", node=node, nodes=nodes), samples, slots)
                for way, plan in (("shared out", shared_out), ("in strata", strata.of_rank)):
                    got = plan(node, 0, 4 if way == "shared out" and nodes > 64 else 40)
                    hits[way].append(float(held.resident(got).mean()))
            steps = min(facts.steps, 10**6 // BATCH_AT_SCALE)
            together = [max(1, (1 << 16) // width) for width in (BATCH_AT_SCALE * nodes, BATCH_AT_SCALE)]  # as the sampler does
            costs = [planned(shared_out, max(4, steps // nodes), together[0]), planned(strata.of_rank, steps, together[1])]
            row = [f"{nodes:,}", f"{filled / nodes:.6f}", f"{filled / nodes:.4f}", f"{statistics.mean(hits['shared out']):.4f}"]
            row += [f"{_served(filled, nodes):.4f}", f"{statistics.mean(hits['in strata']):.4f}", f"{filled:.4f}"]
            row += [f"{seconds / count * 1e7:.2f}" for count, seconds, _ in costs]
            row += [f"{peak / 2**20:.1f}" for _, _, peak in costs]
            print("| " + " | ".join(row) + " |", flush=True)


def _shared_out(plan: ShuffledEpoch, ordering: Any, rank: int, begin: int, end: int) -> Any:
    """Return the samples that a rank gets of the global batches of these steps."""
    batches = plan.batches(begin, end).reshape(end - begin, -1)
    return batches[assign_ranks(ordering.positions(batches), ordering.bounds, 1) == rank]


def _served(filled: float, nodes: int) -> float:
    """Return the share of samples that caches serve which together hold a share ``filled``.

    The samples of a node in a batch are binomial in number. Of those its cache holds it keeps as many as it has room for.
    """
    rng = np.random.default_rng(0)
    held = rng.binomial(nodes * BATCH_AT_SCALE, filled / nodes, 10**6)
    return float(np.minimum(held, BATCH_AT_SCALE).mean()) / BATCH_AT_SCALE


# ---------------------------------------------------------------------------------------------------- stragglers


class Numbers(Dataset[int]):
    """Numbers behind a cache that holds a share of them."""

    def __init__(self, samples: int, share: float) -> None:
        self.cache = SharedCache(f"{samples + int(share * samples) * 8}B", samples, (), torch.int64, placement="scattered")
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


def stragglers(arguments: argparse.Namespace) -> None:
    """Print how many more samples than the mean the unluckiest of 8 ranks reads at a step."""
    samples, batch_size, ranks = 1 << 20, 256, 8
    print("| cached | sampler | max / mean reads at a step, mean over steps | worst step | reads of a rank at a step |")
    print("| ---: | --- | ---: | ---: | --- |")
    for share in (0.5, 0.9, 0.99):
        with (dataset := Numbers(samples, share)).cache:
            held = residency(dataset.cache.placement, samples, len(dataset.cache))
            for way in ("DistributedSampler", "Locality", "Locality, stratify"):
                reads = []
                for rank in range(ranks):
                    numbers = {"num_replicas": ranks, "rank": rank}
                    sampler: Any = DistributedSampler(dataset, **numbers)
                    if way != "DistributedSampler":
                        sampler = LocalityDistributedSampler(dataset, batch_size, stratify=way.endswith("stratify"), **numbers)
                    order = np.array(list(sampler))
                    reads.append((~held.resident(order)).reshape(-1, batch_size).sum(1))
                at = np.stack(reads)
                ratio = at.max(0) / at.mean(0)
                row = [f"{share}", way, f"{ratio.mean():.3f}", f"{ratio.max():.3f}", f"{at.min():.0f} to {at.max():.0f}"]
                print("| " + " | ".join(row) + " |", flush=True)


# ---------------------------------------------------------------------------------------------------- ray


class Fatal(Dataset[Any]):
    """Photographs, of which one kills the process that loads it, the first time; notes each load in a file.

    ``node``: it kills that process's node of a Ray cluster as well.
    """

    def __init__(self, photos: Any, log: Path, deadly: int | None, node: bool) -> None:
        self.photos, self.log, self.deadly, self.node = photos, log, deadly, node

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, idx: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{idx}\n")  # at once, so that several processes can
        died = self.log.with_suffix(".died")
        if idx == self.deadly and not died.exists():
            died.touch()
            if self.node:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.photos[idx]


def ray(arguments: argparse.Namespace) -> None:
    """Print the time of Ray for photographs, and whether its files are equal, beside this process and worker processes."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    environment = {"PYTHONPATH": os.getcwd()}
    ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
    photos = open_source(arguments.folder, size=256)
    print(f"| {len(photos)} photographs, 256 x 256, blocks of 16 | s | loaded | files equal |")
    print("| --- | ---: | ---: | --- |")
    half = len(photos) // 2
    ways: dict[str, tuple[dict[str, Any], int | None]] = {
        "this process": ({}, None),
        "2 worker processes": ({"num_workers": 2}, None),
        "Ray, 2 nodes of 1 CPU": ({"engine": "ray"}, None),
        "Ray, 2 nodes of 1 CPU, a worker killed half-way": ({"engine": "ray"}, half),
        "Ray, 2 nodes of 1 CPU, to a URL": ({"engine": "ray"}, None),
        "Ray, 2 nodes of 1 CPU, one killed half-way": ({"engine": "ray"}, half),
    }
    with tempfile.TemporaryDirectory(dir=arguments.workdir) as scratch:
        first: dict[str, bytes] = {}
        for number, (way, (options, deadly)) in enumerate(ways.items()):
            log, folder = Path(scratch, f"{number}.log"), Path(scratch, str(number))
            began = time.monotonic()
            where = f"file://{folder}" if way.endswith("URL") else folder
            source = Fatal(photos, log, deadly, way.endswith("one killed half-way"))
            prepare(source, where, block_size=16, progress=False, **options).close()
            seconds = time.monotonic() - began
            files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            first = first or files
            equal = sum(files.get(name) == content for name, content in first.items()) if files.keys() == first.keys() else 0
            loaded = len(log.read_text().split())
            print(f"| {way} | {seconds:.1f} | {loaded} | {equal} of {len(first)} |", flush=True)
    ray.shutdown()
    cluster.shutdown()


def main() -> None:
    """Run one of the experiments."""
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, samples in ((train, 16384), (scale, 10**9), (stragglers, 0)):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        command.add_argument("--workdir", type=Path)
        if samples:
            command.add_argument("--samples", type=int, default=samples)
    command = commands.add_parser("ray")
    command.set_defaults(run=ray)
    command.add_argument("folder", type=Path)
    command.add_argument("--workdir", type=Path)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
