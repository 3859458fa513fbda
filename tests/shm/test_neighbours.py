"""Named caches among hostile users: places that were taken, races for them, and forged files."""

import contextlib
import gc
import io
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from stocache import SharedCacheDDP
from stocache.shm import registry
from stocache.shm.layout import HUGE_PAGE, Layout
from stocache.shm.segment import Segment
from stocache.system import limits
from stocache.system.waiting import printable
from stocache.tools.cli import listing
from stocache.tools.cli.app import app
from stocache.tools.cli.table import table
from tests.support.faults import nothing_attached
from tests.support.processes import in_child

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

NAME, N = "test-neighbours", 8
VICTIM, ATTACKER = 12345, 12346


def directory_of(uid):
    return Path(f"{limits.SHM_DIR}/stocache-{uid}")


def make(size=1):
    return SharedCacheDDP(size, N, (4,), name=NAME)


def is_shared():
    """Whether a second cache of the name has the samples of the first."""
    with make() as first, make() as second:
        first.set_slot(3, torch.zeros(4, dtype=torch.uint8))
        return second.get_slot(3) is not None


def as_user(uid, action):
    """Run an action in a forked child that is another user; return whether it went well."""
    return in_child(action, uid=uid) == 0


@pytest.fixture(autouse=True)
def _clean():
    yield
    gc.collect()
    for uid in (VICTIM, ATTACKER):
        place = directory_of(uid)
        if place.is_symlink() or place.is_file():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("what", ["directory", "link", "file"])
def test_where_another_user_has_taken_the_place_each_rank_has_a_cache_of_its_own(what, monkeypatch, caplog):
    ranks = {"RANK": 1, "WORLD_SIZE": 8, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 2}  # 4 on each machine
    for name, number in ranks.items():
        monkeypatch.setenv(name, str(number))
    place = directory_of(VICTIM)
    {"directory": place.mkdir, "link": lambda: place.symlink_to("/tmp"), "file": place.touch}[what]()

    def use():
        part = N + 4 * (N // 4)  # bytes: the states, and slots for a quarter
        assert len(make(f"{4 * part}B")) == N // 4
        assert not is_shared()
        assert "belongs to user 0, not to 12345. It is not used" in caplog.text
        assert f"Cache {NAME!r} is not shared" in caplog.text

    assert as_user(VICTIM, use)


def test_a_directory_that_is_changed_before_it_is_opened_is_not_used(monkeypatch):
    place = Path(registry.directory_of())
    really_open = os.open

    def swapped(path, flags, *arguments, **options):
        if path == str(place) and flags & os.O_DIRECTORY:
            with contextlib.suppress(FileNotFoundError):
                place.rmdir()
            place.mkdir(0o700)
            os.chown(place, ATTACKER, -1)
        return really_open(path, flags, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", swapped)
        assert not is_shared()
    place.rmdir()  # it is empty


def test_a_file_that_is_changed_before_it_is_opened_is_refused(monkeypatch):
    really_open = os.open

    def swapped(path, *arguments, **options):
        if path == NAME:
            target.unlink()
            os.mkfifo(target, 0o600)
        return really_open(path, *arguments, **options)

    with make():
        target = Path(registry.path_of(NAME))
        monkeypatch.setattr(os, "open", swapped)
        with nothing_attached():
            (found,) = listing.find()
        assert "is a pipe, so it is not used" in found.problem
        target.unlink()


def header(descriptor=b"", control=N, data=HUGE_PAGE, extent=HUGE_PAGE, claimed=None):
    """Return the bytes of a header whose checksum is right."""
    sizes = struct.pack("<QQQI", control, data, extent, len(descriptor) if claimed is None else claimed)
    packed = lambda checksum: struct.pack("<8sQ", b"stocache", 4) + sizes + struct.pack("<I", checksum)
    return packed(zlib.crc32(packed(0) + descriptor)) + descriptor


FACTS = {"dataset_len": N, "capacity": N, "slot_bytes": 4}


def described(samples="uint8[4]", fingerprint=None, **more):
    identity = {"samples": samples, "fingerprint": fingerprint}
    return header(json.dumps({"identity": identity, "facts": FACTS, "created": 1.7e9} | more).encode())


def facts(**changed):
    return described(facts=FACTS | changed)


FORGED = {
    "no extents": header(extent=0), "more extents than the file has": header(data=2**62),
    "control that wraps around": header(control=2**64 - 1), "a descriptor that is longer": header(b"{}", claimed=2**31),
    "nested JSON": header(b"[" * 4000), "no descriptor": header(), "no facts": described(facts={}),
    "facts of text": facts(dataset_len="8"), "negative facts": facts(dataset_len=-1), "huge capacity": facts(capacity=2**62),
    "a late date": described(created=1e300), "no identity": described(identity={}),
    "an escape in the identity": described("\x1b]0;x\x07", "\x1b[2J\n"), "half a surrogate": described("\ud800", "[red]x"),
}  # fmt: skip


def forge(place, name, content):
    """Put a forged file into a directory, as large as its header says, if that can be."""
    place.mkdir(0o700, exist_ok=True)
    target = place / name
    target.touch(0o600)
    planned = Layout(N, HUGE_PAGE, HUGE_PAGE)
    with open(target, "wb") as file:
        file.write(content)
        file.truncate(planned.size)
        os.posix_fallocate(file.fileno(), 0, planned.control_at + N)


def test_forged_files_are_listed_and_do_no_harm():
    place = Path(registry.directory_of())
    for what, content in FORGED.items():
        forge(place, what, content)
    forge(place, "\x1b[31mred", FORGED["no identity"])
    found = listing.find()
    assert printable("a b ü 漢 [x]\n\x9b\u202e\ud800") == r"a b ü 漢 [x]\n\x9b\u202e\ud800"
    assert json.loads(json.dumps([each.as_dict() for each in found]))[0]["name"] == r"\x1b[31mred"
    dead = {each.name for each in found if each.state == "dead" and each.stats.filled == 0}
    assert dead == {r"\x1b[31mred", "no identity", "an escape in the identity", "half a surrogate"}
    assert {each.name for each in found if each.state == "bad"} == FORGED.keys() - dead
    with Console(width=200, record=True, file=io.StringIO()) as console:
        console.print(table(found))
    assert console.export_text().replace("\n", "").isprintable()
    assert all(text.isprintable() for each in found for text in (each.samples, each.fingerprint or "", each.problem))
    for arguments in (["ls"], ["stat", "nested JSON"], ["rm", "--dead", "--force"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == (arguments[0] == "rm"), result.output
        assert "\x1b" not in result.output
    shutil.rmtree(place)


def test_an_anonymous_segment_in_a_memfd_cannot_be_cut(monkeypatch):
    monkeypatch.setattr(limits, "shm_room", lambda: 0)
    segment = Segment.create(N, HUGE_PAGE)
    assert segment.backing == "memfd"
    for nbytes in (0, segment.layout.size * 2):
        with pytest.raises(PermissionError, match="Operation not permitted"):
            os.ftruncate(segment.fd, nbytes)
    assert os.fstat(segment.fd).st_size == segment.layout.size
