"""Samples of any kind come back from a record as they were; the round trip is checked in a RaggedCache."""

import ast
import collections
import dataclasses
import enum
import string
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from tensordict import TensorDict

from stocache import RaggedCache, SampleError, SegmentError
from stocache.readers import reader_of
from stocache.records import Record, parse_skeleton, write_skeleton
from tests.test_structure import Box, Point, same

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.frombuffer(bytearray(draw(st.binary(min_size=count + 1, max_size=count + 1))), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        data = data % 2
    value = data.clone().view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return value.transpose(0, -1) if value.dim() > 1 and draw(st.booleans()) else value


arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.byte_string_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.array_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)
numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.complex_numbers())
texts = st.text(st.characters(), max_size=9)  # with lone surrogates
leaves = st.one_of(
    tensors(), arrays, numbers, texts, st.binary(max_size=9), st.none(),
    st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats()).map(tuple), st.lists(st.booleans()), st.lists(texts),
    st.sampled_from([np.float32(0.5), np.int64(-3), np.datetime64("2026-11-21"), np.str_("å"), np.bool_(True)]),
)  # fmt: skip
keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)), st.none(), st.booleans())
samples = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Box, inner, st.integers(0, 9)),
    ),
    max_leaves=10,
)


def round_trip(sample, **options):
    with RaggedCache("1MB", 1, **options) as cache:
        cache.set_slot(0, sample)
        got, viewed = cache.get_slot(0), cache.get_slot(0, copy=False)
        assert same(viewed, sample)
        return got


def identical(a, b):
    """`same`, and NaNs and dict order bit for bit."""
    if isinstance(a, torch.Tensor) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    return same(a, b)


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@given(samples)
def test_every_sample_comes_back_equal(sample):
    with RaggedCache("4MB", 1) as cache:
        cache.set_slot(0, sample)
        for copy in (True, False):
            assert everywhere(identical, cache.get_slot(0, copy=copy), sample)


def everywhere(check, a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(everywhere(check, a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(everywhere(check, *pair) for pair in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return everywhere(check, vars(a), vars(b))
    return check(a, b)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@given(samples)
def test_every_sample_comes_back_equal_compressed(codec, sample):
    padded = (sample, "much that is easy to compress " * 20)
    with RaggedCache("4MB", 1, codec=codec) as cache:
        cache.set_slot(0, padded)
        assert cache.stats().slot_bytes < 600 + 64 * len(repr(sample))
        assert everywhere(identical, cache.get_slot(0), padded)


@given(samples)
def test_its_own_bytes_are_all_a_sample_costs_but_for_64(sample):
    """And what a kind of sample costs once, and one or two bytes for each length and shape."""
    record = Record(sample)
    data, integers = record.pack()
    with RaggedCache("4MB", 2) as cache:
        cache.set_slot(0, sample)
        once = cache._arena.used
        cache.set_slot(1, sample)
        own = cache._arena.used - once + 9
        assert own - len(data) <= 9 + 16 + 7 + 8 * len(integers)
        assert max(integers, default=0) > 65535 or own - len(data) <= 32 + 2 * len(integers)


class Kind(enum.Enum):
    BOX = "box"


class Odd:
    """Not of any kind that has bytes of its own."""

    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


class Annotated(torch.Tensor):
    """As torchvision's BoundingBoxes: a tensor with attributes."""


class Extra(NamedTuple):
    image: object
    info: object


@dataclasses.dataclass
class Slotted:
    __slots__ = ("image",)
    image: object


class Bag(collections.UserDict):
    pass


def annotated():
    boxes = torch.arange(8.0).view(2, 4).as_subclass(Annotated)
    boxes.canvas_size = (3, 5)
    return boxes


def same_annotated(a, b):
    return type(a) is type(b) is Annotated and torch.equal(a, b) and vars(a) == vars(b)


def same_images(a, b):
    return type(a) is type(b) and a.mode == b.mode and a.info == b.info and a.tobytes() == b.tobytes()


def image(mode):
    picture = Image.frombytes(mode, (5, 3), bytes(range(5 * 3 * len(mode))))
    picture.info["dpi"] = (72, 72)
    return picture


def tensordict():
    return TensorDict({"a": torch.arange(6).view(2, 3), "b": {"c": torch.ones(2)}}, batch_size=[2])


def same_tensordicts(a, b):
    return type(a) is type(b) and a.batch_size == b.batch_size and bool((a == b).all())


@pytest.mark.parametrize(
    ("sample", "check"),
    [
        (annotated(), same_annotated),
        (torch.arange(3).as_subclass(Annotated), same_annotated),
        (Extra(torch.ones(2), {"a": 1}), same),
        (Slotted("x"), lambda a, b: type(a) is type(b) and a.image == b.image),
        (Bag(a=1, b="x"), lambda a, b: type(a) is type(b) and a == b),
        (collections.Counter("abba"), lambda a, b: type(a) is type(b) and a == b),
        (torch.Size([2, 3]), lambda a, b: type(a) is type(b) and a == b),
        (torch.max(torch.eye(2), 0), lambda a, b: type(a) is type(b) and torch.equal(a.indices, b.indices)),
        (image("RGB"), same_images),
        (image("L"), same_images),
        (tensordict(), same_tensordicts),
        (np.array([(1, 2.0)], dtype=[("a", "<i2"), ("b", "<f8")]), same),
        (
            np.array([(1, 2.0)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
            lambda a, b: a.dtype == b.dtype and a == b,
        ),
        (torch.tensor([1 + 2j]).conj(), lambda a, b: torch.equal(a, b)),
    ],
)
def test_containers_of_libraries_come_back_as_they_were(sample, check):
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, sample)
        assert check(cache.get_slot(0), sample)


def test_a_memmap_comes_back_as_an_array(tmp_path):
    np.save(tmp_path / "data.npy", np.arange(6))
    data = np.load(tmp_path / "data.npy", mmap_mode="r")
    assert same(round_trip([np.asarray(data[2:4])]), [np.arange(2, 4)])
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, data[2:4])
        assert same(cache.get_slot(0), np.arange(2, 4))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"a": object()},
            r'set_slot\(0\): sample\["a"\] is a object, which has no bytes of its own\. Turn .*, or pass allow_pickle=True\.$',
        ),
        ([Odd()], r"set_slot\(0\): sample\[0\] is a Odd, which has no bytes of its own"),
        (np.array([None]), r"set_slot\(0\): value is a ndarray, which has no bytes of its own"),
        (np.ma.array([1, 2], mask=[0, 1]), "value is a MaskedArray, the cache gives ndarrays back"),
        (torch.zeros(2, requires_grad=True), "value is on cpu and requires a gradient, the cache gives plain CPU tensors back"),
        (torch.zeros(2, device="meta"), "value is on meta"),
        (torch.zeros(2).to_sparse(), "sparse_coo tensor"),
        (types.MappingProxyType({"a": 1}), "other processes do not find as builtins:mappingproxy"),
        (
            dataclasses.make_dataclass("Local", ["x"])(1),
            "other processes do not find as .*:Local. Define it at .*, or pass allow",
        ),
        (torch.nn.Parameter(torch.zeros(2)), "value is a Parameter"),
        ({frozenset(): 1}, r"value has a key, frozenset\(\), that is not a str, number, enum member or tuple of such"),
        ({"x": {np.str_("a"): 1}}, r'sample\["x"\] has a key, np.str_\(\'a\'\), that is not a str'),
        (collections.defaultdict(lambda: 0, a=1), "a defaultdict, which has no bytes of its own"),
    ],
)
def test_what_would_not_come_back_the_same_is_refused(sample, message):
    with RaggedCache("1MB", 1) as cache:
        with pytest.raises(SampleError, match=message):
            cache.set_slot(0, sample)
        assert cache.aux_array.tolist() == [0]


def test_other_objects_are_pickled_only_if_allowed():
    sample = {"odd": Odd(), "objects": np.array([None, "x"]), "more": [Odd()]}
    got = round_trip_allowed(sample)
    assert got["odd"] == Odd() == got["more"][0]
    assert got["objects"].tolist() == [None, "x"]
    with RaggedCache("1MB", 1, allow_pickle=True) as cache:
        with pytest.raises(SampleError, match=r"set_slot\(0\): sample\[0\] is a function, which cannot be pickled: "):
            cache.set_slot(0, [lambda: None])


def round_trip_allowed(sample):
    with RaggedCache("1MB", 1, allow_pickle=True) as cache:
        cache.set_slot(0, sample)
        return cache.get_slot(0)


def test_nothing_is_unpickled_unless_allowed():
    text = write_skeleton(Record([object()], allow_pickle=True).skeleton)
    with pytest.raises(SegmentError, match="was pickled, which needs allow_pickle=True"):
        reader_of(text, allow_pickle=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read here"),
        (b"__import__('os')", "cannot be read here"),
        (b"('tensor', 'no_such_dtype', 1)", "no_such_dtype"),
        (b"('what',)", "what"),
        (b"('in', 'namedtuple', 'tests.test_records:Extra', ('image', 'label'), (), (('str',), ('str',)))", "it has "),
        (b"('in', 'dataclass', 'tests.test_records:Gone', (), (), ())", "Gone"),
        (b"('in', 'list', 'no_such_module:List', (), (), ())", "No module named 'no_such_module'"),
    ],
)
def test_a_skeleton_that_cannot_be_read_says_why(text, message):
    with pytest.raises(SegmentError, match=message):
        reader_of(text, allow_pickle=False)


def test_samples_that_differ_in_sizes_only_have_one_skeleton():
    def coco(count):
        return {
            "image": torch.zeros(3, 5 + count, 7, dtype=torch.uint8),
            "objects": [{"bbox": [1.0, 2.5, 3.0, 4.0], "polygons": [[1, 2.5] * (i + 1)], "id": i} for i in range(count + 1)],
            "caption": string.ascii_letters[:count],
            "tokens": list(range(count + 1)),
        }

    assert len({Record(coco(count)).skeleton for count in range(9)}) == 1
    skeleton = Record(coco(3)).skeleton
    assert ast.literal_eval(write_skeleton(skeleton).decode()) == skeleton


def test_damage_is_an_error_and_no_crash():
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, torch.zeros(4, 4))
        at = cache._arena.offsets[0]
        cache._memory[at + 16 + 64 : at + 16 + 66] = b"\xff\xff"  # the shape
        with pytest.raises(SegmentError, match="a sample reaches beyond its record"):
            cache.get_slot(0)


def test_what_is_parsed_within_the_parsing_of_a_skeleton_does_no_harm(monkeypatch):
    """As python/cpython#106905 has it: a finalizer that formats a traceback meanwhile makes ast raise SystemError."""
    parse, calls = ast.literal_eval, []

    def disturbed(text):
        calls.append(text)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=198, after=218)")
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", disturbed)
    assert parse_skeleton("('a', 1)") == ("a", 1)
    assert len(calls) == 2
