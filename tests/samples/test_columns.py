"""Samples of any kind come back from a block as they were, one by one and all together."""

import collections
import datetime
import json
import pathlib
import resource
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict

from benchmark.fuzz import seal_block
from stocache import DamagedError, SampleError, StorageError
from stocache.storage.block import Block, BytesFile, encode
from stocache.system.hashing import checksum
from tests.support.containers import Box, Point
from tests.support.equality import everywhere, identical, same
from tests.support.samples import (
    PICKLED,
    Access,
    Annotated,
    Extra,
    Kind,
    Odd,
    Slotted,
    Space,
    made,
    made_by_name,
    same_metatensors,
    samples,
    tensordict,
    tv_boxes,
)


def whole(values, allow_pickle=False):
    """The file of a block, and its checksum."""
    pieces, digest = encode(values, 0, allow_pickle)
    return b"".join(pieces), digest


def block_of(values, allow_pickle=False):
    return Block(BytesFile(whole(values, allow_pickle)[0]), "a block", allow_pickle)


def round_trip(values, allow_pickle=False):
    block = block_of(values, allow_pickle)
    assert block.samples == len(values)
    return [block.sample(row) for row in range(len(values))], block.all()


@given(st.lists(samples, max_size=5))
def test_any_samples_come_back_equal(values):
    for got in round_trip(values):
        assert everywhere(identical, got, values)


@given(samples, st.integers(1, 4))
def test_samples_of_one_structure_come_back_equal(sample, count):
    for got in round_trip([sample] * count):
        assert everywhere(identical, got, [sample] * count)


class Pair(NamedTuple):
    left: object
    right: object


def image(size):
    return Image.fromarray(np.arange(size * size, dtype=np.uint8).reshape(size, size))


@pytest.mark.parametrize(
    "values",
    [
        [Pair(1, "a"), Pair(2, "b")],
        [Box(1, 2), Point(1, 2), None],
        [collections.OrderedDict(b=1, a=2), {"a": 1, "b": 2}, {"b": 1, "a": 2}],
        [{1: "int"}, {True: "bool"}, {1.0: "float"}, {None: 0}, {(1, ("a",)): 0}],
        [2**63 - 1, 2**63, -(2**63), -(2**200)],
        [[1, 2**63], [1, 2]],
        [["a", "b"], ["c"], []],
        [[{"box": [1, 2, 3, 4], "mask": torch.ones(2, n)} for n in range(k)] for k in range(4)],
        [[[]], [[], []], [[1]], []],
        [[f"token {n}" for n in range(1000)]],
        [np.array("2020-01-01", "M8[D]"), np.array(["a", "bcd"]), np.zeros(2, ">i4"), np.zeros(3, [("x", "<f4"), ("y", "i1")])],
        [torch.zeros(2, 0, 3), torch.zeros(2, 4, 3)],
        [torch.tensor([1 + 2j], dtype=torch.complex128), torch.zeros(1, dtype=torch.complex128)],
        [torch.zeros(3, dtype=torch.float8_e4m3fn), torch.ones(5, dtype=torch.bfloat16)],
        [{"a/b": 1, "a": {"b": 2}}, {"a/b": 3, "a": {"b": 4}}],
        [{":checks": 1, "sample": 2, "": 3, "\ud800": 4}],
        [image(3), image(4)],
        [TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2]), TensorDict({"a": torch.ones(4, 3)}, batch_size=[4])],
        [torch.arange(3).as_subclass(Annotated)],
    ],
    ids=lambda values: str(values)[:40],
)
def test_unusual_samples_come_back_equal(values):
    for got in round_trip(values):
        assert all(map(alike, got, values))


def alike(a, b):
    if isinstance(a, Image.Image):
        return type(a) is type(b) and a.size == b.size and a.tobytes() == b.tobytes()
    if isinstance(a, TensorDict):
        return a.batch_size == b.batch_size and bool((a == b).all())
    return identical(a, b)


@pytest.mark.parametrize(
    "values",
    [
        [*Kind, Kind.MASK],
        [Access(n) for n in range(12)],
        [{Kind.BOX: 1, Space.RAS: 2}, {"box": 3, "ras": 4}, {(Space.RAS, (True,)): 5}, {("ras", (1,)): 5}],
        [{b"x": 1}, {1 + 2j: 2}],
        [made(None), made(int), made(dict)],
        [datetime.date(2026, 11, 22), datetime.datetime(2026, 11, 22, tzinfo=datetime.timezone.utc), datetime.timedelta(1, 2)],
        [pathlib.Path("a"), pathlib.Path("b/c"), pathlib.PureWindowsPath("c:/d")],
        [collections.deque([1], 3), collections.deque()],
        [slice(1, 2), slice(None, 2)],
        [bytearray(b"a"), range(3), torch.float16, torch.device("cpu"), torch.Size([1]), collections.Counter("abba")],
        [tv_boxes()],
    ],
    ids=lambda values: str(values)[:40],
)
def test_values_with_text_of_their_own_come_back_equal(values):
    for got in round_trip(values):
        assert everywhere(identical, got, values)
        assert [getattr(value, "default_factory", None) for value in got] == [
            getattr(value, "default_factory", None) for value in values
        ]
    assert block_of(values, allow_pickle=True).all() is not None


def test_a_block_is_the_file_that_safetensors_writes():
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    parts = {str(dtype): torch.ones(2, 3, dtype=dtype) for dtype in dtypes} | {
        'ü/"\n\\\x01': "x",
        "a": "",
        "empty": torch.ones(0),
    }
    for values in ([parts, parts | {"a": "bc"}], [], [None], [complex(1, 2)]):
        data, _ = whole(values)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert data == safetensors.torch.save(safetensors.torch.load(data), header["__metadata__"])


def test_members_that_vary_are_one_column():
    data, _ = whole([{"kind": kind, "day": datetime.date(2026, 11, 1 + n)} for n, kind in enumerate([*Kind, Kind.BOX])])
    tensors = safetensors.torch.load(data)
    assert bytes(tensors["kind"].numpy()) == b"BOXMASKBOX"
    assert set(tensors) == {"kind", "kind:offsets", "day", ":checks"}


def test_strides_come_back():
    images = [torch.arange(3 * 4 * n, dtype=torch.uint8).view(4, n, 3).permute(2, 0, 1) for n in (5, 5, 6)]
    pairs = [(image, np.asfortranarray(image.numpy())) for image in images]
    for values in (images[:2], images, pairs, [*images, torch.zeros(2, 2)]):
        for got in round_trip(values):
            assert everywhere(identical, got, values)
    tensors = safetensors.torch.load(whole(images[:2])[0])
    assert tensors["sample"].shape == (2, 4, 5, 3)
    assert torch.equal(tensors["sample"][0], images[0].permute(1, 2, 0))
    plain = json.dumps(block_of([image.contiguous() for image in images]).structure)
    assert "order" not in plain


def test_a_metatensor_of_monai_comes_back_as_it_was(tmp_path):
    transforms = pytest.importorskip("monai.transforms")
    np.save(tmp_path / "volume.npy", np.arange(60, dtype=np.float32).reshape(5, 4, 3))
    load = transforms.Compose([transforms.LoadImaged("img"), transforms.EnsureChannelFirstd("img", channel_dim="no_channel")])
    sample = load({"img": tmp_path / "volume.npy"})
    for got in round_trip([sample, sample]):
        same_metatensors(got[1]["img"], sample["img"])


@pytest.mark.parametrize(("value", "check"), PICKLED, ids=lambda value: type(value).__name__)
def test_whatever_pickles_is_taken_if_allowed(value, check):
    values = [{"first": torch.ones(n), "list": ["a"] * n + [value, 1], "last": value} for n in range(3)] + [[], 1]
    with pytest.raises(SampleError, match=r'^sample 0: sample\["(list"\]\[0|last")\].*pass allow_pickle=True\.$'):
        whole(values)
    for got in round_trip(values, allow_pickle=True):
        for n in range(3):
            assert check(got[n]["list"][n], value)
            assert check(got[n]["last"], value)
            assert got[n]["list"][n + 1] == 1
            assert torch.equal(got[n]["first"], torch.ones(n))
        assert got[3:] == [[], 1]


@pytest.mark.parametrize(
    "value", [torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta"), torch.nn.Parameter(torch.ones(2))]
)
def test_what_the_transform_has_to_do_is_not_pickled_either(value):
    with pytest.raises(SampleError, match=r'^sample 2: sample\["x"\]\[1\] is (on|a Parameter).*back\. (Leave|Convert)[^=]*$'):
        whole([{"x": [1, 2]}, {"x": [1]}, {"x": [1, value]}], allow_pickle=True)


def test_what_does_not_pickle_is_named():
    with pytest.raises(SampleError, match=r'^sample 1: sample\["a"\]\[2\] is a lock, which cannot be pickled: '):
        whole([{"a": ["x"]}, {"a": ["x", 1, threading.Lock()]}], allow_pickle=True)


def test_a_default_factory_that_would_have_to_be_imported_needs_allow_pickle_on_both_sides():
    values = [made(made_by_name)]
    with pytest.raises(
        SampleError, match=r"value has the default_factory tests.support.samples:made_by_name.*pass allow_pickle=True"
    ):
        whole(values)
    data, _ = whole(values, allow_pickle=True)
    assert Block(BytesFile(data), "a block", allow_pickle=True).sample(0).default_factory is made_by_name
    with pytest.raises(
        StorageError, match=r"have the default_factory tests.support.samples:made_by_name.*pass allow_pickle=True"
    ):
        Block(BytesFile(data), "a block")


def test_samples_are_the_callers_own():
    block = block_of([(torch.zeros(3), np.zeros(2), [1])] * 2)
    image, array, numbers = block.sample(0)
    image += 1
    array += 1
    numbers.append(2)
    assert same(block.sample(0), (torch.zeros(3), np.zeros(2), [1]))


def test_columns_are_what_other_programs_read():
    data, _ = whole([{"image": torch.full((2, 3), n, dtype=torch.uint8), "text": "ab" * n, "label": n} for n in range(3)])
    tensors = safetensors.torch.load(data)
    assert tensors["image"].tolist() == [[[n] * 3] * 2 for n in range(3)]
    assert tensors["label"].tolist() == [0, 1, 2]
    assert bytes(tensors["text"].numpy()) == b"ababab"
    assert tensors["text:offsets"].tolist() == [0, 0, 2, 6]
    assert tensors["text:offsets"].dtype == torch.int64


def test_arrays_of_varying_shape_have_offsets_and_shapes():
    tensors = safetensors.torch.load(whole([np.zeros((2, n), np.float32) for n in range(3)])[0])
    assert tensors["sample"].shape == (6,)
    assert tensors["sample:offsets"].tolist() == [0, 0, 2, 6]
    assert tensors["sample:shapes"].tolist() == [[2, 0], [2, 1], [2, 2]]


def test_lists_of_varying_length_and_unions_are_columns_too():
    tensors = safetensors.torch.load(whole([["a"], ["b", None, "cd"]])[0])
    assert tensors["sample:offsets"].tolist() == [0, 1, 4]
    assert tensors["sample[]:kinds"].tolist() == [0, 0, 1, 0]
    assert bytes(tensors["sample[]|0"].numpy()) == b"abcd"


def test_a_block_is_the_same_each_time():
    values = [{"a": n, "b": [str(n)] * n} for n in range(20)]
    assert len({whole(values)[0] for _ in range(5)}) == 1
    code = "from stocache.storage.block import encode; print(encode([{'a': n, 'b': [str(n)] * n} for n in range(20)])[1])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == whole(values)[1]
    )


def test_the_checksum_of_a_sample_is_the_one_that_is_specified():
    values = [
        (torch.tensor([1, 2], dtype=torch.int16), "ab", [[True], [], [False]]),
        (torch.tensor([3, 4], dtype=torch.int16), "", []),
    ]
    checks = safetensors.torch.load(whole(values)[0])[":checks"].numpy().view("<u8")
    first = b"\x01\0\x02\0" + (2).to_bytes(8, "little") + b"ab" + (3).to_bytes(8, "little")
    kinds = [(0).to_bytes(8, "little"), (1).to_bytes(8, "little")]  # of lists: of numbers, empty
    assert f"{checks[0]:016x}" == checksum(first + kinds[0] + b"\1" + kinds[1] + kinds[0] + b"\0")
    assert f"{checks[1]:016x}" == checksum(b"\x03\0\x04\0" + (0).to_bytes(8, "little") + (0).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "value", [Odd(), object, {"a": {frozenset(): 1}}, {frozenset(): 1}], ids=lambda value: type(value).__name__
)
def test_what_has_no_bytes_of_its_own_needs_allow_pickle_on_both_sides(value):
    with pytest.raises(
        SampleError, match=r'sample 1: (value|sample\["a"\]) (is a \w+|has a key), .*or pass allow_pickle=True\.$'
    ):
        whole([0, value])
    data, _ = whole([0, value], allow_pickle=True)
    assert Block(BytesFile(data), "a block", allow_pickle=True).sample(1) == value
    with pytest.raises(StorageError, match="a block: its samples are partly pickled"):
        Block(BytesFile(data), "a block")
    Block(BytesFile(data), "a block", decode=False).verify()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, requires_grad=True), "requires a gradient"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.nn.Parameter(torch.zeros(2)), r'sample 0: sample\["x"\] is a Parameter, the cache gives Tensors back'),
        (lambda: 0, "no bytes of its own"),
    ],
)
def test_what_would_not_come_back_the_same_is_refused(value, message):
    with pytest.raises(SampleError, match=message):
        whole([{"x": value}])


def test_deep_nesting_is_refused():
    value = 1
    for _ in range(100):
        value = {"a": value}
    with pytest.raises(
        SampleError,
        match=r"is a container within 60 others, which is the limit\. Use fewer levels, or pass allow_pickle=True\.",
    ):
        whole([value])


def forged(values, change):
    """A block whose structure is changed, with checksums that are right."""
    data, digest = whole(values)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["stocache"])
    facts["checksum"] = "0" * 16
    change(facts["structure"])
    header["__metadata__"]["stocache"] = json.dumps(facts)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    at, end = header[":checks"]["data_offsets"]
    columns = data[8 + length :]
    digest = checksum(head, columns[at:end])
    return head.replace(b'checksum\\": \\"' + b"0" * 16, b'checksum\\": \\"' + digest.encode()) + columns


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "builtins:exec", "builtins:list", "pathlib:Path"])
def test_a_forged_class_is_not_called(name):
    data = forged([("true", "x"), ("true", "y")], lambda tree: tree.update({"class": name}))
    with pytest.raises(StorageError, match=f"its samples are made of {name}, which is not of kind tuple"):
        Block(BytesFile(data), "a block")


def test_a_module_is_not_imported_for_a_forged_class():
    data = forged([("true", "x")], lambda tree: tree.update({"class": "antigravity:fly"}))
    with pytest.raises(StorageError, match="Import antigravity first, or pass allow_pickle=True"):
        Block(BytesFile(data), "a block")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "builtins:int", "enum:auto", "tests.support.samples:Odd"])
def test_a_forged_class_of_members_is_not_called(name):
    data = forged([Kind.BOX], lambda tree: tree.update({"class": name}))
    with pytest.raises(StorageError, match=f"its samples have members of {name}, which is not an enum"):
        Block(BytesFile(data), "a block")
    data = forged([{Kind.BOX: 1}], lambda tree: tree.update(keys=[{"enum": [name, "BOX"]}]))
    with pytest.raises(StorageError, match=f"its samples have members of {name}, which is not an enum"):
        Block(BytesFile(data), "a block")


def test_a_module_is_not_imported_for_forged_members_and_factories():
    changes = [
        (Kind.BOX, {"class": "antigravity:Kind"}),
        ({Kind.BOX: 1}, {"keys": [{"tuple": [{"enum": ["antigravity:Kind", "BOX"]}]}]}),
        (made(list), {"extra": ["antigravity:fly"]}),
        (made(list), {"extra": ["os:getcwd"]}),
    ]
    for value, change in changes:
        data = forged([value], lambda tree, change=change: tree.update(change))
        with pytest.raises(
            StorageError, match=r"Import antigravity first|have the default_factory (antigravity:fly|os:getcwd)"
        ):
            Block(BytesFile(data), "a block")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Kind.MASK, {"class": "tests.support.samples:Space"}),
        (Kind.MASK, {"class": "enum:Enum"}),
        ({Kind.MASK: 1}, {"keys": [{"enum": ["tests.support.samples:Space", "MASK"]}]}),
        ({Kind.MASK: 1}, {"keys": [{"enum": ["tests.support.samples:Kind"]}]}),
        ({Kind.MASK: 1}, {"keys": [{"pickle": "x"}]}),
        ({Kind.MASK: 1}, {"keys": [{}]}),
        ({b"": 1}, {"keys": [{"bytes": "xyz"}]}),
        *(
            ("xyz", {"kind": kind})
            for kind in ("date", "datetime", "range", "Fraction", "torch.dtype", "torch.device", "long|")
        ),
        ("[]", {"kind": "time"}),
        ({1, 2}, {"children": []}),
        ({1, 2}, {"class": "builtins:list"}),
        (slice(1), {"class": "builtins:range"}),
        (made(list), {"extra": []}),
        (made(list), {"extra": [["builtins:list"]]}),
        (torch.zeros(2, 3), {"order": [0, 0]}),
        (torch.zeros(2, 3), {"order": [1]}),
        (torch.zeros(2, 3), {"order": [2, 1, 0]}),
        (torch.zeros(2, 3), {"order": "ab"}),
        (np.zeros((2, 3)), {"order": {"a": 1}}),
    ],
    ids=str,
)
def test_forged_kinds_are_errors(value, change):
    data = forged([value], lambda tree: tree.update(change))
    with pytest.raises(StorageError, match=r"a block is damaged|a block: its samples are made of .*, which is not of kind"):
        Block(BytesFile(data), "a block").all()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["children"].pop(),
        lambda tree: tree["children"][0].update(shape=[2**60]),
        lambda tree: tree["children"][0].update(shape=[-1]),
        lambda tree: tree["children"][0].update(column="1:offsets"),
        lambda tree: tree["children"][0].update(column="none"),
        lambda tree: tree["children"][0].update(kind="void"),
        lambda tree: tree["children"][0].update(dtype="save"),
        lambda tree: tree["children"][1].update(dims=2, shapes="1:offsets"),
        lambda tree: tree["children"][1].update(offsets=":checks"),
        lambda tree: tree["children"][2].update(offsets=":checks"),
        lambda tree: tree["children"][2].update(items=None),
        lambda tree: tree.update(children=[tree["children"]] * 3),
    ],
)
def test_a_forged_structure_is_an_error(change):
    data = forged([(torch.zeros(4), "ab", ["x"]), (torch.ones(4), "c", [])], change)
    with pytest.raises(StorageError, match="a block is damaged"):
        Block(BytesFile(data), "a block").all()


def test_a_pickle_is_checked_before_it_is_loaded():
    data = bytearray(whole([Trap()], allow_pickle=True)[0])
    at = data.index(b"sprung")
    data[at : at + 6] = b"SPRUNG"
    with pytest.raises(DamagedError, match="sample 0 in it has the checksum"):
        Block(BytesFile(bytes(data)), "a block", allow_pickle=True).sample(0)
    assert Trap.sprung == []


def test_a_pickle_is_checked_before_it_is_loaded_however_its_kind_is_written():
    data = whole([Trap()], allow_pickle=True)[0]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["stocache"]) | {"checksum": "0" * 16}
    text = json.dumps(facts).replace('"kind": "pickle"', '"kind":"\\u0070ickle"')
    forged = bytearray(seal_block(header, text, bytearray(data[8 + length :])))
    at = forged.index(b"sprung")
    forged[at : at + 6] = b"SPRUNG"
    with pytest.raises(DamagedError, match="sample 0 in it has the checksum"):
        Block(BytesFile(bytes(forged)), "a block", allow_pickle=True).sample(0)
    assert Trap.sprung == []


class Trap:
    sprung: list = []  # noqa: RUF012

    def __reduce__(self):
        return Trap.sprung.append, ("sprung",)


def refused(data, message="a block is damaged"):
    """Reading a forged block is an error, and takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StorageError, match=message):
        Block(BytesFile(data), "a block").all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    "dtype",
    [
        "|O8",
        "O",
        [["a", "|O8"]],
        [["a", "<i4"], ["b", [["c", "|O8"]]]],
        [["a", "|O8", [1]]],
        "qint8",
        "f4,O",
        "|V2147483647",
        None,
    ],
    ids=str,
)
def test_a_forged_dtype_is_an_error(dtype):
    for value in (np.zeros(4), np.zeros((2, 0)), np.float64(1), torch.zeros(4)):
        refused(forged([value], lambda tree: tree.update(dtype=dtype)))


@pytest.mark.parametrize("items", [None, (), {}])
def test_a_list_has_no_more_items_than_its_file_accounts_for(items):
    data = bytearray(whole([[items] * 20, [items] * 21])[0])
    at = data.rindex((41).to_bytes(8, "little"))
    for count in (2**40, 2**62, 2**63 - 1, 10**6):
        data[at : at + 8] = count.to_bytes(8, "little")
        refused(resealed(bytes(data)))


def resealed(data):
    """A block with the checksums that it should have, but for those of samples that cannot be read."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return seal_block(header, json.loads(header["__metadata__"]["stocache"]), bytearray(data[8 + length :]))


@pytest.mark.parametrize("items", [None, {}, {"a": None, "b": ()}, torch.zeros(0, 3)], ids=str)
def test_lists_of_many_items_without_bytes_come_back(items):
    values = [[items] * 70_000, [items] * 3]
    data, _ = whole(values)
    assert list(map(len, Block(BytesFile(data), "a block").all())) == [70_000, 3]
    assert ":room" in safetensors.torch.load(data)
    assert ":room" not in safetensors.torch.load(whole([[items] * 30_000, [items] * 3] if items is None else [[items] * 40])[0])


def test_a_block_without_room_is_read_as_before():
    """As they were written before there was a column for it."""
    data = whole([[None] * 60_000, [None] * 3])[0]
    assert len(data) < 1000
    assert [len(value) for value in Block(BytesFile(data), "a block").all()] == [60_000, 3]


def test_lists_that_share_their_items_do_not_multiply():
    """Each of 30 levels twice what is in it: a gigabyte of items in 4 KB."""
    tree = {"kind": "tensor", "dtype": "uint8", "shape": [], "column": "sample"}
    for _ in range(30):
        tree = {"kind": "list", "offsets": "sample:offsets", "items": tree}
    refused(forged([["a"], ["b", "c"]], lambda facts: (facts.clear(), facts.update(tree))))
    data = forged([torch.zeros(1000), torch.ones(1000)], lambda facts: facts.update(
        kind="in", container="list", keys=list(range(9)), extra=[], children=[dict(facts)] * 9, **{"class": "builtins:list"}
    ))  # fmt: skip
    refused(data)


def test_offsets_that_go_back_do_not_multiply():
    data = bytearray(whole([["x" * (5000 + item % 2) for item in range(n)] for n in (30, 31)])[0])
    begin = data.index(b"".join(n.to_bytes(8, "little") for n in (0, 5000, 10_001)))
    for item in range(62):
        data[begin + 8 * item : begin + 8 * item + 8] = (0 if item % 2 == 0 else 61 * 5000).to_bytes(8, "little")
    refused(resealed(bytes(data)))


@pytest.mark.parametrize(
    "shape",
    [[2**62, 2**62, 0], [2**63], [-1, 0], [0.5], [True], [0] * 65, ["0"], "0", None, [[0]], [0, 2**31, 2**31, 2**31]],
    ids=str,
)
def test_a_forged_shape_is_an_error(shape):
    for value in (torch.zeros(0, 3), np.zeros((0, 3))):
        refused(forged([value], lambda tree: tree.update(shape=shape)))


@pytest.mark.parametrize("dims", [-1, 0, 65, 2**40, 1.0, True, None, "2"])
def test_forged_dimensions_are_an_error(dims):
    refused(forged([torch.zeros(2, 1), torch.zeros(2, 2)], lambda tree: tree.update(dims=dims)))


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_deep_structure_is_an_error(depth):
    for piece in ('{"kind": "list", "offsets": "a", "items": ', "["):
        text = json.dumps({"version": 1, "samples": 1, "structure": 0})
        text = text.replace('"structure": 0', f'"structure": {piece * depth}0{("}" if "{" in piece else "]") * depth}')
        header = {":checks": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
        refused(seal_block(header, text[:-1] + ', "checksum": "' + "0" * 16 + '"}', bytearray(8)))


@pytest.mark.parametrize("value", [2**60, -1, 1.0, True, None, "2", [2]])
def test_a_forged_number_of_samples_is_an_error(value):
    data, _ = whole([1, 2])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["stocache"]) | {"samples": value}
    refused(seal_block(header, facts, bytearray(data[8 + length :])))


@pytest.mark.parametrize("offsets", [[0, 2**60], [4, 12], [-8, 0], [8, 0], [0.0, 8.0], [0], None, [0, 8, 16], [False, True]])
def test_columns_that_overlap_or_lie_elsewhere_are_an_error(offsets):
    data, _ = whole([torch.zeros(3), torch.ones(3)])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["sample"]["data_offsets"] = offsets
    refused(seal_block(header, json.loads(header["__metadata__"]["stocache"]), bytearray(data[8 + length :])))


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Extra(1, 2), {"keys": ["image", "label"]}),
        (Extra(1, 2), {"class": "tests.support.samples:Slotted"}),
        (Slotted(1), {"keys": ["__class__"]}),
        (Slotted(1), {"keys": ["__dict__"]}),
        (Slotted(1), {"keys": [1]}),
        (collections.Counter("a"), {"class": "collections.abc:Mapping"}),
        (collections.Counter("a"), {"class": "weakref:WeakValueDictionary"}),
        (image(4), {"class": "PIL.Image:Image", "keys": [0, 1, 2, 3]}),
        ({"a": 1}, {"keys": [["a"]]}),
        ({"a": 1}, {"keys": [{"tuple": [["a"]]}]}),
        (tensordict(), {"extra": [2**70]}),
        (tensordict(), {"extra": ["a"]}),
        (tensordict(), {"extra": 3}),
        (tv_boxes(), {"class": "torch:Size"}),
        (tv_boxes(), {"class": "torch:Generator"}),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else type(part).__name__,
)
def test_a_forged_container_is_an_error(value, change):
    refused(forged([value], lambda tree: tree.update(change)), "a block")


def test_an_image_that_claims_more_pixels_than_it_has_is_an_error():
    data = whole([image(4)])[0]
    at = data.index((4).to_bytes(8, "little") * 2)
    refused(
        resealed(data[:at] + (2**30).to_bytes(8, "little") * 2 + data[at + 16 :]), "takes 1152921504606846976 bytes, and has 16"
    )
