"""Records: what is written once for all samples of a kind, and forged ones, which are errors that call nothing."""

import ast
import datetime
import itertools
import pathlib
import string

import numpy as np
import pytest
import torch

from stocache import RaggedCache, SegmentError
from stocache.samples.record_encoder import EncodedSample, pack_integers, write_treedef
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


def test_lists_of_many_items_without_bytes_come_back(monkeypatch):
    for module in ("leaves.kind", "record_decoder"):
        monkeypatch.setattr(f"stocache.samples.{module}.BARE_NODES", 500)  # see NOTE [ Items without bytes ]
    with RaggedCache("4MB", 3) as cache:
        for idx, (item, many) in enumerate(((None, 700), ({"a": None}, 350), (np.str_(""), 660))):
            cache.set_slot(idx, [[item] * many, [item] * 3])
            assert same(cache.get_slot(idx), [[item] * many, [item] * 3])
    data = file_of([[None] * 7_000, [None] * 3])
    assert len(data) > 7_000 - 500
    assert list(map(len, opened(data).all())) == [7_000, 3]


@pytest.mark.parametrize(("sample", "old", "new", "message"), [
    (Kind.BOX, b"BOX", b"TOP", "Kind has no member 'TOP'"),
    (Access(3), b"READ", b"REED", r"Access has no member 'REED\|WRITE'"),
    (datetime.date(2026, 11, 22), b"2026", b"2O26", "b'2O26-11-22' is not a date"),
    (torch.float32, b"float32", b"tensor_", "is not a dtype"),
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
        with pytest.raises(SegmentError, match="the cache is damaged: a sample reaches beyond its record"):
            cache.get_slot(0)
        for place in (2**63, 2**64 - 1, 2**40, cache.stats().capacity_bytes):
            misplace(cache, 0, place)
            with pytest.raises(SegmentError, match="the cache is damaged: the record of sample 0 reaches beyond it"):
                cache.get_slot(0)


def refused(sample, message, integers=None, data=None, codec=None, packed=None):
    """Demand that a record that says something else than the sample's is an error."""
    read = pytest.importorskip("benchmark.fuzz", reason="needs the extra bench").read_record
    its = EncodedSample(sample)
    own, sizes = its.pack()
    text, given = repr(its.treedef).encode(), sizes if integers is None else integers
    head = {} if packed is None else {"packed": packed}
    with takes_little_memory(), pytest.raises(SegmentError, match=message):
        read(sample, text, own if data is None else data, given, codec=codec, **head)


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
    packed = pack_integers(integers)[1] | 4
    large, own = compress(codec, bytes(64 << 20)), compress(codec, data)
    huge = (b"\xff\xff\xff\x7f" if codec == "lz4" else b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little")) + bytes(20)
    for message, changed in (
        ("compressed data is damaged: it claims 67108864 bytes, not 600", {"data": large}),
        ("compressed data is damaged: it claims", {"data": huge}), ("compressed data", {"data": own[:-3]}),
        ("compressed data", {"data": b""}), ("the cache is damaged", {"data": own, "integers": [], "packed": 4}),
        ("it has a compressed sample, but no codec", {"data": data, "codec": None}),
    ):  # fmt: skip
        refused(sample, message, **{"integers": integers, "codec": installed(codec), "packed": packed} | changed)
