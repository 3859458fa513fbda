import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Placement
from stocache.placement import Residency

OUTSIDE = -1


@st.composite
def residencies(draw):
    order = draw(st.sampled_from(["prefix", "scattered"]))
    nodes = draw(st.integers(1, 4))
    placement = Placement(order, draw(st.integers(1, 9)), draw(st.integers(0, nodes - 1)), nodes)
    dataset_len = draw(st.integers(0, 300))
    return Residency(placement, dataset_len, draw(st.integers(0, dataset_len)))


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
    residency = Residency(Placement(order), dataset_len, slots)
    assert sorted(slot for slot in slots_of(residency, dataset_len) if slot != OUTSIDE) == list(range(slots))


def test_prefix_keeps_the_first_samples_in_their_own_slots():
    assert slots_of(Residency(Placement(), 6, 4), 6) == [0, 1, 2, 3, OUTSIDE, OUTSIDE]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_scattered_gives_every_stretch_its_share(share):
    n, stretch = 100_000, 1000
    residency = Residency(Placement("scattered"), n, int(share * n))
    resident = residency.resident(torch.arange(n)).view(-1, stretch).sum(dim=1)
    assert resident.min() >= share * stretch - 5
    assert resident.max() <= share * stretch + 5


@pytest.mark.parametrize("order", ["prefix", "scattered"])
def test_blocks_are_resident_as_a_whole(order):
    residency = Residency(Placement(order, unit=64), 1000, 500)
    resident = residency.resident(torch.arange(1000)).tolist()
    blocks = [resident[start : start + 64] for start in range(0, 1000, 64)]
    assert all(all(block) or not any(block) for block in blocks)
    assert sum(map(all, blocks)) == 500 // 64


@pytest.mark.parametrize("order", ["prefix", "scattered"])
@pytest.mark.parametrize(("nodes", "slots"), [(4, 25), (3, 50), (2, 40)])
def test_nodes_add_up(order, nodes, slots):
    windows = [Residency(Placement(order, node=node, nodes=nodes), 100, slots) for node in range(nodes)]
    held = torch.stack([window.resident(torch.arange(100)) for window in windows])
    assert (held.sum(dim=1) == slots).all()
    assert held.any(dim=0).sum() == min(100, nodes * slots)


def test_all_resident_means_slot_is_index_whatever_the_placement():
    assert Residency(Placement("scattered", unit=7, node=1, nodes=2), 100, 100).identity


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
        Residency(Placement("scattered"), 2**33, 10)
