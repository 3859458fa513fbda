"""The folder of a disk cache: what is refused, what is warned of, and who finds it again."""

import ctypes
import fcntl
import functools
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from stocache import DiskCache, DiskError, LimitError, MismatchError
from stocache.disk import folder as folder_module
from stocache.disk.folder import Folder, filesystem_of
from stocache.samples.spec import Structure
from stocache.system import limits
from stocache.system.hashing import ZEROS, embed_checksum
from tests.support import traces
from tests.support.disks import COUNT, contents, flip, loaded, mounted, open_disk, row
from tests.support.processes import in_child, run_all

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def filled(tmp_path):
    """A folder with all samples."""
    with open_disk("rows", tmp_path / "disk") as cache:
        loaded(cache, "rows")
    return tmp_path / "disk"


def need_mounts():
    if not traces.private or os.geteuid() != 0:
        pytest.skip("this process may not mount")


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match=r"is a file or below one. Give a folder of its own"):
            open_disk("rows", path)
    assert (tmp_path / "file").read_text() == "x"


@as_root
def test_a_folder_of_another_user_is_refused(filled):
    os.chown(filled, 4321, 4321)
    with pytest.raises(DiskError, match=r"belongs to user 4321, not to 0. Give a folder of your own"):
        open_disk("rows", filled)


@as_root
@pytest.mark.parametrize("name", ["lock", "index", "samples"])
def test_a_file_of_another_user_is_refused(filled, name):
    os.chown(filled / name, 4321, 4321)
    with pytest.raises(DiskError, match=f"{name} is not a file of this user. Remove it"):
        open_disk("rows", filled)


@pytest.mark.parametrize(("mode", "allow_pickle"), [(0o777, False), (0o702, False), (0o770, True), (0o720, True)])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode, allow_pickle):
    tmp_path.chmod(mode)
    with pytest.raises(DiskError, match=rf"others may write to .* \(mode {mode:o}\). Change it: chmod 700"):
        open_disk("records", tmp_path, allow_pickle=allow_pickle)
    assert os.listdir(tmp_path) == []


def test_the_group_may_write_where_nothing_is_unpickled(tmp_path):
    tmp_path.chmod(0o770)
    with open_disk("records", tmp_path) as cache:
        loaded(cache, "records")
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_folder_that_holds_other_files_is_refused(tmp_path):
    (tmp_path / "thesis\x1b[31m.tex").write_text("x")
    with pytest.raises(DiskError, match=r"thesis.*is not of a disk cache. Give a folder of its own") as caught:
        open_disk("rows", tmp_path)
    assert "\x1b" not in str(caught.value)
    assert len(os.listdir(tmp_path)) == 1


def test_a_limit_without_room_for_one_sample_is_refused(tmp_path):
    with pytest.raises(LimitError, match=r"disk_limit='8KB' leaves 6976 bytes .* one sample needs \d+. Raise disk_limit"):
        open_disk("rows", tmp_path / "new", limit="8KB")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"count": COUNT + 1}, "dataset_len 64, now 65"),
        ({"structure": Structure.of((row(0)[0].float(), 0))}, "samples .*uint8.*, now .*float32"),
        ({"structure": Structure.of(row(0)[0])}, "samples .*, now"),
        ({"structure": None}, "samples .*, now 'any size'"),
        ({"placement": "prefix"}, "placement .*scattered.*, now .*prefix"),
    ],
)
def test_a_folder_for_other_samples_is_refused(filled, options, difference):
    files = contents(filled)
    options = {"count": COUNT, "structure": Structure.of(row(0)), "fingerprint": "1"} | options
    with pytest.raises(MismatchError, match=rf"is for other samples: {difference}.*stocache rm"):
        DiskCache(filled, "1GB", options.pop("count"), **options)
    assert contents(filled) == files


def test_another_codec_or_pickle_is_refused(tmp_path):
    with open_disk("records", tmp_path) as cache:
        loaded(cache, "records")
    with pytest.raises(MismatchError, match="codec None, now 'zstd'"):
        open_disk("zstd", tmp_path)
    with pytest.raises(MismatchError, match="allow_pickle False, now True"):
        open_disk("records", tmp_path, allow_pickle=True)


def test_another_fingerprint_makes_the_folder_anew(filled, warnings):
    with open_disk("rows", filled, fingerprint="2") as cache:
        (warning,) = warnings()
        assert "left behind for other data: fingerprint '1', now '2'. Starting afresh" in warning
        assert len(loaded(cache, "rows")) == COUNT
        with pytest.raises(MismatchError, match="is in use for other data: fingerprint '2', now '1'"):
            open_disk("rows", filled, fingerprint="1")
        assert loaded(cache, "rows") == []
    assert warnings() == []


def test_without_a_fingerprint_an_earlier_run_is_named(tmp_path, warnings):
    with open_disk("rows", tmp_path, fingerprint=None) as cache:
        loaded(cache, "rows")
        open_disk("rows", tmp_path, fingerprint=None).close()
        assert warnings() == []
    with open_disk("rows", tmp_path, fingerprint=None) as cache:
        assert loaded(cache, "rows") == []
    (warning,) = warnings()
    assert "is from an earlier run" in warning


# ---------------------------------------------------------------------------------------------------- damaged folders


def test_a_damaged_manifest_says_what_to_do(filled):
    rng, path = random.Random(29), filled / "cache.json"
    text = path.read_bytes()
    damaged = [b"", b"{}", text[:-1], text[: len(text) // 2], bytes(len(text)), *(flip(rng, text) for _ in range(100))]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(DiskError, match=r"cache.json is damaged: .* Remove the cache: stocache rm --force"):
            open_disk("rows", filled)
    path.write_bytes(text)
    with open_disk("rows", filled) as cache:
        assert loaded(cache, "rows") == []


FORGED = {
    "key": ["", "x" * 16, "0" * 17, 5, None, ["0" * 16]],
    "created": ["now", -1, 1e300, None],
    "fingerprint": [5, ["1"], {}],
    "identity": [None, [], "identity"],
    "facts": [None, [], {}, {"memory_slots": -1, "example": None}, {"memory_slots": 1 << 70, "example": None}],
    "version": [0, 2, "1", None, [1]],
}


def test_a_forged_manifest_is_refused(filled):
    path = filled / "cache.json"
    manifest = json.loads(path.read_text())
    forged = [manifest | {name: value} for name, values in FORGED.items() for value in values]
    forged += [{name: value for name, value in manifest.items() if name != left} for left in FORGED]
    texts = [json.dumps(each | {"checksum": ZEROS}).encode() for each in forged]
    texts += [b'["checksum": "' + ZEROS.encode() + b'"]', b'{"checksum": "' + ZEROS.encode() + b'", "a": ' + b"[" * 500000]
    for text in texts:
        path.write_bytes(embed_checksum(text, b'"checksum": "'))
        with pytest.raises(DiskError, match=r"cache.json is damaged"):
            open_disk("rows", filled)


@pytest.mark.parametrize("name", ["lock", "index", "samples", "cache.json"])
@pytest.mark.parametrize("thing", ["link", "dangling", "fifo", "folder", "device"])
def test_what_is_not_a_file_is_refused(filled, tmp_path, name, thing):
    (filled / name).unlink()
    (tmp_path / "precious").write_text("x")
    if thing == "device" and os.geteuid() != 0:
        pytest.skip("needs root")
    {
        "link": lambda path: path.symlink_to(tmp_path / "precious"),
        "dangling": lambda path: path.symlink_to(tmp_path / "missing"),
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),  # /dev/zero
    }[thing](filled / name)
    with pytest.raises(DiskError, match=rf"{name} is (not a file of this user. Remove it|damaged: it is not a file)"):
        open_disk("rows", filled)
    assert (tmp_path / "precious").read_text() == "x"
    assert not (tmp_path / "missing").exists()


def test_a_link_in_place_of_the_new_manifest_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "cache.json.new").symlink_to(tmp_path / "precious")
    open_disk("rows", tmp_path / "disk").close()
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("names", [["samples"], ["index"], ["lock"], ["samples", "index", "lock"], ["cache.json"]])
def test_a_file_that_is_missing_is_made_again(filled, names):
    for name in names:
        (filled / name).unlink()
    with open_disk("rows", filled) as cache:
        assert loaded(cache, "rows") == ([] if names == ["lock"] else list(range(COUNT)))
    with open_disk("rows", filled) as cache:
        assert loaded(cache, "rows") == []


def test_an_error_does_not_keep_the_folder_locked(filled):
    with pytest.raises(MismatchError) as caught:
        open_disk("rows", filled, COUNT + 1)
    began = time.monotonic()
    open_disk("rows", filled).close()
    assert time.monotonic() - began < 20  # not until the lock's time is over
    del caught


# ---------------------------------------------------------------------------------------------------- where it lies


def test_memory_is_warned_of(tmp_path, warnings):
    need_mounts()
    with mounted(tmp_path, "size=8m,mode=700"), open_disk("rows", tmp_path, limit="1MB") as cache:
        loaded(cache, "rows")
        del cache
    assert [warning for warning in warnings() if "is on tmpfs, which is memory. Give a folder on a local disk" in warning]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_warned_of(tmp_path, warnings, monkeypatch, kind):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr(folder_module, "_mounts", lambda: iter([("0:9999", "ext4"), (number, kind)]))
    with open_disk("rows", tmp_path) as cache:
        loaded(cache, "rows")
    (warning,) = warnings()
    assert f"is on a network file system ({kind})" in warning


def test_the_kind_of_a_file_system_is_that_of_the_kernel():
    for path, kind in (("/proc", "proc"), ("/sys", "sysfs"), ("/dev/shm", "tmpfs")):
        at = os.open(path, os.O_RDONLY)
        assert filesystem_of(at) == kind
        os.close(at)


def test_a_limit_above_what_is_free_is_warned_of(tmp_path, warnings):
    need_mounts()
    with mounted(tmp_path, "size=1m,mode=700"):
        with open_disk("rows", tmp_path, limit="1GB") as cache:
            assert cache.stats().capacity_bytes <= 1 << 20
        assert any(re.search(r"disk_limit=1GB is more than .* has room for: 10\d\d\.\d KiB", warning) for warning in warnings())


# ---------------------------------------------------------------------------------------------------- other machines


def test_a_folder_that_another_machine_uses_is_refused(tmp_path, monkeypatch):
    with open_disk("rows", tmp_path) as cache:
        loaded(cache, "rows")
        with monkeypatch.context() as other:
            other.setattr(folder_module, "domain", lambda: "machine boot 7")
            with pytest.raises(DiskError, match=r"is in use by another machine, or by a container.*a folder of its own"):
                open_disk("rows", tmp_path)
        assert loaded(cache, "rows") == []
    monkeypatch.setattr(folder_module, "domain", lambda: "machine boot 7")  # after a reboot, or on another host
    with open_disk("rows", tmp_path) as cache:
        assert loaded(cache, "rows") == []


def test_a_container_with_its_own_shared_memory_is_refused(filled):
    need_mounts()

    def contained():
        assert traces.mount_private()
        with pytest.raises(DiskError, match="is in use by another machine, or by a container"):
            open_disk("rows", filled)

    with open_disk("rows", filled):
        assert in_child(contained) == 0


def test_on_a_network_file_system_each_machine_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "filesystem_of", lambda fd: "nfs4")
    monkeypatch.setattr(folder_module, "domain", lambda: "one boot 7")
    open_disk("rows", tmp_path).close()
    open_disk("rows", tmp_path).close()
    monkeypatch.setattr(folder_module, "domain", lambda: "two boot 8")
    with pytest.raises(DiskError, match="was made by another machine, and is on a network file system"):
        open_disk("rows", tmp_path)


# ---------------------------------------------------------------------------------------------------- read-only


def read_only(folder):
    """Remount what is mounted on a folder read-only."""
    assert ctypes.CDLL(None).mount(None, os.fsencode(folder), None, 32 | 1, None) == 0  # MS_REMOUNT, MS_RDONLY


def test_a_read_only_folder_is_read(tmp_path, warnings, monkeypatch):
    need_mounts()
    with mounted(tmp_path, "size=8m,mode=700"):
        with open_disk("rows", tmp_path, limit="4MB") as cache:
            loaded(cache, "rows", range(40))
        read_only(tmp_path)
        warnings()
        with open_disk("rows", tmp_path, limit="4MB") as cache:
            assert sum("is read-only: its samples are read, and no others are added" in each for each in warnings()) == 1
            assert loaded(cache, "rows") == list(range(40, COUNT))
            assert loaded(cache, "rows") == list(range(40, COUNT))
            with open_disk("rows", tmp_path, limit="4MB") as other:  # whoever wrote the lock last
                assert loaded(other, "rows") == list(range(40, COUNT))
        monkeypatch.setattr(folder_module, "domain", lambda: "machine boot 7")
        with open_disk("rows", tmp_path, limit="4MB"), open_disk("rows", tmp_path, limit="4MB") as cache:
            assert loaded(cache, "rows", range(40)) == []
        warnings()
        with open_disk("rows", tmp_path, limit="4MB", fingerprint="2") as cache:
            assert len(loaded(cache, "rows")) == COUNT
        assert [each for each in warnings() if "is on tmpfs" not in each] == [
            f"disk={str(tmp_path)!r} is not used: Read-only file system. Nothing is cached there."
        ]
        del cache, other


def test_a_new_folder_on_a_read_only_disk_is_not_used(tmp_path, warnings):
    need_mounts()
    with mounted(tmp_path, "size=1m,mode=700"):
        (tmp_path / "empty").mkdir()
        read_only(tmp_path)
        for path in (tmp_path / "new", tmp_path / "empty"):
            with open_disk("rows", path) as cache:
                assert len(loaded(cache, "rows")) == COUNT
            assert warnings()[-1].endswith("is not used: Read-only file system. Nothing is cached there.")


# ---------------------------------------------------------------------------------------------------- who finds it again


def filled_by_others(number, cache, path):
    """Find all samples in a cache that came with the process, and in the folder."""
    assert loaded(cache, "rows") == []
    with open_disk("rows", path) as own:
        assert loaded(own, "rows") == []
        assert own.stats().hits >= 2 * COUNT * (number + 1) - COUNT


def test_other_processes_find_the_samples(tmp_path, start_method):
    context = multiprocessing.get_context(start_method)
    with open_disk("rows", tmp_path) as cache:
        loaded(cache, "rows")
        run_all(context, 1, filled_by_others, cache, tmp_path)
        assert cache.stats().hits == 2 * COUNT


def race(number, path, log):
    """Load all samples that the other process has not loaded."""
    at = os.open(log, os.O_WRONLY | os.O_APPEND)

    def load(indices):
        os.write(at, b"".join(idx.to_bytes(2, "little") for idx in indices))
        time.sleep(0.001)
        return [row(idx) for idx in indices]

    order = random.Random(number).sample(range(COUNT), COUNT)
    with open_disk("rows", path) as cache:
        for first in range(0, COUNT, 4):
            indices = order[first : first + 4]
            for idx, found in zip(indices, cache.get_or_load_many(indices, load), strict=True):
                assert torch.equal(found[0], row(idx)[0])


def test_two_processes_load_each_sample_once(tmp_path, start_method):
    (tmp_path / "log").touch()
    run_all(multiprocessing.get_context(start_method), 2, race, tmp_path / "disk", tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    assert sorted(int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)) == list(range(COUNT))
    with open_disk("rows", tmp_path / "disk") as cache:
        assert loaded(cache, "rows") == []


def test_a_process_that_ended_early_is_not_in_the_way(tmp_path):
    """One that was alone has ended before it wrote anything, when another had found the folder locked."""
    at = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(at, fcntl.LOCK_SH)  # as of others that have come too late
    threading.Timer(0.2, os.close, [at]).start()
    with open_disk("rows", tmp_path) as cache:
        assert len(loaded(cache, "rows")) == COUNT


def test_what_killed_processes_left_in_shared_memory_goes(tmp_path):
    def fill_and_die():
        cache = open_disk("rows", tmp_path)
        loaded(cache, "rows")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(fill_and_die) == signal.SIGKILL
    names = list(Path(limits.SHM_DIR).rglob("disk.*"))
    key = json.loads((tmp_path / "cache.json").read_text())["key"]
    assert [path for path in names if path.name == f"disk.{key}"]
    with open_disk("rows", tmp_path) as cache:
        assert loaded(cache, "rows") == []
    assert not [path for path in Path(limits.SHM_DIR).rglob("disk.*") if path.name == f"disk.{key}"]


def test_a_process_that_reopens_the_folder_lets_others_in(filled):
    key = json.loads((filled / "cache.json").read_text())["key"]
    folder = Folder.reopen(str(filled), key)
    assert in_child(functools.partial(open_disk, "rows", filled), timeout_s=20) == 0
    folder.close()


def test_a_folder_that_was_replaced_is_not_reopened(filled, tmp_path, warnings):
    with open_disk("rows", filled) as cache:
        packed = pickle.dumps(cache)
        filled.rename(tmp_path / "away")
        filled.mkdir()
        (filled / "thesis.tex").write_text("x")
        with pickle.loads(packed) as reopened:
            assert len(loaded(reopened, "rows")) == COUNT
            with pickle.loads(packed) as again:
                assert len(loaded(again, "rows")) == COUNT
        (warning,) = warnings()
        assert "is not used in process" in warning
        assert os.listdir(filled) == ["thesis.tex"]
        assert loaded(cache, "rows") == []  # others still have it
        assert cache.stats().damaged == 0
