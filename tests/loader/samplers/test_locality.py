"""Which rank of which machine gets which sample: the same global batches, if they are cached."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, Subset

import stocache
from stocache import LimitError, LocalityDistributedSampler, Placement, SharedCache, StateError
from stocache.cache.placement import BlockBounds, residency
from stocache.loader.samplers.assignment import assign_ranks

TORCHRUN = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
SLURM = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_NODEID SLURM_STEP_NUM_NODES"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in f"{TORCHRUN} {SLURM}".split():
        monkeypatch.delenv(name, raising=False)


class Numbers(list):
    """A dataset of numbers, behind a cache of that many slots."""

    def __init__(self, samples, slots, placement):
        super().__init__(range(samples))
        limit, shared = f"{samples + slots * 8}B", {"fingerprint": "numbers"}  # by the ranks of a job, without their part of it
        self.cache = SharedCache(limit, samples, (), torch.int64, placement=placement, **shared)
        assert len(self.cache) == min(slots, samples)


def samplers(samples, batch_size, nodes, per_node, **options):
    ranks = nodes * per_node
    options = {"placement": Placement("scattered", nodes=nodes), "num_replicas": ranks} | options
    return [LocalityDistributedSampler(range(samples), batch_size, rank=rank, **options) for rank in range(ranks)]


def stratified(samples, slots, batch_size, nodes, per_node, unit=1, **options):
    """Return the samplers of all ranks, and the samples that the cache of each one's node holds."""
    found, held = [], []
    for node in range(nodes):
        dataset = Numbers(samples, slots, Placement("scattered", unit, node, nodes))
        with dataset.cache as cache:
            resident = np.flatnonzero(residency(cache.placement, samples, len(cache)).resident(np.arange(samples)))
            for rank in range(node * per_node, (node + 1) * per_node):
                numbers = {"num_replicas": nodes * per_node, "rank": rank}
                found.append(LocalityDistributedSampler(dataset, batch_size, stratify=True, **numbers, **options))
                held.append(set(resident.tolist()))
    return found, held


def batches_of(sampler):
    order = list(sampler)
    return [order[at : at + sampler.batch_size] for at in range(0, len(order), sampler.batch_size)]


def steps_of(samplers):
    """Return the batches of all ranks, step by step."""
    return list(zip(*map(batches_of, samplers), strict=True))


def global_batches(steps):
    return [Counter(itertools.chain(*step)) for step in steps]


@st.composite
def trainings(draw):
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    samples = draw(st.integers(1, 120))
    unit = draw(st.sampled_from([1, 1, 4, "units"]))
    if unit == "units":
        unit = BlockBounds(np.unique([0, *draw(st.lists(st.integers(1, samples), max_size=9)), samples]))
    placement = Placement(draw(st.sampled_from(["prefix", "scattered"])), unit, nodes=nodes)
    options = {"shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 5)), "drop_last": draw(st.booleans())}
    return samples, draw(st.integers(1, 8)), nodes, per_node, placement, options


@settings(max_examples=25)
@given(trainings(), st.integers(0, 3), st.data())
def test_global_batches_are_those_of_the_distributed_sampler_and_go_on_with_other_ranks(training, epoch, data):
    samples, batch_size, nodes, per_node, placement, options = training
    ours = samplers(samples, batch_size, nodes, per_node, placement=placement, **options)
    theirs = [DistributedSampler(range(samples), nodes * per_node, rank, **options) for rank in range(nodes * per_node)]
    for sampler in (*ours, *theirs):
        sampler.set_epoch(epoch)
        sampler.batch_size = batch_size
    assert [len(sampler) for sampler in ours] == [len(sampler) for sampler in theirs]
    random_state = torch.get_rng_state()
    steps = steps_of(ours)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(len(set(map(len, step))) == 1 for step in steps)
    assert global_batches(steps) == global_batches(steps_of(theirs))

    width = batch_size * nodes * per_node
    others = data.draw(st.sampled_from([ranks for ranks in range(1, width + 1) if width % ranks == 0]))
    done = data.draw(st.integers(0, samples // width))
    for iterator in map(iter, ours):
        list(itertools.islice(iterator, done * batch_size))
    after = samplers(samples, width // others, 1, others, placement=Placement(nodes=1), **options)
    for sampler in after:
        sampler.set_epoch(epoch)
    whole = global_batches(steps_of(after))
    state = ours[-1].state_dict()
    for sampler in after:
        sampler.load_state_dict(state)
    assert global_batches(steps_of(after)) == whole[done if state["position"]["done"] else 0 :]


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_node_keeps_what_stands_first_in_its_part_and_gives_away_the_rest(nodes, per_node, batch_size, steps, random):
    width = nodes * per_node * batch_size
    bounds = np.array([node * 1000 // nodes for node in range(nodes + 1)])
    positions = np.array([random.sample(range(1000), width) for _ in range(steps)])
    ranks = assign_ranks(positions, bounds, per_node)
    for at, rank in zip(positions, ranks, strict=True):
        assert (np.bincount(rank, minlength=nodes * per_node) == batch_size).all()
        for node in range(nodes):
            own = np.sort(at[(at >= bounds[node]) & (at < bounds[node + 1])])
            kept = at[(rank // per_node == node) & np.isin(at, own)]
            assert sorted(kept) == own[: per_node * batch_size].tolist()
            held = own[: len(own) // 2]  # whatever the cache of the node holds
            shares = [np.isin(at[rank == node * per_node + local], held).sum() for local in range(per_node)]
            assert max(shares) - min(shares) <= 1


def hits_of(ours, held):
    """How many cached samples each rank has at each step."""
    return [[sum(sample in its for sample in batch) for batch, its in zip(step, held, strict=True)] for step in steps_of(ours)]


@settings(max_examples=15)
@given(st.data())
def test_an_epoch_in_strata_has_every_sample_once_and_the_cached_ones_where_they_are(data):
    nodes, per_node = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    samples, batch_size = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 8))
    slots, unit = data.draw(st.integers(1, samples)), data.draw(st.sampled_from([1, 1, 3]))
    options = {"drop_last": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 9))}
    ours, held = stratified(samples, slots, batch_size, nodes, per_node, unit, **options)
    ranks, part = nodes * per_node, min(slots // unit * unit, samples // nodes)
    for epoch in range(2):
        for sampler in ours:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in ours]
        assert [len(order) for order in orders] == [len(sampler) for sampler in ours]
        counts = Counter(itertools.chain(*orders))
        assert set(counts) <= set(range(samples))
        if options["drop_last"]:
            assert sum(counts.values()) == len(counts) == samples // ranks * ranks
        else:
            assert len(counts) == samples
            assert sum(counts.values()) == -(-samples // ranks) * ranks
        hits = hits_of(ours, held)
        for node in range(nodes):
            assert sum(sum(step[node * per_node : (node + 1) * per_node]) for step in hits) >= part - ranks - unit * nodes


@pytest.mark.parametrize(("nodes", "per_node", "share"), [(1, 8, 0.9), (4, 2, 0.2), (2, 2, 1.0)])
def test_strata_give_all_ranks_as_many_cached_samples(nodes, per_node, share):
    samples = 64 * nodes * per_node * 10
    slots = int(samples * share) // 8 * 8
    hits = hits_of(*stratified(samples, slots, 64, nodes, per_node))
    assert all(len(set(step)) == 1 for step in hits)
    each = [step[0] for step in hits]
    assert max(each) - min(each) <= 1
    assert sum(each) == min(slots // per_node, samples // nodes // per_node)


@pytest.mark.parametrize(
    ("samples", "drop_last", "nodes", "per_node", "batch_size"),
    [(240, False, 4, 2, 3), (249, True, 1, 1, 24), (249, False, 2, 1, 12), (249, True, 1, 3, 8)],
)
def test_strata_go_on_as_they_were_begun(nodes, per_node, batch_size, samples, drop_last):
    options = {"drop_last": drop_last, "seed": 3}
    before, _ = stratified(samples, 50, 3, 4, 2, **options)
    whole = steps_of(before)
    for iterator in map(iter, before):
        list(itertools.islice(iterator, 4 * 3))
    after, _ = stratified(samples, 70, batch_size, nodes, per_node, **options)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    left = steps_of(after)
    assert global_batches(left[:6]) == global_batches(whole[4:10])
    seen = set(itertools.chain(*itertools.chain(*whole[:4]), *itertools.chain(*left)))
    assert len(seen) == samples or (drop_last and len(seen) > samples - 8)


@pytest.mark.parametrize("names", [TORCHRUN, SLURM])
def test_ranks_and_nodes_are_those_of_the_launcher(names, monkeypatch):
    assert list(LocalityDistributedSampler(range(10), 4, shuffle=False)) == list(range(10))  # without one, all is one process
    wanted = samplers(100, 4, 4, 2)[5]
    for name, value in zip(names.split(), "5824", strict=True):
        monkeypatch.setenv(name, value)
    placement = Placement.from_env()
    assert placement == Placement("scattered", node=2, nodes=4)
    dataset = Numbers(100, 10, placement)
    with dataset.cache:
        for sampler in (LocalityDistributedSampler(dataset, 4), LocalityDistributedSampler(range(100), 4)):
            assert (sampler.rank, sampler.num_replicas) == (5, 8)
            assert list(sampler) == list(wanted)


BLOCKS = "blocks of 7 samples in all, the dataset has 40"
OPTIONS = [
    ({"batch_size": 0}, "batch_size=0"), ({"seed": -1}, "seed=-1"), ({"rank": 4}, "rank=4 is out of range for num_replicas=4"),
    ({"placement": Placement(nodes=3)}, "cannot be divided evenly among 3 nodes"),
    ({"placement": Placement("prefix", BlockBounds([0, 7]), nodes=2)}, BLOCKS),
    ({"num_nodes": 3}, "for 2 nodes, but there are 3"), ({"dataset": Subset(range(40), range(3))}, "CachedDataset around the"),
    ({"node_rank": 1}, "node_rank says node 1, but rank 0 of 4, 2 on each node, is on node 0"),
    ({"stratify": True}, "stratify needs shuffle=True, and a CachedDataset"),
]  # fmt: skip


def test_options_that_do_not_go_together_are_errors(monkeypatch):
    defaults = {"dataset": range(40), "batch_size": 2, "placement": Placement(nodes=2), "num_replicas": 4, "rank": 0}
    for options, message in OPTIONS:
        with pytest.raises(LimitError, match=message):
            LocalityDistributedSampler(**defaults | options)
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(LimitError, match="the launcher says node 0, but rank 1"):
        LocalityDistributedSampler(range(40), 2, num_replicas=2, rank=1)
    with pytest.raises(LimitError, match="batches of 4 samples, but batch_size=8"):
        stocache.DataLoader(range(40), batch_size=8, sampler=LocalityDistributedSampler(range(40), 4, num_replicas=2, rank=0))


def test_a_state_within_a_batch_is_an_error():
    sampler = LocalityDistributedSampler(range(40), 4, num_replicas=2, rank=0)
    next(iter(sampler))
    with pytest.raises(StateError, match="within a batch of 4"):
        LocalityDistributedSampler(range(40), 8, num_replicas=1, rank=0).load_state_dict(sampler.state_dict())
