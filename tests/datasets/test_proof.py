"""Ranks whose datasets differ in a value do not share a cache, however deep it is; what samples do not depend on may differ."""

import argparse
import dataclasses
import functools
import logging
import random
import threading
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from stocache.datasets.probing import Probe
from stocache.datasets.proof import proof_of

target = 10


class Masks:
    """A dataset of equal samples."""

    def __init__(self, value=None):
        self.value = value


@dataclasses.dataclass
class Config:
    target: object
    folder: str = "masks"


def in_class(value):
    return type("OfClass", (Masks,), {"target": value, "__module__": __name__})()


def asking(value):
    return lambda idx: torch.distributed.get_rank() + value * 0


def reading(value):
    return types.FunctionType((lambda idx: target + idx).__code__, {"target": value})


def in_array(value, length=100_000):
    return np.where(np.arange(length) == 777, value, 0)


DIFFER = {
    "a number": lambda n: n, "a namespace": lambda n: types.SimpleNamespace(config=argparse.Namespace(model=Config(n))),
    "a closure": lambda n: lambda idx: idx == n, "a default": lambda n: lambda idx, target=n: idx == target,
    "a partial": lambda n: functools.partial(max, n), "a method": lambda n: Config(n).__eq__,
    "a path": lambda n: Path("masks") / str(n), "a key": lambda n: {("long", n): 1},
    "a long dict": lambda n: {idx: [n * (idx == 500)] for idx in range(1000)}, "a set": lambda n: {"a", n},
    "a list": lambda n: [(str(idx), n * (idx == 4321)) for idx in range(10_000)], "an array": in_array,
    "an array of objects": lambda n: np.array([[1], [n, n]], dtype=object),
    "a transposed tensor": lambda n: torch.from_numpy(in_array(n)).view(10, -1).t(),
    "a module": lambda n: torch.nn.Sequential(torch.nn.Dropout(n / 100)), "a class": in_class, "a global variable": reading,
}  # fmt: skip
CANNOT_BE_COMPARED = {
    "a handle": lambda n: (number for number in range(n)), "the number of the rank": asking,
    "too many": lambda n: [[Config(n) for _ in range(200)] for _ in range(50)],
}  # fmt: skip
SAME = {
    "generators": lambda n: [np.random.default_rng(n), random.Random(n), torch.Generator().manual_seed(n)],
    "locks": lambda n: [threading.Lock(), threading.Event(), logging.getLogger(str(n)), torch.device("cuda", n)],
    "an address": lambda n: f"<object at {hex(id(n))}>",
}  # fmt: skip


def proof(value):
    dataset = Masks(value)
    return proof_of(dataset, Probe(samples={0: torch.zeros(3)}), None)


def in_other_process(value):
    """Return the identity that a rank in another process has."""
    with mock.patch("os.getpid", return_value=1):
        return proof(value).identity


@pytest.mark.parametrize("what", DIFFER | CANNOT_BE_COMPARED | SAME)
def test_a_value_that_differs_is_found_and_named(what):
    make = (DIFFER | CANNOT_BE_COMPARED | SAME)[what]
    difference, same = (proof(make(n)).other_value(in_other_process(make(10))) for n in (11, 10))
    if what in DIFFER:
        assert difference.startswith("target" if what == "a global variable" else "dataset.value")
        assert not any(text in difference for text in ("cannot be compared", "#"))
    assert bool(difference) == (what not in SAME)
    assert "cannot be compared" in same if what in CANNOT_BE_COMPARED else not same


def test_both_values_are_named():
    held = in_other_process({"model": Config(10)})
    assert proof({"model": Config(11)}).other_value(held) == "dataset.value['model'].target: 11 here, 10 there"
    assert proof({"model": Config([11])}).other_value(held) == "dataset.value['model'].target differs"


def test_a_header_holds_the_texts_of_any_values():
    many = {f"名前{idx}": "名" * 20 for idx in range(60)}
    sizes = [len(str(value)) for value in proof(many).identity.values()]
    assert max(sizes) <= 400
    assert proof(many).other_value(proof(many | {"名前59": 1}).identity)
