"""Damage to the files of a disk cache: flipped bits, power cuts, forged entries. A miss each, never a wrong sample."""

import json
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from stocache.disk.formats import Records, Rows
from stocache.disk.samples_file import BEGIN, SamplesFile, index_bytes
from stocache.samples.spec import Structure
from tests.support.disks import COUNT, after_power_cut, contents, flip, loaded, open_disk, put, record, row


def entries(folder):
    return np.frombuffer(Path(folder, "index").read_bytes(), "<u8").reshape(-1, 2).astype(object)


def enter(folder, idx, at, nbytes):
    """Have the index say something else of a sample."""
    with open(folder / "index", "r+b") as file:
        file.seek(16 * idx)
        file.write(at.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))


@pytest.mark.parametrize(("flips", "rounds"), [(1, 16), (10, 4)])
def test_flipped_bits_are_misses_or_harmless(kind, filled, flips, rounds):
    rng = random.Random(26)
    files = contents(filled)
    found = 0
    for number in range(rounds):
        damaged = dict(files)
        for place in range(flips):
            name = ("samples", "index")[(number + place) % 2]
            damaged[name] = flip(rng, damaged[name])
        put(filled, damaged)
        with open_disk(kind, filled) as cache:
            missed = loaded(cache, kind)
            assert len(missed) <= 2 * flips
            assert cache.stats().damaged <= len(missed)
            assert loaded(cache, kind) == []
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == []
        found += len(missed)
    assert found > rounds // 2


def test_samples_are_damaged_while_they_are_in_use(kind, filled, warnings):
    files = contents(filled)
    with open_disk(kind, filled) as cache:
        assert loaded(cache, kind) == []
        put(filled, {"samples": files["samples"][: len(files["samples"]) // 2]})
        missed = loaded(cache, kind)
        assert 0 < len(missed) < COUNT
        assert cache.stats().damaged == len(missed)
        assert loaded(cache, kind) == []
    assert contents(filled) == files
    assert ["has lost samples" in warning for warning in warnings()] == [True]


@pytest.mark.quick
def test_batches_have_no_row_that_is_damaged(filled):
    with open_disk("rows", filled) as cache:
        with open(filled / "samples", "r+b") as file:
            file.seek(int(entries(filled)[5][0]) + 100)
            file.write(b"\xff\xfe")
        items = [torch.zeros(8, 6001, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)]
        there = cache.fill(np.arange(8), np.arange(8), items).tolist()
        assert there == [0, 1, 2, 3, 4, 6, 7]
        assert all(torch.equal(items[0][idx], row(idx)[0]) and items[1][idx] == idx for idx in there)
        assert loaded(cache, "rows") == [5]


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_cut_what_is_not_there_is_loaded_and_written_again(kind, seed, tmp_path):
    rng = random.Random(seed)
    count, limit = 150, "1GB"
    if kind == "rows":  # no more room than the samples need
        limit = f"{index_bytes(count) + BEGIN + count * SamplesFile.room(Rows(Structure.of(row(0))).nbytes)}B"
    for _ in range(3):
        before = contents(tmp_path) if (tmp_path / "index").exists() else {}
        with open_disk(kind, tmp_path, count, limit) as cache:
            loaded(cache, kind, rng.sample(range(count), 40))
            if rng.random() < 0.5:
                before = contents(tmp_path)
            loaded(cache, kind, rng.sample(range(count), 40))
        put(tmp_path, after_power_cut(rng, before, contents(tmp_path)))
        with open_disk(kind, tmp_path, count, limit) as cache:
            loaded(cache, kind, rng.sample(range(count), 60))
    with open_disk(kind, tmp_path, count, limit) as cache:
        loaded(cache, kind)
        assert loaded(cache, kind) == []
    with open_disk(kind, tmp_path, count, limit) as cache:
        assert loaded(cache, kind) == []


def test_files_of_zeros_or_of_another_folder_hold_nothing(kind, filled, tmp_path):
    with open_disk(kind, tmp_path / "other", fingerprint="2") as cache:
        loaded(cache, kind)
    zeros = [{"samples": bytes(len(contents(filled)["samples"]))}, {"index": bytes(16 * COUNT)}, {"samples": b""}]
    for files in (*zeros, contents(tmp_path / "other")):
        put(filled, files)
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind) == list(range(COUNT))


WILD = [0, 1, 8, BEGIN - 8, BEGIN, BEGIN + 1, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]


def test_an_index_with_wild_numbers_is_a_miss_and_takes_no_memory(kind, filled):
    for number, at in enumerate(WILD):
        for nbytes in (WILD[number - 1], WILD[-number], 8):
            enter(filled, 7, at, nbytes)
            with open_disk(kind, filled) as cache:
                assert loaded(cache, kind, [7]) == [7]
                assert len(loaded(cache, kind)) <= 1  # of another one, the room may be taken
                assert loaded(cache, kind) == []
    os.truncate(filled / "samples", 1 << 42)
    for nbytes in (1 << 31, 1 << 36, 1 << 41):
        enter(filled, 7, 1 << 30, nbytes)
        with open_disk(kind, filled) as cache:
            tracemalloc.start()
            assert loaded(cache, kind, [7]) == [7]
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
            tracemalloc.stop()


@pytest.mark.quick
def test_entries_that_were_cut_or_have_the_place_of_another_harm_no_sample(kind, filled):
    files = contents(filled)
    enter(filled, 7, *map(int, entries(filled)[8]))
    for _ in range(2):
        with open_disk(kind, filled) as cache:
            missed = loaded(cache, kind)
            assert set(missed) <= {7, 8}
            assert loaded(cache, kind) == []
    assert missed == []
    put(filled, files)
    enter(filled, 50, *map(int, entries(filled)[7]))
    put(filled, {"index": (filled / "index").read_bytes()[: 16 * 50 + 9]})
    for missing in ([55, 56, 57, 58, 59], []):
        with open_disk(kind, filled) as cache:
            assert loaded(cache, kind, range(40)) == []
            assert loaded(cache, kind, range(55, 60)) == missing


def forge(folder, idx, at, data):
    """Write bytes as those of a sample, under the right checksum."""
    key = int(json.loads((folder / "cache.json").read_text())["key"], 16)
    data += bytes(-len(data) & 7)
    digest = xxhash.xxh3_64_intdigest(data, key + idx & (1 << 64) - 1)
    with open(folder / "samples", "r+b") as file:
        file.seek(at)
        file.write(data + digest.to_bytes(8, "little"))


class Named:
    """A class that only pickle can make."""

    def __reduce__(self):
        return Path("/tmp/no such path/made").mkdir, ()


@pytest.mark.quick
def test_a_forged_record_runs_no_code_and_raises_nothing(tmp_path):
    rng = random.Random(28)
    with open_disk("records", tmp_path) as cache:
        loaded(cache, "records")
        data = (tmp_path / "samples").read_bytes()
        for number in range(400):
            idx = rng.choice([3, 5, 11])
            at, nbytes = map(int, entries(tmp_path)[idx])
            forged = bytearray(data[at : at + nbytes])
            for _ in range(rng.choice([1, 1, 4])):
                place = -1 - rng.randrange(min(150, nbytes)) if number % 3 else rng.randrange(nbytes)  # mostly in its treedef
                forged[place] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            forge(tmp_path, idx, at, bytes(forged))
            if cache.get_slot(idx) is None:
                cache.set_slot(idx, record(idx))
        put(tmp_path, {"samples": data})
        assert loaded(cache, "records") == []
    data = b"".join(bytes(part) for part in Records(True, None).encode({"made": Named()}, "sample"))
    enter(tmp_path, 7, 1 << 20, len(data))
    forge(tmp_path, 7, 1 << 20, data)
    with open_disk("records", tmp_path) as cache:
        assert loaded(cache, "records") == [7]
