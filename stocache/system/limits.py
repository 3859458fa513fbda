"""Find out how much memory this machine can give to a cache: /dev/shm, memory, cgroup limits. Parse and format sizes.

All amounts are bytes unless the name says GiB. Every amount is read again at each call: containers are resized, and other jobs
start and end.
"""

import errno
import functools
import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal, NamedTuple

from stocache.errors import LimitError
from stocache.system.platform import here

logger = logging.getLogger("stocache")

PROC = Path("/proc/self")

KIB, MIB, GIB = 1024, 1024**2, 1024**3

SHM_DIR = "/dev/shm"
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of opening a file that come from this process or machine, and say nothing about the file."""

# Linux 6.3 and later complains in its log unless a memfd says whether it may be executed. Older kernels refuse the flag.
_MFD_NOEXEC_SEAL = 0x8

_SEGMENT_OVERHEAD = 136 * KIB  # header, counter rows and extent states of a segment, see `stocache.shm.layout`

_UNITS = {"": GIB, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:E[+-]?[0-9]+)?)\s*([KMGT]I?B|B|)\s*", re.IGNORECASE)


def parse_size(size: float | str, name: str = "size_limit_gib") -> int:
    """Return the bytes in ``size``: a number or bare numeral of GiB, or a string such as "32GiB" or "500MB".

    ``name`` is the name of the argument in errors.

    Raises:
        LimitError: ``size`` is negative, NaN, infinite, or not a size.
    """
    written = "Write 32, 0.5, '32GiB', '500MB' or 'auto'." if name == "size_limit_gib" else "Write for example '500MB'."
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match:
            raise LimitError(f"{name}={size!r} is not a size. {written}")
        number, unit = float(match[1]), _UNITS[match[2].upper()]
    elif isinstance(size, Real) and not isinstance(size, bool):
        number, unit = float(size), GIB
    else:
        raise LimitError(f"{name}={size!r} is a {type(size).__name__}. {written}")
    if not math.isfinite(number) or number < 0:
        raise LimitError(f"{name}={size!r} must be finite and not negative; 0 switches the cache off.")
    return int(number * unit)


def format_size(n: float) -> str:
    """Return ``n`` bytes as a person writes them: "1.5 GiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n) >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{int(n)} B"


def shm_total() -> int:
    """Return the size of /dev/shm in bytes; 0 if it does not exist."""
    return _statvfs_bytes("f_blocks")


def shm_free() -> int:
    """Return the bytes of /dev/shm that this process may still write; 0 if it does not exist or is read-only."""
    return _statvfs_bytes("f_bavail") if os.access(SHM_DIR, os.W_OK) else 0


def shm_room() -> int:
    """Return the bytes of /dev/shm for a cache: three quarters of the free ones. DataLoader workers need the others."""
    return max(0, shm_free() * 3 // 4 - _SEGMENT_OVERHEAD)


def _statvfs_bytes(field: Literal["f_blocks", "f_bavail"]) -> int:
    if not here.SHARES_MEMORY:
        return 0
    try:
        status = os.statvfs(SHM_DIR)
    except OSError:
        return 0
    return int(getattr(status, field)) * status.f_frsize


def open_memfd() -> int | None:
    """Return the descriptor of a new anonymous file in memory, not limited by /dev/shm; None if that is forbidden."""
    for flags in (_MFD_NOEXEC_SEAL, 0) if here.SHARES_MEMORY else ():
        try:
            return os.memfd_create("stocache", flags | os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return None
    return None


def has_memfd() -> bool:
    """Whether this process may create files in memory (a seccomp filter may forbid it)."""
    fd = open_memfd()
    if fd is None:
        return False
    os.close(fd)
    return True


def memfd_huge_policy() -> str:
    """Return the kernel's huge-page policy for memfd: always, within_size, advise, never, deny or force.

    /dev/shm has its own policy: the mount option ``huge=``, by default never.
    Source: Documentation/admin-guide/mm/transhuge.rst of Linux; both measured.
    """
    try:
        match = re.search(r"\[(\w+)\]", SHMEM_HUGE.read_text())
    except OSError:
        return "never"
    return match[1] if match else "never"


@dataclass(frozen=True)
class CgroupMemory:
    """The memory limit of a cgroup.

    Attributes:
        limit: bytes that the group may use.
        available: bytes that it may still take. The page cache that it would drop first (inactive_file) counts as available.
        path: the directory of the group.
    """

    limit: int
    available: int
    path: str


def cgroup_memory(proc: Path = PROC) -> CgroupMemory | None:
    """Return the limit of this process's cgroup (v1 or v2), or of the ancestor with the least memory left. None: no limit."""
    levels = [level for path in _cgroup_dirs(proc) if (level := _cgroup_level(path))]
    return min(levels, key=lambda level: level.available, default=None)


@functools.lru_cache(maxsize=8)
def _cgroup_dirs(proc: Path) -> tuple[Path, ...]:
    """Return the directories with the memory files of this process's cgroup and its ancestors, innermost first.

    The result is cached: a process is hardly ever moved to a different cgroup, and this is called before each reservation.
    """
    try:
        memberships = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return ()
    dirs: list[Path] = []
    for _, controllers, path in memberships:
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        for mount in mounts(proc):
            if mount.kind == "cgroup2" if unified else mount.kind == "cgroup" and "memory" in mount.options:
                dirs += _ancestry(Path(mount.path), mount.root, path)
                break
    return tuple(dirs)


def _ancestry(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the directories from cgroup ``path`` up to ``mount``, where the cgroup ``root`` is mounted."""
    relative = os.path.relpath(path, root)
    if relative.startswith(".."):  # a cgroup namespace: groups above the mount are not visible
        relative = "."
    directory = mount / relative
    yield from (directory, *(parent for parent in directory.parents if parent.is_relative_to(mount)))


def _cgroup_level(path: Path) -> CgroupMemory | None:
    limits = [_read_int(path / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    # v1 writes "no limit" as the largest multiple of a page below 2**63
    limit = min((n for n in limits if n is not None and n < 2**60), default=None)
    if limit is None:
        return None
    used = _read_int(path / "memory.current") or _read_int(path / "memory.usage_in_bytes") or 0
    try:
        stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
    except OSError:
        stat = {}
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return CgroupMemory(limit, max(0, limit - max(0, used - droppable)), str(path))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


@dataclass(frozen=True)
class Memory:
    """The memory that the processes of this cgroup may use: the memory of the machine, or of the cgroup if that is less.

    Attributes:
        total: bytes in all.
        available: bytes that can be taken before the machine swaps, or the kernel kills a process of the cgroup.
    """

    total: int
    available: int

    @property
    def floor(self) -> int:
        """Bytes that caches always leave free: 5 % of the total, at least 64 MiB, at most 2 GiB."""
        return min(max(self.total // 20, 64 * MIB), 2 * GIB)

    @property
    def spare(self) -> int:
        """Bytes that caches may still take: the available bytes above the floor."""
        return max(0, self.available - self.floor)


def memory() -> Memory:
    """Return the memory that this process may use now."""
    machine, cgroup = _machine_memory(), cgroup_memory() if here.SHARES_MEMORY else None
    if cgroup is None:
        return machine
    return Memory(min(machine.total, cgroup.limit), min(machine.available, cgroup.available))


def _machine_memory() -> Memory:
    import psutil  # here: a loader without a cache starts faster

    try:
        machine = psutil.virtual_memory()
    except OSError:  # /proc is hidden: then the free bytes, without the bytes of the page cache
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))
    return Memory(machine.total, machine.available)


def shared_memory_room(named: bool = False) -> int:
    """Return the bytes that the largest cache could hold now, with a name or without.

    Memory above the floor limits every cache. The room in /dev/shm limits caches with a name, which are files there; and all
    caches if memfd is forbidden.
    """
    spare = memory().spare
    return spare if not here.SHARES_MEMORY or (has_memfd() and not named) else min(spare, shm_room())


def recommended_limit(named: bool = False, promised: int = 0) -> int:
    """Return the bytes that ``size_limit_gib="auto"`` stands for.

    It leaves memory for the model, the workers and their batches: a fifth of the available memory, at least 2 GiB, at most half
    of it. /dev/shm may limit a cache further (`shared_memory_room`).

    Args:
        named: whether the cache has a name, so that it has to lie in /dev/shm.
        promised: bytes that other caches may still take.
    """
    available = max(0, memory().available - promised)
    head_room = max(available // 5, min(2 * GIB, available // 2))
    return min(available - head_room, max(0, shared_memory_room(named) - promised))


def warn_short(limit: int, fitting: str, named: bool) -> None:
    """Warn that the machine cannot give a cache ``limit`` bytes, and that it holds ``fitting`` instead."""
    gib = -(-limit // GIB) + 1
    if not here.SHARES_MEMORY or (has_memfd() and not (named and shm_room() < memory().spare)):
        have = f"{format_size(memory().available)} of memory are available, of which {format_size(memory().floor)} stay free"
        remedy = "give this process more memory"
    elif shm_free():
        have = f"{SHM_DIR} has {format_size(shm_free())} free, of which a quarter is left to the batches"
        remedy = f"in Docker --shm-size={gib}g, on a host mount -o remount,size={gib}G {SHM_DIR}"
    else:
        have = f"no shared memory: {SHM_DIR} cannot be written" + (" and memfd_create is forbidden" if not named else "")
        remedy = f"in Docker --shm-size={gib}g, on a host mount -t tmpfs -o size={gib}G tmpfs {SHM_DIR}"
    text = "%s; the cache was given %s. Caching what fits: %s. Lower size_limit_gib, or %s."
    logger.warning(text, have, format_size(limit), fitting, remedy)


class Mount(NamedTuple):
    """A mounted file system: its device number, the directory of it that is mounted, and where; its type and options."""

    device: str
    root: str
    path: str
    kind: str
    options: list[str]


def mounts(proc: Path = PROC) -> Iterator[Mount]:
    """Yield the file systems that this process sees; nothing if /proc is hidden.

    Source: /proc/[pid]/mountinfo in proc(5).
    """
    try:
        lines = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, others = left.split(), right.split()
        yield Mount(fields[2], _unescape(fields[3]), _unescape(fields[4]), others[0], others[-1].split(","))


def _unescape(field: str) -> str:
    r"""Undo mountinfo's octal escapes (a space is written \040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def filesystem_of(device: int) -> str:
    """Return the type of the file system with a device number (``st_dev``): "ext4", "tmpfs", "nfs4"; "" if it is not known."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == wanted), "")


def get_shm_size() -> int:
    """Return the size of /dev/shm in whole GiB, rounded down.

    Change it for now with ``mount -o remount,size=128G /dev/shm``; in Docker with ``--shm-size=128g``.
    Source: the API of stocaching 0.2 (C. Jones, MIT).
    """
    return shm_total() // GIB
