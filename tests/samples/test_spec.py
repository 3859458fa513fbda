"""Structures of samples of one size: what they take apart, what they refuse, and how they are written."""

from collections import OrderedDict
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stocache import SampleError
from stocache.samples.spec import Structure
from tests.support.containers import Box, Point
from tests.support.equality import same
from tests.support.samples import nested

Key, Other = Enum("Key", {"A": "a"}, type=str), Enum("Other", {"A": "a"}, type=str)
fixed = [torch.zeros(2, 3), torch.tensor(7, dtype=torch.int16), torch.ones(0), np.arange(3.0), np.float32(0.5), None]
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.complex_numbers())
samples = st.recursive(
    st.one_of(numbers, st.sampled_from(fixed)),
    lambda inner: st.one_of(
        *(dicts := st.dictionaries(st.text(max_size=3), inner, max_size=3), dicts.map(OrderedDict)),
        *(st.lists(inner, max_size=3), st.tuples(inner, inner), st.builds(Point, inner, inner)),
        st.builds(Box, inner, st.integers(0, 9)),
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(samples)
def test_a_sample_comes_apart_and_together_again(sample):
    structure = Structure.of(sample)
    assert structure == Structure.of(sample)
    buffers = structure.encode(sample)
    assert [memoryview(buffer).nbytes for buffer in buffers] == [leaf.nbytes for leaf in structure.leaves]
    assert same(structure.unflatten(structure.columns(sample)), sample)
    structure = Structure.of({"a": 1, "b": 2.0})  # entries of dicts may come in a different order
    assert structure.encode({"b": 4.0, "a": 3}) == structure.encode({"a": 3, "b": 4.0})


@pytest.mark.parametrize(("example", "sample", "message"), [
    ({"a": 1}, {"b": 1}, r"sample: value has the entries \['b'\], the cache holds the entries \['a'\]"),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), r"has the entries \['b', 'a'\]"),
    ({Key.A: 1}, {"a": 1}, r"has the entries \['a'\]"), (Point(1, 2), (1, 2), "value is a tuple, the cache holds Point"),
    ({"a": [1, 2.0]}, {"a": [1, 2]}, r'sample\["a"\]\[1\] is 2, a int; the cache holds float\.'),
    ({"a": None}, {"a": 1}, r'sample\["a"\] is a int, the cache holds NoneType'),
    (1, True, "sample: value is True, a bool; the cache holds int"), (1, 2**63, "9223372036854775808, which exceeds 64 bits"),
    (np.zeros(3), np.zeros(4), r"value is numpy <f8\[4\], the cache holds numpy <f8\[3\]"),
])  # fmt: skip
def test_encode_names_the_place_and_the_difference(example, sample, message):
    with pytest.raises(SampleError, match=message):
        Structure.of(example).encode(sample)


@pytest.mark.parametrize(("sample", "message"), [
    ({"text": "hello"}, r'^sample\["text"\] is a str, which has no fixed size'),
    (torch.zeros(2).to_sparse(), "sparse_coo tensor"), (torch.zeros(2, device="meta"), "on meta"), (2**70, "exceeds 64 bits"),
    (np.array([object()]), "is a numpy array of Python objects, which has no fixed size"),
    # a part is named as its user would write it
    ({"a\n": ["x"]}, r'^sample\["a\\n"\]\[0\] is a str'), ({1: {(2, "b"): "x"}}, r"^sample\[1\]\[\(2, 'b'\)\] is a str"),
    (Point(1, {"ü": "x"}), r'^sample\.y\["ü"\] is a str'), (Box((1, "x"), 2), r"^sample\.corner\[1\] is a str"),
    (nested(80, "x"), r'^sample\["a"\].{90,120}….{100,120} is a str'),
])  # fmt: skip
def test_of_refuses_what_has_no_fixed_size(sample, message):
    with pytest.raises(SampleError, match=message):
        Structure.of(sample)


Meta = type("Meta", (torch.Tensor,), {"meta": property(lambda self: self._meta)})  # as MONAI's MetaTensor


@pytest.mark.parametrize(("meta", "other", "place"), [({"space": "RAS"}, 2, r'meta\["space"\]'), ({"space": 1}, "x", "_other")])
def test_attributes_of_tensors_are_named_by_their_public_names(meta, other, place):
    image = torch.zeros(2).as_subclass(Meta)
    image._meta, image._other = {"space": 1}, 2
    structure = Structure.of({"img": image})
    image._meta, image._other = meta, other
    with pytest.raises(SampleError, match=rf'^sample 3: sample\["img"\]\.{place} is \'\w+\', a str; the cache'):
        structure.encode({"img": image}, "sample 3")


@pytest.mark.parametrize(("dims", "dtype", "example"), [
    ([2], torch.int8, torch.zeros(2, dtype=torch.int8)), ((), torch.float64, torch.tensor(1.0).double()),
    ({"image": (2,), "label": ()}, {"label": torch.int64, "image": torch.uint8},
     {"image": torch.zeros(2, dtype=torch.uint8), "label": torch.tensor(1)}),
    (((2,), (3, 1)), torch.float32, (torch.zeros(2), torch.zeros(3, 1))),
])  # fmt: skip
def test_from_dims_builds_the_structure_of_tensors(dims, dtype, example):
    assert Structure.from_dims(dims, dtype) == Structure.of(example)


@pytest.mark.parametrize(("dims", "dtype", "message"), [
    ("abc", torch.uint8, "data_dims='abc' is not a shape"), ((3, -1), torch.uint8, r"\(3, -1\) has a negative size"),
    ((3,), "uint8", "dtype 'uint8' is not a torch dtype"), ((3,), torch.quint8, "torch.quint8 cannot be cached"),
    ({"a": (3,)}, {"b": torch.uint8}, "does not match data_dims"),
])  # fmt: skip
def test_from_dims_refuses_what_is_no_shape_or_dtype(dims, dtype, message):
    with pytest.raises(SampleError, match=message):
        Structure.from_dims(dims, dtype)


AB, BA = [("a", "<f4"), ("b", "<f4")], [("b", "<f4"), ("a", "<f4")]
ALIGNED = np.dtype([("a", "i1"), ("b", "<f8")], align=True)


@pytest.mark.parametrize(("one", "other"), [
    *((np.zeros(2, one), np.zeros(2, other)) for one, other in (
        (AB, BA), (AB, "V8"), (AB, [("a", "<f4"), ("b", ">f4")]), ([("a", "<f4", (2, 1))], [("a", "<f4", (1, 2))]),
        ("<M8[ns]", "<M8[us]"), ([("a", "i1"), ("b", "<f8")], ALIGNED), ("<U3", "<U4"),
    )),
    (np.zeros((), AB)[()], np.zeros((), BA)[()]), ({"a: int, 'b'": 1}, {"a": 1, "b": 1}),
    *(({one: 1}, {other: 1}) for one, other in ((1, True), (Key.A, "a"), (Key.A, Other.A), (("a", 1), ("a", True)))),
], ids=str)  # fmt: skip
def test_the_identity_of_a_structure_tells_what_differs(one, other):
    assert Structure.of(one).identity != Structure.of(other).identity
    assert Structure.of(one).identity == Structure.of(one).identity


@pytest.mark.parametrize(("sample", "text"), [
    ({"a": torch.zeros(2), 1: [np.zeros(3), (1.5, None)]},
     "dict('a': float32[2], 1: list(0: numpy <f8[3], 1: tuple(0: float, 1: NoneType())))"),
    (np.zeros(2, AB), "numpy [('a', '<f4'), ('b', '<f4')][2]"), (np.zeros(2, "<M8[ns]"), "numpy <M8[ns][2]"),
    (np.zeros(2, ALIGNED), f"numpy {ALIGNED}[2]"),
])  # fmt: skip
def test_structures_read_as_people_write_them(sample, text):
    assert Structure.of(sample).identity == str(Structure.of(sample)) == text
    point = Structure.of({"point": Point(np.zeros(2), 0.5)})
    assert str(point) == "dict('point': Point('x': numpy <f8[2], 'y': float))"
