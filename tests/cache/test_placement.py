import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Placement
from stocache.cache.placement import BlockBounds, ordering_of, residency

OUTSIDE = -1


@st.composite
def residencies(draw):
    order = draw(st.sampled_from(["prefix", "scattered"]))
    nodes = draw(st.integers(1, 4))
    placement = Placement(order, draw(st.integers(1, 9)), draw(st.integers(0, nodes - 1)), nodes)
    dataset_len = draw(st.integers(0, 300))
    return residency(placement, dataset_len, draw(st.integers(0, dataset_len)))


def slots_of(residency, dataset_len):
    indices = torch.arange(dataset_len)
    return torch.where(residency.resident(indices), residency.slots(indices), OUTSIDE).tolist()


@given(residencies(), st.data())
def test_resident_samples_have_slots_of_their_own(residency, data):
    slots = slots_of(residency, residency.dataset_len)
    resident = [slot for slot in slots if slot != OUTSIDE]
    assert len(set(resident)) == len(resident)
    assert all(0 <= slot < residency.dataset_len for slot in resident)
    for idx, slot in enumerate(slots):
        if slot != OUTSIDE:
            assert residency.slot(idx) == slot
            assert not residency.identity or slot == idx


@given(st.integers(1, 500), st.integers(0, 500), st.sampled_from(["prefix", "scattered"]))
def test_every_slot_is_used_when_units_are_single_samples(dataset_len, slots, order):
    slots = min(slots, dataset_len)
    chosen = residency(Placement(order), dataset_len, slots)
    assert sorted(slot for slot in slots_of(chosen, dataset_len) if slot != OUTSIDE) == list(range(slots))


def test_prefix_keeps_the_first_samples_in_their_own_slots():
    assert slots_of(residency(Placement(), 6, 4), 6) == [0, 1, 2, 3, OUTSIDE, OUTSIDE]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_scattered_gives_every_stretch_its_share(share):
    n, stretch = 100_000, 1000
    chosen = residency(Placement("scattered"), n, int(share * n))
    resident = chosen.resident(torch.arange(n)).view(-1, stretch).sum(dim=1)
    assert resident.min() >= share * stretch - 5
    assert resident.max() <= share * stretch + 5


@pytest.mark.parametrize("order", ["prefix", "scattered"])
def test_blocks_are_resident_as_a_whole(order):
    chosen = residency(Placement(order, unit=64), 1000, 500)
    resident = chosen.resident(torch.arange(1000)).tolist()
    blocks = [resident[start : start + 64] for start in range(0, 1000, 64)]
    assert all(all(block) or not any(block) for block in blocks)
    assert sum(map(all, blocks)) == 500 // 64


@pytest.mark.parametrize("order", ["prefix", "scattered"])
@pytest.mark.parametrize(("nodes", "slots"), [(4, 25), (3, 50), (2, 40)])
def test_nodes_add_up(order, nodes, slots):
    windows = [residency(Placement(order, node=node, nodes=nodes), 100, slots) for node in range(nodes)]
    held = torch.stack([window.resident(torch.arange(100)) for window in windows])
    assert (held.sum(dim=1) == slots).all()
    assert held.any(dim=0).sum() == min(100, nodes * slots)


@st.composite
def placements(draw):
    """Return a placement, and the number of its samples."""
    order, nodes = draw(st.sampled_from(["prefix", "scattered"])), draw(st.integers(1, 5))
    if draw(st.booleans()):
        return Placement(order, draw(st.integers(1, 9)), nodes=nodes), draw(st.integers(1, 300))
    bounds = np.cumsum([0, *draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))])
    return Placement(order, BlockBounds(bounds), nodes=nodes), int(bounds[-1])


@given(placements())
def test_every_sample_has_a_position_in_line(drawn):
    placement, dataset_len = drawn
    found = ordering_of(placement, dataset_len)
    everything = np.arange(dataset_len)
    positions = found.positions(everything)
    assert sorted(positions) == list(range(dataset_len))
    assert (found.samples(positions) == everything).all()
    assert found.bounds[0] == 0
    assert found.bounds[-1] == dataset_len
    assert (np.diff(found.bounds) >= 0).all()


@given(placements(), st.data())
def test_a_node_keeps_the_head_of_its_part_or_all_of_it_and_some_before(drawn, data):
    placement, dataset_len = drawn
    slots = data.draw(st.integers(0, dataset_len - 1))
    found = ordering_of(placement, dataset_len)
    for node, (begin, end) in enumerate(zip(found.bounds[:-1], found.bounds[1:], strict=True)):
        own = residency(Placement(placement.order, placement.unit, node, placement.nodes), dataset_len, slots)
        in_line = own.resident(torch.from_numpy(found.samples(np.arange(dataset_len)))).tolist()
        part, kept = in_line[begin:end], sum(in_line)
        assert part == sorted(part, reverse=True)
        if not all(part):
            assert sum(part) == kept
        elif isinstance(placement.unit, int):  # one stretch around the line that ends where the part ends
            assert all(in_line[(end - 1 - back) % dataset_len] for back in range(kept))


def test_all_resident_means_slot_is_index_whatever_the_placement():
    assert residency(Placement("scattered", unit=7, node=1, nodes=2), 100, 100).identity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "random"}, "placement 'random' is unknown"),
        ({"unit": 0}, "unit=0"),
        ({"node": 2, "nodes": 2}, "node=2, nodes=2"),
        ({"nodes": 0}, "nodes=0"),
    ],
)
def test_placement_refuses_nonsense(arguments, message):
    with pytest.raises(LimitError, match=message):
        Placement(**arguments)


def test_scattered_refuses_what_64_bits_cannot_multiply():
    with pytest.raises(LimitError, match="exceeds 64-bit arithmetic"):
        residency(Placement("scattered"), 2**33, 10)
