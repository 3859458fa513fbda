"""The records of samples are copied out of the columns of a block, and are those of the samples that the block returns."""

import collections
import contextlib
import datetime
import functools
import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stocache import RaggedCache
from stocache.errors import StocacheError
from stocache.samples.record_decoder import pack_sample
from stocache.storage import block as block_module
from stocache.storage import copying
from stocache.storage.block import Block
from stocache.storage.files import File
from tests.support.containers import Box
from tests.support.samples import Kind, made_by_name, samples
from tests.support.storages import COPIED, MADE, apart, file_of, opened, picture

N = 25


def in_cache(records):
    with RaggedCache("1MB", max(records) + 1) as cache:
        cache.set_encoded_if_empty(records)
        return {row: pack_sample(cache.get_slot(row, allow_empty_slot=False)) for row in records}


def check(block, records):
    assert not records or in_cache(records) == {row: pack_sample(block.sample(row)) for row in records}


values_of = functools.cache(lambda kind: [COPIED[kind](idx) for idx in range(N)])


@pytest.mark.parametrize("kind", COPIED)
def test_records_of_every_kind_are_copied_and_are_those_that_are_encoded(kind):
    values = values_of(kind)
    block = opened(file_of(values))
    records = block.encoded(range(N))
    assert sorted(records) == list(range(N))
    check(block, records)
    assert in_cache(records) == dict(enumerate(map(pack_sample, values)))
    if kind not in ("nested", "other types", "made containers"):
        parts = lambda record: (record.treedef, b"".join(record.leaves), record.nbytes, record.packed, record.tail)
        with RaggedCache("1MB", N) as cache:
            assert all(parts(records[idx]) == parts(cache._store.encode(values[idx], "sample")) for idx in range(N))


@pytest.mark.parametrize("kind", ["optional parts", "tensors"])
def test_some_rows_are_copied_in_any_order(kind, tmp_path):
    path = tmp_path / "block"
    path.write_bytes(file_of(values_of(kind)))
    block = Block(File(str(path)), "a block")
    for rows in ([3], [7, 2, 24, 2], range(24, 2, -1)):
        records = block.encoded(rows)
        assert set(records) == set(rows)
        check(block, records)


@pytest.mark.parametrize(("name", "most"), [("_AT_ONCE", 4), ("_CELLS", 30)])
def test_rows_are_copied_in_parts_of_limited_size(name, most, monkeypatch):
    monkeypatch.setattr(copying, name, most)
    sizes, real = [], copying.RowGroup.__init__
    monkeypatch.setattr(copying.RowGroup, "__init__", lambda self, *args: sizes.append(len(args[2])) or real(self, *args))
    block = opened(file_of(values_of("optional parts")))
    check(block, records := block.encoded(range(N)))
    assert len(records) == N
    assert max(sizes) <= 10


def outcome(make):
    """What a function makes, packed, or the type of its error."""
    try:
        return list(map(pack_sample, make()))
    except StocacheError as error:
        return type(error)


def agrees(block):
    """Demand that the whole block is as its samples, one by one, also where it cannot be read."""
    with mock.patch.object(block_module, "_TOGETHER", 1):
        made = outcome(block.all)
    assert made == outcome(lambda: [block.sample(row) for row in range(block.samples)])


@pytest.mark.parametrize("kind", [*COPIED, *MADE])
def test_a_whole_block_is_made_as_its_samples_one_by_one(kind, monkeypatch):
    monkeypatch.setattr(block_module, "_SMALL", 1 << 20)
    monkeypatch.setattr(block_module, "_TOGETHER", 1)
    values = [*map((COPIED | MADE)[kind], range(N))]
    block = opened(file_of(values))
    assert outcome(block.all) == list(map(pack_sample, values))
    agrees(block)


@pytest.mark.parametrize("texts", [["", "ünï€", "a" * 3000], ["", "one of them is no UTF-8: \ud800", "日本語"]])
def test_texts_and_numbers_of_a_whole_block_are_made_together(texts):
    values = [(text, row % 2 == 0, -(2**63) + row, float("nan"), complex(row, -0.0)) for row, text in enumerate(texts * 12)]
    assert outcome(opened(file_of(values)).all) == list(map(pack_sample, values))


def test_the_samples_of_a_whole_block_may_be_changed():
    values = values_of("tensors")
    block = opened(file_of(values))
    first = block.all()
    for sample in first:
        sample["image"] += 1
        sample["boxes"] += 1
    assert outcome(block.all) == list(map(pack_sample, values))


@settings(max_examples=30)
@given(st.lists(samples, min_size=1, max_size=3), st.integers(1, 4))
def test_what_is_copied_of_any_samples_is_equal(values, times):
    block = opened(file_of(values * times))
    check(block, block.encoded(range(block.samples)) or {})
    agrees(block)


@pytest.mark.parametrize("kind", MADE)
def test_rows_that_vary_in_their_structure_are_not_copied(kind):
    assert opened(file_of([*map(MADE[kind], range(200))])).encoded(range(200)) is None


def test_what_is_pickled_or_may_be_read_only_where_names_are_trusted_is_not_copied():
    for value, message in (
        ({1: {2j: [object]}}, "its samples are partly pickled"),
        ({"a": torch.eye(2).to_sparse()}, "its samples are partly pickled"),
        (collections.defaultdict(made_by_name, a=b"x"), "have the default_factory"),
    ):
        block = opened(file_of([{"bytes": b"x", "value": value}], allow_pickle=True), allow_pickle=True)
        assert block.sample(0)["bytes"] == b"x"
        with pytest.raises(StocacheError, match=message):
            block.encoded([0])


def copied_or_refused(block):
    try:
        return block.encoded(range(block.samples)) or {}
    except Exception:  # as the admission of blocks takes it
        return {}


@pytest.mark.parametrize("kind", ["tokens", "optional parts", "tensors", "other types", "made containers"])
def test_of_a_damaged_block_sound_samples_only_are_copied(kind):
    values = values_of(kind)[:9]
    data, rng = file_of(values), np.random.default_rng(0)
    expected = dict(enumerate(map(pack_sample, values)))
    for at in rng.integers(opened(data).begin, len(data), 80).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        with contextlib.suppress(StocacheError):  # its checksums
            block = opened(bytes(damaged))
            agrees(block)
            records = copied_or_refused(block)
            assert len(records) < 9
            assert not records or in_cache(records).items() <= expected.items()


def forged(values, change):
    """A block whose checksums are right, after changing its structure, and its columns by name."""
    seal_block = pytest.importorskip("benchmark.fuzz", reason="it makes images").seal_block
    header, facts, columns = apart(file_of(values))
    view = np.frombuffer(columns, np.uint8)
    views = {name: view[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"}
    change(facts["structure"], views)
    return opened(seal_block(header, facts, columns))


def write(name, at, data):
    def change(tree, columns):
        columns[name][at : at + len(data)] = list(data)

    return change


set_in_tree = lambda **entries: lambda tree, columns: tree.update(entries)
integers = lambda *numbers: np.array(numbers, np.int64).tobytes()
TEXTS = ["ab", "cd", "efg"].__getitem__
FORGED = {
    "text that is not UTF-8": (TEXTS, write("sample", 2, b"\xff"), [0, 2]),
    "a day that does not exist": (lambda idx: datetime.date(2026, 1, 1 + idx), write("sample", 18, b"99"), [0, 2]),
    "an unknown member": ([Kind.BOX, Kind.MASK, Kind.BOX].__getitem__, write("sample", 0, b"Z"), [1, 2]),
    "an image without its pixels": (lambda idx: picture(idx, 4, 5, 3), write("2", 0, integers(99)), [1, 2]),
    "a length below zero": (lambda idx: collections.deque([idx], 3), write("maxlen", 8, integers(-1)), [0, 2]),
    "a value beyond its column": (TEXTS, write("sample:offsets", 24, integers(2**40)), []),
    "a value before its column": (TEXTS, write("sample:offsets", 8, integers(-(2**62))), []),
    "a shape of another size": (lambda idx: torch.zeros(idx, 2), write("sample:shapes", 16, integers(2)), []),
    "a shape that overflows": (lambda idx: torch.zeros(idx, 2), write("sample:shapes", 32, integers(2**33, 2**31 + 2)), []),
    "a shape no tensor has": (lambda idx: torch.zeros(0, 2, idx), write("sample:shapes", 0, integers(0, 2**62, 2**62)), []),
    "a kind that its union does not have": ([b"ab", 2, None].__getitem__, write("sample:kinds", 8, integers(7)), []),
    "numbers that claim dimensions": (lambda idx: 1 + idx, set_in_tree(shape=[0]), []),
    "a class that is not here": (lambda idx: Box(b"x", idx), set_in_tree(**{"class": "nowhere:Box"}), []),
    "a class of another kind": (lambda idx: Box(b"x", idx), set_in_tree(**{"class": "subprocess:Popen"}), []),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_is_forged_is_copied_only_where_it_can_be_read(case):
    make, change, sound = FORGED[case]
    try:
        block = forged([*map(make, range(3))], change)
    except StocacheError:
        assert sound == []
        return
    readable = []
    for row in range(3):
        with contextlib.suppress(StocacheError):
            block.sample(row)
            readable.append(row)
    agrees(block)
    records = copied_or_refused(block)
    assert set(records) <= set(readable)
    assert sorted(records) == sound
    check(block, records)


def test_a_block_that_is_cut_while_it_is_open_is_not_copied(tmp_path):
    path = tmp_path / "block"
    path.write_bytes(file_of([bytes(200_000)] * 4))
    block = Block(File(str(path)).open(), "a block")
    os.truncate(path, 500_000)
    with pytest.raises(ValueError, match="it is truncated"):
        block.encoded(range(4))


def test_what_is_forged_at_random_is_read_or_refused_without_harm():
    for name in ("PIL", "zstandard", "lz4"):
        pytest.importorskip(name, reason="the benchmark needs it")
    from benchmark import fuzz

    counts, failures, _ = fuzz.trials(200, 1_000_000)
    assert failures == []
    assert counts.total() == 200
    assert {name for name, _ in counts} == {forger.__name__ for forger in fuzz.FORGERS}
