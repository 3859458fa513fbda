import os
from pathlib import Path

import pytest

from stocache import LimitError, get_shm_size
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (32, 32 * GIB),
        (0.5, GIB // 2),
        (0, 0),
        ("32", 32 * GIB),
        ("32GiB", 32 * GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("64KiB", 65536),
        ("2TB", 2_000_000_000_000),
        ("7B", 7),
        ("1e3 B", 1000),
    ],
)
def test_parse_size_takes_numbers_and_units(size, expected):
    assert limits.parse_size(size) == expected


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-1, "finite and not negative"),
        (float("nan"), "finite and not negative"),
        (float("inf"), "finite and not negative"),
        ("-3GiB", "is not a size"),
        ("much", "is not a size"),
        ("", "is not a size"),
        ("3 gallons", "is not a size"),
        (None, "is a NoneType"),
        (True, "is a bool"),
        ([1], "is a list"),
    ],
)
def test_parse_size_refuses_what_is_no_size(size, message):
    with pytest.raises(LimitError, match=message):
        limits.parse_size(size)


def test_format_size_uses_binary_units():
    assert [limits.format_size(n) for n in (0, 1023, 1024, 3 * MIB // 2, 5 * GIB)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB",
    ]  # fmt: skip


def test_get_shm_size_is_whole_gib_of_the_file_system():
    status = os.statvfs("/dev/shm")
    assert get_shm_size() == status.f_blocks * status.f_frsize // GIB


def test_shm_is_nothing_where_there_is_none(monkeypatch):
    monkeypatch.setattr(limits, "SHM_DIR", "/nonexistent")
    assert (limits.shm_total(), limits.shm_free()) == (0, 0)


def test_memory_is_within_the_machine():
    memory = limits.memory()
    assert 0 < memory.available <= memory.total
    assert 64 * MIB <= memory.floor <= 2 * GIB


def test_floor_is_a_twentieth_between_bounds():
    assert Memory(256 * MIB, 0).floor == 64 * MIB
    assert Memory(20 * GIB, 0).floor == GIB
    assert Memory(1024 * GIB, 0).floor == 2 * GIB
    assert Memory(256 * MIB, 10 * MIB).spare == 0


# ------------------------------------------------------------------------------------------------ cgroups


def fake_proc(root: Path, cgroup: str, mountinfo: str) -> Path:
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def write_files(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_cgroup_v2_takes_the_tightest_of_all_ancestors(tmp_path):
    mount = tmp_path / "cgroup"
    proc = fake_proc(tmp_path, "0::/a/b\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    write_files(mount / "a/b", memory__max="max", memory__current=GIB)
    write_files(mount / "a", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    write_files(mount, cgroup__procs="")
    level = limits.cgroup_memory(proc)
    assert level == limits.CgroupMemory(8 * GIB, 4 * GIB, str(mount / "a"))


def test_cgroup_v2_memory_high_is_a_limit_too(tmp_path):
    mount = tmp_path / "cgroup"
    proc = fake_proc(tmp_path, "0::/a\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    write_files(mount / "a", memory__max=8 * GIB, memory__high=2 * GIB, memory__current=GIB)
    assert limits.cgroup_memory(proc).available == GIB


def test_cgroup_v1_reads_limit_in_bytes_and_ignores_no_limit(tmp_path):
    mount = tmp_path / "memory"
    proc = fake_proc(
        tmp_path,
        "5:cpu:/x\n4:cpuset,memory:/docker/abc\n0::/x\n",
        f"31 20 0:27 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n32 20 0:28 / {mount} rw - cgroup cgroup rw,cpuset,memory\n",
    )
    inner = mount / "docker" / "abc"
    write_files(inner, memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat="total_inactive_file 0")
    write_files(mount, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=20 * GIB)
    assert limits.cgroup_memory(proc) == limits.CgroupMemory(3 * GIB, GIB, str(inner))


def test_cgroup_path_is_taken_relative_to_the_mounted_root(tmp_path):
    """A container without a cgroup namespace sees the host's path, but has its own group mounted at the root."""
    mount = tmp_path / "my cgroup"
    escaped = str(mount).replace(" ", "\\040")
    proc = fake_proc(tmp_path, "0::/docker/abc\n", f"30 20 0:26 /docker/abc {escaped} ro - cgroup2 cgroup2 rw\n")
    write_files(mount, memory__max=GIB, memory__current=0)
    assert limits.cgroup_memory(proc).path == str(mount)


def test_cgroup_path_above_the_mount_falls_back_to_the_mount(tmp_path):
    mount = tmp_path / "cgroup"
    proc = fake_proc(tmp_path, "0::/../other\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    write_files(mount, memory__max=GIB, memory__current=0)
    assert limits.cgroup_memory(proc).limit == GIB


def test_no_cgroup_files_mean_no_limit(tmp_path):
    assert limits.cgroup_memory(tmp_path / "nothing") is None


# ------------------------------------------------------------------------------------------------ limits


def test_auto_leaves_head_room(monkeypatch):
    for available, expected in ((100 * GIB, 80 * GIB), (4 * GIB, 2 * GIB), (GIB, GIB // 2)):
        monkeypatch.setattr(limits, "memory", lambda available=available: Memory(2 * available, available))
        assert limits.recommended_limit() == expected


def test_auto_is_bounded_by_shm_where_memfd_is_forbidden(monkeypatch):
    monkeypatch.setattr(limits, "memory", lambda: Memory(100 * GIB, 100 * GIB))
    monkeypatch.setattr(limits, "has_memfd", lambda: False)
    monkeypatch.setattr(limits, "shm_free", lambda: 64 * MIB)
    assert limits.recommended_limit() == 48 * MIB - 80 * 1024
