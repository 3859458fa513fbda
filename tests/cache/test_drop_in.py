"""``import stocache as stocaching``: the same names, results and exceptions as stocaching 0.2.1.

`tests/test_readme.py` runs a program of stocaching with no more than the import changed: `docs/coming_from/stocaching.md`.
"""

import inspect
import itertools

import pytest
import torch

import stocache as stocaching
from stocache import SharedCache


def test_names_and_positions_of_arguments_are_those_of_stocaching():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.default) for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    empty = inspect.Parameter.empty
    sizes = [(name, empty) for name in ("size_limit_gib", "dataset_len", "data_dims")]
    assert names(SharedCache) == [*sizes, ("dtype", torch.uint8)]
    own, oob = [("self", empty), ("idx", empty)], ("allow_oob_idx", True)
    assert names(SharedCache.get_slot) == [*own, oob, ("allow_empty_slot", True)]
    assert names(SharedCache.set_slot) == [*own, ("value", empty), oob, ("allow_overwrite", False)]
    assert isinstance(stocaching.get_shm_size(), int)
    assert [(state.name, state.value) for state in stocaching.SlotState] == [("EMPTY", 0), ("SET", 1), ("OOB", 2)]


@pytest.mark.leaves_descriptors
def test_calls_end_as_in_stocaching():
    peer = pytest.importorskip("stocaching", reason="pip install --no-deps stocaching==0.2.1")
    caches = [module.SharedCache((4 + 3 * 8) / 2**30, 4, (), torch.int64) for module in (stocaching, peer)]  # 3 is outside
    calls = ("set_slot", "get_slot", "__setitem__", "__getitem__")
    for is_set, call, idx, *flags in itertools.product((True, False), calls, range(-1, 5), (True, False), (True, False)):
        ends = []
        for cache in caches:
            cache.clear()
            for known in range(3 * is_set):
                cache.set_slot(known, torch.tensor(7 + known))
            value = [torch.tensor(5)] if "set" in call else []
            try:
                ends.append(str(getattr(cache, call)(idx, *value, *(flags if call.endswith("slot") else []))))
            except Exception as error:
                ends.append(error)
        mine, peers = ends
        assert isinstance(mine, type(peers)) if isinstance(peers, Exception) else mine == peers, (call, is_set, idx, flags)
        assert torch.equal(caches[0].aux_array, caches[1].aux_array)
        assert torch.equal(caches[0].array, caches[1].array)
    caches[0].close()
