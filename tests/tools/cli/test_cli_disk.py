"""The commands over the folders of disk caches: ls, stat, rm, check and doctor."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from stocache import DiskCache
from stocache.cache.disk import folder as folder_module
from stocache.cache.disk.samples_file import DATA_OFFSET, room_of
from stocache.samples.spec import Structure
from stocache.shm import registry
from stocache.system.limits import format_size
from stocache.system.platform import here
from stocache.tools.cli import doctor, listing
from tests.support.records import leave_behind

N, DIMS, LIMIT = 20, (3, 5), "1MB"
FILLED = 12
ROOM = room_of(15)


def sample(idx):
    return torch.full(DIMS, idx, dtype=torch.uint8)


def open_cache(path, **options):
    structure = Structure.from_dims(DIMS, torch.uint8)
    return DiskCache(path, LIMIT, N, **{"structure": structure, "placement": "prefix", "fingerprint": "v1"} | options)


def fill(cache):
    for idx in range(FILLED):
        cache.set_slot(idx, sample(idx))
    return cache


def flip(path, *places):
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    """A folder of `FILLED` samples, which is not in use."""
    with open_cache(tmp_path / "photos") as cache:
        fill(cache)
    return tmp_path / "photos"


@pytest.fixture
def live(tmp_path):
    """A cache of `FILLED` samples that is in use, after as many hits and 4 misses."""
    with open_cache(tmp_path / "photos") as cache:
        fill(cache)
        for idx in range(FILLED + 4):
            cache.get_slot(idx)
        yield cache


@pytest.mark.linux
def test_what_a_killed_process_left_in_shared_memory_is_dead_and_can_be_removed(run, tmp_path):
    leave_behind(lambda: fill(open_cache(tmp_path / "photos")))
    (found,) = listing.find()
    assert (found.state, found.name, found.stats.filled) == ("dead", str(tmp_path / "photos"), FILLED)
    whats = [finding.what for finding in doctor.examine()]
    assert any(f"states of the samples in {tmp_path / 'photos'} (" in what for what in whats)
    assert run("rm", "--dead").exit_code == 0
    assert not Path(registry.directory_of()).exists()
    assert f"{FILLED} of {N} are there" in run("stat", tmp_path / "photos").stdout


def rows(result):
    assert result.exit_code == 0, result.output
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in result.stdout.splitlines())


def files_of(folder):
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}


@pytest.mark.linux
def test_stat_shows_a_folder_that_is_not_in_use_and_changes_nothing(run, folder):
    before = files_of(folder)
    assert run("ls").stdout == "no named caches\n"
    found = rows(run("stat", f"{folder}/"))
    facts = json.loads(run("stat", folder, "--json").stdout)
    assert files_of(folder) == before
    assert (found["folder"], found["samples"]) == (str(folder), "12 of 20 are there")
    assert (found["structure"], found["fingerprint"]) == ("uint8[3, 5]", "v1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d, \d+ (s|min) ago", found["created"])
    assert re.fullmatch(r"\d+\.0 KiB on the disk", found["size"])
    assert ("hits" in found, found["in use by"]) == (False, "nobody that is visible from here")
    assert (facts["in_use"], facts["holders"], facts["limit_bytes"], facts["stats"]) == (False, [], None, None)
    with open(folder / "lock", "r+") as lock:  # held by a process before it has shared memory
        here.lock_file(lock.fileno())
        assert rows(run("stat", folder))["in use by"].startswith(f"{os.getpid()} ")


@pytest.mark.linux
def test_ls_and_stat_show_who_uses_a_folder_and_what_they_found(run, live):
    (found,) = listing.find()
    assert (found.kind, found.folder, found.stats) == ("disk", live.disk, live.stats())
    *_, row = run("ls").stdout.splitlines()
    assert re.match(rf"{re.escape(live.disk)} +{format_size(FILLED * ROOM)} +60% +75\.0% +live +{os.getpid()} ", row)
    (facts,) = json.loads(run("ls", "--json").stdout)
    assert (facts["kind"], facts["limit_bytes"], facts["stats"]["reserved_bytes"]) == ("disk", 10**6, FILLED * ROOM)
    found, facts = rows(run("stat", live.disk)), json.loads(run("stat", live.disk, "--json").stdout)
    assert found["in use by"].startswith(f"{os.getpid()} ")
    assert found["size"].endswith(f", limit {format_size(10**6)}")
    assert (found["hits"], found["misses"], found["damaged"]) == ("12, rate 75.0%", "4", "0 found by reading")
    assert (facts["filled"], facts["in_use"], facts["stats"]["hits"]) == (FILLED, True, FILLED)
    flip(Path(live.disk, "samples"), DATA_OFFSET + 3)
    assert live.get_slot(0) is None
    assert rows(run("stat", live.disk))["damaged"] == "1 found by reading"


DAMAGED = [
    ("cache.json", b"", "is damaged: it has no checksum"),
    ("cache.json", b'{"checksum": "\x1b[31m\x1b[31m\x1b[31m\x1b["}', r"is damaged: its checksum is \x1b[31m"),
    ("cache.json", "nothing", "is missing: the cache is being made, or its making was interrupted."),
    *((name, "nothing", "") for name in ("index", "samples", "lock")),
    *((name, instead, "") for name in ("cache.json", "index", "samples", "lock") for instead in ("link", "pipe")),
]


@pytest.mark.linux
@pytest.mark.parametrize(("name", "content", "problem"), DAMAGED)
def test_damage_is_one_line_with_the_remedy_and_links_are_not_followed(run, tmp_path, folder, name, content, problem):
    (tmp_path / "precious").write_text("x")
    (folder / name).unlink()
    if content == "link":
        (folder / name).symlink_to(tmp_path / "precious")
    elif content == "pipe":
        os.mkfifo(folder / name)
    elif content != "nothing":
        (folder / name).write_bytes(content)
    for command in ("stat", "check", "rm"):
        result = run(command, folder)
        if (name == "lock" and command != "rm") or (command == "rm" and name in ("index", "samples")):
            continue  # it does without
        assert (result.exit_code, result.output.count("\n"), "\x1b" in result.output) == (1, 1, False)
        assert result.output.startswith(f"{folder}/{name} {problem}")
        assert result.output.endswith(f": stocache rm --force {folder}\n") or not problem
    if folder.exists():
        assert run("rm", "--force", folder).exit_code == 0
    assert not folder.exists()
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("workers", [0, 3])
def test_check_reads_all_samples_and_changes_nothing(run, folder, workers):
    result = run("check", folder, "--workers", workers)
    assert (result.exit_code, result.stdout) == (0, "12 of 20 samples are there, no damage\n")
    assert "12/12" in result.stderr
    flip(folder / "samples", *(DATA_OFFSET + idx * ROOM + 5 for idx in (2, 7)), DATA_OFFSET + 11 * ROOM + ROOM - 1)
    changed = files_of(folder)
    result = run("check", folder, "--workers", workers)
    assert (result.exit_code, result.stdout) == (1, "12 of 20 samples are there: 9 sound, 3 damaged: 2, 7, 11\n")
    assert "is loaded again when it is requested" in result.stderr
    assert files_of(folder) == changed
    with open_cache(folder) as cache:  # which loads them again
        for idx in range(FILLED):
            cache.get_or_load(idx, sample)
        assert run("check", folder).stdout == "12 of 20 samples are there, no damage\n"


@pytest.mark.linux
def test_rm_spares_a_folder_in_use_and_by_force_leaves_it_to_the_processes_that_use_it(run, live):
    result = run("rm", live.disk)
    assert result.exit_code == 1
    assert f"{live.disk} is in use by process {os.getpid()} (" in result.output
    assert result.output.endswith(f"To remove it anyway: stocache rm --force {live.disk}\n")
    assert sorted(os.listdir(live.disk)) == ["cache.json", "index", "lock", "samples"]
    assert run("rm", "--force", live.disk).exit_code == 0
    assert not os.path.exists(live.disk)
    with open_cache(live.disk) as other:
        assert other.get_slot(3) is None
        other.set_slot(3, sample(4))
        assert torch.equal(live.get_slot(3), sample(3))


def test_rm_removes_a_folder_that_is_not_in_use_and_neither_links_nor_folders_of_others(run, folder, monkeypatch):
    link = folder.parent / "link"
    link.symlink_to(folder)
    for arguments in ((link,), (f"{link}/",), ("--force", link)):
        result = run("rm", *arguments)
        assert (result.exit_code, result.output) == (1, f"{link} is a symbolic link. Give the folder itself.\n")
    assert rows(run("stat", link))["samples"] == "12 of 20 are there"
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        assert "To remove it anyway: stocache rm --force" in run("rm", folder).output
    monkeypatch.chdir(folder.parent)
    result = run("rm", "photos/")
    assert (result.exit_code, result.output, folder.exists()) == (0, "removed photos/\n", False)


def test_doctor_says_that_a_disk_is_no_local_one_or_has_no_room_or_a_path_cannot_be_used(run, tmp_path, monkeypatch):
    path = tmp_path / "a" / "b"
    result = run("doctor", "--disk", path, "--disk-limit", "9000TB")
    room = rf"the disk cache {re.escape(str(path))} has room for [\d.]+ .iB, its limit is 8381903.2 GiB\."
    remedy = r"\n    do: remove other files from that disk, or lower disk_limit to "
    assert re.search(rf"^problem: {room}{remedy}", result.stdout, re.M)
    assert " room for " not in run("doctor", "--disk", path, "--disk-limit", "1KB").stdout
    monkeypatch.setattr(folder_module, "filesystem_of", lambda fd: "nfs4")
    assert f"the disk cache {path} is on a network file system (nfs4)" in run("doctor", "--disk", path).stdout
    (tmp_path / "file").write_text("x")
    problem = f"{tmp_path / 'file'} is not the folder of a disk cache: Not a directory."
    assert f"problem: {problem}\n" in run("doctor", "--disk", tmp_path / "file").stdout
