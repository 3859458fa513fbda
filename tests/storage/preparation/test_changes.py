"""Preparation notices what has changed in the source, and a damaged folder is prepared again."""

import itertools
import os
import re
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from stocache import OnDiskBlockDataStorage
from stocache.errors import DamagedError, StorageError
from stocache.storage.inspection import find_damage
from stocache.storage.manifest import block_name
from stocache.storage.preparation.sources import open_source
from tests.support.equality import same
from tests.support.preparing import Preparer, damage, prepare_quietly, prepared

ROWS, BLOCK = 100, 10


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table.npy")


def write_table(path, factor=2, time=5 * 10**9):
    np.save(path, np.arange(ROWS) * factor)
    os.utime(path, ns=(time, time))
    return path


def dataset():
    return TensorDataset(torch.arange(ROWS * 20).view(ROWS, 20))


def test_an_edited_table_with_as_many_rows_is_not_prepared_already(table, tmp_path):
    folder = tmp_path / "out"
    prepare_quietly(open_source(table), folder).close()
    write_table(table, factor=3, time=1)  # as many bytes: only the values differ
    with pytest.raises(StorageError, match=r"last change of the source[^{]*\n.*--again.*fingerprint"):
        prepare_quietly(open_source(table), folder)
    for options in ({"again": True}, {}):  # and then it is
        with prepare_quietly(open_source(table), folder, **options) as storage:
            assert storage.load_sample(7) == 21


@pytest.mark.parametrize(("options", "given"), [({"hashes": True}, {}), ({}, {"fingerprint": "v1"})])
def test_a_file_that_was_touched_is_the_same_by_its_contents_or_by_a_fingerprint(table, tmp_path, options, given):
    before = prepared(open_source(table, **options), tmp_path / "out", **given)
    os.utime(table, ns=(1, 1))
    assert prepared(open_source(table, **options), tmp_path / "out", **given) == before
    write_table(table, factor=3, time=1)
    if options:
        with pytest.raises(StorageError, match="files of the source have changed"):
            prepare_quietly(open_source(table, **options), tmp_path / "out")


def test_each_change_of_a_folder_of_images_is_one_of_its_files(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"1")
    facts = [open_source(tmp_path).describe_files()]
    for name, data in (("2.jpg", b"9"), ("2.jpg", b"8 edited"), ("1.jpg", None)):
        (tmp_path / name).write_bytes(data) if data else (tmp_path / name).unlink()
        facts.append(open_source(tmp_path).describe_files())
    assert all(one != other for one, other in itertools.combinations(facts, 2))


@pytest.mark.parametrize("change", [lambda table: table.write_text("edited"), lambda table: table.unlink()])
def test_a_source_that_changes_while_it_is_prepared_is_an_error(table, tmp_path, monkeypatch, change):
    source = open_source(table)
    assert source[0] == 0  # it has the file open
    describe, later = source.describe_files, [lambda: None, lambda: change(table)]
    monkeypatch.setattr(source, "describe_files", lambda: (later.pop(0)(), describe())[1])
    with pytest.raises(StorageError, match=r"changed while|cannot be read"):
        prepare_quietly(source, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def rewrite(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flip(at):
    return lambda path: damage(path.parent, path.name, at=at)


def cut(length):
    return lambda path: os.truncate(path, length)


DAMAGE = [  # what is done to a block, and what is said about it
    (flip(-9), r"is damaged \(sample"), (flip(20), r"is damaged \(its header is not one of a block"),
    (rewrite(lambda data: b"\0" * 7 + b"\x10" + data[8:]), r"is damaged \(its header claims 115292150460"),
    (cut(100), r"is damaged \(its header claims .* the file has 100"), (cut(0), r"is damaged \(it is truncated"),
    (rewrite(lambda data: data.replace(b'\\"version\\": 2', b'\\"version\\": 9')), ": it has version 9"),
    (lambda path: shutil.copy(path.with_name("000009.safetensors"), path), "is not the block in the index"),
    (os.unlink, "is missing"),
]  # fmt: skip


def test_damaged_blocks_are_named_the_others_are_read_and_the_folder_is_prepared_again(tmp_path):
    before = prepared(dataset(), tmp_path, block_size=BLOCK)
    for number, (spoil, _) in enumerate(DAMAGE):
        spoil(tmp_path / block_name(number))
    with OnDiskBlockDataStorage(tmp_path) as storage:
        problems = find_damage(storage, 0)
        assert not any("stocache check" in problem or "codec" in problem for problem in problems)
        for number, ((_, message), problem) in enumerate(zip(DAMAGE, problems, strict=True)):
            assert re.search(f"{block_name(number)}.*{message}", problem)
            remedy = "Update stocache" if "version" in message else r"lists all damage\. Prepare the folder again: .* --again'"
            with pytest.raises(StorageError, match=f"{block_name(number)}.*{message}.*{remedy}"):
                storage.load_block(number)
        for row in range(len(DAMAGE) * BLOCK, ROWS):
            assert same(storage.load_sample(row), dataset()[row])
    assert prepared(dataset(), tmp_path, block_size=BLOCK, again=True) == before


def test_a_damaged_index_is_an_error_and_the_folder_is_prepared_again(tmp_path):
    before = prepared(Preparer(), tmp_path)
    damage(tmp_path, "index.json")
    with pytest.raises(DamagedError, match=r"index\.json is damaged.* Prepare the folder again: .*again=True"):
        prepare_quietly(Preparer(), tmp_path)
    assert prepared(Preparer(), tmp_path, again=True) == before
