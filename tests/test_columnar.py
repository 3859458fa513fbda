"""Samples of any kind come back from a block as they were, one by one and all together."""

import collections
import json
import subprocess
import sys
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

from stocache import DamagedError, SampleError, StorageError
from stocache.block import Block, Memory, encode
from stocache.checksums import checksum
from tests.test_records import Annotated, Odd, everywhere, identical, samples
from tests.test_structure import Box, Point, same


def whole(values, allow_pickle=False):
    """The file of a block, and its checksum."""
    pieces, digest = encode(values, 0, allow_pickle)
    return b"".join(pieces), digest


def block_of(values, allow_pickle=False):
    return Block(Memory(whole(values, allow_pickle)[0]), "a block", allow_pickle)


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
    return same(a, b)


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
    code = "from stocache.block import encode; print(encode([{'a': n, 'b': [str(n)] * n} for n in range(20)])[1])"
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


@pytest.mark.parametrize("value", [Odd(), object, {"a": {frozenset(): 1}}, {frozenset(): 1}], ids=str)
def test_what_has_no_bytes_of_its_own_needs_allow_pickle_on_both_sides(value):
    with pytest.raises(
        SampleError, match=r'sample 1: (value|sample\["a"\]) (is a \w+|has a key), .*or pass allow_pickle=True\.$'
    ):
        whole([0, value])
    data, _ = whole([0, value], allow_pickle=True)
    assert Block(Memory(data), "a block", allow_pickle=True).sample(1) == value
    with pytest.raises(StorageError, match="a block: its samples are partly pickled"):
        Block(Memory(data), "a block")
    Block(Memory(data), "a block", allow_pickle=None).verify()


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
    with pytest.raises(StorageError, match=f"its samples are made of {name}, which is no tuple"):
        Block(Memory(data), "a block")


def test_a_module_is_not_imported_for_a_forged_class():
    data = forged([("true", "x")], lambda tree: tree.update({"class": "antigravity:fly"}))
    with pytest.raises(StorageError, match="Import antigravity first, or pass allow_pickle=True"):
        Block(Memory(data), "a block")
    assert "antigravity" not in sys.modules


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
        Block(Memory(data), "a block").all()


def test_a_pickle_is_checked_before_it_is_loaded():
    data = bytearray(whole([Trap()], allow_pickle=True)[0])
    at = data.index(b"sprung")
    data[at : at + 6] = b"SPRUNG"
    with pytest.raises(DamagedError, match="sample 0 in it has the checksum"):
        Block(Memory(bytes(data)), "a block", allow_pickle=True).sample(0)
    assert Trap.sprung == []


class Trap:
    sprung: list = []  # noqa: RUF012

    def __reduce__(self):
        return Trap.sprung.append, ("sprung",)
