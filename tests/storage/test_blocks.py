"""Blocks: their bytes are what is specified, their samples are copied into caches, and forged ones are errors without harm."""

import sys

import numpy as np
import pytest
import torch
import xxhash

from stocache import RaggedCache
from stocache.errors import DamagedError, StocacheError, StorageError
from stocache.samples.record_decoder import pack_sample
from stocache.samples.spec import RowLayout, Structure
from stocache.storage.block import encode
from tests.support.equality import same
from tests.support.samples import Kind, takes_little_memory
from tests.support.storages import COPIED, ROWS, STRUCTURES, apart, file_of, opened

N = 25
ALL = COPIED | STRUCTURES | ROWS


def in_cache(records):
    with RaggedCache("1MB", max(records) + 1) as cache:
        cache.set_encoded_if_empty(records)
        return {row: pack_sample(cache.get_slot(row, allow_empty_slot=False)) for row in records}


def outcome(make):
    """What a function makes, packed, or the type of its error."""
    try:
        return list(map(pack_sample, make()))
    except StocacheError as error:
        return type(error)


@pytest.mark.parametrize("kind", ALL)
def test_samples_come_back_one_by_one_and_together_and_their_records_are_copied(kind):
    values = [*map(ALL[kind], range(N))]
    expected = list(map(pack_sample, values))
    block = opened(file_of(values))
    assert bool(block.row) == (kind in ROWS or kind == "scalars")
    assert outcome(block.all) == outcome(lambda: map(block.sample, range(N))) == expected
    assert outcome(lambda: block.some(range(5, 20))) == expected[5:20]
    assert in_cache(block.encoded(range(N))) == dict(enumerate(expected))
    assert in_cache(block.encoded([7, 2, 24])) == {row: expected[row] for row in (7, 2, 24)}
    assert block.encoded(range(N), RowLayout(Structure.of((torch.ones(9),)))) is None  # they are not rows of this layout
    if kind in ("image and label", "all alignments", "permuted", "nothing"):
        structure = Structure.of(values[0], exact=True)
        leaves = block.encoded(range(N), RowLayout(structure))
        assert [b"".join(leaves[row]) for row in range(N)] == [b"".join(structure.encode(value)) for value in values]


def test_a_block_of_rows_is_what_is_specified():
    values = [(torch.tensor([n, 2], dtype=torch.int16), n, "ab") for n in range(2)]
    header, facts, data = apart(file_of(values))
    assert facts["treedefs"] == [
        "('in', 'tuple', 'builtins:tuple', (0, 1, 2), (), (('tensor', 'int16', 1), ('number', 'int'), ('str',)))"
    ]
    assert (facts["version"], facts["samples"], facts["row"]) == (2, 2, [14, [8, 4, 2, 2]])  # bytes of two streams; shapes
    assert [name for name in header if name != "__metadata__"] == ["checks", "samples"]
    rows = [n.to_bytes(8, "little") + bytes([n, 0, 2, 0]) + b"ab" + bytes(2) for n in range(2)]
    assert bytes(data) == b"".join(xxhash.xxh3_64_intdigest(row).to_bytes(8, "little") for row in rows) + b"".join(rows)
    assert encode(values)[1] == facts["checksum"]


def test_a_block_of_records_is_what_is_specified():
    header, facts, data = apart(file_of(["abc", 5]))
    assert (facts["treedefs"], facts["row"]) == (["('str',)", "('number', 'int')"], None)
    assert [name for name in header if name != "__metadata__"] == ["checks", "offsets", "samples"]
    heads = [
        (3).to_bytes(8, "little") + bytes(4) + bytes([8, 0, 0, 0]),
        (8).to_bytes(8, "little") + bytes([1, 0, 0, 0]) + bytes(4),
    ]
    records = [heads[0] + b"abc\3" + bytes(4), heads[1] + (5).to_bytes(8, "little")]
    checks = b"".join(xxhash.xxh3_64_intdigest(record).to_bytes(8, "little") for record in records)
    assert bytes(data) == checks + np.array([0, 24, 48], "<i8").tobytes() + b"".join(records)


def test_a_block_is_a_file_of_safetensors_from_which_labels_are_read_without_the_samples(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="comes with the extra test")
    values = [{"image": torch.zeros(3, 4, dtype=torch.uint8), "label": n} for n in range(N)]
    (tmp_path / "block").write_bytes(file_of(values))
    with safetensors.safe_open(tmp_path / "block", "np") as file:
        assert set(file.keys()) == {"checks", "samples"}
        begin = RowLayout(Structure.of(values[0])).begins[1]
        labels = file.get_slice("samples")[:, begin : begin + 8]
    assert labels.copy().view("<i8").ravel().tolist() == list(range(N))


def test_samples_may_be_changed_and_a_small_part_does_not_hold_a_large_one():
    values = [(torch.zeros(3000, dtype=torch.int64), torch.tensor(n)) for n in range(8)]
    block = opened(file_of(values))
    for image, label in (block.sample(3), *block.all()):
        image += 1
        assert label.untyped_storage().nbytes() == 8
        assert image.untyped_storage().nbytes() < 24_100
    assert same(block.all(), values)


def refused(values, forge, message="a block is damaged|a block: it has version"):
    """Demand that a block is refused that was changed, with checksums that are right."""
    seal_block = pytest.importorskip("benchmark.fuzz", reason="needs the extra bench").seal_block
    forge(block := apart(file_of(values)))
    for load in (lambda block: block.all(), lambda block: block.encoded([0])):
        with takes_little_memory(), pytest.raises(StorageError, match=message):
            load(opened(seal_block(*block)))


def facts(**changes):
    """Have other facts in the header of a block."""
    return lambda block: block[1].update(changes)


def test_a_forged_class_is_not_called_and_a_module_is_not_imported():
    for name in ("subprocess:Popen", "os:system", "pathlib:Path"):
        treedefs = [f"('in', 'tuple', '{name}', (0, 1), (), (('str',), ('str',)))"]
        message = f"its samples are made of {name}, which is not of kind tuple"
        refused([("true", "x")], facts(treedefs=treedefs), message)
    module = facts(treedefs=["('enum', 'antigravity:Kind')"])
    refused([Kind.BOX], module, "Import antigravity first, or pass allow_pickle=True")
    assert "antigravity" not in sys.modules


class Trap:
    sprung: list = []  # noqa: RUF012

    def __reduce__(self):
        return Trap.sprung.append, ("sprung",)


def test_a_pickle_is_checked_before_it_is_loaded_and_is_not_copied():
    data = file_of([Trap()], allow_pickle=True)
    damaged = opened(data.replace(b"sprung", b"SPRUNG"), allow_pickle=True)
    for load in (lambda: damaged.sample(0), damaged.all, damaged.verify):
        with pytest.raises(DamagedError, match="sample 0 in it has the checksum"):
            load()
    assert opened(data, allow_pickle=True).encoded([0]) is None
    assert Trap.sprung == []


def column(name, *offsets):
    return lambda block: block[0].update({name: {"dtype": "U8", "shape": [1], "data_offsets": offsets or None}})


def written(begin, number, size=8):
    """Have a different number in the columns of a block."""
    return lambda block: block[2].__setitem__(slice(begin, begin + size), number.to_bytes(size, "little", signed=number < 0))


OFFSETS, FIRST = 16, 40  # where they begin in a block of two records, and where the first record does
FORGED = {
    "rows": [
        *(facts(samples=value) for value in (2**60, -1, 1.0, True, None, 3)),
        *(facts(treedefs=value) for value in ([], None, [1], ["x"], ["(" * 9999], ["('void',)"])),
        *(facts(row=value) for value in ([], None, [2**60, []], [-1, []], [8, [1]], [16, [2**60]], 8)),
        *(facts(version=value) for value in (None, 3, "2", True)),
        column("checks", 0, 2**60), column("checks"), column("samples", 0.0, 8.0), column("more", 0, 0),
    ],
    "rows without bytes": [facts(samples=value) for value in (2**60, 3, 1)],
    "records": [
        *(written(OFFSETS, number) for number in (8, -8)), *(written(OFFSETS + 16, number) for number in (24, 40)),
        *(written(OFFSETS + 8, number) for number in (2**60, 48, -8, 0, 8)),
        *(written(FIRST, number) for number in (2**60, 9)), *(written(FIRST + 8, number, 4) for number in (7, 2)),
        *(written(FIRST + 12, number, 4) for number in (2**32 - 1, 9 << 3)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values"),
    [("rows", [torch.zeros(()), torch.ones(())]), ("rows without bytes", [torch.zeros(0)] * 2), ("records", ["abc", 5])],
)
def test_what_is_forged_is_an_error(kind, values):
    for forge in FORGED[kind]:
        refused(values, forge)


@pytest.mark.parametrize("kind", ["tokens", "optional parts", "tensors", "made containers", "image and label"])
def test_of_a_damaged_block_sound_samples_only_are_copied(kind):
    values = [*map(ALL[kind], range(9))]
    data, rng = file_of(values), np.random.default_rng(0)
    expected, begin = dict(enumerate(map(pack_sample, values))), opened(data)._begin
    for at in rng.integers(begin, len(data), 40).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        block = opened(damaged)
        assert outcome(block.all) is DamagedError
        records = block.encoded(range(9))
        assert len(records) == 8
        assert in_cache(records).items() <= expected.items()
