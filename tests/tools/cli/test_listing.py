"""The commands over named caches, and the records of loaders over them: ls, stat, rm and doctor."""

import dataclasses
import json
import os
import re
import resource
import sys
import time

import pytest
import torch

from stocache import CachedDataset, DataLoader, SharedCacheDDP
from stocache.observe.recording.record import WAIT_NS, TimingRecord
from stocache.shm import layout, named, registry
from stocache.shm.locks import ROW_LOCKS
from stocache.system import limits
from stocache.system.limits import GIB, MIB, CgroupMemory, Memory
from stocache.tools.cli import doctor, listing
from tests.support.records import FOLDER, SQUARES, leave_behind, leave_loader_behind

N, DIMS = 10, (4,)


def make(name, **options):
    return SharedCacheDDP(1, N, DIMS, name=name, **options)


def fill(cache, count=N):
    for idx in range(count):
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, torch.zeros(DIMS, dtype=torch.uint8))


def filled(name, count, **options):
    cache = make(name, **options)
    fill(cache, count)
    return cache


@pytest.fixture
def four(tmp_path, clean):
    """One cache of each state: live, kept, dead, bad."""
    cache = filled("a-live", 5, fingerprint="v1")
    for idx in range(3):
        cache.get_slot(idx)
    make("b-kept", persist=True).close()
    leave_behind(lambda: filled("c-dead", 3))
    (FOLDER / "d-bad").symlink_to(tmp_path)
    yield cache
    cache.close()


def names():
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def test_find_returns_all_there_is_to_say(four):
    live, kept, dead, bad = listing.find()
    assert [cache.state for cache in (live, kept, dead, bad)] == ["live", "kept", "dead", "bad"]
    assert (live.name, live.fingerprint, live.samples) == ("a-live", "v1", "uint8[4]")
    assert [(each["pid"], sys.executable.split("/")[-1] in each["command"]) for each in live.holders] == [(os.getpid(), True)]
    assert live.stats == four.stats()
    assert abs(live.created - time.time()) < 1000
    assert (kept.persistent, kept.holders, kept.stats.filled) == (True, [], 0)
    assert (dead.stats.filled, dead.holders) == (3, [])
    assert "is a symbolic link" in bad.problem
    status = os.stat(live.path)  # looking does not touch the locks of this process
    assert os.getpid() in registry.lock_owners(ROW_LOCKS, layout.COUNTER_ROWS)[status.st_dev, status.st_ino]
    fill(four)
    (live, *_) = listing.find()
    assert live.stats.filled == N
    assert live.memory_bytes == os.stat(live.path).st_blocks * 512 == live.max_memory_bytes > live.stats.capacity_bytes


def test_ls_shows_a_row_for_each(run, request):
    assert (run("ls").stdout, run("ls", "--json").stdout) == ("no named caches\n", "[]\n")
    request.getfixturevalue("four")
    result = run("ls")
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if re.match(r" ?[abcd]-", line)}
    assert list(rows) == ["a-live", "b-kept", "c-dead", "d-bad"]
    assert re.search(rf"\d+\.0 KiB .*50% +37\.5% +live +{os.getpid()} ", rows["a-live"])
    assert re.search(r"0% +- +kept +nobody", rows["b-kept"])
    assert re.search(r"30% +0\.0% +dead", rows["c-dead"])
    assert "is a symbolic link" in rows["d-bad"]
    live, *_ = json.loads(run("ls", "--json").stdout)
    assert (live["stats"]["filled"], live["hit_rate"], live["holders"][0]["pid"]) == (5, 3 / 8, os.getpid())


def test_stat_shows_one(run, four):
    found = dict(re.split(r" {2,}", line, maxsplit=1) for line in run("stat", "a-live").stdout.splitlines())
    assert (found["filled"], found["fingerprint"]) == ("5 of 10 slots, 50.0% of the dataset", "v1")
    assert found["held by"].startswith(f"{os.getpid()} ")
    shown = re.fullmatch(r"(.*) reserved, at most (.*): up to (.*) of samples, the rest for .*", found["memory"])
    reserved, bound, samples = (limits.parse_size(text) for text in shown.groups())
    assert samples <= reserved <= bound
    assert json.loads(run("stat", "c-dead", "--json").stdout)["state"] == "dead"
    assert "is a symbolic link" in run("stat", "d-bad").stdout


def test_age_in_the_largest_unit(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 10**9)
    for seconds, shown in ((1, "1 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200000, "2 d")):
        assert listing.age_of(10**9 - seconds) == shown


def test_rm_dead_removes_leftovers_only(run, four, monkeypatch):
    found = [dataclasses.replace(cache, alive=False) for cache in listing.find()]
    with monkeypatch.context() as patched:  # "a-live" came into use since it looked
        patched.setattr(listing, "find_all", lambda: found)
        result = run("rm", "--dead", "--force")
    assert (result.exit_code, "cache 'a-live' is in use by processes" in result.output) == (1, True)
    leave_behind(lambda: filled("c-dead", 3))
    result = run("rm", "--dead")
    assert (result.exit_code, "1 dead cache, " in result.output) == (0, True)
    assert names() == ["a-live", "b-kept", "d-bad"]


def test_rm_spares_what_is_in_use_without_force(run, four):
    result = run("rm", "a-live", "b-kept", "e", "d-bad")
    pid = os.getpid()
    assert result.exit_code == 1
    assert f"cache 'a-live' is in use by processes {pid}. To remove it anyway: stocache rm --force a-live" in result.output
    assert "there is no cache 'e'" in result.output
    assert "is a symbolic link" in result.output
    assert names() == ["a-live", "c-dead", "d-bad"]
    assert run("rm", "--force", "a-live", "d-bad").exit_code == 0
    assert names() == ["c-dead"]
    fill(four)  # it goes on without its file
    assert four.stats().filled == N


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine with nothing to find."""
    facts = {"shm_total": 64 * GIB, "shm_free": 60 * GIB, "memory": Memory(128 * GIB, 100 * GIB)}
    facts |= {"cgroup_memory": None, "memfd_huge_policy": "advise", "has_memfd": True}
    for name, fact in facts.items():
        monkeypatch.setattr(limits, name, lambda fact=fact: fact)
    monkeypatch.setattr(doctor, "_SEATS", tmp_path / "seats")
    monkeypatch.setattr(doctor, "filesystem_of", lambda device: "tmpfs")
    found = doctor.named.deleted_in_use
    before = set(found(os.stat("/dev/shm").st_dev))
    here = lambda device: {path: pids for path, pids in found(device).items() if os.getpid() in pids and path not in before}
    monkeypatch.setattr(doctor.named, "deleted_in_use", here)  # other tests delete files of caches, before and meanwhile
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536) if what == resource.RLIMIT_NOFILE else (-1, -1))


FILES = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_AS: (-1, -1)}
SPACE = {resource.RLIMIT_NOFILE: (65536, 65536), resource.RLIMIT_AS: (GIB, GIB)}
JOB = CgroupMemory(16 * GIB, 8 * GIB, "/sys/fs/cgroup/job")
JOBS_LIMITS = "docker run --memory=34g; in Slurm --mem=34G; or size_limit_gib=12"
FEW_FREE = Memory(64 * GIB, 20 * GIB)
SICK = [
    (doctor, "SHM_DIR", "/nonexistent", "there is no", "mount -t tmpfs tmpfs"),
    (os, "access", lambda *_: False, "/dev/shm cannot be written", "mount -o remount,rw /dev/shm"),
    (doctor, "filesystem_of", lambda device: "ext4", "/dev/shm is ext4, not tmpfs", "mount -t tmpfs -o size=50%"),
    (limits, "shm_total", lambda: 64 * MIB, "is small: 64.0 MiB, a named cache of 32.0 GiB needs 42.7", "--shm-size=43g"),
    (limits, "shm_free", lambda: GIB, "nearly full: 1.0 GiB free of 64.0 GiB", "stocache rm --dead"),
    (limits, "cgroup_memory", lambda: JOB, "job allows 16.0 GiB, the cache is to have 32.0 GiB", JOBS_LIMITS),
    (limits, "memory", lambda: FEW_FREE, "20.0 GiB of memory are available", "lower size_limit_gib; 'auto' takes"),
    (limits, "memfd_huge_policy", lambda: "never", "2 MiB of page tables per GiB", "echo advise >"),
    (limits, "has_memfd", lambda: False, "memfd_create is forbidden", "seccomp"),
    (resource, "getrlimit", FILES.get, "a process may open 1024 files", "ulimit -n 4096"),
    (resource, "getrlimit", SPACE.get, "a process may map 1.0 GiB", "ulimit -v unlimited"),
]


def test_doctor_finds_nothing_on_a_healthy_machine_and_names_the_remedy_on_others(healthy, run, monkeypatch):
    result = run("doctor", "--size-limit-gib", "32")
    assert (result.exit_code, result.stdout, run("doctor", "--json").stdout) == (0, "0 problems found\n", "[]\n")
    for owner, name, value, what, remedy in SICK:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            (finding,) = doctor.examine(32 * GIB)
            assert (what in finding.what, remedy in finding.remedy) == (True, True)
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
        assert named.deleted_in_use(-1) == {}  # as in another container, in which the same paths are others


@pytest.mark.parametrize(("files", "on"), [
    ({}, True),
    ({"etc/logind.conf": "[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n"}, False),
    ({"usr/logind.conf": "RemoveIPC=no", "etc/logind.conf.d/50.conf": "RemoveIPC = yes"}, True),
    ({"linger/12345": ""}, False),
    (None, False),
])  # fmt: skip
def test_doctor_knows_what_logind_does_at_logout(healthy, monkeypatch, tmp_path, files, on):
    monkeypatch.setattr(doctor, "_LOGIND", [str(tmp_path / "etc"), str(tmp_path / "usr")])
    monkeypatch.setattr(doctor, "_LINGER", tmp_path / "linger")
    if files is not None:
        (tmp_path / "seats").mkdir()
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    findings = doctor.examine()
    assert ["systemd deletes your files in /dev/shm when you log out" in finding.what for finding in findings] == [True] * on
    assert all("loginctl enable-linger 12345" in finding.remedy for finding in findings)


def loaders():
    """The records of loaders, with their counts."""
    return [file for file in listing.find_all(count=True) if file.kind == "loader"]


def test_a_loader_over_a_named_cache_is_found_with_its_counts_apart_from_caches():
    with CachedDataset(SQUARES, 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        assert [len(batch) for batch in loader] == [4] * 6
        (found,) = loaders()
        assert (found.name, found.cache, found.state) == (f"squares.loader-{os.getpid()}-0", "squares", "live")
        assert found.counted.distribution(WAIT_NS) == loader.stats().wait
        assert [cache.name for cache in listing.find()] == ["squares"]
        assert [file.counted for file in listing.find_all() if file.kind == "loader"] == [None]
        del loader
    assert loaders() == []


def test_rm_dead_removes_the_records_of_killed_processes_only(run, clean):
    leave_loader_behind("c", rank=1)
    kept = TimingRecord(0, False, "d")
    dead, live = loaders()
    assert (dead.state, dead.rank, dead.counted.sum(WAIT_NS), live.state) == ("dead", 1, 5, "live")
    assert f"left behind by processes that were killed: c.loader-{dead.pid}-0 (" in next(doctor._named()).what
    result = run("rm", "--dead")
    assert (result.exit_code, "0 dead caches and 1 dead loader, " in result.output) == (0, True)
    assert [loader.name for loader in loaders()] == [live.name]
    del kept
