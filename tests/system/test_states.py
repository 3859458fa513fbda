"""States of random generators, and the one form of all states: what they accept and what they refuse."""

import random

import numpy as np
import pytest
import torch

from stocache.errors import StateError
from stocache.system import generators
from stocache.system.state import STATE_TYPES, StateForm
from tests.support.edits import changed, through_json

FORM = StateForm("Thing", 3, {"batches": (int,), "epoch": (int, type(None))}, {"own": STATE_TYPES}, optional=("fingerprint",))


@pytest.mark.parametrize("kept", [False, True])
def test_a_state_that_is_restored_or_saved_as_json_has_the_second_number_of_a_pair_or_none(kept):
    def numbers():  # an odd number of normal ones: each generator remembers the second of a pair
        of_torch = torch.rand(1).item(), torch.rand(1, generator=own).item()
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), *of_torch]

    own = torch.Generator()
    generators.seed_all([1] * 3)
    if kept:
        numbers()
    state, saved, of_own = generators.read(), through_json(generators.states([own])), own.get_state()
    expected = [numbers() for _ in range(3)]
    for _ in range(2):  # one is remembered, or none
        numbers()
        generators.restore_all(state)
        own.set_state(of_own)
        assert [numbers() for _ in range(3)] == expected
        numbers()
        generators.set_rng_state(generators.checked(saved), [own])
        assert [numbers() for _ in range(3)] == expected


DRAWS = {
    "one number": lambda own: random.random(), "a bit": lambda own: random.getrandbits(1),
    "a pair": lambda own: random.gauss(0, 1),
    "all numbers of a twister": lambda own: [random.getrandbits(32) for _ in range(624)], "a seed": lambda own: random.seed(3),
    "its own": lambda own: own.random(), "the other one of a pair": lambda own: own.gauss(0, 1),
    "numpy": lambda own: np.random.rand(), "torch": lambda own: torch.rand(1),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_each_draw_is_noticed(draw):
    own = random.Random(1)
    own.gauss(0, 1)
    kept = generators.Kept([own])
    assert not kept.drawn()
    DRAWS[draw](own)
    assert kept.drawn()


DAMAGED, NOT_ONE = "damaged", "not a state of a Thing"
OTHERS = [  # places of a state, what is there, and what is said of it
    (("identity", "samples"), 8, "samples 8; this one has 7"), (("identity",), {}, DAMAGED), (("identity",), 3, DAMAGED),
    (("position", "batches"), -1, "batches=-1"), (("position", "batches"), True, "batches=True"), (("parts",), None, DAMAGED),
    (("parts", "own"), object(), "own=<object"), (("what",), "Other", NOT_ONE), (("position", "more"), 1, DAMAGED),
    (("version",), 2, "reads states of version 3, and this state has version 2"),
]  # fmt: skip


def test_a_state_is_read_as_it_was_made_and_others_are_refused():
    own, position, parts = {"samples": 7, "fingerprint": "a"}, {"batches": 2, "epoch": None}, {"own": [1, "a"]}
    state = through_json(FORM.make(own, position, parts))
    for fingerprint in ("a", None):  # unknown
        assert FORM.read(state, own | {"fingerprint": fingerprint}) == (position, parts)
    for path, value, message in OTHERS:
        with pytest.raises(StateError, match=message):
            FORM.read(changed(state, path, value), own)
    for other in (None, [], 3, "state", b"state", {}):
        with pytest.raises(StateError, match=NOT_ONE):
            FORM.read(other, {})
