"""Random sequences of calls against an independent oracle: a dict."""

import pickle
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stocache import Placement, SampleIndexError, SharedCache, SlotError

N = 12
indices = st.integers(-2, N + 1)


def refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


class CacheMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, N), order=st.sampled_from(["prefix", "scattered"]), unit=st.integers(1, 3))
    def make(self, slots, order, unit):
        self.cache = SharedCache(f"{N + slots * 8}B", N, (), torch.int64, placement=Placement(order, unit))
        self.resident = {idx for idx in range(N) if self.cache.aux_array[idx] != 2}
        self.values: dict[int, int] = {}
        self.missed: dict[int, int] = {}
        self.counts = {"hits": 0, "misses": 0, "fills": 0, "races": 0, "refused": 0}

    def is_outside(self, idx, allow_oob):
        return not 0 <= idx < N or (idx not in self.resident and not allow_oob)

    def miss(self, idx):
        self.counts["misses"] += 1
        if idx in self.resident:
            self.missed[idx] = self.missed.get(idx, 0) + 1

    @rule(idx=indices, allow_oob=st.booleans(), allow_empty=st.booleans(), copy=st.booleans())
    def get(self, idx, allow_oob, allow_empty, copy):
        call = partial(self.cache.get_slot, idx, allow_oob, allow_empty, copy=copy)
        if self.is_outside(idx, allow_oob):
            refused(call, SampleIndexError, "outside the")
        elif idx in self.values:
            assert call() == self.values[idx]
            self.counts["hits"] += 1
        elif idx in self.resident and not allow_empty:
            refused(call, SlotError, "the slot is empty")
        else:
            assert call() is None
            self.miss(idx)

    @rule(idx=indices, value=st.integers(0, 99), allow_oob=st.booleans(), overwrite=st.booleans())
    def set(self, idx, value, allow_oob, overwrite):
        call = partial(self.cache.set_slot, idx, torch.tensor(value), allow_oob, overwrite)
        if self.is_outside(idx, allow_oob):
            refused(call, SampleIndexError, "outside the")
        elif idx in self.values and not overwrite and not self.missed.get(idx):
            refused(call, SlotError, "the slot is set")
        else:
            call()
            self.note_set(idx, value, overwrite)

    def note_set(self, idx, value, overwrite):
        self.missed[idx] = max(0, self.missed.get(idx, 0) - 1)
        if idx in self.resident:
            is_new = idx not in self.values or overwrite
            self.counts["fills" if is_new else "races"] += 1
            self.values[idx] = value if is_new else self.values[idx]

    @rule(batch=st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, 99)), max_size=6))
    def set_many(self, batch):
        values = torch.tensor([value for _, value in batch], dtype=torch.int64)
        self.cache.set_slots([idx for idx, _ in batch], values, allow_overwrite=True)
        for idx, value in batch:
            self.note_set(idx, value, True)

    @rule(batch=st.lists(st.integers(0, N - 1), max_size=6))
    def get_many(self, batch):
        rows, mask = self.cache.get_slots(batch)
        assert rows.tolist() == [self.values.get(idx, 0) for idx in batch]
        assert mask.tolist() == [idx in self.values for idx in batch]
        self.counts["hits"] += sum(mask.tolist())
        for idx in batch:
            if idx not in self.values:
                self.miss(idx)

    @rule()
    def clear(self):
        self.cache.clear()
        self.values.clear()

    @rule()
    def go_on_with_a_copy(self):
        original, self.cache = self.cache, pickle.loads(pickle.dumps(self.cache))
        original.close()
        self.missed.clear()

    @invariant()
    def states_and_counts_agree(self):
        expected = [1 if idx in self.values else 0 if idx in self.resident else 2 for idx in range(N)]
        assert self.cache.aux_array.tolist() == expected
        stats = self.cache.stats()
        assert {name: getattr(stats, name) for name in self.counts} == self.counts

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=12, stateful_step_count=40, derandomize=True, deadline=None)
