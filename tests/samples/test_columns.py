"""Blocks: their columns are what is specified, and forged ones are errors that call nothing and take little memory."""

import collections
import datetime
import itertools
import json
import sys

import numpy as np
import pytest
import torch

from stocache import DamagedError, StorageError
from stocache.samples.leaves.kinds import BULK_ENCODERS, ENCODERS
from stocache.storage.block import encode
from stocache.system.hashing import checksum
from tests.support.samples import Extra, Kind, Slotted, boxes, made, picture, takes_little_memory, tensordict
from tests.support.storages import apart, file_of, opened


def columns(values):
    """The columns of a block as any program reads them: arrays by name."""
    header, _, data = apart(file_of(values))
    header.pop("__metadata__")
    dtypes = {"I64": np.int64, "I16": np.int16, "U8": np.uint8, "BOOL": np.bool_, "F32": np.float32}
    return {
        name: np.frombuffer(data[slice(*its["data_offsets"])], dtypes[its["dtype"]]).reshape(its["shape"])
        for name, its in header.items()
    }


def test_a_block_is_the_file_that_safetensors_writes():
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with the extra test")
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    parts = {str(dtype): torch.ones(2, 3, dtype=dtype) for dtype in dtypes}
    parts |= {'ü/"\n\\\x01': "x", "a": "", "empty": torch.ones(0)}
    for values in ([parts, parts | {"a": "bc"}], [], [None], [complex(1, 2)]):
        data = file_of(values)
        assert data == safetensors.save(safetensors.load(data), apart(data)[0]["__metadata__"])


def test_columns_are_what_other_programs_read():
    found = columns([{"image": torch.full((2, 3), n, dtype=torch.uint8), "text": "ab" * n, "label": n} for n in range(3)])
    assert found["image"].tolist() == [[[n] * 3] * 2 for n in range(3)]
    assert found["label"].tolist() == [0, 1, 2]
    assert found["text"].tobytes() == b"ababab"
    assert (found["text:offsets"].tolist(), found["text:offsets"].dtype) == ([0, 0, 2, 6], np.int64)
    found = columns([np.zeros((2, n), np.float32) for n in range(3)])
    assert found["sample"].shape == (6,)
    assert found["sample:offsets"].tolist() == [0, 0, 2, 6]
    assert found["sample:shapes"].tolist() == [[2, 0], [2, 1], [2, 2]]
    found = columns([["a"], ["b", None, "cd"]])
    assert found["sample:offsets"].tolist() == [0, 1, 4]
    assert found["sample[]:kinds"].tolist() == [0, 0, 1, 0]
    assert found["sample[]|0"].tobytes() == b"abcd"
    found = columns([{"kind": kind, "day": datetime.date(2026, 11, 1 + n)} for n, kind in enumerate([*Kind, Kind.BOX])])
    assert found["kind"].tobytes() == b"BOXMASKBOX"
    assert set(found) == {"kind", "kind:offsets", "day", ":checks"}
    image = torch.arange(60, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1)  # dimensions lie as they do in memory
    assert columns([image] * 2)["sample"].tolist() == [image.permute(1, 2, 0).tolist()] * 2
    assert "order" not in json.dumps(opened(file_of([image.contiguous()])).structure)


def test_blocks_are_the_same_in_each_process_and_version_and_checksums_of_samples_are_as_specified():
    values = [{"a": n, "b": [str(n)] * n, "c": {"x", "y", "z", str(n)}} for n in range(20)]  # the order of sets differs
    assert encode(values)[1] == "c297a170847e49a8"
    one = (torch.tensor([1, 2], dtype=torch.int16), "ab", [[True], [], [False]])
    other = (torch.tensor([3, 4], dtype=torch.int16), "", [])
    checks = columns([one, other])[":checks"].view("<u8")
    zero, one, two, three = (number.to_bytes(8, "little") for number in range(4))
    items = zero + b"\1" + one + zero + b"\0"  # each after its kind
    assert f"{checks[0]:016x}" == checksum(b"\1\0\2\0" + two + b"ab" + three + items)
    assert f"{checks[1]:016x}" == checksum(b"\3\0\4\0" + zero + zero)


def sealed(header, facts, data):
    """A block with the checksums that it should have, but for those of samples that cannot be read."""
    return pytest.importorskip("benchmark.fuzz", reason="needs the extra bench").seal_block(header, facts, bytearray(data))


def forged(values, change):
    """A block whose structure is changed by a function, or updated, with checksums that are right."""
    header, facts, data = apart(file_of(values))
    change(facts["structure"]) if callable(change) else facts["structure"].update(change)
    facts["checksum"] = "0" * 16
    header["__metadata__"]["stocache"] = json.dumps(facts)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    digest = checksum(head, data[slice(*header[":checks"]["data_offsets"])])
    return head.replace(b'checksum\\": \\"' + b"0" * 16, b'checksum\\": \\"' + digest.encode()) + data


def refused(data, message="a block is damaged"):
    with takes_little_memory(), pytest.raises(StorageError, match=message):
        opened(data).all()


def test_a_forged_class_is_not_called_and_a_module_is_not_imported():
    for name in ("subprocess:Popen", "os:system", "builtins:int", "pathlib:Path"):
        refused(forged([("true", "x")], {"class": name}), f"its samples are made of {name}, which is not of kind tuple")
        for value, change in ((Kind.BOX, {"class": name}), ({Kind.BOX: 1}, {"keys": [{"enum": [name, "BOX"]}]})):
            refused(forged([value], change), f"its samples have members of {name}, which is not an enum")
    for value, change in (
        (("true", "x"), {"class": "antigravity:fly"}), (Kind.BOX, {"class": "antigravity:Kind"}),
        ({Kind.BOX: 1}, {"keys": [{"tuple": [{"enum": ["antigravity:Kind", "BOX"]}]}]}),
    ):  # fmt: skip
        refused(forged([value], change), "Import antigravity first, or pass allow_pickle=True")
    for name in ("antigravity:fly", "os:getcwd"):
        refused(forged([made(list)], {"extra": [name]}), f"have the default_factory {name}")
    assert "antigravity" not in sys.modules


class Trap:
    sprung: list = []  # noqa: RUF012

    def __reduce__(self):
        return Trap.sprung.append, ("sprung",)


def test_a_pickle_is_checked_before_it_is_loaded_however_its_kind_is_written():
    data = file_of([Trap()], allow_pickle=True)
    header, facts, rest = apart(data)
    text = json.dumps(facts | {"checksum": "0" * 16}).replace('"kind": "pickle"', '"kind":"\\u0070ickle"')
    for written in (data, sealed(header, text, rest)):
        with pytest.raises(DamagedError, match="sample 0 in it has the checksum"):
            opened(written.replace(b"sprung", b"SPRUNG"), allow_pickle=True).sample(0)
    assert Trap.sprung == []


TEXTS = ("date", "datetime", "range", "Fraction", "torch.dtype", "torch.device", "long|")
DTYPES = ("|O8", [["a", "<i4"], ["b", [["c", "|O8"]]]], "qint8", "f4,O", "|V2147483647", None)
SHAPES = ([2**62, 2**62, 0], [2**63], [-1, 0], [0.5], [True], [0] * 65, "0", None, [[0]])


@pytest.mark.parametrize(("value", "changes"), [
    (Kind.MASK, [{"class": "tests.support.samples:Space"}, {"class": "enum:Enum"}]),
    ({Kind.MASK: 1}, [{"keys": [{"enum": ["tests.support.samples:Space", "MASK"]}]}]),
    ({Kind.MASK: 1}, [{"keys": [{"enum": ["tests.support.samples:Kind"]}]}, {"keys": [{"pickle": "x"}]}, {"keys": [{}]}]),
    ({b"": 1}, [{"keys": [{"bytes": "xyz"}]}, {"keys": [["a"]]}, {"keys": [{"tuple": [["a"]]}]}]),
    ("xyz", [{"kind": kind} for kind in TEXTS]),
    ("[]", [{"kind": "time"}]),
    ({1, 2}, [{"children": []}, {"class": "builtins:list"}]),
    (slice(1), [{"class": "builtins:range"}]),
    (made(list), [{"extra": []}, {"extra": [["builtins:list"]]}]),
    (Extra(1, 2), [{"keys": ["image", "label"]}, {"class": "tests.support.samples:Slotted"}]),
    (Slotted(1), [{"keys": ["__class__"]}, {"keys": ["__dict__"]}, {"keys": [1]}]),
    (collections.Counter("a"), [{"class": "collections.abc:Mapping"}, {"class": "weakref:WeakValueDictionary"}]),
    (picture, [{"class": "PIL.Image:Image", "keys": [0, 1, 2, 3]}]),
    (tensordict, [{"extra": [2**70]}, {"extra": ["a"]}, {"extra": 3}]),
    (boxes, [{"class": "torch:Size"}, {"class": "torch:Generator"}]),
    (torch.zeros(2, 3), [{"order": order} for order in ([0, 0], [1], [2, 1, 0], "ab")]),
    (np.zeros((2, 3)), [{"order": {"a": 1}}]),
    *((value, [{"dtype": name} for name in DTYPES]) for value in (np.zeros(4), np.zeros((2, 0)), np.float64(1), torch.eye(2))),
    *((value, [{"shape": shape} for shape in SHAPES]) for value in (torch.zeros(0, 3), np.zeros((0, 3)))),
])  # fmt: skip
def test_what_is_forged_is_an_error(value, changes):
    for change in changes:
        refused(forged([value() if callable(value) else value], change), "a block is damaged|a block: its samples are made of ")


def test_a_forged_or_deep_structure_is_an_error():
    for number, change in (
        (0, {"shape": [2**60]}), (0, {"shape": [-1]}), (0, {"column": "1:offsets"}), (0, {"column": "none"}),
        (0, {"kind": "void"}), (0, {"dtype": "save"}), (1, {"dims": 2, "shapes": "1:offsets"}), (1, {"offsets": ":checks"}),
        (2, {"offsets": ":checks"}), (2, {"items": None}),
        *((1, {"dims": dims}) for dims in (-1, 0, 65, 2**40, 1.0, True, None, "2")),
    ):  # fmt: skip
        values = [(torch.zeros(4), "ab", ["x"]), (torch.ones(4), "c", [])]
        refused(forged(values, lambda tree, number=number, change=change: tree["children"][number].update(change)))
    refused(forged(values, lambda tree: tree["children"].pop()))
    refused(forged(values, lambda tree: tree.update(children=[tree["children"]] * 3)))
    for depth, (piece, end) in itertools.product((300, 100_000), (('{"kind": "list", "offsets": "a", "items": ', "}"), "[]")):
        deep = f"{piece * depth}0{end * depth}"
        text = f'{{"version": 1, "samples": 1, "structure": {deep}, "checksum": "{"0" * 16}"}}'
        refused(sealed({":checks": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, text, bytes(8)))


def test_forged_numbers_of_samples_items_bytes_and_pixels_are_errors():
    for value in (2**60, -1, 1.0, True, None, "2", [2]):
        header, facts, data = apart(file_of([1, 2]))
        refused(sealed(header, facts | {"samples": value}, data))
    for offsets in ([0, 2**60], [4, 12], [-8, 0], [8, 0], [0.0, 8.0], [0], None, [0, 8, 16], [False, True]):
        header, facts, data = apart(file_of([torch.zeros(3), torch.ones(3)]))
        header["sample"]["data_offsets"] = offsets
        refused(sealed(header, facts, data))
    for items, count in itertools.product((None, (), {}), (2**40, 2**62, 2**63 - 1, 10**6)):
        data = file_of([[items] * 20, [items] * 21])
        at = data.rindex((41).to_bytes(8, "little"))
        refused(sealed(*apart(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])))
    data = file_of([picture("L", 3)])
    data = data.replace((3).to_bytes(8, "little") * 2, (2**30).to_bytes(8, "little") * 2)
    refused(sealed(*apart(data)), "takes 1152921504606846976 bytes, and has 9")


def test_what_is_shared_does_not_multiply():
    """Each of 30 levels twice what is in it would be a gigabyte of items in 4 KB."""
    tree = {"kind": "tensor", "dtype": "uint8", "shape": [], "column": "sample"}
    for _ in range(30):
        tree = {"kind": "list", "offsets": "sample:offsets", "items": tree}
    refused(forged([["a"], ["b", "c"]], lambda facts: (facts.clear(), facts.update(tree))))
    twice = forged([(torch.zeros(1), torch.zeros(1))], lambda facts: facts["children"][1].update(column="0"))
    refused(twice, "the column '0' belongs to two leaves")
    listed = {"kind": "in", "container": "list", "class": "builtins:list", "keys": list(range(9)), "extra": []}
    refused(forged([torch.zeros(9), torch.ones(9)], lambda facts: facts.update(listed, children=[dict(facts)] * 9)))
    data = bytearray(file_of([["x" * (5000 + item % 2) for item in range(n)] for n in (30, 31)]))
    begin = data.index(b"".join(n.to_bytes(8, "little") for n in (0, 5000, 10_001)))
    for item in range(62):  # offsets that go back
        data[begin + 8 * item : begin + 8 * item + 8] = (0 if item % 2 == 0 else 61 * 5000).to_bytes(8, "little")
    refused(sealed(*apart(bytes(data))))


@pytest.mark.parametrize("values", [["", "é\ud800x", "a\0b"], [0, -(2**63), 2**63 - 1], [1, 2**63], [-(2**70)]], ids=repr)
def test_values_that_are_encoded_at_once_are_encoded_as_each_is(values):
    each = [ENCODERS[type(value)](value) for value in values]
    at_once = BULK_ENCODERS[type(values[0])](values)
    if {kind for kind, *_ in each} == {at_once and at_once[0]}:
        assert at_once[1] == [(data, shape) for _, _, data, shape in each]
    else:
        assert at_once is None
        assert any(kind == ("long",) for kind, *_ in each)
