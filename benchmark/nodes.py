"""Training on several machines, beside torch's DistributedSampler with a cache on each.

``train`` starts torchrun once for each "machine", with --nnodes, over gloo. Each has a cache by a name of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from stocache import CachedDataset, DataLoader, LocalityDistributedSampler, Placement, SharedCache
from stocache.cache.placement import ordering_of, residency
from stocache.loader.samplers.assignment import EpochShape, ShuffledEpoch, StrataLayout, StratifiedEpoch, assign_ranks
from stocache.samples.spec import Structure

CLAIM = "Several machines read only the surplus of random batches, with the batches and losses of DistributedSampler."

EPOCHS, BATCH = 4, 64
READ_S = 0.0005  # a sample from a source far away
WAYS = ("DistributedSampler", "Locality", "Locality, warm()", "Locality, stratify")


# ---------------------------------------------------------------------------------------------------- train


def far(samples: int) -> Made:
    """Return points in two classes; each takes a while to load."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(samples, 3, 16, 16, generator=generator)
    labels = (points.flatten(1) @ torch.randn(3 * 256, generator=generator) > 0).long()

    def load(idx: int) -> Any:
        time.sleep(READ_S)
        return points[idx], labels[idx], idx

    return Made(samples, load)


def rank(way: str, samples: int, share: float, out: str) -> None:
    """Train as one rank, and write its reads, batches and losses."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    number, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    source, placement = far(samples), Placement.from_env()
    if way == "DistributedSampler":
        placement = Placement("scattered")  # each cache by itself
    slot_bytes = Structure.of(source[0]).nbytes
    limit = f"{int(share * samples) * slot_bytes + samples}B"
    name = f"node-{os.environ['GROUP_RANK']}-{os.environ['TORCHELASTIC_RUN_ID']}"
    with CachedDataset(source, limit, name=name, fingerprint="points", placement=placement, audit=0) as dataset:
        assert abs(len(dataset.cache) - share * samples) <= 1
        sampler: Any
        if way == "DistributedSampler":
            sampler = DistributedSampler(dataset, world_size, number)
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
        Path(out, f"{number}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def trained(way: str, nodes: int, per_node: int, samples: int, share: float) -> list[Any]:
    """Return the results of all ranks: torchrun starts once for each machine."""
    code = "import sys; from benchmark.nodes import rank; rank(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])"
    with tempfile.TemporaryDirectory() as out:
        script = Path(out, "rank.py")
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc_per_node={per_node}"]
        command += ["--master_addr=127.0.0.1", f"--master_port={29000 + os.getpid() % 1000}", f"--rdzv_id={os.getpid()}"]
        arguments = [str(script), way, str(samples), str(share), out]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        started = [
            subprocess.Popen([*command, f"--node_rank={node}", *arguments], env=environment, stderr=subprocess.PIPE, text=True)
            for node in range(nodes)
        ]
        errors = [process.communicate()[1] for process in started]
        if any(process.returncode for process in started):
            raise RuntimeError("\n".join(errors))
        return [json.loads(Path(out, f"{number}.json").read_text()) for number in range(nodes * per_node)]


def global_batches(figures: list[Any]) -> list[Counter[int]]:
    """Return the global batch of each step."""
    return [sum((Counter(seen) for seen in step), Counter()) for step in zip(*(its["seen"] for its in figures), strict=True)]


@experiment(rounds=16_384, quick=1_024)
def train(run: Run) -> None:
    """2 and 4 "machines" on this one: reads, losses, batches."""
    titles = "last epoch, s", "global batches equal", "losses differ by up to"
    table = run.table("machines x ranks", "share of each cache", "sampler", "read in epochs 1 to 4, of all samples", *titles)
    later, alike = [], True
    for nodes, per_node, share in ((2, 1, 0.5), (4, 1, 0.25), (2, 2, 0.5), (4, 1, 0.125))[: run.size(None, 1)]:
        reference: list[Any] = []
        for way in WAYS[: run.size(None, 2)]:
            figures = trained(way, nodes, per_node, run.rounds, share)
            reference = reference or figures
            reads = [sum(its["reads"][epoch] for its in figures[::per_node]) / run.rounds for epoch in range(EPOCHS)]
            pairs = list(zip(global_batches(figures), global_batches(reference), strict=True))
            equal = sum(one == other for one, other in pairs)
            losses = zip(figures[0]["losses"], reference[0]["losses"], strict=True)
            differ = max(abs(one - other) for one, other in losses)
            shown = ", ".join(f"{read:.4f}" for read in reads)
            seconds = max(its["seconds"][-1] for its in figures)
            table.row(f"{nodes} x {per_node}", share, way, shown, seconds, f"{equal} of {len(pairs)}", differ)
            if way.startswith("Locality") and "stratify" not in way:
                alike &= equal == len(pairs) and differ < 1e-5
                later += [reads[-1]] if nodes * share >= 1 else []
    run.claim("machines read the surplus of random batches, in the last epoch", max(later), most=0.05)
    run.claim("with the batches and losses of DistributedSampler", alike)


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


@experiment(rounds=10**9, quick=10**7)
def scale(run: Run) -> None:
    """Planning and hit rates, from 1 node to 1,024."""
    titles = "shared out", "in theory", "in strata", "s to plan 10^7 samples of a rank: shared out", "s in strata"
    table = run.table("nodes", "share of each cache", "private", *titles, "MiB: shared out", "MiB in strata")
    for nodes in run.size((1, 4, 16, 64, 256, 1024), (1, 16)):
        for filled in (0.5, 1.0):
            slots = int(filled * run.rounds / nodes)
            ordering = ordering_of(Placement("scattered", nodes=nodes), run.rounds)
            facts = EpochShape(run.rounds, nodes, BATCH_AT_SCALE, -(-run.rounds // nodes), 0, 0)
            shuffled, strata = ShuffledEpoch(facts, True), StratifiedEpoch(facts, StrataLayout(nodes, 1, slots), ordering)
            plans = {"shared out": partial(_shared_out, shuffled, ordering), "in strata": strata.of_rank}
            hits: dict[str, list[float]] = {way: [] for way in plans}
            for node in np.random.default_rng(nodes).choice(nodes, min(nodes, 64), replace=False).tolist():
                held = residency(Placement("scattered", node=node, nodes=nodes), run.rounds, slots)
                for way, plan in plans.items():
                    got = plan(node, 0, 4 if way == "shared out" and nodes > 64 else 40)
                    hits[way].append(float(held.resident(got).mean()))
            steps = min(facts.steps, 10**6 // BATCH_AT_SCALE)
            together = [max(1, (1 << 16) // width) for width in (BATCH_AT_SCALE * nodes, BATCH_AT_SCALE)]  # as the sampler does
            costs = [
                planned(plans["shared out"], max(4, steps // nodes), together[0]),
                planned(strata.of_rank, steps, together[1]),
            ]
            rates = statistics.mean(hits["shared out"]), _served(filled, nodes), statistics.mean(hits["in strata"])
            seconds = [took_s / count * 1e7 for count, took_s, _ in costs]
            table.row(nodes, filled / nodes, filled / nodes, *rates, *seconds, *(nbytes / 2**20 for _, _, nbytes in costs))
    run.claim("10^7 samples of a rank are planned in 1 s, in strata", max(table.column("s in strata")), most=1)


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


@experiment()
def stragglers(run: Run) -> None:
    """How many more samples than the mean the unluckiest of 8 ranks reads at a step."""
    samples, batch_size, ranks = 1 << run.size(20, 16), 256, 8
    table = run.table("cached", "sampler", "max / mean reads at a step", "worst step", "reads of a rank at a step")
    for share in (0.5, 0.9, 0.99):
        limit = f"{samples + int(share * samples) * 8}B"
        with SharedCache(limit, samples, (), torch.int64, placement="scattered") as cache:
            dataset: Any = Made(samples, int)
            dataset.cache = cache
            held = residency(cache.placement, samples, len(cache))
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
                table.row(share, way, float(ratio.mean()), float(ratio.max()), f"{at.min():.0f} to {at.max():.0f}")
    (most,) = table.column("max / mean reads at a step", cached=0.9, sampler="Locality, stratify")
    run.claim("with 90 % cached the unluckiest rank reads 1.01 of the mean", most, most=1.01)
