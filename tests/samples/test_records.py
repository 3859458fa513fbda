"""Records: what is written once for all samples of a kind, and forged ones, which are errors that call nothing."""

import ast
import datetime
import decimal
import itertools
import pathlib
import string
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from stocache import RaggedCache, SegmentError
from stocache.samples.record_decoder import reader_of_cache
from stocache.samples.record_encoder import EncodedSample, pack_integers, parse_treedef, write_treedef
from tests.support.equality import same
from tests.support.faults import misplace, record
from tests.support.makers import codec as installed
from tests.support.samples import Access, Kind, Space, takes_little_memory
from tests.support.storages import file_of, opened


def coco(count):
    return {
        "image": torch.zeros(3, 5 + count, 7, dtype=torch.uint8),
        "objects": [{"bbox": [1.0, 2.5, 3.0, 4.0], "polygons": [[1, 2.5] * (i + 1)], "id": i} for i in range(count + 1)],
        "caption": string.ascii_letters[:count],
        "tokens": list(range(count + 1)),
    }


def test_samples_that_differ_in_sizes_members_and_values_only_have_one_treedef():
    paths = [pathlib.Path("a"), pathlib.Path("b/c")]
    for kind in ([*Kind, Kind.MASK], [Access(n) for n in range(9)], paths, [coco(n) for n in range(9)]):
        assert len({write_treedef(EncodedSample(value).treedef) for value in kind}) == 1
        assert len({write_treedef(EncodedSample({"x": [value], Space.RAS: 1}).treedef) for value in kind}) == 1
    treedef = EncodedSample(coco(3)).treedef
    assert ast.literal_eval(write_treedef(treedef).decode()) == treedef


def test_lists_of_many_items_without_bytes_come_back():
    samples = [[[item] * many, [item] * 3] for item, many in ((None, 70_000), ({"a": None}, 35_000), (np.str_(""), 66_000))]
    with RaggedCache("4MB", 3) as cache:
        for idx, sample in enumerate(samples):
            cache.set_slot(idx, sample)
            assert same(cache.get_slot(idx), sample)
    data = file_of([[None] * 70_000, [None] * 3])
    assert len(data) > 70_000 - 65_536
    assert list(map(len, opened(data).all())) == [70_000, 3]


def test_what_is_parsed_within_the_parsing_of_a_treedef_does_no_harm(monkeypatch):
    """As python/cpython#106905 has it: a finalizer that formats a traceback meanwhile makes ast raise SystemError."""
    parse = Mock(side_effect=[SystemError("AST constructor recursion depth mismatch (before=198, after=218)"), ("a", 1)])
    monkeypatch.setattr(ast, "literal_eval", parse)
    assert parse_treedef("('a', 1)") == ("a", 1)
    assert parse.call_count == 2


@pytest.mark.parametrize(("sample", "old", "new", "message"), [
    (Kind.BOX, b"BOX", b"TOP", "Kind has no member 'TOP'"),
    (Access(3), b"READ", b"REED", r"Access has no member 'REED\|WRITE'"),
    (datetime.date(2026, 11, 22), b"2026", b"2O26", "b'2O26-11-22' is not a date"),
    (decimal.Decimal("123.5"), b"123.5", b"12x.5", "is not a Decimal"),
    (torch.float32, b"float32", b"tensor_", "is not a dtype"),
    (torch.device("cpu"), b"cpu", b"gpu", "is not a device"),
    ("abc", b"abc", b"\xffbc", "the cache is damaged"),
])  # fmt: skip
def test_damaged_values_are_errors(sample, old, new, message):
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, sample)
        memory = record(cache, 0)
        at = bytes(memory[:4096]).index(old)
        memory[at : at + len(old)] = new
        with pytest.raises(SegmentError, match=message):
            cache.get_slot(0)


def test_a_damaged_or_forged_place_is_an_error_and_no_crash():
    with RaggedCache("1MB", 1) as cache:
        cache.set_slot(0, torch.zeros(4, 4))
        record(cache, 0)[16 + 64 : 16 + 66] = b"\xff\xff"  # the shape
        with pytest.raises(SegmentError, match="a sample reaches beyond its record"):
            cache.get_slot(0)
        for place in (2**63, 2**64 - 1, 2**40, cache.stats().capacity_bytes):
            misplace(cache, 0, place)
            with pytest.raises(SegmentError, match="the record of sample 0 reaches beyond it"):
                cache.get_slot(0)


@pytest.mark.parametrize(("text", "message"), [
    ("", "cannot be read here"),
    ("__import__('os')", "cannot be read here"),
    ("('what',)", "what"),
    *((str(("tensor", name, 1)), "is not a dtype of torch") for name in ("no_such_dtype", "qint8", "save", "nn", 1, None)),
    ("('tensor', 'uint8', 2, (0, 0))", "is not an order of dimensions"),
    ("('tensor', 'uint8', 2, (1, 0, 2))", "is not an order of dimensions"),
    ("('array', '|u1', 1, (1,))", "is not an order of dimensions"),
    *((str((kind, key, dims)), "cannot be read here") for kind, dims in (("array", 1), ("scalar", 0))
      for key in ("|O8", (("a", "<i4"), ("b", (("c", "|O8"),))), (("a", "|O8", (1,)),), "f4,O", 1, None)),
    ("('enum', 'collections:OrderedDict')", "have members of collections:OrderedDict, which is not an enum"),
    ("('enum', 'no_such_module:Kind')", "Import no_such_module first"),
    ("('in', 'list', 'no_such_module:List', (), (), ())", "Import no_such_module first"),
    ("('in', 'tuple', 'antigravity:fly', (0,), (), (('str',),))", "Import antigravity first"),
    ("('in', 'dict', 'builtins:dict', (('enum', 'antigravity:A', 'A'),), (), (('str',),), 'coded')", "Import antigravity"),
    ("('in', 'dict', 'builtins:dict', (('enum', 'os:system', 'A'),), (), (('str',),), 'coded')", "which is not an enum"),
    ("('in', 'dict', 'builtins:dict', (('enum', 'enum:Enum', 'A'),), (), (('str',),), 'coded')", "has no member 'A'"),
    ("('in', 'dict', 'builtins:dict', ('plain',), (), (('str',),), 'coded')", "cannot be read here"),
    ("('in', 'namedtuple', 'tests.support.samples:Extra', ('image', 'label'), (), (('str',), ('str',)))", "cannot have"),
    ("('in', 'dataclass', 'tests.support.samples:Gone', (), (), ())", "Gone"),
    *((f"('in', '{kind}', '{name}', (0, 1), (), (('str',), ('str',)))", f"made of {name}, which is not of kind {kind}")
      for kind in ("tuple", "namedtuple", "dataclass", "tensor", "list", "dict")
      for name in ("subprocess:Popen", "os:system", "pathlib:Path", "os:gone")),
    *((text, "cannot be read here") for depth in (70, 150, 5000, 200_000) for text in (
        "('in', 'tuple', 'builtins:tuple', (0,), (), (" * depth + "('str',)" + ",))" * depth,
        "(" * depth + ")" * depth, "-" * depth + "1", "9" * max(5000, depth))),
], ids=lambda value: value[:80])  # fmt: skip
def test_a_treedef_that_cannot_be_read_says_why_and_imports_nothing(text, message):
    with pytest.raises(SegmentError, match=message):
        reader_of_cache(text.encode(), allow_pickle=False)
    assert "antigravity" not in sys.modules


def test_modules_of_classes_are_imported_only_if_pickles_are_allowed(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("import enum\nColour = enum.Enum('Colour', 'RED BLUE')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SegmentError, match="Import imported_later first, or pass allow_pickle=True"):
        reader_of_cache(b"('enum', 'imported_later:Colour')", allow_pickle=False)
    assert "imported_later" not in sys.modules
    data = bytearray(b"BLUE\4")
    reader = reader_of_cache(b"('enum', 'imported_later:Colour')", allow_pickle=True)
    assert reader.read(memoryview(data), 0, 4, pack_integers([4])[1], True) is sys.modules.pop("imported_later").Colour.BLUE
    with pytest.raises(SegmentError, match="classes of no_such_module, which is not here: No module named"):
        reader_of_cache(b"('enum', 'no_such_module:Kind')", allow_pickle=True)


def forged(sample, text=None, integers=None, data=None, codec=None, packed=None):
    """Read a record that says something else than the sample's."""
    read = pytest.importorskip("benchmark.fuzz", reason="needs the extra bench").read_record
    its = EncodedSample(sample)
    own, sizes = its.pack()
    text = repr(its.treedef).encode() if text is None else text
    given = sizes if integers is None else integers
    return read(sample, text, own if data is None else data, given, codec=codec, packed=packed)


def refused(sample, message, **changes):
    with takes_little_memory(), pytest.raises(SegmentError, match=message):
        forged(sample, **changes)


def test_forged_counts_shapes_and_lengths_are_errors():
    for items, count in itertools.product(([None] * 3, [{}] * 3, [(None, None)] * 3, [[]] * 3), (2**40, 2**62, 2**63, 10**6)):
        refused(items, "the cache is damaged", integers=[count])
    value = torch.zeros(1, 1, 1, dtype=torch.uint8)
    for sample in (value, (value, 1), value.numpy(), [value, "x"]):
        its = EncodedSample(sample)
        integers = its.pack()[1]
        lengths = integers[: len(integers) - len(its.integers)]
        for sizes in ([2**40], [2**62, 2**62, 0], [2**63, 0, 0], [0, 2**63, 2**63], [], [1], [1, 1, 1, 1]):
            refused(sample, "the cache is damaged", integers=[*lengths, *sizes])
    for sample, length in itertools.product(("abc", b"abc", ("abc", 1), {"name": {"first": "abc"}}), (4, 2**40, 2**63)):
        integers = [*EncodedSample(sample).pack()[1][:-1], length]
        refused(sample, "the cache is damaged: a sample reaches beyond its record", integers=integers)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_record_is_not_larger_than_its_leaves(codec):
    compress = pytest.importorskip("benchmark.fuzz", reason="needs the extra bench").compress
    sample = "much that is easy to compress " * 20
    data, integers = EncodedSample(sample).pack()
    integers.append(len(data))  # before compression
    changes = {"integers": integers, "codec": installed(codec), "packed": pack_integers(integers)[1] | 4}
    assert forged(sample, data=compress(codec, data), **changes) == "equal"
    huge = (b"\xff\xff\xff\x7f" if codec == "lz4" else b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little")) + bytes(20)
    large = compress(codec, bytes(64 << 20))
    refused(sample, "compressed data is damaged: it claims 67108864 bytes, where 600", data=large, **changes)
    refused(sample, "compressed data is damaged: it claims", data=huge, **changes)
    for cut in (compress(codec, data)[:-3], b""):
        refused(sample, "compressed data", data=cut, **changes)
    refused(sample, "the cache is damaged", data=compress(codec, data), **changes | {"integers": [], "packed": 4})
    refused(sample, "it has a compressed sample, but no codec", data=data, packed=changes["packed"])
