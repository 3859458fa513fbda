"""RecordStore: a batch is written as its samples would be one by one, in few calls."""

from itertools import chain, repeat

import numpy as np
import pytest
import torch

from stocache import RaggedCache
from stocache.cache.stats import FILLS, REFUSED
from stocache.shm import extents
from stocache.system import limits
from stocache.system.limits import GIB, Memory
from tests.support import makers
from tests.support.equality import same

N = 60
MIXED = [
    torch.arange(5000), {"image": torch.ones(3, 4, 5), "label": 3},
    *("text", b"", [], None, 2**70, [np.arange(9), np.zeros((2, 0))]), {"image": torch.ones(3, 2, 2), "label": 4},
    *(np.full(100_000, 7, np.uint8), "more text", ["much that is easy to compress "] * 40),
]  # fmt: skip
write_one_by_one = lambda cache, *batch: [cache._store.write_many([i], [e])[0] for i, e in zip(*batch, strict=True)]
write_together = lambda cache, *batch: cache._store.write_many(*batch)


def outcome(cache, write, values, epochs=1, cost_s=lambda idx: None):
    """Write the samples of a few epochs, and return all that may depend on how they are written."""
    store, indices = cache._store, list(range(len(values)))
    encoded = [store.encode(value, "sample")._replace(cost_s=cost_s(idx)) for idx, value in enumerate(values)]
    counters = [write(cache, indices, encoded) for _ in range(epochs)]
    with cache._segment.guard:
        number = store.arena.run_locked(lambda: store.arena.number_of(encoded[-1].treedef), None)
    control, used = bytes(cache._segment.control), store.arena.used
    return counters, number, control, bytes(cache._segment.view(0, used)), cache._segment.extents.reserved_bytes


def compare(make, values, **options):
    outcomes = []
    for write in (write_one_by_one, write_together):
        with make() as cache:
            outcomes.append(outcome(cache, write, values, **options))
    assert outcomes[0] == outcomes[1]
    return outcomes[0][0]


@pytest.mark.parametrize("name", [None, "zstd", "lz4"])
def test_a_batch_is_written_as_its_samples_are(name):
    codec = name and makers.codec(name)
    assert compare(lambda: RaggedCache("1MB", N, codec=codec), MIXED) == [[FILLS] * len(MIXED)]
    with RaggedCache("1MB", N, codec=codec) as cache:
        assert write_together(cache, [], []) == []
        outcome(cache, write_together, MIXED)
        assert all(same(cache._store.load(idx, True), value) for idx, value in enumerate(MIXED))


def test_what_has_no_room_in_a_batch_is_outside_and_smaller_samples_behind_it_fit():
    values = [bytes(4000), bytes(8000), bytes(100), "a treedef that is new"]
    assert compare(lambda: RaggedCache("7000B", N), values) == [[FILLS, None, FILLS, FILLS]]
    compare(lambda: RaggedCache("5000B", N), [bytes(4300), ("a treedef", {"without": "room"}), bytes(10)])


def test_what_is_refused_memory_in_a_batch_is_counted_and_smaller_samples_behind_it_fit(monkeypatch):
    def make():
        monkeypatch.setattr(limits, "memory", memory)
        cache, answers = RaggedCache("40MB", N), chain([Memory(100 * GIB, 100 * GIB)], repeat(Memory(GIB, 0)))
        monkeypatch.setattr(limits, "memory", lambda: next(answers))  # memory for one extent
        return cache

    memory = limits.memory
    monkeypatch.setattr(extents, "_LOOKED_AT_EVERY", 0)
    assert compare(make, [bytes(1000), bytes(5_000_000), bytes(1000)]) == [[FILLS, REFUSED, FILLS]]


def test_each_sample_of_a_batch_is_admitted_by_its_own_cost():
    values, cost_s = [bytes(900 + idx) for idx in range(N)], lambda idx: 1.0 if idx % 5 else 1e-3
    counters = compare(lambda: RaggedCache("30KB", N, admission="cost"), values, epochs=3, cost_s=cost_s)
    assert {None, FILLS} == {counter for epoch in counters for counter in epoch}
    assert counters[0][:31] == [None] * 31
