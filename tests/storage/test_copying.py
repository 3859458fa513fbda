"""The records of samples are copied out of the columns of a block, and are those of the samples that the block returns."""

import collections
import contextlib
import datetime
import functools
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmark.fuzz import seal_block
from stocache import RaggedCache
from stocache.errors import StocacheError
from stocache.samples.record_encoder import pack_sample
from stocache.storage import copying
from stocache.storage.block import Block, BytesFile, File, encode
from tests.support.containers import Box
from tests.support.samples import Kind, made_by_name, samples
from tests.support.storages import COPIED, MADE

N = 25


def file_of(values, allow_pickle=False):
    return b"".join(encode(values, 0, allow_pickle)[0])


def opened(data, allow_pickle=False):
    return Block(BytesFile(data), "a block", allow_pickle)


def parts(record):
    return record.treedef, b"".join(record.leaves), record.nbytes, record.packed, record.tail


def in_cache(records):
    """The samples of records, as a cache returns them."""
    with RaggedCache("1MB", max(records) + 1) as cache:
        cache.set_encoded_if_empty(records)
        return {row: pack_sample(cache.get_slot(row, allow_empty_slot=False)) for row in records}


def check(block, records):
    """Samples that are copied are those that the block returns."""
    assert not records or in_cache(records) == {row: pack_sample(block.sample(row)) for row in records}


@functools.cache
def values_of(kind):
    return [(COPIED | MADE)[kind](idx) for idx in range(N)]


@pytest.mark.parametrize("kind", COPIED)
def test_records_of_every_kind_are_copied(kind):
    block = opened(file_of(values_of(kind)))
    records = block.records(range(N))
    assert sorted(records) == list(range(N))
    check(block, records)
    assert in_cache(records) == dict(enumerate(map(pack_sample, values_of(kind))))


@pytest.mark.parametrize("kind", [kind for kind in COPIED if kind not in ("nested", "other types", "made containers")])
def test_a_copied_record_is_the_one_that_is_encoded(kind):
    records = opened(file_of(values_of(kind))).records(range(N))
    with RaggedCache("1MB", N) as cache:
        for idx, value in enumerate(values_of(kind)):
            assert parts(records[idx]) == parts(cache._store.encode(value, "sample"))


@pytest.mark.parametrize("rows", [[3], [7, 2, 24, 2], [0, 5, 10], range(24, 2, -1)])
@pytest.mark.parametrize("kind", ["optional parts", "tensors", "encoded images"])
def test_some_rows_are_copied_in_any_order(kind, rows, tmp_path):
    path = tmp_path / "block"
    path.write_bytes(file_of(values_of(kind)))
    block = Block(File(str(path)), "a block")
    records = block.records(rows)
    assert set(records) == set(rows)
    check(block, records)


@pytest.mark.parametrize(("name", "most"), [("_AT_ONCE", 4), ("_CELLS", 30)])
def test_rows_are_copied_in_parts_of_limited_size(name, most, monkeypatch):
    monkeypatch.setattr(copying, name, most)
    sizes = []
    real = copying.RowGroup.__init__
    monkeypatch.setattr(copying.RowGroup, "__init__", lambda self, *args: sizes.append(len(args[2])) or real(self, *args))
    block = opened(file_of(values_of("optional parts")))
    check(block, records := block.records(range(N)))
    assert len(records) == N
    assert max(sizes) <= 10


@given(st.lists(samples, min_size=1, max_size=3), st.integers(1, 4))
def test_what_is_copied_of_any_samples_is_equal(values, times):
    block = opened(file_of(values * times))
    check(block, block.records(range(block.samples)) or {})


@pytest.mark.parametrize("kind", MADE)
def test_rows_that_vary_in_their_structure_are_not_copied(kind):
    values = [*map(MADE[kind], range(200))]
    assert opened(file_of(values)).records(range(200)) is None


@pytest.mark.parametrize("value", [{1: {2j: [object]}}, {"a": torch.eye(2).to_sparse()}])
def test_what_is_pickled_is_not_copied(value):
    block = opened(file_of([{"bytes": b"x", "value": value}], allow_pickle=True), allow_pickle=True)
    with pytest.raises(StocacheError, match="its samples are partly pickled"):
        block.records([0])


def test_what_may_be_read_only_where_names_are_trusted_is_not_copied():
    block = opened(file_of([collections.defaultdict(made_by_name, a=b"x")], allow_pickle=True), allow_pickle=True)
    assert block.sample(0)["b"] == 7
    with pytest.raises(StocacheError, match="have the default_factory"):
        block.records([0])


# ---------------------------------------------------------------------------------------------------- damaged and forged


def copied_or_refused(block):
    try:
        return block.records(range(block.samples)) or {}
    except Exception:  # as the admission of blocks takes it
        return {}


@pytest.mark.parametrize("kind", ["tokens", "optional parts", "tensors", "other types", "made containers"])
def test_of_a_damaged_block_sound_samples_only_are_copied(kind):
    values = values_of(kind)[:9]
    data, rng, wrong = file_of(values), np.random.default_rng(0), []
    expected = dict(enumerate(map(pack_sample, values)))
    begin = opened(data).begin
    for at in rng.integers(begin, len(data), 150).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        try:
            block = opened(bytes(damaged))
        except StocacheError:  # its checksums
            continue
        records = copied_or_refused(block)
        wrong.append(9 - len(records))
        assert not records or in_cache(records).items() <= expected.items()
    assert len(wrong) > 20
    assert min(wrong) >= 1


def test_one_damaged_sample_costs_only_itself():
    values = [bytes([idx]) * 100 for idx in range(9)]
    data = bytearray(file_of(values))
    data[opened(bytes(data)).span("sample")[0] + 420] ^= 1
    assert sorted(opened(bytes(data)).records(range(9))) == [0, 1, 2, 3, 5, 6, 7, 8]


def forged(values, change):
    """A block whose checksums are right, after changing its structure, and its columns by name."""
    data = file_of(values)
    length = int.from_bytes(data[:8], "little")
    header, columns = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    facts = json.loads(header["__metadata__"]["stocache"])
    views = {
        name: memoryview(columns)[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"
    }
    change(facts["structure"], views)
    for view in views.values():
        view.release()
    return opened(seal_block(header, facts, columns))


def write(name, at, data):
    def change(tree, columns):
        columns[name][at : at + len(data)] = data

    return change


def set_in_tree(**entries):
    return lambda tree, columns: tree.update(entries)


def integers(*numbers):
    return np.array(numbers, np.int64).tobytes()


DAYS = [datetime.date(2026, 1, 1 + idx) for idx in range(3)]
PICTURES = [Image.fromarray(np.full((4, 5, 3), idx, np.uint8)) for idx in range(3)]
EMPTY = [torch.zeros(0, 2, idx) for idx in range(3)]
FORGED = {
    "text that is not UTF-8": (["ab", "cd", "efg"], write("sample", 2, b"\xff"), [0, 2]),
    "a day that does not exist": (DAYS, write("sample", 18, b"99"), [0, 2]),
    "an unknown member": ([Kind.BOX, Kind.MASK, Kind.BOX], write("sample", 0, b"Z"), [1, 2]),
    "an image without its pixels": (PICTURES, write("2", 0, integers(99)), [1, 2]),
    "a length below zero": ([collections.deque([idx], 3) for idx in range(3)], write("maxlen", 8, integers(-1)), [0, 2]),
    "a value beyond its column": (["ab", "cd", "efg"], write("sample:offsets", 24, integers(2**40)), []),
    "a value before its column": (["ab", "cd", "efg"], write("sample:offsets", 8, integers(-(2**62))), []),
    "a shape of another size": ([torch.zeros(idx, 2) for idx in range(3)], write("sample:shapes", 16, integers(2)), []),
    "a shape whose product overflows": (
        [torch.zeros(idx, 2) for idx in range(3)],
        write("sample:shapes", 32, integers(2**33, 2**31 + 2)),
        [],
    ),
    "a shape that no tensor has": (EMPTY, write("sample:shapes", 0, integers(0, 2**62, 2**62)), []),
    "a kind that its union does not have": ([b"ab", 2, None], write("sample:kinds", 8, integers(7)), []),
    "numbers that claim dimensions": ([1, 2, 3], set_in_tree(shape=[0]), []),
    "a class that is not here": ([Box(b"x", idx) for idx in range(3)], set_in_tree(**{"class": "nowhere:Box"}), []),
    "a class of another kind": ([Box(b"x", idx) for idx in range(3)], set_in_tree(**{"class": "subprocess:Popen"}), []),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_is_forged_is_copied_only_where_it_can_be_read(case):
    values, change, sound = FORGED[case]
    try:
        block = forged(values, change)
    except StocacheError:
        assert sound == []
        return
    readable = []
    for row in range(3):
        with contextlib.suppress(StocacheError):
            block.sample(row)
            readable.append(row)
    records = copied_or_refused(block)
    assert set(records) <= set(readable)
    assert sorted(records) == sound
    check(block, records)


def test_a_block_that_is_cut_while_it_is_open_is_not_copied(tmp_path):
    path = tmp_path / "block"
    path.write_bytes(file_of([bytes(200_000)] * 4))
    block = Block(File(str(path)).open(), "a block")
    os.truncate(path, 500_000)
    with pytest.raises(ValueError, match="it is cut"):
        block.records(range(4))
