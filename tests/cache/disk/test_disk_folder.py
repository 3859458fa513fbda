"""The folder of a disk cache: what is refused, what is warned of, and who finds it again."""

import json
import os
import random
import stat

import numpy as np
import pytest

from stocache import DiskCache, DiskError, LimitError, MismatchError
from stocache.cache.disk import folder as folder_module
from stocache.samples.spec import Structure
from stocache.system import limits
from stocache.system.hashing import ZEROS, embed_checksum
from tests.support import traces
from tests.support.disks import COUNT, contents, flip, loaded, mounted, open_disk, row
from tests.support.processes import run_python


@pytest.fixture
def may_mount():
    if not traces.private or os.geteuid() != 0:
        pytest.skip("this process may not mount")


def refused(path, match, error=DiskError, **options):
    """Demand that opening a folder raises an error."""
    with pytest.raises(error, match=match):
        open_disk("rows", path, **options)


def test_files_and_folders_with_other_files_are_refused(tmp_path):
    (tmp_path / "thesis\x1b[31m.tex").write_text("x")
    for path in (tmp_path / "thesis\x1b[31m.tex", tmp_path / "thesis\x1b[31m.tex" / "below"):
        refused(path, "is not the folder of a disk cache: Not a directory. Give a folder of its own")
    refused(tmp_path, r"is not the folder of a disk cache: it holds [^\x1b]*thesis[^\x1b]*Give a folder of its own[^\x1b]*$")
    assert len(os.listdir(tmp_path)) == 1
    refused(tmp_path / "new", r"disk_limit='8KB' leaves 6976 bytes .* one sample needs \d+. Raise", LimitError, limit="8KB")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_or_file_of_another_user_is_refused(filled):
    for name in ("lock", "index", "samples"):
        os.chown(filled / name, 4321, 4321)
        refused(filled, f"{name} is not a file of the user of the folder. Remove it")
        os.chown(filled / name, 0, 0)
    os.chown(filled, 4321, 4321)
    refused(filled, r"belongs to user 4321, not to 0. Give a folder of your own")


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    for mode, allow_pickle in ((0o777, False), (0o702, False), (0o770, True), (0o720, True)):
        tmp_path.chmod(mode)
        with pytest.raises(DiskError, match=rf"others may write to .* \(mode {mode:o}\). Change it: chmod 700"):
            open_disk("records", tmp_path, allow_pickle=allow_pickle)
        assert os.listdir(tmp_path) == []
    tmp_path.chmod(0o770)  # the group may, when nothing is unpickled
    open_disk("records", tmp_path).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    tmp_path.chmod(0o700)
    with pytest.raises(MismatchError, match="allow_pickle False, now True"):
        open_disk("records", tmp_path, allow_pickle=True)


@pytest.mark.parametrize(("options", "difference"), [
    ({"dataset_len": COUNT + 1}, "dataset_len 64, now 65"), ({"placement": "prefix"}, "placement .*scattered.*, now .*prefix"),
    ({"structure": Structure.of((row(0)[0].float(), 0))}, "samples .*uint8.*, now .*float32"),
    ({"structure": None}, "samples .*, now 'any size'"),
])  # fmt: skip
def test_a_folder_for_other_samples_is_refused(filled, options, difference):
    files = contents(filled)
    options = {"dataset_len": COUNT, "structure": Structure.of(row(0)), "fingerprint": "1"} | options
    with pytest.raises(MismatchError, match=rf"is for other samples: {difference}.*stocache rm"):
        DiskCache(filled, "1GB", **options)
    assert contents(filled) == files
    open_disk("rows", filled).close()  # an error does not keep the folder locked


@pytest.mark.linux
def test_without_a_fingerprint_samples_of_an_earlier_run_are_warned_of(tmp_path, warnings):
    for is_known in (False, True):
        with open_disk("rows", tmp_path, fingerprint=None) as cache:
            assert loaded(cache, "rows") == ([] if is_known else list(range(COUNT)))
            open_disk("rows", tmp_path, fingerprint=None).close()  # in the same run
            assert ["is from an earlier run" in warning for warning in warnings()] == [True] * is_known


FORGED = {
    "key": ["x" * 16, 5], "created": ["now", 1e300], "fingerprint": [5], "identity": [[]], "version": ["2", None],
    "facts": [None, {}, {"memory_slots": 1 << 70, "example": None}],
}  # fmt: skip


def test_a_damaged_or_forged_manifest_says_what_to_do(filled):
    path = filled / "cache.json"
    text = path.read_bytes()
    damaged = [b"", b"{}", text[:-1], bytes(len(text)), *(flip(random.Random(seed), text) for seed in range(30))]
    forged = [json.loads(text) | {name: value, "checksum": ZEROS} for name, values in FORGED.items() for value in values]
    texts = [*(json.dumps(each).encode() for each in forged), b'{"checksum": "' + ZEROS.encode() + b'", "a": ' + b"[" * 500000]
    for data in (*damaged, *(embed_checksum(text, b'"checksum": "') for text in texts)):
        path.write_bytes(data)
        refused(filled, r"cache.json is damaged: .* Remove the cache: stocache rm --force")


def test_a_file_that_is_missing_is_made_again(filled):
    for name in ("samples", "index", "cache.json"):
        (filled / name).unlink()
        for missing in (list(range(COUNT)), []):
            with open_disk("rows", filled) as cache:
                assert loaded(cache, "rows") == missing


def test_links_and_pipes_are_refused_and_not_followed(filled, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    for name in ("lock", "index", "samples", "cache.json"):
        for put_thing in (os.mkfifo, lambda path: path.symlink_to(precious), lambda path: path.symlink_to(tmp_path / "new")):
            (filled / name).rename(tmp_path / name)
            put_thing(filled / name)
            refused(filled, rf"{name} is not a file of the user of the folder. Remove it|it holds '{name}'")
            (tmp_path / name).replace(filled / name)
    (filled / "cache.json").unlink()
    (filled / "cache.json.new").symlink_to(precious)
    open_disk("rows", filled).close()
    assert (precious.read_text(), (tmp_path / "new").exists()) == ("x", False)


@pytest.mark.linux
def test_memory_and_a_limit_above_what_is_free_are_warned_of(may_mount, tmp_path, warnings):
    with mounted(tmp_path, "size=1m,mode=700"):
        with open_disk("rows", tmp_path, limit="1GB") as cache:
            assert cache.stats().capacity_bytes <= 1 << 20
        text = "\n".join(warnings())
        assert "is on tmpfs, which is memory. Give a folder on a local disk" in text
        assert "disk_limit=1GB is more than" in text
        del cache


@pytest.mark.linux
def test_a_network_file_system_is_warned_of(tmp_path, warnings, monkeypatch):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = [limits.Mount(device, "/", "/", kind, []) for device, kind in (("0:9999", "ext4"), (number, "fuse.sshfs"))]
    monkeypatch.setattr(limits, "mounts", lambda: iter(table))
    open_disk("rows", tmp_path).close()
    assert ["is on a network file system (fuse.sshfs)" in warning for warning in warnings()] == [True]


@pytest.mark.linux
def test_a_folder_that_another_machine_uses_is_refused(tmp_path, monkeypatch):
    with open_disk("rows", tmp_path) as cache:
        loaded(cache, "rows")
        with monkeypatch.context() as other:
            other.setattr(folder_module, "domain", lambda: "machine boot 7")
            refused(tmp_path, r"is in use by another machine, or by a container.*a folder of its own")
        assert loaded(cache, "rows") == []
    monkeypatch.setattr(folder_module, "domain", lambda: "machine boot 7")  # after a reboot, or on another host
    with open_disk("rows", tmp_path) as cache:
        assert loaded(cache, "rows") == []


PROGRAM = """
import sys, torch
from stocache.cache.disk.cache import DiskCache
cache = DiskCache(sys.argv[1], "4MB", 40, fingerprint="1")
for idx in range(40):
    cache.serve(lambda indices: [torch.full((9,), idx)], lambda idx: False, [idx])
"""


def test_a_program_that_ends_without_closing_has_written_what_it_has_loaded(tmp_path):
    assert run_python("-c", PROGRAM, tmp_path / "disk").stderr == ""
    entries = np.frombuffer((tmp_path / "disk" / "index").read_bytes(), "<u8").reshape(-1, 2)
    assert (entries[:, 0] > 0).sum() == 40
