"""The commands over named caches: ls, stat, rm, top and doctor."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stocache import SharedCacheDDP
from stocache.cli import doctor, listing, top
from stocache.shm import layout, named, registry
from stocache.shm.segment import ROW_LOCKS
from stocache.system import limits
from stocache.system.limits import GIB, MIB, CgroupMemory, Memory
from tests.support import traces

N, DIMS = 10, (4,)
FOLDER = Path(registry.directory_of())


def make(name, **options):
    return SharedCacheDDP(1, N, DIMS, name=name, **options)


def fill(cache, count=N):
    for idx in range(count):
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, torch.zeros(DIMS, dtype=torch.uint8))


def leave_behind(name, **options):
    pid = os.fork()
    if pid == 0:
        cache = make(name, **options)
        fill(cache, 3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def four(tmp_path):
    """One cache of each state: live, kept, dead, bad."""
    cache = make("a-live", fingerprint="v1")
    fill(cache, 5)
    for idx in range(3):
        cache.get_slot(idx)
    with make("b-kept", persist=True):
        pass
    leave_behind("c-dead")
    (FOLDER / "d-bad").symlink_to(tmp_path)
    yield cache
    cache.close()
    for path in FOLDER.glob("*") if FOLDER.exists() else ():
        path.unlink()
    if FOLDER.exists():
        FOLDER.rmdir()


def names():
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def test_find_tells_all_there_is_to_say(four):
    live, kept, dead, bad = listing.find()
    assert [cache.state for cache in (live, kept, dead, bad)] == ["live", "kept", "dead", "bad"]
    assert (live.name, live.alive, live.persistent, live.fingerprint, live.samples) == ("a-live", True, False, "v1", "uint8[4]")
    assert [(holder.pid, sys.executable.split("/")[-1] in holder.command) for holder in live.holders] == [(os.getpid(), True)]
    assert live.stats == four.stats()
    assert (live.stats.hits, live.stats.misses, live.stats.filled) == (3, 5, 5)
    assert live.memory_bytes == os.stat(live.path).st_blocks * 512
    assert abs(live.created - time.time()) < 100
    assert (kept.persistent, kept.holders, kept.stats.filled) == (True, [], 0)
    assert (dead.stats.filled, dead.holders) == (3, [])
    assert "is a symbolic link" in bad.problem


def test_looking_does_not_touch_the_locks_of_this_process(four):
    status = os.stat(listing.find()[0].path)
    assert os.getpid() in registry.lock_owners(ROW_LOCKS, layout.ROWS)[status.st_dev, status.st_ino]
    fill(four)
    assert four.stats().filled == N


def test_ls_shows_a_row_for_each(run, four):
    result = run("ls")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if re.match(r" ?[abcd]-", line)}
    assert list(rows) == ["a-live", "b-kept", "c-dead", "d-bad"]
    assert re.search(rf"\d+\.0 KiB .*50% +5 of 10 +37\.5% +live +no +\d+ s +{os.getpid()} ", rows["a-live"])
    assert re.search(r"0% +0 of 10 +- +kept +yes +\d+ s +nobody", rows["b-kept"])
    assert re.search(r"30% +3 of 10 +0\.0% +dead +no", rows["c-dead"])
    assert "is a symbolic link" in rows["d-bad"]


def test_ls_as_json_reads_back(run, four):
    caches = json.loads(run("ls", "--json").stdout)
    assert [cache["state"] for cache in caches] == ["live", "kept", "dead", "bad"]
    assert caches[0]["stats"]["filled"] == 5
    assert caches[0]["hit_rate"] == 3 / 8
    assert caches[0]["holders"][0]["pid"] == os.getpid()


def test_ls_without_caches(run):
    assert run("ls").stdout == "no named caches\n"
    assert json.loads(run("ls", "--json").stdout) == []


def test_stat_shows_one(run, four):
    shown = run("stat", "a-live").stdout
    assert re.search(r"^filled +5 of 10 slots, 50\.0% of the dataset$", shown, re.MULTILINE)
    assert re.search(r"^fingerprint +v1$", shown, re.MULTILINE)
    assert re.search(rf"^held by +{os.getpid()} ", shown, re.MULTILINE)
    assert json.loads(run("stat", "c-dead", "--json").stdout)["state"] == "dead"
    assert "is a symbolic link" in run("stat", "d-bad").stdout
    missing = run("stat", "e")
    assert missing.exit_code == 1
    assert "there is no cache 'e'. 'stocache ls' lists all caches." in missing.output


def test_stat_tells_memory_that_never_exceeds_its_bound(run, four):
    """The reserved memory holds counters and states too, and comes in whole pages."""
    fill(four)
    shown = re.search(
        r"^memory +(.*) reserved, at most (.*): up to (.*) of samples, the rest for states and counters$",
        run("stat", "a-live").stdout,
        re.MULTILINE,
    )
    reserved, bound, samples = (limits.parse_size(text) for text in shown.groups())
    assert samples <= reserved <= bound
    live = listing.find()[0]
    assert live.memory_bytes == live.max_memory_bytes  # all samples are cached
    assert live.max_memory_bytes > live.stats.capacity_bytes == N * 4


def test_rm_dead_removes_leftovers_only(run, four):
    result = run("rm", "--dead")
    assert result.exit_code == 0
    assert "1 dead cache, " in result.output
    assert names() == ["a-live", "b-kept", "d-bad"]


def test_rm_dead_spares_what_came_into_use_since_it_looked(run, four, monkeypatch):
    """Also with --force, which is for those of other users."""
    found = [dataclasses.replace(cache, alive=False) for cache in listing.find()]
    monkeypatch.setattr(listing, "find", lambda uid: found)
    result = run("rm", "--dead", "--force")
    assert result.exit_code == 1
    assert "cache 'a-live' is in use by processes" in result.output
    assert names() == ["a-live", "b-kept", "d-bad"]


def test_rm_spares_what_is_in_use_without_force(run, four):
    result = run("rm", "a-live", "b-kept", "e")
    assert result.exit_code == 1
    assert f"cache 'a-live' is in use by processes {os.getpid()}. Nevertheless: stocache rm --force a-live" in result.output
    assert "there is no cache 'e'" in result.output
    assert names() == ["a-live", "c-dead", "d-bad"]
    assert "is a symbolic link" in run("rm", "d-bad").output
    assert names() == ["a-live", "c-dead", "d-bad"]
    assert run("rm", "--force", "a-live", "d-bad").exit_code == 0
    assert names() == ["c-dead"]
    fill(four)  # it goes on without its file
    assert four.stats().filled == N


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm"], "say which: stocache rm NAME..., or stocache rm --dead"),
        (["rm", "--dead", "x"], "say which"),
        (["rm", ".x"], "name='.x' cannot name a cache"),
        (["rm", "--user", "all", "x"], "--user all works with --dead only"),
        (["rm", "x"], "there is no cache 'x'"),
        (["ls", "--user", "no-such-user"], "there is no user 'no-such-user' on this machine"),
        (["top"], "top needs a terminal. In scripts: stocache ls --json"),
        (["top", "--interval", "0"], "Invalid value for '--interval'"),
        (["doctor", "--size-limit-gib", "much"], "size_limit_gib='much' is not a size"),
    ],
)
def test_what_the_commands_cannot_do(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_caches_of_another_user(run):
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(12345)
        cache = make("theirs")
        fill(cache, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert json.loads(run("ls", "--json").stdout) == []
    (cache,) = json.loads(run("ls", "--json", "--user", "12345").stdout)
    assert (cache["user"], cache["state"], cache["stats"]["filled"]) == ("12345", "dead", 2)
    assert "12345" in run("ls", "--user", "all").stdout

    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(12346)
        (cache,) = listing.find(12345)
        os._exit(0 if "root can look" in cache.problem else 1)
    assert os.waitpid(pid, 0)[1] == 0

    refused = run("rm", "theirs", "--user", "12345")
    assert refused.exit_code == 1
    assert "cache 'theirs' belongs to user 12345. Nevertheless: --force" in refused.output
    for user in ("12345", "all"):
        refused = run("rm", "--dead", "--user", user)
        assert refused.exit_code == 1
        assert "belongs to user 12345. Nevertheless: --force" in refused.output
    assert run("rm", "--dead", "--user", "12345", "--force").exit_code == 0
    assert not Path(registry.directory_of(12345)).exists()


# ---------------------------------------------------------------------------------------------------- top


def test_top_shows_the_busiest_first_and_leaves_on_q(four):
    fill(four)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stocache", "top", "--interval", "0.1"]
    terminal = {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | terminal)
    os.close(theirs)
    shown = ""
    while not re.search(
        r"a-live.*10 of 10 +█{10} +100% .*[1-9]\d* +10 +1 +live", shown
    ):  # until it has seen hits in an interval
        four.get_slot(1)
        shown += os.read(ours, 65536).decode(errors="replace")
    os.write(ours, b"xq")
    assert process.wait(20) == 0
    os.close(ours)
    assert "quit with q" in shown


def test_rates_are_hits_per_second_between_looks(four):
    rates = top.Rates()
    live = listing.find()
    assert set(rates.update(live, 10.0).values()) == {0.0}
    for _ in range(30):
        four.get_slot(0)
    after = rates.update(listing.find(), 12.0)
    assert after[str(FOLDER / "a-live")] == 15.0
    assert after[str(FOLDER / "c-dead")] == 0.0


# ---------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def healthy(monkeypatch):
    """A machine with nothing to find."""
    monkeypatch.setattr(limits, "shm_total", lambda: 64 * GIB)
    monkeypatch.setattr(limits, "shm_free", lambda: 60 * GIB)
    monkeypatch.setattr(limits, "memory", lambda: Memory(128 * GIB, 100 * GIB))
    monkeypatch.setattr(limits, "cgroup_memory", lambda: None)
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "advise")
    monkeypatch.setattr(doctor, "_file_system", lambda path: "tmpfs")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536) if what == resource.RLIMIT_NOFILE else (-1, -1))


def test_doctor_finds_nothing_on_a_healthy_machine(healthy, run):
    assert doctor.examine(32 * GIB) == []
    result = run("doctor", "--size-limit-gib", "32")
    assert (result.exit_code, result.stdout) == (0, "0 problems found\n")
    assert json.loads(run("doctor", "--json").stdout) == []


SICK = {
    "no shm": ({"SHM_DIR": "/nonexistent"}, "there is no", "mount -t tmpfs tmpfs"),
    "read-only": ({"access": False}, "/dev/shm cannot be written", "mount -o remount,rw /dev/shm"),
    "on disk": ({"file_system": "ext4"}, "/dev/shm is ext4, not tmpfs", "mount -t tmpfs -o size=50% tmpfs /dev/shm"),
    "small": ({"shm_total": 64 * MIB}, "/dev/shm is small: 64.0 MiB, a named cache of 32.0 GiB needs 42.7", "--shm-size=43g"),
    "nearly full": ({"shm_free": GIB}, "nearly full: 1.0 GiB free of 64.0 GiB", "stocache rm --dead"),
    "cgroup": (
        {"cgroup_memory": CgroupMemory(16 * GIB, 8 * GIB, "/sys/fs/cgroup/job")},
        "the cgroup /sys/fs/cgroup/job allows 16.0 GiB, the cache is to have 32.0 GiB",
        "docker run --memory=34g; in Slurm --mem=34G; or size_limit_gib=12",
    ),
    "memory": (
        {"memory": Memory(64 * GIB, 20 * GIB)},
        "20.0 GiB of memory are available",
        "lower size_limit_gib; 'auto' takes",
    ),
    "huge pages": ({"memfd_huge_policy": "never"}, "2 MiB of page tables per GiB", "echo advise >"),
    "memfd": ({"has_memfd": False}, "memfd_create is forbidden", "seccomp"),
    "files": ({"files": (1024, 4096)}, "a process may open 1024 files", "ulimit -n 4096"),
    "address space": ({"address_space": GIB}, "a process may map 1.0 GiB", "ulimit -v unlimited"),
}


@pytest.mark.parametrize("case", SICK)
def test_doctor_names_the_remedy(healthy, run, monkeypatch, case):
    changes, what, remedy = SICK[case]
    for name, value in changes.items():
        if name == "SHM_DIR":
            monkeypatch.setattr(doctor, "SHM_DIR", value)
        elif name == "access":
            monkeypatch.setattr(os, "access", lambda *arguments: False)
        elif name == "file_system":
            monkeypatch.setattr(doctor, "_file_system", lambda path, value=value: value)
        elif name in ("files", "address_space"):
            files, space = (value, -1) if name == "files" else ((65536, 65536), value)
            monkeypatch.setattr(
                resource, "getrlimit", lambda what, f=files, s=space: f if what == resource.RLIMIT_NOFILE else (s, s)
            )
        else:
            monkeypatch.setattr(limits, name, lambda value=value: value)
    (finding,) = doctor.examine(32 * GIB)
    assert what in finding.what
    assert remedy in finding.remedy
    result = run("doctor", "--size-limit-gib", "32GiB")
    assert result.exit_code == (finding.kind == "problem")
    assert f"{finding.kind}: {finding.what}\n    do: {finding.remedy}\n" in result.stdout
    assert json.loads(run("doctor", "--size-limit-gib", "32", "--json").stdout) == [vars(finding)]


def test_doctor_finds_leftovers_and_damage(healthy, four):
    dead, bad = doctor.examine()
    assert dead.what.startswith("left behind by processes that were killed: c-dead (")
    assert dead.remedy == "stocache rm --dead"
    assert "d-bad is a symbolic link" in bad.what
    assert bad.remedy == "stocache rm --force d-bad"


def test_doctor_finds_a_file_deleted_in_use(healthy):
    with make("lost"):
        (FOLDER / "lost").unlink()
        FOLDER.rmdir()
        (finding,) = doctor.examine()
        assert f"processes {os.getpid()} use a named cache whose file was deleted" in finding.what


def test_doctor_leaves_out_files_deleted_in_other_containers(healthy):
    """Their /dev/shm is not ours, although its paths are the same."""
    if not traces.private:
        pytest.skip("needs the right to mount")
    ready, go = os.pipe(), os.pipe()
    here = make("here")
    pid = os.fork()  # the child holds a segment here, too
    if pid == 0:
        with contextlib.suppress(BaseException):
            traces.mount_private()
            with make("lost"):
                (FOLDER / "lost").unlink()
                os.write(ready[1], b"x")
                os.close(go[1])
                os.read(go[0], 1)
        os._exit(0)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"
    assert any(pid in pids for pids in named.holders().values())
    found = doctor.examine()
    os.close(go[1])
    os.waitpid(pid, 0)
    for fd in (ready[0], go[0]):
        os.close(fd)
    here.close()
    assert found == []


@pytest.mark.parametrize(
    ("files", "on"),
    [
        ({}, True),
        ({"etc/logind.conf": "#RemoveIPC=no\n"}, True),
        ({"etc/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({"etc/logind.conf": "RemoveIPC=no\n", "usr/logind.conf": "RemoveIPC=yes"}, False),
        ({"usr/logind.conf": "RemoveIPC=no", "etc/logind.conf.d/50.conf": "RemoveIPC = yes"}, True),
        ({"etc/logind.conf.d/10.conf": "RemoveIPC=yes", "usr/logind.conf.d/20.conf": "RemoveIPC=off"}, False),
        ({"usr/logind.conf.d/10.conf": "RemoveIPC=yes", "etc/logind.conf.d/10.conf": "RemoveIPC=0"}, False),
        ({"linger/12345": ""}, False),
        ({"seats": None}, False),
    ],
)
def test_doctor_knows_what_logind_does_at_logout(healthy, monkeypatch, tmp_path, files, on):
    monkeypatch.setattr(doctor, "_LOGIND", [str(tmp_path / "etc"), str(tmp_path / "usr")])
    monkeypatch.setattr(doctor, "_SEATS", tmp_path / "seats")
    monkeypatch.setattr(doctor, "_LINGER", tmp_path / "linger")
    if "seats" not in files:
        (tmp_path / "seats").mkdir()
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    findings = doctor.examine()
    assert len(findings) == on
    if on:
        assert "systemd deletes your files in /dev/shm when you log out" in findings[0].what
        assert "loginctl enable-linger 12345" in findings[0].remedy


def test_doctor_looks_at_the_real_machine(run):
    findings = json.loads(run("doctor", "--json").stdout)
    assert all(finding.keys() == {"kind", "what", "remedy"} for finding in findings)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0 s"), (59, "59 s"), (120, "2 min"), (7200, "2 h"), (200000, "2 d")])
def test_age_in_the_largest_unit(seconds, shown):
    assert listing.NamedCache("x", "me", "/", created=time.time() - seconds).age == shown
    assert listing.NamedCache("x", "me", "/").age == ""
