"""Random sequences of calls against an independent oracle: a dict."""

import pickle

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stocache import Placement, SharedCache
from stocache.cache.stats import SlotState

N = 12
indices = st.integers(0, N - 1)


class CacheMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, N), order=st.sampled_from(["prefix", "scattered"]), unit=st.integers(1, 3))
    def make(self, slots, order, unit):
        self.cache = SharedCache(f"{N + slots * 8}B", N, (), torch.int64, placement=Placement(order, unit))
        self.resident = {idx for idx in range(N) if self.cache.aux_array[idx] != SlotState.OOB}
        self.values: dict[int, int] = {}

    @rule(batch=st.lists(st.tuples(indices, st.integers(0, 99)), max_size=6))
    def set_many(self, batch):
        values = torch.tensor([value for _, value in batch], dtype=torch.int64)
        self.cache.set_slots([idx for idx, _ in batch], values, allow_overwrite=True)
        self.values |= {idx: value for idx, value in batch if idx in self.resident}

    @rule(idx=indices)
    def get(self, idx):
        found = self.cache.get_slot(idx)
        assert (None if found is None else found.item()) == self.values.get(idx)

    @rule(batch=st.lists(indices, max_size=6))
    def get_many(self, batch):
        rows, mask = self.cache.get_slots(batch)
        assert rows.tolist() == [self.values.get(idx, 0) for idx in batch]
        assert mask.tolist() == [idx in self.values for idx in batch]

    @rule()
    def clear(self):
        self.cache.clear()
        self.values.clear()

    @rule()
    def go_on_with_a_copy(self):
        original, self.cache = self.cache, pickle.loads(pickle.dumps(self.cache))
        original.close()

    @invariant()
    def what_is_set_is_what_was_given(self):
        states = dict.fromkeys(self.resident, SlotState.EMPTY) | dict.fromkeys(self.values, SlotState.SET)
        assert self.cache.aux_array.tolist() == [states.get(idx, SlotState.OOB) for idx in range(N)]
        assert self.cache.stats().filled == len(self.values)

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=12, stateful_step_count=40, derandomize=True, deadline=None)
