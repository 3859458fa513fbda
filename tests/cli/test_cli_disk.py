"""The commands over the folders of disk caches: ls, stat, rm, check, top and doctor."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from stocache import DiskCache, prepare
from stocache.cli import doctor, listing, top
from stocache.disk import inspection
from stocache.disk.samples_file import BEGIN, SamplesFile
from stocache.samples.spec import Structure
from stocache.shm import registry
from stocache.system.hashing import ZEROS, embed_checksum
from stocache.system.limits import format_size
from tests.support.terminals import in_terminal, shown

N, DIMS, LIMIT = 20, (3, 5), "1MB"
FILLED = 12
ROOM = SamplesFile.room(15)
LONG = "imagenet-train-256-px-augmented-by-the-team-of-the-second-flo"  # 60 letters and one
ODD = os.fsdecode(b"caf\xe9 \x1b[31m\n")


def sample(idx):
    return torch.full(DIMS, idx, dtype=torch.uint8)


def open_cache(path, **options):
    structure = Structure.from_dims(DIMS, torch.uint8)
    return DiskCache(path, LIMIT, N, **{"structure": structure, "placement": "prefix", "fingerprint": "v1"} | options)


def make(path, **options):
    """Make a folder of `FILLED` samples, which is not in use."""
    with open_cache(path, **options) as cache:
        fill(cache)
    return Path(path)


def fill(cache):
    for idx in range(FILLED):
        cache.set_slot(idx, sample(idx))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def content(path):
    """All that a look must not change."""
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in Path(path).iterdir()}


def no_segments():
    """Whether nothing is left in shared memory."""
    return not Path(registry.directory_of()).exists()


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "photos")


@pytest.fixture
def live(tmp_path):
    with open_cache(tmp_path / "photos") as cache:
        fill(cache)
        for idx in range(FILLED + 4):
            cache.get_slot(idx)
        yield cache


# ---------------------------------------------------------------------------------------------------- ls and top


def test_find_describes_a_disk_cache_in_use(live):
    (found,) = listing.find()
    assert (found.kind, found.name, found.folder, found.state) == ("disk", live.disk, live.disk, "live")
    assert found.stats == live.stats()
    assert (found.stats.filled, found.stats.hits, found.stats.misses) == (FILLED, FILLED, 4)
    assert (found.limit_bytes, found.size_bytes) == (10**6, FILLED * ROOM)
    assert [holder.pid for holder in found.holders] == [os.getpid()]


def test_ls_shows_the_folder(run, live):
    heading, _, row = run("ls").stdout.splitlines()
    assert re.split(r" {2,}", heading.strip()) == [
        "name", "kind", "size", "limit", "filled", "samples", "hit rate", "state", "keep", "age", "held by",
    ]  # fmt: skip
    shown = re.escape(live.disk)
    size, limit = format_size(FILLED * ROOM), format_size(10**6)
    assert re.search(rf"^{shown} +disk +{size} +{limit} +60% +12 of 20 +75\.0% +live +yes +\d+ s +{os.getpid()} ", row)


def test_ls_as_json_names_kind_folder_and_limit(run, live):
    (found,) = json.loads(run("ls", "--json").stdout)
    assert [found[key] for key in ("kind", "name", "folder", "limit_bytes", "state")] == [
        "disk", live.disk, live.disk, 10**6, "live",
    ]  # fmt: skip
    assert found["stats"]["reserved_bytes"] == FILLED * ROOM


def test_a_folder_that_is_not_in_use_is_not_listed(run, folder):
    assert run("ls").stdout == "no named caches\n"


def test_what_a_killed_process_left_in_shared_memory_is_dead_and_can_be_removed(run, tmp_path):
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            cache = open_cache(tmp_path / "photos")
            fill(cache)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    os.waitpid(pid, 0)
    (found,) = listing.find()
    assert (found.state, found.name, found.stats.filled) == ("dead", str(tmp_path / "photos"), FILLED)
    whats = [finding.what for finding in doctor.examine()]
    assert any(f"states of the samples in {tmp_path / 'photos'} (" in what for what in whats)
    assert run("rm", "--dead").exit_code == 0
    assert no_segments()
    assert f"{FILLED} of {N} are there" in run("stat", tmp_path / "photos").stdout


@pytest.mark.parametrize(
    ("width", "ls", "live_table"),
    [
        (50, {"name", "size", "filled", "state"}, {"name", "full", "hit rate", "hits/s", "state"}),
        (
            80,
            {"name", "kind", "size", "filled", "hit rate", "state", "held by"},
            {"name", "size", "limit", "full", "hit rate", "hits/s", "processes", "state"},
        ),
        (
            200,
            {"name", "kind", "size", "limit", "filled", "samples", "hit rate", "state", "keep", "age", "held by"},
            {"name", "kind", "size", "limit", "samples", "bar", "full", "hit rate", "hits/s", "misses", "processes", "state"},
        ),
    ],
)
def test_tables_fit_the_terminal(tmp_path, width, ls, live_table):
    with open_cache(tmp_path / LONG) as cache:
        fill(cache)
        (found,) = listing.find()
        caches = [dataclasses.replace(found, stats=dataclasses.replace(found.stats, reserved_bytes=500 * 10**9))]
        views = {"ls": top.table(caches, width), "top": top.live_table(caches, {caches[0].path: 5.0}, width)}
        for name, headings in (("ls", ls), ("top", live_table)):
            lines = shown(views[name], width)
            assert max(map(len, lines)) <= width
            assert set(re.split(r" {2,}", lines[name == "top"].strip())) == headings
            assert re.match(r"/.*….*flo +" if width < 200 else rf"/.*{LONG[-20:]} +", lines[-1]), lines[-1]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_screens_of_a_real_terminal(tmp_path, width):
    with open_cache(tmp_path / LONG) as cache:
        fill(cache)
        for arguments in (["ls"], ["stat", cache.disk], ["rm", cache.disk], ["doctor", "--disk", cache.disk]):
            for line in in_terminal(width, *arguments):
                assert len(line) <= width or cache.disk in line or " " not in line.strip(), (
                    arguments,
                    line,
                )  # a path may be longer
        assert any(re.search("/.*flo", line) for line in in_terminal(width, "top", until=r"flo.* live"))


# ---------------------------------------------------------------------------------------------------- stat


def rows(result):
    assert result.exit_code == 0, result.output
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in result.stdout.splitlines())


def test_stat_shows_a_folder_and_changes_nothing(run, folder):
    before = content(folder)
    found = rows(run("stat", f"{folder}/"))
    assert content(folder) == before
    assert found["folder"] == str(folder)
    assert found["samples"] == "12 of 20 are there"
    assert (found["structure"], found["fingerprint"]) == ("uint8[3, 5]", "v1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d, \d+ s ago", found["created"])
    assert re.fullmatch(r"\d+\.0 KiB on the disk", found["size"])
    assert found["in use by"] == "nobody that is visible from here"
    assert "hits" not in found


def test_stat_shows_who_uses_a_folder_and_what_they_found(run, live):
    found = rows(run("stat", live.disk))
    assert found["in use by"].startswith(f"{os.getpid()} ")
    assert found["size"].endswith(f", limit {format_size(10**6)}")
    assert (found["hits"], found["misses"], found["damaged"]) == ("12, rate 75.0%", "4", "0 found by reading")
    flip(Path(live.disk, "samples"), BEGIN + 3)
    assert live.get_slot(0) is None
    assert rows(run("stat", live.disk))["damaged"] == "1 found by reading"


def test_stat_as_json(run, live):
    found = json.loads(run("stat", live.disk, "--json").stdout)
    assert (found["path"], found["dataset_len"], found["filled"], found["fingerprint"]) == (live.disk, N, FILLED, "v1")
    assert (found["in_use"], found["limit_bytes"], found["stats"]["hits"]) == (True, 10**6, FILLED)
    assert [holder["pid"] for holder in found["holders"]] == [os.getpid()]
    path = live.disk
    live.close()
    found = json.loads(run("stat", path, "--json").stdout)
    assert (found["in_use"], found["holders"], found["limit_bytes"], found["stats"]) == (False, [], None, None)


def test_stat_finds_a_process_that_holds_the_folder_before_it_has_shared_memory(run, folder):
    fd = os.open(folder / "lock", os.O_RDWR)
    inspection.try_flock(fd)
    try:
        assert rows(run("stat", folder))["in use by"].startswith(f"{os.getpid()} ")
    finally:
        os.close(fd)


def test_stat_of_samples_of_any_size_without_a_fingerprint(run, tmp_path):
    with DiskCache(tmp_path / "texts", LIMIT, N) as cache:
        cache.set_slot(3, "three")
    found = rows(run("stat", tmp_path / "texts"))
    assert (found["samples"], found["structure"], found["fingerprint"]) == ("1 of 20 are there", "any size", "none")


@pytest.mark.parametrize("kept", [0, 5, 16, 16 * 5 + 3])
def test_an_index_that_is_too_short_has_fewer_samples(run, folder, kept):
    os.truncate(folder / "index", kept)
    assert rows(run("stat", folder))["samples"] == f"{kept // 16} of {N} are there"
    assert run("check", folder).stdout == f"{kept // 16} of {N} samples are there, no damage\n"


def test_an_index_that_is_too_long_is_read_as_far_as_there_are_samples(run, folder):
    with open(folder / "index", "ab") as file:
        file.truncate(16 * N)
        file.seek(0, os.SEEK_END)
        file.write(b"\1" * 16 * 100)
    os.truncate(folder / "index", 1 << 40)
    assert rows(run("stat", folder))["samples"] == f"{FILLED} of {N} are there"
    assert run("check", folder).stdout == f"{FILLED} of {N} samples are there, no damage\n"


@pytest.mark.parametrize("command", ["stat", "check"])
def test_a_folder_that_is_made_anew_at_this_moment_is_not_mixed_up(run, folder, monkeypatch, command):
    open_file = inspection._open_file

    def make_anew(*arguments):
        monkeypatch.undo()
        with open_cache(folder, fingerprint="v2") as cache:
            cache.set_slot(0, sample(0))
        return open_file(*arguments)

    monkeypatch.setattr(inspection, "_open_file", make_anew)
    result = run(command, folder)
    assert (result.exit_code, result.output) == (1, f"{folder} is being made anew. Look again.\n")
    assert run(command, folder).exit_code == 0


# ---------------------------------------------------------------------------------------------------- names and bad folders


@pytest.mark.parametrize("name", [ODD, LONG])
def test_names_are_shown_without_control_characters(run, tmp_path, name):
    escaped = r"caf\udce9 \x1b[31m\n" if name == ODD else LONG
    with open_cache(tmp_path / name) as cache:
        fill(cache)
        results = [run("ls"), run("stat", cache.disk), run("rm", cache.disk), run("check", cache.disk)]
        assert json.loads(run("ls", "--json").stdout)[0]["folder"] == cache.disk
        assert [result.exit_code for result in results] == [0, 0, 1, 0]
        results += [run("doctor", "--disk", cache.disk, "--disk-limit", "9000TB")]
    results += [run("rm", tmp_path / name)]
    assert not (tmp_path / name).exists()
    for number, result in enumerate(results):
        assert escaped in result.output or number == 3, result.output
        assert "\x1b[31m" not in result.output


def bad_folders(path):
    """Folders and files that are not of a disk cache, by what is said of them."""
    (path / "empty").mkdir()
    (path / "other").mkdir()
    (path / "other" / "notes \x1b[1m").write_text("x")
    (path / "file").write_text("x")
    (path / "inner").mkdir()
    (path / "inner" / "cache.json").mkdir()
    prepare([1, 2, 3], path / "prepared", progress=False)
    return {
        "empty": "it holds no cache.json.",
        "other": r"it holds 'notes \\x1b[1m'.",
        "file": "Not a directory.",
        "inner": "it holds 'cache.json'.",
        "prepared": "it holds 'blocks'.",
        "nothing": "No such file or directory.",
    }


@pytest.mark.parametrize("command", [["stat"], ["stat", "--json"], ["rm"], ["rm", "--force"]])
def test_what_is_not_a_disk_cache_is_named_and_stays(run, tmp_path, command):
    for name, problem in bad_folders(tmp_path).items():
        before = sorted(tmp_path.rglob("*"))
        result = run(*command, tmp_path / name)
        said = f"{tmp_path / name} is not the folder of a disk cache: {problem}\n"
        if (name, command[0]) == ("inner", "stat"):
            said = f"{tmp_path / name}/cache.json cannot be read: Is a directory.\n"
        assert (result.exit_code, result.output) == (1, said)
        assert sorted(tmp_path.rglob("*")) == before


def test_check_of_a_prepared_folder_is_as_ever(run, tmp_path):
    bad_folders(tmp_path)
    assert run("check", tmp_path / "prepared", "--workers", 0).stdout == "1 blocks, 3 samples, no damage\n"
    for name in ("empty", "other", "nothing"):
        assert "index.json is missing: nothing was prepared there" in run("check", tmp_path / name).output


def manifest_of(**changes):
    """A manifest whose checksum is right, with other values."""
    whole = {"version": 1, "key": "0" * 16, "created": 1.0, "fingerprint": None, "identity": {"dataset_len": 5, "samples": "x"}}
    whole["facts"] = {"memory_slots": 0, "example": None}
    return embed_checksum(json.dumps(whole | changes | {"checksum": ZEROS}).encode(), b'"checksum": "')


DAMAGED = {
    "empty": (b"", "it has no checksum"),
    "zeros": (bytes(4096), "it has no checksum"),
    "another checksum": (manifest_of().replace(b'"created": 1.0', b'"created": 2.0'), "its checksum is"),
    "escapes": (b'{"checksum": "\x1b[31m\x1b[31m\x1b[31m\x1b["}', r"its checksum is \x1b[31m"),
    "not ascii": (b'{"checksum": "\xff\xff"}', "'ascii' codec can't decode"),
    "not JSON": (embed_checksum(b'{{"checksum": "' + ZEROS.encode(), b'"checksum": "'), "Expecting property name"),
    "a list": (embed_checksum(b'[{"checksum": "' + ZEROS.encode() + b'"}]', b'"checksum": "'), "it is not a mapping"),
    "version": (manifest_of(version=2), "it has format version 2"),
    "key": (manifest_of(key="../../../etc/shadow"), "it holds other values"),
    "created": (manifest_of(created=float("nan")), "it holds other values"),
    "fingerprint": (manifest_of(fingerprint=[1]), "it holds other values"),
    "identity": (manifest_of(identity=None), "it holds other values"),
    "length": (manifest_of(identity={"dataset_len": -1, "samples": "x"}), "it holds other values"),
    "structure": (manifest_of(identity={"dataset_len": 5, "samples": [1]}), "it holds other values"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_manifest_is_named_with_the_remedy(run, folder, case):
    data, problem = DAMAGED[case]
    (folder / "cache.json").write_bytes(data)
    for command in ("stat", "check", "rm"):
        result = run(command, folder)
        assert result.exit_code == 1
        assert result.output.startswith(f"{folder}/cache.json is damaged: {problem}")
        assert result.output.endswith(f" Remove the cache: stocache rm --force {folder}\n")
        assert "\x1b" not in result.output
    assert run("rm", "--force", folder).exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("name", ["index", "samples", "cache.json", "lock"])
@pytest.mark.parametrize("instead", ["nothing", "link", "pipe"])
def test_a_file_that_is_missing_or_of_another_kind_is_not_followed(run, tmp_path, folder, name, instead):
    (tmp_path / "precious").write_text("x")
    (folder / name).unlink()
    if instead == "link":
        (folder / name).symlink_to(tmp_path / "precious")
    elif instead == "pipe":
        os.mkfifo(folder / name)
    for command in ("stat", "check", "rm"):
        result = run(command, folder)
        if (name == "lock" and command != "rm") or (command == "rm" and name in ("index", "samples")):
            continue  # it does without
        assert result.exit_code == 1
        assert result.output.startswith(f"{folder}/{name} ")
        assert len(result.output.splitlines()) == 1
    if folder.exists():
        assert run("rm", "--force", folder).exit_code == 0
    assert not folder.exists()
    assert (tmp_path / "precious").read_text() == "x"


def test_a_huge_dataset_in_the_manifest_takes_no_memory(run, folder):
    (folder / "cache.json").write_bytes(manifest_of(identity={"dataset_len": 10**30, "samples": "x"}))
    assert rows(run("stat", folder))["samples"] == f"{FILLED} of {10**30} are there"
    assert run("check", folder).stdout.startswith(
        f"{FILLED} of {10**30} samples are there: 0 sound, {FILLED} damaged"
    )  # another key


# ---------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_check_reads_all_samples_and_changes_nothing(run, folder, workers):
    before = content(folder)
    result = run("check", folder, "--workers", workers)
    assert (result.exit_code, result.stdout) == (0, "12 of 20 samples are there, no damage\n")
    assert "12/12" in result.stderr
    for idx in (2, 7):
        flip(folder / "samples", BEGIN + idx * ROOM + 5)
    changed = content(folder)
    result = run("check", folder, "--workers", workers)
    assert (result.exit_code, result.stdout) == (1, "12 of 20 samples are there: 10 sound, 2 damaged: 2, 7\n")
    assert "is loaded again by itself" in result.stderr
    assert content(folder) == changed != before


def test_check_agrees_with_a_cache_that_loads_the_damaged_again(run, folder):
    for idx in (0, 11):
        flip(folder / "samples", BEGIN + idx * ROOM + ROOM - 1)
    with open_cache(folder) as cache:
        assert [idx for idx in range(FILLED) if cache.get_slot(idx) is None] == [0, 11]
        assert "2 damaged: 0, 11\n" in run("check", folder).stdout
        for idx in (0, 11):
            assert torch.equal(cache.get_or_load(idx, sample), sample(idx))
        assert run("check", folder).stdout == "12 of 20 samples are there, no damage\n"


def test_check_counts_what_a_cut_file_and_a_false_index_have_lost(run, folder):
    os.truncate(folder / "samples", BEGIN + 10 * ROOM + 3)
    assert "10 sound, 2 damaged: 10, 11\n" in run("check", folder).stdout
    index = bytearray((folder / "index").read_bytes())
    index[8:16] = (1 << 63).to_bytes(8, "little")  # bytes of the first sample
    index[16:32] = b"\xff" * 16
    (folder / "index").write_bytes(index)
    assert "8 sound, 4 damaged: 0, 1, 10, 11\n" in run("check", folder).stdout


def test_check_names_the_first_damaged_samples_only(run, folder):
    data = (folder / "samples").read_bytes()
    (folder / "samples").write_bytes(bytes(len(data)))
    assert run("check", folder).stdout.endswith(": 0 sound, 12 damaged: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …\n")


def test_check_finds_no_damage_while_samples_are_written_and_cleared(run, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "_RUN", 4)
    with open_cache(tmp_path / "photos") as cache:
        over = threading.Event()

        def work():
            for _ in range(30):
                fill(cache)
                cache.clear()
            over.set()

        thread = threading.Thread(target=work)
        thread.start()
        found = []
        while not over.is_set():
            found.append(run("check", tmp_path / "photos").exit_code)
        thread.join()
        assert set(found) == {0}


def test_samples_that_are_larger_than_a_piece_are_checked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "_PIECE", 1000)
    with DiskCache(tmp_path / "large", "1MB", 3) as cache:
        cache.set_slot(1, torch.arange(10001))
    assert "no damage" in run("check", tmp_path / "large").stdout
    flip(tmp_path / "large" / "samples", BEGIN + 54321)
    assert "1 damaged: 1\n" in run("check", tmp_path / "large").stdout


# ---------------------------------------------------------------------------------------------------- rm


@pytest.mark.parametrize("path", ["photos", "photos/", "./photos", "x/../photos"])
def test_rm_removes_a_folder_that_is_not_in_use(run, folder, monkeypatch, path):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "x").mkdir()
    result = run("rm", path)
    if "/" not in path:
        told = "there is no cache 'photos'. The folder is ./photos\n"
        assert (result.exit_code, result.output) == (1, told)  # a name, as ever
        assert "The folder is ./photos" in run("stat", path).output
        return
    assert (result.exit_code, result.output) == (0, f"removed {path}\n")
    assert not folder.exists()


def test_rm_spares_a_folder_in_use(run, live):
    result = run("rm", live.disk)
    assert result.exit_code == 1
    assert f"{live.disk} is in use by process {os.getpid()} (" in result.output
    assert result.output.endswith(f"Nevertheless: stocache rm --force {live.disk}\n")
    assert torch.equal(live.get_slot(3), sample(3))
    assert sorted(os.listdir(live.disk)) == ["cache.json", "index", "lock", "samples"]


def test_rm_by_force_leaves_it_to_the_processes_that_use_it(run, live):
    assert run("rm", "--force", live.disk).exit_code == 0
    assert not os.path.exists(live.disk)
    assert torch.equal(live.get_slot(3), sample(3))
    live.set_slot(FILLED, sample(FILLED))
    with open_cache(live.disk) as other:
        assert other.get_slot(3) is None
        other.set_slot(3, sample(4))
        assert torch.equal(live.get_slot(3), sample(3))
        assert torch.equal(live.get_slot(FILLED), sample(FILLED))


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_rm_spares_folders_with_other_files(run, folder, force):
    (folder / "notes.txt").write_text("x")
    result = run("rm", *force, folder)
    assert (result.exit_code, result.output) == (1, f"{folder} is not the folder of a disk cache: it holds 'notes.txt'.\n")
    assert len(os.listdir(folder)) == 5


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_rm_does_not_follow_a_link(run, folder, force):
    link = folder.parent / "link"
    link.symlink_to(folder)
    for path in (link, f"{link}/"):
        result = run("rm", *force, path)
        assert (result.exit_code, result.output) == (1, f"{link} is a symbolic link. Give the folder itself.\n")
    assert rows(run("stat", link))["samples"] == "12 of 20 are there"


def test_rm_of_an_interrupted_making_needs_force(run, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "lock").write_text("")
    for command in ("stat", "check", "rm"):
        result = run(command, tmp_path / "photos")
        assert result.exit_code == 1
        assert "cache.json is missing: the cache is being made, or its making was interrupted." in result.output
        assert result.output.endswith(f"To remove it: stocache rm --force {tmp_path / 'photos'}\n")
    assert run("rm", "--force", tmp_path / "photos").exit_code == 0
    assert not (tmp_path / "photos").exists()


def test_rm_removes_several_and_tells_which_it_could_not(run, folder, tmp_path):
    result = run("rm", tmp_path / "nothing", folder, "also-nothing")
    assert result.exit_code == 1
    assert f"removed {folder}\n" in result.output
    assert "nothing is not the folder of a disk cache: No such file" in result.output
    assert "there is no cache 'also-nothing'." in result.output


def test_rm_of_another_users_folder_needs_force(run, folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    result = run("rm", folder)
    assert result.exit_code == 1
    assert f"{folder} belongs to user {folder.stat().st_uid}. Nevertheless: stocache rm --force" in result.output
    assert folder.exists()


# ---------------------------------------------------------------------------------------------------- doctor


def about(path, findings):
    return [(finding.kind, finding.what, finding.remedy) for finding in findings if str(path) in finding.what]


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("ext4", None),
        ("", None),
        ("tmpfs", "is on tmpfs, which is memory."),
        ("nfs4", "is on a network file system (nfs4): it may be as slow as the source."),
    ],
)
def test_doctor_tells_where_a_disk_cache_lies(tmp_path, monkeypatch, kind, what, is_live):
    monkeypatch.setattr(inspection, "filesystem_of", lambda fd: kind)
    path = tmp_path / "photos"
    expected = [("problem", f"the disk cache {path} {what}", "give a folder on a local disk: disk=...")] if what else []
    with open_cache(path) if is_live else contextlib.nullcontext():
        assert about(path, doctor.examine() if is_live else doctor.examine(disk=str(path))) == expected
    if not is_live:
        assert not path.exists()


def test_doctor_tells_of_a_disk_without_room(run, tmp_path):
    path = tmp_path / "a" / "b"
    result = run("doctor", "--disk", path, "--disk-limit", "9000TB")
    assert result.exit_code == 1
    room = rf"the disk cache {re.escape(str(path))} has room for [\d.]+ .iB, its limit is 8381903.2 GiB\."
    assert re.search(
        rf"^problem: {room}\n    do: remove other files from that disk, or lower disk_limit to ", result.stdout, re.M
    )
    findings = json.loads(run("doctor", "--disk", path, "--disk-limit", "1KB", "--json").stdout)
    assert not [finding for finding in findings if " room for " in finding["what"]]


def test_doctor_counts_what_the_cache_itself_takes_as_room(tmp_path, monkeypatch):
    with open_cache(tmp_path / "photos") as cache:
        fill(cache)
        taken = os.stat(tmp_path / "photos" / "samples").st_blocks * 512
        free = os.statvfs_result([4096, 4096, 10**6, 10**6, 100, 0, 0, 0, 0, 255])
        monkeypatch.setattr(os, "fstatvfs", lambda fd: free)
        assert inspection.place_of(cache.disk)[1] == 409600 + taken
        assert any(" has room for " in what for _, what, _ in about(cache.disk, doctor.examine()))  # 1 MB


def test_doctor_names_a_path_that_cannot_be_used(run, tmp_path):
    (tmp_path / "file").write_text("x")
    findings = json.loads(run("doctor", "--disk", tmp_path / "file", "--json").stdout)
    assert f"{tmp_path / 'file'} is not the folder of a disk cache: Not a directory." in [item["what"] for item in findings]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--disk-limit", "1GB"], "--disk-limit needs --disk FOLDER."),
        (["--disk", "x", "--disk-limit", "many"], "disk_limit='many' is not a size."),
    ],
)
def test_doctor_refuses_options_that_say_nothing(run, arguments, problem):
    result = run("doctor", *arguments)
    assert result.exit_code == 2
    assert problem in result.output
