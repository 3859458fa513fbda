"""How many samples a cache gets for its limit, on a machine that may not have as much, and which."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stocache import LimitError, Placement
from stocache.cache.allocate import CacheLayout
from stocache.cache.placement import BlockBounds, ordering_of, residency
from stocache.samples.spec import Structure
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory

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
    indices = np.arange(residency.dataset_len)
    return np.where(residency.resident(indices), residency.slots(indices), OUTSIDE).tolist()


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


def test_prefix_keeps_the_first_samples_and_scattered_gives_every_stretch_its_share():
    assert slots_of(residency(Placement(), 6, 4)) == [0, 1, 2, 3, OUTSIDE, OUTSIDE]
    n, stretch = 100_000, 1000
    for share in (0.1, 0.25, 0.9):
        chosen = residency(Placement("scattered"), n, int(share * n))
        resident = chosen.resident(np.arange(n)).reshape(-1, stretch).sum(1)
        assert (np.abs(resident - share * stretch) <= 5).all()


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
    in_line = own.resident(found.samples(everything)).tolist()
    part, kept = in_line[begin:end], sum(in_line)
    assert part == sorted(part, reverse=True)
    if not all(part):
        assert sum(part) == kept
    else:  # one stretch around the line that ends where the part ends
        assert all(in_line[(end - 1 - back) % dataset_len] for back in range(kept))


def slots_for(dataset_len, slot_bytes):
    return CacheLayout(dataset_len, dataset_len, {}, Structure.from_dims((slot_bytes,), torch.uint8))


@given(st.integers(1, 2**40), st.integers(1, 10**7), st.integers(1, 10**7))
def test_as_many_slots_fit_as_in_stocaching(limit, dataset_len, slot_bytes):
    """The formula of stocaching 0.2.1, in whole numbers."""
    expected = dataset_len if slot_bytes * dataset_len + dataset_len <= limit else (limit - dataset_len) // slot_bytes
    assert slots_for(dataset_len, slot_bytes).capacity_within(limit) == max(0, expected)


def test_a_limit_must_leave_room_for_one_slot_unless_it_is_zero(caplog):
    for slot_bytes, limit, slots in ((100, "110B", 1), (0, "10B", 10), (10, 0, 0), (10, "auto", 10)):
        assert slots_for(10, slot_bytes).affordable(limit, named=False) == slots
    with pytest.raises(LimitError, match="109B leaves 99 bytes after the 10-byte state array; one slot needs 100 bytes"):
        slots_for(10, 100).affordable("109B", named=False)
    assert not caplog.records


@pytest.mark.linux
def test_a_limit_above_the_machine_caches_what_fits_and_says_so(monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(limits, "memory", lambda: Memory(4 * GIB, 2 * GIB))
        slots = slots_for(10**6, 10**6).affordable(32, named=False)
        assert slots == (2 * GIB - 4 * GIB // 20 - 10**6) // 10**6
        assert f"the cache was given 32.0 GiB. Caching what fits: {slots} of 1000000 samples" in caplog.text
        assert "Lower size_limit_gib" in caplog.text
        patched.setattr(limits, "memory", lambda: Memory(GIB, 100))
        assert slots_for(10, GIB).affordable("auto", named=False) == 0
        assert "no room for one sample of 1.0 GiB" in caplog.text
    monkeypatch.setattr(limits, "has_memfd", lambda: False)
    monkeypatch.setattr(limits, "shm_free", lambda: 64 * MIB)
    assert slots_for(1000, MIB).affordable(1, named=False) == 47
    assert "/dev/shm has 64.0 MiB free, of which a quarter is left to the batches; the cache was given 1.0 GiB" in caplog.text
    assert "--shm-size=2g" in caplog.text
    monkeypatch.setattr(limits, "shm_free", lambda: 0)
    assert slots_for(1000, MIB).affordable(1, named=False) == 0
    assert "memfd_create is forbidden" in caplog.text
