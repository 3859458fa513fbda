"""Batches without tensors: what comes is what torch's DataLoader would bring, however large it is and however it travels."""

import copyreg
import dataclasses
import gc
import threading
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import stocache
from benchmark.support.describe import describe, difference
from stocache.ring.ring import FULL, NOTHING
from tests.support.rings import free, states

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker", "ignore:.*no accelerator is found")

LARGE = 100_000  # bytes: such a batch lies in the ring

Pair = namedtuple("Pair", "name data")


@dataclasses.dataclass
class Record:
    name: str
    array: np.ndarray
    more: dict


class Slotted:
    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data


class Reduced:
    """Pickles by a reducer of its own, to a buffer if the protocol has them."""

    def __init__(self, data):
        self.data = bytes(data)

    def __reduce_ex__(self, protocol):
        return Reduced, (self.data,)


class Registered:
    def __init__(self, data):
        self.data = data


copyreg.pickle(Registered, lambda value: (Registered, (value.data,)))


class Sub(np.ndarray):
    """A subclass of arrays."""


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def frozen(array):
    array.flags.writeable = False
    return array


def noise(seed):
    return pixels(seed, LARGE).tobytes()


OBJECTS = {
    "bytes": noise,
    "str": lambda seed: f"é{seed}" * LARGE,
    "bytearray": lambda seed: bytearray(noise(seed)),
    "integers": lambda seed: list(range(seed, seed + LARGE)),
    "image": lambda seed: Image.fromarray(pixels(seed, 200, 200, 3)),
    "palette": lambda seed: Image.fromarray(pixels(seed, 400, 400)).convert("P"),
    "record": lambda seed: Record(f"{seed}", pixels(seed, 300, 400), {"crop": pixels(seed, 9, 9), "jpeg": noise(seed)}),
    "slotted": lambda seed: Slotted([noise(seed), pixels(seed, 50)]),
    "reduced": lambda seed: Reduced(noise(seed)),
    "registered": lambda seed: Registered({"data": noise(seed), "array": pixels(seed, 77)}),
    "mappings": lambda seed: defaultdict(list, {"a": OrderedDict(b=[noise(seed), {"c": (noise(seed + 1), f"{seed}")}]), 3: []}),
    "tuples": lambda seed: [Pair(f"{n}", noise(seed + n)) for n in range(3)],
}
ARRAYS = {
    "frozen": lambda seed: frozen(pixels(seed, 300, 400)),
    "fortran": lambda seed: np.asfortranarray(pixels(seed, 300, 400)),
    "frozen fortran": lambda seed: frozen(np.asfortranarray(pixels(seed, 300, 400))),
    "frozen rows": lambda seed: frozen(pixels(seed, 600, 400)[::2]),
    "transposed": lambda seed: pixels(seed, 20, 30, 200).transpose(2, 0, 1),
    "frozen, big-endian": lambda seed: frozen(pixels(seed, 300, 400).astype(">i4")),
    "frozen, empty": lambda seed: frozen(np.zeros((0, seed + 1))),
    "frozen objects": lambda seed: frozen(np.array([noise(seed), seed, None], object)),
    "fields": lambda seed: frozen(np.array([(seed, 0.5)] * 9_000, [("a", "i4"), ("b", "f8")])),
    "dates": lambda seed: np.full(30_000, "2024-02-29", "M8[D]") + seed,
    "frozen subclass": lambda seed: frozen(pixels(seed, 300, 400).view(Sub)),
    "masked": lambda seed: np.ma.masked_array(pixels(seed, 300), pixels(seed + 1, 300) > 99),
}


class Makes(Dataset):
    """A sample of each kind."""

    def __init__(self, makers, names):
        self.makers, self.names = makers, names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        return {"OBJECTS": OBJECTS, "ARRAYS": ARRAYS}[self.makers][self.names[idx]](idx)


def first(samples):
    """A collate function: the batch is its only sample."""
    return samples[0]


def both(dataset, **options):
    options = {"batch_size": 1, "collate_fn": first, "num_workers": 2} | options
    return stocache.DataLoader(dataset, **options), torch.utils.data.DataLoader(dataset, **options)


def test_objects_of_all_kinds_are_those_of_torch(start_method):
    ours, theirs = both(Makes("OBJECTS", list(OBJECTS)), num_workers=1, multiprocessing_context=start_method)
    came, expected = list(ours), list(theirs)
    for name, mine, others in zip(OBJECTS, came, expected, strict=True):
        assert difference(describe(mine), describe(others)) is None, name
    assert (ours.stats().ring, ours.stats().fallbacks) == (len(OBJECTS), {})


def flags(array):
    return {name: array.flags[name] for name in ("WRITEABLE", "C_CONTIGUOUS", "F_CONTIGUOUS", "ALIGNED")}


@pytest.mark.parametrize("inside", [first, list], ids=["arrays", "lists of arrays"])
def test_arrays_have_the_flags_order_and_dtype_that_torch_gives_them(inside):
    ours, theirs = both(Makes("ARRAYS", list(ARRAYS)), collate_fn=inside, multiprocessing_context="fork")
    for name, mine, others in zip(ARRAYS, ours, theirs, strict=True):
        assert difference(describe(mine), describe(others)) is None, name
        if inside is list:
            (mine,), (others,) = mine, others
        assert flags(mine) == flags(others), name


@pytest.mark.leaves_descriptors
def test_arrays_without_room_have_the_flags_that_torch_gives_them():
    """They are held until no buffer is free."""
    names = list(ARRAYS) * 4
    ours, theirs = both(Makes("ARRAYS", names), num_workers=1, multiprocessing_context="fork")
    came, expected = list(ours), list(theirs)
    assert ours.stats().fallbacks[FULL] > 0
    for name, mine, others in zip(names, came, expected, strict=True):
        assert difference(describe(mine), describe(others)) is None, name
        assert flags(mine) == flags(others), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be pinned")
def test_pin_memory_without_a_gpu_changes_nothing():
    names = ["bytes", "mappings", "record", "image"]
    ours, theirs = both(Makes("OBJECTS", names), pin_memory=True, multiprocessing_context="fork")
    assert difference(describe(list(ours)), describe(list(theirs))) is None


@pytest.mark.parametrize("kind", ["record", "bytes"])
def test_what_is_held_never_changes_while_later_batches_come(kind):
    """Arrays keep their buffers; when all are held, others go the way of torch. bytes are copies, and free theirs at once."""
    loader = stocache.DataLoader(
        Makes("OBJECTS", [kind] * 40), 1, num_workers=1, collate_fn=first, multiprocessing_context="fork"
    )
    held = [batch for _ in range(2) for batch in loader]
    for idx, batch in enumerate(held):
        assert difference(describe(batch), describe(OBJECTS[kind](idx % 40))) is None
    stats = loader.stats()
    assert stats.ring + stats.fallbacks.get(FULL, 0) == 80
    assert (FULL in stats.fallbacks) == (kind == "record")
    del held, batch
    assert free(loader.ring) == loader.ring.lanes * loader.ring.depth


def test_writing_to_an_array_in_an_object_reaches_no_other_batch():
    loader = stocache.DataLoader(
        Makes("OBJECTS", ["record"] * 12), 1, num_workers=1, collate_fn=first, multiprocessing_context="fork"
    )
    held = []
    for batch in loader:
        batch.array[:] = len(held)
        held.append(batch)
    assert [set(batch.array.flat) for batch in held] == [{number} for number in range(12)]


SMALL = {
    "strings": lambda idx: f"{idx}",
    "bytes": lambda idx: b"%d" % idx,
    "dictionaries": lambda idx: {"name": f"{idx}", "tags": ["a", str(idx)]},
    "tuples": lambda idx: (f"{idx}", b"x" * idx),
}


@pytest.mark.parametrize("collate_fn", [None, list], ids=["default_collate", "list"])
@pytest.mark.parametrize("name", SMALL)
def test_small_batches_are_those_of_torch_and_take_no_buffer(name, collate_fn):
    samples = [SMALL[name](idx) for idx in range(20)]
    options = {"batch_size": 6, "collate_fn": collate_fn, "shuffle": True, "multiprocessing_context": "fork"}
    ours, theirs = both(samples, **options, persistent_workers=True)
    for seed in range(2):
        torch.manual_seed(seed)
        came = list(ours)
        torch.manual_seed(seed)
        assert came == list(theirs)
    assert (ours.stats().ring, ours.stats().fallbacks, ours.stats().ring_bytes) == (0, {NOTHING: 8}, 0)


# ---------------------------------------------------------------------------------------------------- errors


class Unbuilt:
    """It pickles, and does not unpickle."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise ValueError("it cannot be rebuilt")


class Odd(Dataset):
    """Sample 1 does not pickle, or does not unpickle."""

    def __init__(self, odd, nbytes):
        self.odd, self.nbytes = odd, nbytes

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        return {"data": bytes(self.nbytes), "array": pixels(idx, 10), "idx": idx, "odd": self.odd() if idx == 1 else None}


ODD = [(10, "fork"), (LARGE, "fork"), (LARGE, "spawn"), (LARGE, "forkserver")]


@pytest.mark.parametrize(("nbytes", "method"), ODD)
def test_what_does_not_unpickle_raises_the_error_that_torch_raises_and_frees_its_buffer(nbytes, method):
    ours, theirs = both(Odd(Unbuilt, nbytes), num_workers=1, multiprocessing_context=method)
    for loader in (ours, theirs):
        batches = iter(loader)
        assert next(batches)["idx"] == 0
        with pytest.raises(ValueError, match=r"^it cannot be rebuilt$"):
            next(batches)
        del batches
    held = 2
    gc.collect()
    ours.ring.reap()
    assert held not in states(ours.ring)


@pytest.mark.parametrize(("nbytes", "method"), ODD)
def test_what_does_not_pickle_is_an_error_of_its_worker_and_the_loader_goes_on(nbytes, method):
    """torch's loader prints it in the worker, and waits for ever."""
    loader, _ = both(Odd(threading.Lock, nbytes), num_workers=1, multiprocessing_context=method)
    batches = iter(loader)
    assert next(batches)["idx"] == 0
    with pytest.raises(
        TypeError, match=r"(?s)^Caught TypeError in DataLoader worker process 0\..*cannot pickle '_thread.lock'"
    ):
        next(batches)
    assert [batch["idx"] for batch in batches] == [2, 3]
