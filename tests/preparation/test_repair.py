"""Preparation notices what has changed in the source, and repairs what is damaged in the folder."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from stocache import DataPreparer, OnDiskBlockDataStorage, prepare
from stocache.errors import DamagedError, StorageError
from stocache.preparation.sources import open_source
from stocache.storage.inspection import find_damage

ROWS, BLOCK = 100, 10


def write_table(path, factor=2, rows=ROWS):
    path.write_text("a,b\n" + "".join(f"{row},{row * factor:06}\n" for row in range(rows)))
    return path


def contents(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def written_since(folder, times):
    return {name for name in contents(folder) if os.stat(Path(folder) / name).st_mtime_ns != times.get(name)}


def times_of(folder):
    return {name: os.stat(Path(folder) / name).st_mtime_ns for name in contents(folder)}


def prepare_quietly(source, folder, **options):
    return prepare(source, folder, block_size=BLOCK, progress=False, **options)


class Numbers(DataPreparer):
    def prepare_data(self):
        yield from (torch.full((20,), row) for row in range(ROWS))

    def get_dataset_info(self):
        return {"torch": torch.ones(3)}  # not JSON: it has a file of its own


def dataset():
    return TensorDataset(torch.arange(ROWS * 20).view(ROWS, 20))


MAKERS = {"dataset": dataset, "preparer": Numbers, "table": None}
OPTIONS = {"in order": {}, "shuffled": {"shuffle_seed": 3}, "workers": {"num_workers": 2}}


def flip_byte(path, at=-9):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


DAMAGE = {
    "value": lambda path: flip_byte(path),
    "header": lambda path: flip_byte(path, 20),
    "length of the header": lambda path: flip_byte(path, 3),
    "cut": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}


@pytest.fixture
def make(tmp_path):
    table = write_table(tmp_path / "table.csv")

    def source(kind):
        return open_source(table) if kind == "table" else MAKERS[kind]()

    return source


# ---------------------------------------------------------------------------------------------------- the source has changed


def test_an_edited_table_with_as_many_rows_is_not_prepared_already(tmp_path):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    prepare_quietly(open_source(table), folder).close()
    write_table(table, factor=3)  # as many bytes: only the values differ
    os.utime(table, ns=(1, 1))
    with pytest.raises(StorageError) as raised:
        prepare_quietly(open_source(table), folder)
    first, second = str(raised.value).split("\n")
    assert "last change of the source" in first
    assert "{" not in first
    assert "--again" in second
    assert "fingerprint" in second
    with prepare_quietly(open_source(table), folder, again=True) as storage:
        assert storage.load_sample(7) == {"a": 7, "b": "000021"}
    with prepare_quietly(open_source(table), folder) as storage:  # and now it is
        assert storage.load_sample(7) == {"a": 7, "b": "000021"}


def test_a_file_that_was_touched_is_the_same_by_its_contents_or_by_a_fingerprint(tmp_path):
    table = write_table(tmp_path / "table.csv")
    for number, (options, given) in enumerate([({"hashes": True}, {}), ({}, {"fingerprint": "v1"})]):
        folder = tmp_path / f"out{number}"
        prepare_quietly(open_source(table, **options), folder, **given).close()
        before = contents(folder)
        os.utime(table, ns=(number, number))
        prepare_quietly(open_source(table, **options), folder, **given).close()
        assert contents(folder) == before


def test_contents_that_changed_without_a_trace_are_found_by_their_hash(tmp_path):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    os.utime(table, ns=(5, 5))
    prepare_quietly(open_source(table, hashes=True), folder).close()
    write_table(table, factor=3)
    os.utime(table, ns=(5, 5))
    with pytest.raises(StorageError, match="files of the source have changed"):
        prepare_quietly(open_source(table, hashes=True), folder)


@pytest.mark.parametrize("change", ["another image", "one less", "edited"])
def test_a_changed_folder_of_images_is_noticed(tmp_path, change):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        (images / f"{number}.jpg").write_bytes(bytes([number + 1]) * 9)
    prepare_quietly(open_source(images), tmp_path / "out").close()
    if change == "another image":
        (images / "3.jpg").write_bytes(b"9")
    elif change == "one less":
        (images / "1.jpg").unlink()
    else:
        (images / "1.jpg").write_bytes(b"edited")
    with pytest.raises(StorageError, match=r"of the source|have changed"):
        prepare_quietly(open_source(images), tmp_path / "out")


def test_an_interrupted_preparation_of_another_source_starts_again(tmp_path, monkeypatch):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("stocache.storage.manifest.BlockFolderWriter.finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(open_source(table), folder)
    write_table(table, factor=3)
    os.utime(table, ns=(1, 1))
    with prepare_quietly(open_source(table), folder) as storage:
        assert [storage.load_sample(row)["b"] for row in (0, 99)] == ["000000", "000297"]


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_a_source_that_changes_while_it_is_prepared_is_told(tmp_path, change):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    source = open_source(table)
    opened = source[0]  # it has the file open
    describe, calls = source.describe_files, []

    def describe_later():
        calls.append(None)
        if len(calls) == 2:
            table.write_text("edited") if change == "edited" else table.unlink()
        return describe()

    source.describe_files = describe_later
    with pytest.raises(StorageError, match=r"changed while|cannot be read"):
        prepare_quietly(source, folder)
    assert opened == {"a": 0, "b": "000000"}
    assert not (folder / "index.json").exists()


def test_a_folder_of_an_earlier_version_without_facts_about_files_is_prepared_already(tmp_path, monkeypatch):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("stocache.preparation.prepare._files_of", lambda source: None)
        prepare_quietly(open_source(table), folder).close()
    before = contents(folder)
    prepare_quietly(open_source(table), folder).close()
    assert contents(folder) == before


# ---------------------------------------------------------------------------------------------------- repairing


@pytest.mark.parametrize("damage", DAMAGE)
def test_exactly_the_damaged_blocks_are_written_anew(tmp_path, damage):
    folder = tmp_path / "out"
    prepare_quietly(dataset(), folder).close()
    before = contents(folder)
    for number in (2, 7):
        DAMAGE[damage](folder / "blocks" / f"{number:06}.safetensors")
    with OnDiskBlockDataStorage(folder) as storage:
        problems = find_damage(storage, 0)
        assert len(problems) == 2
        assert not any("stocache check" in problem or "codec" in problem for problem in problems)
        with pytest.raises(DamagedError, match="stocache prepare SRC DIR --repair"):
            [storage.load_sample(row) for row in range(20, 30)]
    times = times_of(folder)
    prepare_quietly(dataset(), folder, repair=True).close()
    assert contents(folder) == before
    assert written_since(folder, times) == {"blocks/000002.safetensors", "blocks/000007.safetensors"}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_source_repairs_its_folder(make, tmp_path, kind, options):
    folder = tmp_path / "out"
    prepare_quietly(make(kind), folder, **OPTIONS[options]).close()
    before = contents(folder)
    flip_byte(folder / "blocks" / "000004.safetensors")
    times = times_of(folder)
    prepare_quietly(make(kind), folder, repair=True, **OPTIONS[options]).close()
    assert contents(folder) == before
    assert written_since(folder, times) == {"blocks/000004.safetensors"}


@pytest.mark.parametrize("damage", ["value", "cut", "empty", "info"])
def test_a_damaged_index_or_info_is_written_anew_with_the_damaged_blocks(tmp_path, damage):
    folder = tmp_path / "out"
    prepare_quietly(Numbers(), folder).close()
    before = contents(folder)
    DAMAGE["value" if damage == "info" else damage](folder / ("info.safetensors" if damage == "info" else "index.json"))
    flip_byte(folder / "blocks" / "000001.safetensors")
    prepare_quietly(Numbers(), folder, repair=True).close()
    assert contents(folder) == before


def test_a_folder_that_is_whole_stays_as_it_is(tmp_path):
    folder = tmp_path / "out"
    prepare_quietly(dataset(), folder).close()
    times = times_of(folder)
    prepare_quietly(dataset(), folder, repair=True).close()
    assert not written_since(folder, times)


def test_a_source_with_other_samples_does_not_repair(tmp_path):
    folder = tmp_path / "out"
    prepare_quietly(dataset(), folder).close()
    flip_byte(folder / "blocks" / "000003.safetensors")
    before = contents(folder)
    with pytest.raises(StorageError, match="gives other samples now"):
        prepare_quietly(TensorDataset(torch.ones(ROWS, 20, dtype=torch.int64)), folder, repair=True)
    assert contents(folder) == before


def test_a_source_with_other_samples_does_not_repair_a_damaged_index(tmp_path):
    folder = tmp_path / "out"
    prepare_quietly(dataset(), folder).close()
    flip_byte(folder / "index.json")
    before = contents(folder / "blocks")
    with pytest.raises(StorageError, match=r"cannot be repaired: the source gives other samples now\. Prepare the folder anew"):
        prepare_quietly(TensorDataset(torch.ones(ROWS, 20, dtype=torch.int64)), folder, repair=True)
    assert contents(folder / "blocks") == before
    prepare_quietly(dataset(), folder).close()
    prepare_quietly(dataset(), tmp_path / "whole").close()
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS - BLOCK, 1])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("damaged", [range(10), [9]])
def test_a_preparer_that_yields_fewer_samples_does_not_repair(tmp_path, rows, seed, damaged):
    class Fewer(Numbers):
        def prepare_data(self):
            yield from itertools.islice(super().prepare_data(), rows)

    folder = tmp_path / "out"
    prepare_quietly(Numbers(), folder, shuffle_seed=seed, fingerprint="same").close()
    for number in damaged:
        (folder / "blocks" / f"{number:06}.safetensors").unlink()
    Fewer.__name__ = "Numbers"
    with pytest.raises(StorageError, match=r"cannot be repaired: the source gives other samples now\. Prepare the folder anew"):
        prepare_quietly(Fewer(), folder, shuffle_seed=seed, fingerprint="same", repair=True)
    assert (folder / "index.json").exists()


def test_a_damaged_info_does_not_hide_that_the_source_has_changed(tmp_path):
    table, folder = write_table(tmp_path / "table.csv"), tmp_path / "out"
    prepare_quietly(open_source(table), folder, info=torch.ones(3)).close()
    flip_byte(folder / "info.safetensors")
    write_table(table, factor=3)
    os.utime(table, ns=(1, 1))
    before = contents(folder)
    with pytest.raises(StorageError, match="is prepared in another way: last change of the source"):
        prepare_quietly(open_source(table), folder, info=torch.ones(3), repair=True)
    assert contents(folder) == before


def test_what_was_never_prepared_cannot_be_repaired(tmp_path):
    with pytest.raises(StorageError, match="nothing to repair"):
        prepare_quietly(dataset(), tmp_path / "out", repair=True)


def test_a_repair_that_is_killed_leaves_a_folder_that_can_be_repaired(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    prepare_quietly(Numbers(), folder).close()
    before = contents(folder)
    for name in ("index.json", "blocks/000001.safetensors", "blocks/000005.safetensors"):
        flip_byte(folder / name)
    with monkeypatch.context() as patched:
        patched.setattr("stocache.preparation.prepare.BlockFolderWriter.write_encoded", lambda *arguments: 1 / 0)
        patched.setattr("stocache.preparation.prepare.BlockFolderWriter.write_block", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Numbers(), folder, repair=True)
    prepare_quietly(Numbers(), folder).close()
    assert contents(folder) == before


# ---------------------------------------------------------------------------------------------------- odd files


def test_links_in_a_circle_and_names_that_are_not_utf8(tmp_path):
    images = tmp_path / "images"
    (images / "cats").mkdir(parents=True)
    (images / "cats" / "1.jpg").write_bytes(b"1")
    with open(os.fsencode(images / "cats") + b"/caf\xe9.jpg", "wb") as file:
        file.write(b"2")
    (images / "cats" / "again").symlink_to(images, target_is_directory=True)
    with prepare_quietly(open_source(images), tmp_path / "out") as storage:
        samples = [storage.load_sample(row) for row in range(len(storage))]
    assert {sample["name"] for sample in samples} == {"cats/1.jpg", "cats/caf\\xe9.jpg"}
