"""Samples of any kind come back from a record as they were; the round trip is checked in a RaggedCache."""

import ast
import collections
import dataclasses
import datetime
import decimal
import fractions
import pathlib
import resource
import string
import sys
import types
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import given
from PIL import Image

from benchmark.fuzz import compress, read_record
from stocache import RaggedCache, SampleError, SegmentError, SharedCache
from stocache.samples.record_decoder import RecordReader
from stocache.samples.record_encoder import Record, pack_integers, parse_treedef, write_treedef
from tests.support.equality import everywhere, identical, same
from tests.support.faults import misplace, record
from tests.support.samples import (
    PICKLED,
    Access,
    Annotated,
    BoxFormat,
    Colour,
    Extra,
    Kind,
    Level,
    Odd,
    Slotted,
    Space,
    annotated,
    made,
    made_by_name,
    same_annotated,
    same_factories,
    same_metatensors,
    same_repr,
    same_tensordicts,
    samples,
    tensordict,
    tv_boxes,
)


def round_trip(sample, **options):
    with RaggedCache("1MB", 1, **options) as cache:
        cache.set_slot(0, sample)
        got, viewed = cache.get_slot(0), cache.get_slot(0, copy=False)
        assert same(viewed, sample)
        return got


@given(samples)
def test_every_sample_comes_back_equal(sample):
    with RaggedCache("4MB", 1) as cache:
        cache.set_slot(0, sample)
        for copy in (True, False):
            assert everywhere(identical, cache.get_slot(0, copy=copy), sample)


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
        once = cache.stats().filled_bytes
        cache.set_slot(1, sample)
        own = cache.stats().filled_bytes - once + 9
        assert own - len(data) <= 9 + 16 + 7 + 8 * len(integers)
        assert max(integers, default=0) > 65535 or own - len(data) <= 32 + 2 * len(integers)


class Bag(collections.UserDict):
    pass


class OddZone(datetime.tzinfo):
    def utcoffset(self, when):
        return datetime.timedelta(0)

    def __eq__(self, other):
        return type(other) is OddZone

    __hash__ = None


def same_images(a, b):
    return type(a) is type(b) and a.mode == b.mode and a.info == b.info and a.tobytes() == b.tobytes()


def image(mode):
    picture = Image.frombytes(mode, (5, 3), bytes(range(5 * 3 * len(mode))))
    picture.info["dpi"] = (72, 72)
    return picture


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
        *((factory, same_factories) for factory in (made(None), made(int), made(collections.OrderedDict))),
        (tv_boxes(), lambda a, b: same_annotated(a, b) and a.format is BoxFormat.XYXY),
        (decimal.Decimal("sNaN123"), lambda a, b: repr(a) == repr(b)),
        (datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), same_repr),
        ({Kind.BOX: 1, (Space.RAS, 1): 2, "ras": 3, True: 4, 1.5: 5, float("inf"): 6}, same_repr),
        ([{1: "int"}, {True: "bool"}, {1.0: "float"}], same_repr),
        ({Space.RAS: {Space.LPS: Colour.RED | Colour.BLUE, Level.LOW: Access(11)}}, same_repr),
        (collections.deque([1, "a"], maxlen=3), same_repr),
        (slice(None, np.int64(3), "x"), same_repr),
        ({frozenset({(1, "a")}), None, (Kind.BOX,)}, lambda a, b: type(a) is type(b) and a == b),
        (range(10**30, 0, -3), same_repr),
        (decimal.Decimal(10) ** 5000, lambda a, b: a == b),
        (fractions.Fraction(7**9000, 3), lambda a, b: a == b),
    ],
)
def test_containers_of_libraries_come_back_as_they_were(sample, check):
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, sample)
        assert check(cache.get_slot(0), sample)


@pytest.mark.parametrize("ready", [True, False])
def test_members_and_values_that_vary_have_one_treedef(ready):
    wrap = (lambda value: value) if ready else (lambda value: {"x": [value], Space.RAS: 1})
    for kind in ([*Kind, Kind.MASK], [Access(n) for n in range(9)], [pathlib.Path("a"), pathlib.Path("b/c")]):
        assert len({write_treedef(Record(wrap(value)).treedef) for value in kind}) == 1


class Day(datetime.date):
    """May hold more than a date."""


class Days(set):
    pass


@pytest.mark.parametrize("value", [Day(2026, 1, 1), Days([1]), datetime.datetime(2026, 1, 1, tzinfo=OddZone())], ids=str)
def test_subclasses_are_not_silently_changed(value):
    with RaggedCache("1MB", 1) as cache, pytest.raises(SampleError, match=r"value is a .*, which has no bytes of its own"):
        cache.set_slot(0, value)
    assert same(round_trip_allowed(value), value)


def test_metatensors_of_monai_come_back_as_they_were(tmp_path):
    transforms = pytest.importorskip("monai.transforms")
    np.save(tmp_path / "volume.npy", np.arange(60, dtype=np.float32).reshape(5, 4, 3))
    load = transforms.Compose([transforms.LoadImaged("img"), transforms.EnsureChannelFirstd("img", channel_dim="no_channel")])
    sample = load({"img": tmp_path / "volume.npy"})
    for options in ({}, {"allow_pickle": True}):
        with RaggedCache("1MB", 1, **options) as cache:
            cache.set_slot(0, sample)
            same_metatensors(cache.get_slot(0)["img"], sample["img"])


def test_strides_come_back():
    image = torch.from_numpy(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).permute(2, 0, 1)
    volume = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sample = (image, volume, 1), {"array": np.asfortranarray(np.arange(6).reshape(2, 3)), "view": image[:, ::2]}
    for part in (image, (image, 1), sample):
        with RaggedCache("1MB", 1) as cache:
            cache.set_slot(0, part)
            for copy in (True, False):
                got = cache.get_slot(0, copy=copy)
                assert everywhere(identical, got, part)
    assert got[0][0].stride() == image.stride()
    assert got[0][1].is_contiguous(memory_format=torch.channels_last)
    assert got[1]["array"].flags.f_contiguous
    assert got[1]["view"].is_contiguous()


def test_a_memmap_comes_back_in_memory_and_of_its_type(tmp_path):
    np.save(tmp_path / "data.npy", np.arange(6))
    data = np.load(tmp_path / "data.npy", mmap_mode="r")
    for cache in (RaggedCache("1MB", 1), SharedCache.like(data[2:4], "1MB", 1)):
        with cache:
            cache.set_slot(0, data[2:4])
            got = cache.get_slot(0)
            assert type(got) is np.memmap is type(data[2:4])
            assert same(np.asarray(got), np.arange(2, 4))
            del got


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
        ({"x": {np.str_("a"): 1}}, r'sample\["x"\] has a key, .*a.*, that is not a str'),
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


@pytest.mark.parametrize(("value", "check"), PICKLED, ids=lambda value: type(value).__name__)
def test_whatever_pickles_is_taken_if_allowed(value, check):
    sample = {"first": torch.ones(2), "list": ["a", value, 1], "last": value}
    with RaggedCache("1MB", 1) as cache, pytest.raises(SampleError, match=r'sample\["list"\]\[1\].*pass allow_pickle=True\.$'):
        cache.set_slot(0, sample)
    got = round_trip_allowed(sample)
    assert check(got["list"][1], value)
    assert check(got["last"], value)
    assert (got["list"][::2], list(got)) == (["a", 1], list(sample))
    assert torch.equal(got["first"], sample["first"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_quantized_tensors_are_pickled_if_allowed():
    value = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)
    with (
        RaggedCache("1MB", 1) as cache,
        pytest.raises(SampleError, match=r"value is a quantized tensor.*pass allow_pickle=True"),
    ):
        cache.set_slot(0, value)
    assert torch.equal(round_trip_allowed(value).dequantize(), value.dequantize())


@pytest.mark.parametrize(
    "value", [torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta"), torch.nn.Parameter(torch.ones(2))]
)
def test_what_the_transform_has_to_do_is_not_pickled_either(value):
    with RaggedCache("1MB", 1, allow_pickle=True) as cache:
        with pytest.raises(
            SampleError, match=r'sample\["x"\]\[1\] is (on|a Parameter).*cache gives.*back\. (Leave|Convert)[^=]*$'
        ):
            cache.set_slot(0, {"x": [1, value]})


def test_nothing_is_unpickled_unless_allowed():
    text = write_treedef(Record([object()], allow_pickle=True).treedef)
    with pytest.raises(SegmentError, match="To run what the pickles say, pass allow_pickle=True"):
        RecordReader(text, allow_pickle=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read here"),
        (b"__import__('os')", "cannot be read here"),
        (b"('tensor', 'no_such_dtype', 1)", "no_such_dtype"),
        (b"('what',)", "what"),
        (b"('enum', 'no_such_module:Kind')", "Import no_such_module first"),
        (b"('tensor', 'uint8', 2, (0, 0))", "is not an order of dimensions"),
        (b"('tensor', 'uint8', 2, (1, 0, 2))", "is not an order of dimensions"),
        (b"('array', '|u1', 1, (1,))", "is not an order of dimensions"),
        (
            b"('in', 'dict', 'builtins:dict', (('enum', 'os:system', 'A'),), (), (('str',),), 'coded')",
            "which is not an enum",
        ),
        (b"('in', 'dict', 'builtins:dict', (('enum', 'enum:Enum', 'A'),), (), (('str',),), 'coded')", "has no member 'A'"),
        (b"('in', 'dict', 'builtins:dict', ('plain',), (), (('str',),), 'coded')", "cannot be read here"),
        (b"('in', 'defaultdict', 'collections:defaultdict', (), (), ())", "cannot be read here"),
        (b"('in', 'defaultdict', 'collections:defaultdict', (), ('os:gone',), ())", "have the default_factory os:gone"),
        (b"('in', 'namedtuple', 'tests.support.samples:Extra', ('image', 'label'), (), (('str',), ('str',)))", "it has "),
        (b"('in', 'dataclass', 'tests.support.samples:Gone', (), (), ())", "Gone"),
        (b"('in', 'list', 'no_such_module:List', (), (), ())", "Import no_such_module first"),
    ],
)
def test_a_treedef_that_cannot_be_read_says_why(text, message):
    with pytest.raises(SegmentError, match=message):
        RecordReader(text, allow_pickle=False)


def test_samples_that_differ_in_sizes_only_have_one_treedef():
    def coco(count):
        return {
            "image": torch.zeros(3, 5 + count, 7, dtype=torch.uint8),
            "objects": [{"bbox": [1.0, 2.5, 3.0, 4.0], "polygons": [[1, 2.5] * (i + 1)], "id": i} for i in range(count + 1)],
            "caption": string.ascii_letters[:count],
            "tokens": list(range(count + 1)),
        }

    assert len({Record(coco(count)).treedef for count in range(9)}) == 1
    treedef = Record(coco(3)).treedef
    assert ast.literal_eval(write_treedef(treedef).decode()) == treedef


def test_damage_is_an_error_and_no_crash():
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, torch.zeros(4, 4))
        record(cache, 0)[16 + 64 : 16 + 66] = b"\xff\xff"  # the shape
        with pytest.raises(SegmentError, match="a sample reaches beyond its record"):
            cache.get_slot(0)


def test_what_is_parsed_within_the_parsing_of_a_treedef_does_no_harm(monkeypatch):
    """As python/cpython#106905 has it: a finalizer that formats a traceback meanwhile makes ast raise SystemError."""
    parse, calls = ast.literal_eval, []

    def disturbed(text):
        calls.append(text)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=198, after=218)")
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", disturbed)
    assert parse_treedef("('a', 1)") == ("a", 1)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("sample", "old", "new", "message"),
    [
        (Kind.BOX, b"BOX", b"TOP", "Kind has no member 'TOP'"),
        (Access(3), b"READ", b"REED", "Access has no member 'REED|WRITE'"),
        (datetime.date(2026, 11, 22), b"2026", b"2O26", "b'2O26-11-22' is not a date"),
        (decimal.Decimal("123.5"), b"123.5", b"12x.5", "is not a Decimal"),
        (torch.float32, b"float32", b"tensor_", "is not a dtype"),
        (torch.device("cpu"), b"cpu", b"gpu", "is not a device"),
        ("abc", b"abc", b"\xffbc", "the cache is damaged"),
    ],
)
def test_damaged_values_are_errors(sample, old, new, message):
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, sample)
        memory = record(cache, 0)
        at = bytes(memory[:4096]).index(old)
        memory[at : at + len(old)] = new
        with pytest.raises(SegmentError, match=message.replace("|", r"\|")):
            cache.get_slot(0)


def test_a_class_that_is_not_an_enum_is_not_asked_for_members():
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, Kind.BOX)
        with pytest.raises(SegmentError, match="have members of collections:OrderedDict, which is not an enum"):
            RecordReader(repr(("enum", "collections:OrderedDict")).encode(), allow_pickle=False)


def forged(sample, text=None, integers=None, data=None, codec=None, packed=None):
    """Read a record that says something else than the sample's."""
    record = Record(sample)
    own, sizes = record.pack()
    text = repr(record.treedef).encode() if text is None else text
    given = sizes if integers is None else integers
    return read_record(sample, text, own if data is None else data, given, codec=codec, packed=packed)


def refused(sample, message, **changes):
    """Reading a forged record is an error, and takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SegmentError, match=message):
        forged(sample, **changes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "builtins:exec", "builtins:list", "pathlib:Path", "os:gone"])
def test_a_forged_class_is_not_called(name, tmp_path):
    for kind in ("tuple", "namedtuple", "mapping", "dataclass", "tensor", "list", "dict", "set", "defaultdict"):
        if f"builtins:{kind}" == name:
            continue
        text = repr(("in", kind, name, (0, 1), (), (("str",), ("str",)))).encode()
        refused(("touch", str(tmp_path / "x")), f"made of {name}, which is not of kind {kind}", text=text)
    assert not (tmp_path / "x").exists()


def test_a_module_is_not_imported_for_a_forged_class():
    for text in (
        ("in", "tuple", "antigravity:fly", (0,), (), (("str",),)),
        ("enum", "antigravity:Kind"),
        ("in", "dict", "builtins:dict", (("enum", "antigravity:Kind", "A"),), (), (("str",),), "coded"),
    ):
        with pytest.raises(SegmentError, match="Import antigravity first"):
            RecordReader(repr(text).encode(), allow_pickle=False)
    with pytest.raises(SegmentError, match="have the default_factory antigravity:fly"):
        RecordReader(b"('in', 'defaultdict', 'collections:defaultdict', (), ('antigravity:fly',), ())", allow_pickle=False)
    assert "antigravity" not in sys.modules


def test_a_default_factory_that_would_have_to_be_imported_needs_allow_pickle():
    with RaggedCache("1MB", 1) as cache:
        with pytest.raises(
            SampleError, match=r'sample\["a"\] has the default_factory .*made_by_name.*, or pass allow_pickle=True'
        ):
            cache.set_slot(0, {"a": made(made_by_name)})
    assert round_trip_allowed({"a": made(made_by_name)})["a"].default_factory is made_by_name


@pytest.mark.parametrize(
    "descr",
    ["|O8", "O", (("a", "|O8"),), (("a", "<i4"), ("b", (("c", "|O8"),))), (("a", "|O8", (1,)),), "f4,O", 1, None],
    ids=str,
)
def test_a_forged_dtype_is_an_error(descr):
    for kind, value, dims in (("array", np.zeros(4), 1), ("scalar", np.float64(1), 0), ("array", np.zeros(0), 1)):
        refused(value, "cannot be read here", text=repr((kind, descr, dims)).encode())


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "save", "Tensor", "nn", 1, None])
def test_a_forged_dtype_of_torch_is_an_error(name):
    refused(torch.zeros(4), "is not a dtype of torch", text=repr(("tensor", name, 1)).encode())
    refused((torch.zeros(4), 1), "is not a dtype of torch", text=repr(
        ("in", "tuple", "builtins:tuple", (0, 1), (), (("tensor", name, 1), ("number", "int")))
    ).encode())  # fmt: skip


def test_a_dtype_that_is_quantized_is_not_a_value():
    with RaggedCache("1MB", 1) as cache, pytest.raises(SampleError, match="value is a dtype, which has no bytes of its own"):
        cache.set_slot(0, torch.qint8)


@pytest.mark.parametrize("items", [[None] * 3, [{}] * 3, [(None, None)] * 3, [[]] * 3], ids=str)
def test_a_list_has_no_more_items_than_its_record_accounts_for(items):
    for count in (2**40, 2**62, 2**63, 10**6):
        refused(items, "the cache is damaged", integers=[count])


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
@pytest.mark.parametrize("item", [None, {}, {"a": None, "b": ()}, np.str_("")], ids=str)
@pytest.mark.sampled(4)
def test_lists_of_many_items_without_bytes_come_back(item, codec):
    with RaggedCache("4MB", 1, codec=codec) as cache:
        cache.set_slot(0, [[item] * 70_000, [item] * 3])
        assert same(cache.get_slot(0), [[item] * 70_000, [item] * 3])


@pytest.mark.parametrize(
    "sizes", [[2**40], [2**62, 2**62, 0], [2**63, 0, 0], [0, 2**63, 2**63], [], [1], [1, 1, 1, 1]], ids=str
)
def test_a_forged_shape_is_an_error(sizes):
    value = torch.zeros(1, 1, 1, dtype=torch.uint8)
    for sample in (value, (value, 1), value.numpy(), [value, "x"]):
        record = Record(sample)
        count = len(record.pack()[1]) - len(record.integers)
        lengths = record.pack()[1][:count]
        refused(sample, "the cache is damaged", integers=[*lengths, *sizes])


@pytest.mark.parametrize("length", [4, 2**40, 2**63])
@pytest.mark.parametrize("sample", ["abc", b"abc", ("abc", 1), {"name": {"first": "abc"}}], ids=str)
def test_a_forged_length_is_an_error(sample, length):
    integers = Record(sample).pack()[1]
    refused(sample, "the cache is damaged: a sample reaches beyond its record", integers=[*integers[:-1], length])


@pytest.mark.parametrize("depth", [70, 150, 5000, 200_000])
def test_a_deep_treedef_is_an_error(depth):
    deep = "('in', 'tuple', 'builtins:tuple', (0,), (), (" * depth + "('str',)" + ",))" * depth
    for text in (deep, "(" * depth + ")" * depth, "-" * depth + "1", "9" * max(5000, depth)):
        with pytest.raises(SegmentError, match="cannot be read here"):
            RecordReader(text.encode(), allow_pickle=False)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_record_is_not_larger_than_its_leaves(codec):
    sample = "much that is easy to compress " * 20
    data, integers = Record(sample).pack()
    packed = pack_integers(integers)[1] | 4
    assert forged(sample, data=compress(codec, data), codec=codec, packed=packed) == "equal"
    refused(
        sample,
        "compressed data claims 67108864 bytes, where 600",
        data=compress(codec, bytes(64 << 20)),
        codec=codec,
        packed=packed,
    )
    huge = (b"\xff\xff\xff\x7f" if codec == "lz4" else b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little")) + bytes(20)
    refused(sample, "compressed data claims", data=huge, codec=codec, packed=packed)
    refused(sample, "compressed data", data=compress(codec, data)[:-3], codec=codec, packed=packed)
    refused(sample, "compressed data", data=b"", codec=codec, packed=packed)
    refused(sample, "it has a compressed sample, but no codec", data=data, packed=packed)


def test_a_forged_place_is_an_error():
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, "abc")
        for place in (2**63, 2**64 - 1, 2**40, cache.stats().capacity_bytes):
            misplace(cache, 0, place)
            with pytest.raises(SegmentError, match="the record of sample 0 reaches beyond it"):
                cache.get_slot(0)


def test_an_empty_string_of_numpy_takes_no_bytes_of_others():
    sample = [np.str_(""), "hello", np.bytes_(b""), b"x"]
    assert same(round_trip(sample), sample)
    with SharedCache.like([np.str_(""), 5], "1MB", 1) as cache:
        cache.set_slot(0, [np.str_(""), 7])
        assert same(cache.get_slot(0), [np.str_(""), 7])
