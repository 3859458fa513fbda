"""Training on several machines, beside torch's DistributedSampler with a cache on each.

``train`` starts torchrun once for each "machine", with --nnodes, over gloo. Each has a cache by a name of its own.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from benchmark.support.datasets import Made
from benchmark.support.harness import Run, experiment
from benchmark.support.processes import start_ranks
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
    with tempfile.TemporaryDirectory() as out:
        options = {"nnodes": nodes, "master_addr": "127.0.0.1", "rdzv_id": os.getpid()}
        start = partial(start_ranks, per_node, 29000 + os.getpid() % 1000, rank, way, samples, share, out, **options)
        started = [start(node_rank=node) for node in range(nodes)]
        assert {process.wait() for process in started} == {0}, "a rank failed"
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


BATCH_AT_SCALE = 256
Plan = Callable[[int, int], int]
"""Plans some steps of rank 0; returns how many samples the rank has in them."""


def plans(samples: int, nodes: int) -> tuple[int, Plan, Plan]:
    """Return the steps of an epoch, and its plan in the order of DistributedSampler, and in strata."""
    ordering = ordering_of(Placement("scattered", nodes=nodes), samples)
    shape = EpochShape(samples, nodes, BATCH_AT_SCALE, -(-samples // nodes), 0, 0)
    shuffled = ShuffledEpoch(shape, True)
    strata = StratifiedEpoch(shape, StrataLayout(nodes, 1, samples // nodes // 2), ordering)

    def shared_out(begin: int, end: int) -> int:
        batches = shuffled.batches(begin, end).reshape(end - begin, -1)
        return len(batches[assign_ranks(ordering.positions(batches), ordering.bounds, 1) == 0])

    return shape.steps, shared_out, lambda begin, end: len(strata.of_rank(0, begin, end))


def planned_s(plan: Plan, steps: int, together: int) -> float:
    """Return the seconds to plan 10^7 samples, measured over some steps, ``together`` at a time."""
    began = time.perf_counter()
    samples = sum(plan(begin, min(begin + together, steps)) for begin in range(0, steps, together))
    return (time.perf_counter() - began) / samples * 1e7


@experiment(rounds=10**9, quick=10**7)
def scale(run: Run) -> None:
    """Seconds to plan 10^7 samples of a rank, for 1 node to 1,024, whose caches together hold half of the samples."""
    table = run.table("nodes", "share of each cache", "shared out, s", "in strata, s")
    for nodes in run.size((1, 4, 16, 64, 256, 1024), (1, 16)):
        steps, shared_out, in_strata = plans(run.rounds, nodes)
        steps, together = min(steps, 10**6 // BATCH_AT_SCALE), (1 << 16) // BATCH_AT_SCALE  # at a time, as the sampler does
        shared_out_s = planned_s(shared_out, max(4, steps // nodes), max(1, together // nodes))
        table.row(nodes, 0.5 / nodes, shared_out_s, planned_s(in_strata, steps, together))
    run.claim("10^7 samples of a rank are planned in 1 s, in strata", max(table.column("in strata, s")), most=1)


# ---------------------------------------------------------------------------------------------------- stragglers


@experiment()
def stragglers(run: Run) -> None:
    """How many more samples than the mean the unluckiest of 8 ranks reads at a step."""
    samples, batch_size, ranks = 1 << run.size(20, 16), 256, 8
    table = run.table("cached", "sampler", "max / mean reads at a step")
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
                table.row(share, way, float((at.max(0) / at.mean(0)).mean()))
    (most,) = table.column("max / mean reads at a step", cached=0.9, sampler="Locality, stratify")
    run.claim("with 90 % cached the unluckiest rank reads 1.01 of the mean", most, most=1.01)
