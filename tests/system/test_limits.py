"""How much memory a cache may take: sizes, /dev/shm, cgroups."""

import os

import pytest

from stocache import LimitError, get_shm_size
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory


def test_parse_size_takes_numbers_and_units_and_format_size_writes_them():
    sizes = {0.5: GIB // 2, 0: 0, "32": 32 * GIB, " 1.5 gib ": 3 * GIB // 2, "500MB": 500_000_000, "7B": 7, "1e3 B": 1000}
    assert {size: limits.parse_size(size) for size in sizes} == sizes
    written = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 * MIB // 2: "1.5 MiB", 5 * GIB: "5.0 GiB"}
    assert {n: limits.format_size(n) for n in written} == written


def test_parse_size_refuses_what_is_no_size():
    for size, message in (
        *((size, "finite and not negative") for size in (-1, float("nan"), float("inf"))),
        *((size, "is not a size") for size in ("-3GiB", "much", "", "3 gallons")),
        *((None, "is a NoneType"), (True, "is a bool"), ([1], "is a list")),
    ):
        with pytest.raises(LimitError, match=message):
            limits.parse_size(size)


@pytest.mark.linux
def test_shm_is_a_file_system_and_the_floor_of_memory_a_twentieth_between_bounds(monkeypatch):
    status, memory = os.statvfs("/dev/shm"), limits.memory()
    assert get_shm_size() == status.f_blocks * status.f_frsize // GIB
    monkeypatch.setattr(limits, "SHM_DIR", "/nonexistent")
    assert (limits.shm_total(), limits.shm_free()) == (0, 0)
    assert 0 < memory.available <= memory.total
    assert [Memory(total, 0).floor for total in (256 * MIB, 20 * GIB, 1024 * GIB)] == [64 * MIB, GIB, 2 * GIB]
    assert Memory(256 * MIB, 10 * MIB).spare == 0


def fake_proc(root, cgroup, mountinfo):
    write_files(root / "proc", cgroup=cgroup.strip(), mountinfo=mountinfo.strip())
    return root / "proc"


def write_files(folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_cgroup_v2_takes_the_tightest_of_all_ancestors_and_of_high_and_max(tmp_path):
    mount = tmp_path / "cgroup"
    proc = fake_proc(tmp_path, "0::/a/b\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    write_files(mount / "a/b", memory__max="max", memory__current=GIB)
    write_files(mount / "a", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    write_files(mount, cgroup__procs="")
    assert limits.cgroup_memory(proc) == limits.CgroupMemory(8 * GIB, 4 * GIB, str(mount / "a"))
    write_files(mount / "a/b", memory__max=8 * GIB, memory__high=2 * GIB)
    assert limits.cgroup_memory(proc) == limits.CgroupMemory(2 * GIB, GIB, str(mount / "a/b"))


def test_cgroup_v1_reads_limit_in_bytes_and_ignores_no_limit(tmp_path):
    mount, cpu = tmp_path / "memory", f"31 20 0:27 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
    mountinfo = f"{cpu}32 20 0:28 / {mount} rw - cgroup cgroup rw,cpuset,memory\n"
    proc = fake_proc(tmp_path, "5:cpu:/x\n4:cpuset,memory:/docker/abc\n0::/x\n", mountinfo)
    inner = mount / "docker" / "abc"
    write_files(inner, memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat="total_inactive_file 0")
    write_files(mount, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=20 * GIB)
    assert limits.cgroup_memory(proc) == limits.CgroupMemory(3 * GIB, GIB, str(inner))


@pytest.mark.parametrize(("cgroup", "root"), [("/docker/abc", "/docker/abc"), ("/../other", "/")])
def test_a_container_has_its_own_group_at_the_mount(tmp_path, cgroup, root):
    """Without a cgroup namespace it sees the host's path, with one it may be moved above what is mounted."""
    mount = tmp_path / "my cgroup"
    escaped = str(mount).replace(" ", "\\040")
    proc = fake_proc(tmp_path, f"0::{cgroup}\n", f"30 20 0:26 {root} {escaped} ro - cgroup2 cgroup2 rw\n")
    write_files(mount, memory__max=GIB, memory__current=0)
    assert limits.cgroup_memory(proc) == limits.CgroupMemory(GIB, GIB, str(mount))
    assert limits.cgroup_memory(tmp_path / "nothing") is None


@pytest.mark.linux
def test_auto_leaves_head_room_and_is_bounded_by_shm_where_memfd_is_forbidden(monkeypatch):
    monkeypatch.setattr(limits, "has_memfd", lambda: True)
    for available, expected in ((100 * GIB, 80 * GIB), (4 * GIB, 2 * GIB), (GIB, GIB // 2)):
        monkeypatch.setattr(limits, "memory", lambda available=available: Memory(2 * available, available))
        assert limits.recommended_limit() == expected
    monkeypatch.setattr(limits, "memory", lambda: Memory(100 * GIB, 100 * GIB))
    monkeypatch.setattr(limits, "shm_free", lambda: 64 * MIB)
    assert limits.recommended_limit(named=True) == 48 * MIB - 136 * 1024
    monkeypatch.setattr(limits, "has_memfd", lambda: False)
    assert limits.recommended_limit() == 48 * MIB - 136 * 1024
