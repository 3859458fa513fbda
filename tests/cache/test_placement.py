import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Placement
from stocache.cache.placement import BlockBounds, ordering_of, residency

pytestmark = pytest.mark.quick

OUTSIDE = -1


@st.composite
def placements(draw):
    """Return a placement, and the number of its samples."""
    order, nodes = draw(st.sampled_from(["prefix", "scattered"])), draw(st.integers(1, 5))
    node = draw(st.integers(0, nodes - 1))
    if draw(st.booleans()):
        return Placement(order, draw(st.integers(1, 9)), node, nodes), draw(st.integers(1, 300))
    bounds = np.cumsum([0, *draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))])
    return Placement(order, BlockBounds(bounds), node, nodes), int(bounds[-1])


def slots_of(residency):
    indices = torch.arange(residency.dataset_len)
    return torch.where(residency.resident(indices), residency.slots(indices), OUTSIDE).tolist()


@given(placements(), st.data())
def test_resident_samples_have_slots_of_their_own_and_come_in_whole_blocks(drawn, data):
    placement, dataset_len = drawn
    count = data.draw(st.integers(0, dataset_len))
    chosen, unit = residency(placement, dataset_len, count), placement.unit
    slots = slots_of(chosen)
    resident = [slot for slot in slots if slot != OUTSIDE]
    assert len(set(resident)) == len(resident)
    assert all(0 <= slot < dataset_len for slot in resident)
    for idx, slot in enumerate(slots):
        if slot != OUTSIDE:
            assert chosen.slot(idx) == slot
            assert not chosen.identity or slot == idx
    if count == dataset_len:
        assert chosen.identity
    bounds = unit.bounds if isinstance(unit, BlockBounds) else np.arange(0, dataset_len, unit)
    for block in np.split(np.array(slots) != OUTSIDE, bounds[1:]):
        assert block.all() or not block.any()
    if unit == 1:
        assert sorted(resident) == list(range(count))


def test_prefix_keeps_the_first_samples_in_their_own_slots():
    assert slots_of(residency(Placement(), 6, 4)) == [0, 1, 2, 3, OUTSIDE, OUTSIDE]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_scattered_gives_every_stretch_its_share(share):
    n, stretch = 100_000, 1000
    chosen = residency(Placement("scattered"), n, int(share * n))
    resident = chosen.resident(torch.arange(n)).view(-1, stretch).sum(dim=1)
    assert resident.min() >= share * stretch - 5
    assert resident.max() <= share * stretch + 5


@pytest.mark.parametrize("order", ["prefix", "scattered"])
@pytest.mark.parametrize(("nodes", "slots"), [(4, 25), (3, 50), (2, 40)])
def test_nodes_add_up(order, nodes, slots):
    windows = [residency(Placement(order, node=node, nodes=nodes), 100, slots) for node in range(nodes)]
    held = torch.stack([window.resident(torch.arange(100)) for window in windows])
    assert (held.sum(dim=1) == slots).all()
    assert held.any(dim=0).sum() == min(100, nodes * slots)


@given(placements(), st.data())
def test_a_node_keeps_the_head_of_its_part_or_all_of_it_and_some_before(drawn, data):
    placement, dataset_len = drawn
    found, everything = ordering_of(placement, dataset_len), np.arange(dataset_len)
    positions = found.positions(everything)
    assert sorted(positions) == list(range(dataset_len))
    assert (found.samples(positions) == everything).all()
    assert found.bounds[0] == 0
    assert found.bounds[-1] == dataset_len
    assert (np.diff(found.bounds) >= 0).all()
    begin, end = found.bounds[placement.node : placement.node + 2]
    own = residency(placement, dataset_len, data.draw(st.integers(0, dataset_len - 1)))
    in_line = own.resident(torch.from_numpy(found.samples(everything))).tolist()
    part, kept = in_line[begin:end], sum(in_line)
    assert part == sorted(part, reverse=True)
    if not all(part):
        assert sum(part) == kept
    elif isinstance(placement.unit, int):  # one stretch around the line that ends where the part ends
        assert all(in_line[(end - 1 - back) % dataset_len] for back in range(kept))


def test_placement_refuses_nonsense():
    for arguments, message in (
        ({"order": "random"}, "placement 'random' is unknown"),
        ({"unit": 0}, "unit=0"),
        ({"node": 2, "nodes": 2}, "node=2, nodes=2"),
        ({"nodes": 0}, "nodes=0"),
    ):
        with pytest.raises(LimitError, match=message):
            Placement(**arguments)
    with pytest.raises(LimitError, match="exceeds 64-bit arithmetic"):
        residency(Placement("scattered"), 2**33, 10)
