"""Batches as pickles with their bytes elsewhere: what pickles comes back, and tensors come back as torch would send them."""

import gc
import pickle
import threading
import weakref
from collections import namedtuple
from ctypes import memmove

import numpy as np
import pytest
import torch

from stocache.ring.pickling import Packer, pack, unpack
from tests.support.equality import identical, same

Pair = namedtuple("Pair", "image label")

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


class Memory:
    """Memory to place things in, as large as asked for."""

    def __init__(self, nbytes=1 << 16):
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

    def holds(self, tensor):
        return 0 <= tensor.data_ptr() - self.array.ctypes.data < len(self.array)


@pytest.fixture
def memory():
    return Memory()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(memory, dtype):
    value = torch.arange(24).view(2, 3, 4).to(dtype)
    came = memory.there_and_back(value)
    assert identical(came, value)
    assert memory.holds(came)
    assert len(memory.payload) < 200


@pytest.mark.leaves_descriptors
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 1:], lambda x: x[::2], lambda x: x[0, 0],
        lambda x: x.expand(3, *x.shape), lambda x: x[..., :1], lambda x: x.contiguous(memory_format=torch.contiguous_format),
    ],
)  # fmt: skip
def test_views_keep_their_values_and_strides(memory, view):
    value = view(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    came = memory.there_and_back([value])[0]
    assert torch.equal(came, value)
    assert came.stride() == value.stride()


def test_channels_last_stays_so(memory):
    value = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    came = memory.there_and_back(value)
    assert torch.equal(came, value)
    assert came.is_contiguous(memory_format=torch.channels_last)
    assert memory.holds(came)


def test_what_shares_memory_still_does(memory):
    value = torch.zeros(4, 5)
    came = memory.there_and_back({"a": value, "b": value, "rows": value[1:], "t": value.t()})
    assert came["a"] is came["b"]
    came["a"][1, 0] = 7
    assert came["rows"][0, 0] == 7
    assert came["t"][0, 1] == 7
    whole, part = memory.there_and_back((value, value[:1]))
    part[0, 0] = 5
    assert whole[0, 0] == 5


def test_parts_of_a_large_storage_do_not_take_it_along(memory):
    rows = list(torch.arange(40_000).view(100, 400))
    came = memory.there_and_back(rows[:3])
    assert same(came, rows[:3])
    assert memory.used <= 3 * 3200 + 3 * 64


def test_any_containers_and_objects(memory):
    batch = Pair(torch.ones(3), {"names": ["a", "b"], "n": 3, "none": None, "nested": (torch.zeros(2), [np.arange(4)])})
    assert same(memory.there_and_back(batch), batch)
    assert len(memory.places) == 3


def test_numpy_arrays_lie_in_the_memory_each_its_own_and_writable_as_pickled_ones(memory):
    frozen = np.arange(5.0)
    frozen.flags.writeable = False
    came = memory.there_and_back([np.arange(12).reshape(3, 4), frozen, np.array([], np.int8), np.array(["a", None], object)])
    assert [array.tolist() for array in came] == [np.arange(12).reshape(3, 4).tolist(), [0, 1, 2, 3, 4], [], ["a", None]]
    assert all(array.flags.writeable for array in came)
    assert np.shares_memory(came[0], memory.array)
    one, other = memory.there_and_back([frozen, frozen.reshape(5, 1)])
    one[0] = 9
    assert other[0] == 0
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert memory.there_and_back(fortran).strides == fortran.strides


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(0, 3),
        torch.zeros(3).requires_grad_(),
        torch.nn.Parameter(torch.zeros(2)),
        torch.eye(3).to_sparse(),
        torch.randn(2, generator=torch.Generator().manual_seed(0)).to(torch.complex64).conj().resolve_conj(),
    ],
    ids=["empty", "gradient", "parameter", "sparse", "conjugate"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.leaves_descriptors
def test_what_is_more_than_bytes_goes_the_way_of_torch(memory, value):
    came = memory.there_and_back(value)
    assert type(came) is type(value)
    assert came.requires_grad == value.requires_grad
    assert torch.equal(came.detach().to_dense(), value.detach().to_dense())


@pytest.mark.leaves_descriptors
def test_without_room_tensors_go_the_way_of_torch_and_arrays_stay_in_the_pickle():
    memory = Memory(64)
    batch = [torch.arange(100), np.arange(100), torch.arange(8)]
    came = memory.there_and_back(batch)
    assert same(came, batch)
    assert [memory.holds(came[0]), memory.holds(came[2])] == [False, True]


def test_what_does_not_pickle_is_an_error(memory):
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        memory.there_and_back([torch.zeros(3), lambda: None])


def test_what_came_keeps_the_memory_and_nothing_else_does():
    memory = Memory()
    (payload,), places = pack([torch.arange(5), np.arange(5)], memory.place)
    owner = memory.array.copy()
    gone = weakref.ref(owner)
    tensor, array = unpack(payload, owner.data, places)
    del owner
    part = tensor[2:].numpy()
    del tensor
    assert part.tolist() == [2, 3, 4]
    del part
    assert gone() is not None
    del array
    assert gone() is None


def test_a_packer_that_failed_packs_the_next_batch_and_keeps_nothing_of_either(memory):
    packer = Packer()
    for _ in range(2):
        kept = np.arange(3)
        gone = weakref.ref(kept)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
            packer.pack([kept, b"x" * 100_000, threading.Lock()], memory.place)
        pieces, places = packer.pack(["a", kept, kept], memory.place)
        del kept
        gc.collect()
        assert gone() is None
        came = unpack(b"".join(pieces), memory.array.data, places)
        assert same(came, ["a", np.arange(3), np.arange(3)])
