"""Batches as pickles with their bytes elsewhere: what pickles comes back, and all is as torch's own pickler would send it."""

import dataclasses
import gc
import pickle
import threading
import weakref
from ctypes import memmove
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from stocache.shm.ring.pickling import RingPickler, pack, unpack
from stocache.system.describe import describe, difference
from tests.support.equality import identical, same
from tests.support.samples import DTYPES


class Memory:
    """Memory to place things in, as large as asked for."""

    def __init__(self, nbytes=1 << 18):
        self.array, self.used = np.zeros(nbytes, np.uint8), 0

    def place(self, address, nbytes):
        at = -(-self.used // 64) * 64
        if at + nbytes > len(self.array):
            return None
        memmove(self.array.ctypes.data + at, address, nbytes)
        self.used = at + nbytes
        return at

    def there_and_back(self, batch):
        pieces, self.places = pack(batch, self.place)
        self.payload = b"".join(pieces)
        return unpack(self.payload, self.array.data, self.places)


@pytest.fixture
def memory():
    return Memory()


def test_tensors_of_every_dtype(memory):
    for dtype in DTYPES:
        value = torch.arange(24).view(2, 3, 4).to(dtype)
        came = memory.there_and_back(value)
        assert identical(came, value)
        assert 0 <= came.data_ptr() - memory.array.ctypes.data < len(memory.array)
        assert len(memory.payload) < 200


@pytest.mark.leaves_descriptors
def test_views_keep_their_values_and_strides(memory):
    whole = torch.randn(6, 8)
    for value in (whole.t(), whole[1:], whole[:, 1:], whole[::2], whole[0, 0], whole.expand(3, 6, 8), whole[..., :1]):
        (came,) = memory.there_and_back([value])
        assert torch.equal(came, value)
        assert came.stride() == value.stride()


def test_what_shares_memory_still_does_and_parts_of_a_large_storage_do_not_take_it_along(memory):
    value = torch.zeros(4, 5)
    came = memory.there_and_back({"a": value, "b": value, "rows": value[1:], "t": value.t()})
    assert came["a"] is came["b"]
    came["a"][1, 0] = 7
    assert came["rows"][0, 0] == came["t"][0, 1] == 7
    whole, part = memory.there_and_back((value, value[:1]))
    part[0, 0] = 5
    assert whole[0, 0] == 5
    before, rows = memory.used, list(torch.arange(40_000).view(100, 400))
    assert same(memory.there_and_back(rows[:3]), rows[:3])
    assert memory.used - before <= 3 * 3200 + 4 * 64


@dataclasses.dataclass
class Record:
    name: str
    array: np.ndarray
    more: dict


class Sub(np.ndarray):
    """A subclass of arrays."""


def pixels(*shape):
    return np.random.randint(0, 256, shape, np.uint8)


def frozen(array):
    array.flags.writeable = False
    return array


VALUES = {
    "record": lambda: Record("a", pixels(30, 40), {"crop": pixels(9, 9), "jpeg": b"x" * 1000}),
    "frozen": lambda: frozen(pixels(30, 40)), "frozen fortran": lambda: frozen(np.asfortranarray(pixels(30, 40))),
    "frozen rows": lambda: frozen(pixels(60, 40)[::2]), "transposed": lambda: pixels(20, 30, 20).transpose(2, 0, 1),
    "objects": lambda: frozen(np.array([b"abc", 3, None], object)), "subclass": lambda: frozen(pixels(30, 40).view(Sub)),
}  # fmt: skip


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("nbytes", [1 << 18, 8], ids=["placed", "no room"])
def test_values_of_any_kind_are_those_that_torchs_pickler_sends(name, nbytes):
    value = VALUES[name]()
    came, expected = Memory(nbytes).there_and_back(value), ForkingPickler.loads(ForkingPickler.dumps(value))
    assert difference(describe(came), describe(expected)) is None
    if isinstance(value, np.ndarray):
        for name in ("WRITEABLE", "C_CONTIGUOUS", "F_CONTIGUOUS", "ALIGNED"):
            assert came.flags[name] == expected.flags[name]


def test_arrays_lie_in_the_memory_each_its_own(memory):
    array = frozen(np.arange(5.0))
    one, other = memory.there_and_back([array, array.reshape(5, 1)])
    assert np.shares_memory(one, memory.array)
    one[0] = 9
    assert other[0] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.leaves_descriptors
def test_what_is_more_than_bytes_goes_the_way_of_torch(memory):
    gradient, parameter = torch.zeros(3).requires_grad_(), torch.nn.Parameter(torch.zeros(2))
    for value in (torch.empty(0, 3), gradient, parameter, torch.eye(3).to_sparse()):
        came = memory.there_and_back(value)
        assert (type(came), came.requires_grad) == (type(value), value.requires_grad)
        assert torch.equal(came.detach().to_dense(), value.detach().to_dense())
        assert memory.used == 0


def test_a_packer_that_failed_packs_the_next_batch_and_keeps_nothing_of_either(memory):
    packer, batch = RingPickler(), np.arange(3)
    gone = weakref.ref(batch)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        packer.pack([batch, b"x" * 100_000, threading.Lock()], memory.place)
    pieces, places = packer.pack(["a", batch, batch], memory.place)
    del batch
    gc.collect()
    assert gone() is None
    assert same(unpack(b"".join(pieces), memory.array.data, places), ["a", np.arange(3), np.arange(3)])
