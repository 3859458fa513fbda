"""Samples of any kind come back from a record and from a block unchanged, or are refused."""

import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import struct
import types
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stocache import RaggedCache, SampleError, SharedCache
from stocache.samples.leaves.kind import BYTES, Kind
from stocache.samples.leaves.kinds import ENCODERS, KINDS
from stocache.samples.record_encoder import EncodedSample, RecordEncoder, write_treedef
from tests.support import samples as some
from tests.support.containers import Box, Point
from tests.support.equality import everywhere, identical, same
from tests.support.makers import codec as installed
from tests.support.storages import file_of, opened


def in_records(values, check=some.alike, **options):
    """Demand that samples pass a check when they are read from a cache, as copies and as views."""
    with RaggedCache("8MB", len(values), **options) as cache:
        for idx, value in enumerate(values):
            cache.set_slot(idx, value)
        for idx, value in enumerate(values):
            for copy in (True, False):
                assert check(cache.get_slot(idx, copy=copy), value)


def in_block(values, check=some.alike, allow_pickle=False):
    """Demand that samples pass a check when they are read from a block, one by one and all together."""
    block = opened(file_of(values, allow_pickle), allow_pickle)
    assert block.samples == len(values)
    assert all(check(block.sample(row), value) for row, value in enumerate(values))
    assert all(map(check, block.all(), values))


way = pytest.mark.parametrize("way", [in_records, in_block])
PLACE = r"^(sample {0}|set_slot\({0}\)): "
exactly = functools.partial(everywhere, identical)


@settings(max_examples=25)
@given(st.lists(some.samples, min_size=1, max_size=5), some.samples)
def test_any_samples_come_back_equal(values, one):
    for samples in (values, [one] * 3):
        in_records(samples, exactly)
        in_block(samples, exactly)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@settings(max_examples=25)
@given(sample=some.samples)
def test_every_sample_comes_back_equal_compressed(codec, sample):
    padded = (sample, "much that is easy to compress " * 20)
    with RaggedCache("4MB", 1, codec=installed(codec)) as cache:
        cache.set_slot(0, padded)
        assert cache.stats().slot_bytes < 600 + 64 * len(repr(sample))
        assert exactly(cache.get_slot(0), padded)


NIGHT = datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))


FLOATS, IMAGE = torch.arange(6.0), torch.zeros(3, 4, dtype=torch.uint8)
GRID = FLOATS.view(2, 3)
UNUSUAL = [  # samples that are written one after the other
    [collections.OrderedDict(b=1, a=2), {"a": 1, "b": 2}, {"b": 1, "a": 2}, collections.OrderedDict(image=GRID, label=1)],
    [{1: "int"}, {True: "bool"}, {1.0: "float"}, {None: 0}, {(1, ("a",)): 0}, {b"x": 1}, {1 + 2j: 2}, {float("inf"): 6}],
    [2**63 - 1, 2**63, -(2**63), -(2**200), range(10**30, 0, -3)], [[1, 2**63], [1, 2], [1, 2.0], [1, True], [True], [1j]],
    [["a", "b"], ["c"], []], [[[]], [[], []], [[1]], []], [[f"token {n}" for n in range(1000)]], [(), {}, [{}, {}]],
    [("a", 1) * 20, ["a", None], [None, None, "a"], ["a", 1, None], [None, "a", 1, 1]], [{str(key): key for key in range(20)}],
    [NIGHT, decimal.Decimal("sNaN123"), decimal.Decimal(10) ** 5000, fractions.Fraction(7**9000, 3)],
    [{some.Kind.BOX: 1, some.Space.RAS: {some.Level.LOW: some.Colour(3)}}, {"box": 3, "ras": 4}],
    [{(some.Space.RAS, (True,)): 5}, {("ras", (1,)): 5}],
    [np.array([(1, 2.0)], dtype="<i2,<f8"), np.str_(""), "hello", "", np.bytes_(b""), b"x", b"", np.array([""]), np.array(5)],
    [np.float32(3), np.int64(3), np.str_("a"), np.void(b"ab"), np.bool_(True), np.complex64(1j)],
    [torch.zeros(2, 0, 3), torch.zeros(2, 4, 3)], [torch.max(torch.eye(2), 0)], [torch.arange(3).as_subclass(some.Annotated)],
    [torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 + 2j], dtype=torch.complex128).conj(), torch.tensor(3)],
    [{"a": IMAGE, "b": 1}, {"a": IMAGE, "b": True}, {"a": IMAGE.half(), "other": 1}, {"b": 1, "a": IMAGE}],
    [(FLOATS, 1), (FLOATS, 1.0), (FLOATS, 2**70), (FLOATS, 2**63), (FLOATS, 1j), (FLOATS, False), (FLOATS.int(), 1), (FLOATS,)],
    [(GRID, 1), (GRID.T, 1), (GRID[:, ::2], 1), (torch.zeros(3, 0), 1)], [(FLOATS, "a"), (FLOATS, 1), (FLOATS, "b")],
    [[{"bbox": [1.0, 2.0], "polygons": [[1, 2.5], [2.5]]}, {"bbox": [3.0], "polygons": [[1, 2]]}], [{"a": 1}, {"b": 1}]],
    [some.Extra(torch.ones(2), {"a": 1}), some.Extra(2, "b")], [some.boxes(), some.boxes(some.Annotated)],
    [Box(1, 2), Point(1, 2), None, some.Slotted("x")],
]  # fmt: skip


@way
@pytest.mark.parametrize("values", [*UNUSUAL, lambda: [some.picture("L"), some.picture("L", 4), some.picture("RGB")]])
def test_unusual_samples_come_back_equal(way, values):
    way(values() if callable(values) else values)


def generic(sample, allow_pickle=False):
    """Return how a sample is encoded that is the first of its structure."""
    record = EncodedSample(sample, "sample", allow_pickle)
    return write_treedef(record.treedef), *record.pack()


def encoded(encoder, sample):
    text, leaves = encoder.encode(sample, "sample")
    return text, *leaves.pack()


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, "x"), lambda x: {"a": {"b": x}}, lambda x: [x, 1.5]])
def test_samples_are_encoded_alike_whatever_structures_came_before(wrap, allow_pickle):
    encoder, samples = RecordEncoder(allow_pickle), [wrap(value) for values in UNUSUAL for value in values]
    for sample in [*samples, *samples, *reversed(samples)]:
        assert encoded(encoder, sample) == generic(sample, allow_pickle)


def test_what_is_refused_is_refused_after_a_good_sample():
    encoder = RecordEncoder(allow_pickle=False)
    for good, bad, message in (
        ((FLOATS, 1), (torch.zeros(6, requires_grad=True), 1), "requires a gradient, the cache returns plain CPU tensors"),
        ((np.zeros(2), 1), (np.array([object()]), 1), r"sample\[0\] is a ndarray, which has no bytes of its own"),
    ):
        assert encoded(encoder, good) == generic(good)
        with pytest.raises(SampleError, match=message):
            encoder.encode(bad, "sample 5")


@way
def test_strides_come_back(way):
    images = [torch.arange(3 * 4 * n, dtype=torch.uint8).view(4, n, 3).permute(2, 0, 1) for n in (5, 5, 6)]
    volume = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    pairs = [(image, np.asfortranarray(image.numpy())) for image in images]
    for values in (images[:2], images, pairs, [*images, torch.zeros(2, 2)], [{"v": volume, "view": images[0][:, ::2]}]):
        way(values, exactly)
    aligned = np.array([(1, 2.0)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True))
    way([aligned], lambda got, array: got.dtype == array.dtype and got == array)
    way([images[0]], lambda got, image: got.stride() == image.stride())
    way([volume], lambda got, _: got.is_contiguous(memory_format=torch.channels_last))
    way([images[0][:, ::2]], lambda got, _: got.is_contiguous())


def test_memmaps_come_back_in_memory_and_of_their_type(tmp_path):
    np.save(tmp_path / "data.npy", np.arange(6))
    data = np.load(tmp_path / "data.npy", mmap_mode="r")[2:4]
    for cache in (RaggedCache("1MB", 1), SharedCache.like(data, "1MB", 1)):
        with cache:
            cache.set_slot(0, data)
            got = cache.get_slot(0)
            assert type(got) is np.memmap is type(data)
            assert same(np.asarray(got), np.arange(2, 4))
            del got


@way
@pytest.mark.parametrize(("value", "check"), some.PICKLED, ids=lambda value: type(value).__name__)
def test_whatever_pickles_is_taken_if_allowed(way, value, check):
    values = [{"first": torch.ones(n), "list": ["a"] * n + [value, 1], "last": value} for n in range(3)] + [[], 1]

    def equal(got, wanted):
        if not wanted or wanted == 1:
            return got == wanted
        assert torch.equal(got["first"], wanted["first"])
        *before, pickled, one = got["list"]
        return (before, one) == (wanted["list"][:-2], 1) and check(pickled, value) and check(got["last"], value)

    with pytest.raises(SampleError, match=PLACE.format(0) + r'sample\["(list"\]\[0|last")\].*pass allow_pickle=True\.'):
        way(values)
    way(values, equal, allow_pickle=True)


@way
@pytest.mark.parametrize(("sample", "message"), [
    ({"a": object()}, r'sample\["a"\] is a object, which has no bytes of its own\. Turn .*, or pass allow_pickle=True\.'),
    (np.array([(None,)], dtype=[("a", "O")]), r"value is a ndarray, which has no bytes of its own"),
    *((value, "no bytes of its own.*, or pass allow_pickle=True") for value in (some.Note("a"), {1}, slice(1), some.Tagged())),
    (np.ma.array([1], mask=[1]), r"is a MaskedArray, the cache returns ndarrays\. Convert it first, or pass allow_pickle"),
    (collections.Counter("ab"), "a Counter, which has no bytes of its own. Turn it into .*, in dicts, lists, tuples or data"),
    (torch.zeros(2, requires_grad=True), "value is on cpu and requires a gradient, the cache returns plain CPU tensors"),
    ({"x": torch.nn.Parameter(torch.zeros(2))}, r'sample\["x"\] is a Parameter, the cache returns Tensors'),
    (dataclasses.make_dataclass("Local", ["x"])(1), "processes do not find as .*:Local. Define it at .*, or pass allow_pickle"),
    ({frozenset(): 1}, r"value has a key, frozenset\(\), that is not a str, number, enum member or tuple of such"),
    (some.nested(100), r"is a container within 60 others, which is the limit\. Use fewer levels, or pass allow_pickle=True\."),
])  # fmt: skip
def test_what_would_not_come_back_the_same_is_refused(way, sample, message):
    with pytest.raises(SampleError, match=PLACE.format(1) + f".*{message}"):
        way([0, sample])


Celsius = type("Celsius", (types.SimpleNamespace,), {"__init__": lambda self, degrees: vars(self).update(degrees=degrees)})


class CelsiusKind(Kind):
    name, types, dims, itemsize, stored_as = "Celsius", (Celsius,), 0, 8, (torch.uint8, (8,))

    @classmethod
    def encode(cls, value):
        return (cls.name,), BYTES, struct.pack("<d", value.degrees), ()

    def maker(self):
        return lambda buffer, at, count, shape, copy=False: Celsius(*struct.unpack_from("<d", buffer, at))


@way
def test_a_new_kind_is_one_class(way, monkeypatch):
    sample = {"inside": [Celsius(21.5), Celsius(-3.0)], "outside": Celsius(0.5), "label": "a"}
    with pytest.raises(SampleError, match=r'sample\["inside"\]\[0\] is a Celsius, which has no bytes of its own'):
        way([sample])
    monkeypatch.setitem(KINDS, CelsiusKind.name, CelsiusKind)
    monkeypatch.setitem(ENCODERS, Celsius, CelsiusKind.encode)
    way([sample], same)
