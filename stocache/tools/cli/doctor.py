"""Find settings of this machine that hinder a cache, each with the command that changes it."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stocache.cache.disk.folder import unfit
from stocache.cache.disk.inspection import place_of
from stocache.shm import named
from stocache.shm.registry import directory_of
from stocache.system import limits
from stocache.system.limits import GIB, SHM_DIR, filesystem_of, format_size
from stocache.system.platform import here
from stocache.system.waiting import printable
from stocache.tools.cli import listing

_LEAST_SHM = 1 * GIB  # Docker has 64 MiB
_LEAST_DESCRIPTORS = 4096  # each tensor that a worker sends needs one until it is received
_LOGIND = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")  # the first one found counts
_SEATS, _LINGER = Path("/run/systemd/seats"), Path("/var/lib/systemd/linger")  # exists while logind runs; a file per user


@dataclass(frozen=True)
class Finding:
    """A problem, or a hint at an improvement."""

    kind: Literal["problem", "hint"] = field(default="problem", kw_only=True)
    what: str
    remedy: str


def examine(size_limit: int | None = None, disk: str | None = None, disk_limit: int | None = None) -> list[Finding]:
    """Return all findings on this machine.

    Args:
        size_limit: bytes of a planned cache.
        disk, disk_limit: folder and bytes of a planned disk cache.
    """
    shared = [*_shm(size_limit), *_memfd(), *_named(), *_remove_ipc()] if here.SHARES_MEMORY else []
    return [*shared, *_memory(size_limit), *_disks(disk, disk_limit), *_process()]


def _shm(size_limit: int | None) -> Iterator[Finding]:
    total, free = limits.shm_total(), limits.shm_free()
    if not os.path.isdir(SHM_DIR):
        yield Finding(f"there is no {SHM_DIR}.", f"as root: mkdir {SHM_DIR} && mount -t tmpfs tmpfs {SHM_DIR}")
        return
    if not os.access(SHM_DIR, os.W_OK):
        yield Finding(
            f"{SHM_DIR} cannot be written: DataLoader workers and named caches need it.",
            f"as root: mount -o remount,rw {SHM_DIR}; in Docker with --read-only add --tmpfs {SHM_DIR}:rw,size=8g",
        )
        return
    if (kind := filesystem_of(os.stat(SHM_DIR).st_dev)) not in ("tmpfs", ""):
        yield Finding(
            f"{SHM_DIR} is {kind}, not tmpfs: data that is written there may go to a disk.",
            f"as root: mount -t tmpfs -o size=50% tmpfs {SHM_DIR}",
        )
    wanted = max(size_limit * 4 // 3 if size_limit else 0, _LEAST_SHM)
    if total < wanted:
        gib = -(-wanted // GIB)
        needs = f", a named cache of {format_size(size_limit)} needs {format_size(wanted)}" if size_limit else ""
        yield Finding(
            f"{SHM_DIR} is small: {format_size(total)}{needs}.",
            f"as root: mount -o remount,size={gib}G {SHM_DIR}; in Docker: --shm-size={gib}g",
        )
    elif free < total // 10:
        yield Finding(
            f"{SHM_DIR} is nearly full: {format_size(free)} free of {format_size(total)}.",
            f"find what takes it: stocache ls; du -sh {SHM_DIR}/* | sort -h; then: stocache rm --dead",
        )


def _memory(size_limit: int | None) -> Iterator[Finding]:
    cgroup, memory = limits.cgroup_memory(), limits.memory()
    if size_limit and cgroup and cgroup.limit < size_limit:
        gib = -(-size_limit // GIB) + 2
        yield Finding(
            f"the cgroup {cgroup.path} allows {format_size(cgroup.limit)}, the cache is to have {format_size(size_limit)}.",
            f"docker run --memory={gib}g; in Slurm --mem={gib}G; or size_limit_gib={max(1, cgroup.limit * 3 // 4 // GIB)}",
        )
    elif size_limit and memory.spare < size_limit:
        yield Finding(
            f"{format_size(memory.available)} of memory are available, the cache is to have {format_size(size_limit)}, "
            f"and {format_size(memory.floor)} stay free.",
            "end other programs, or lower size_limit_gib; 'auto' takes " + format_size(limits.recommended_limit()),
        )


def _memfd() -> Iterator[Finding]:
    if limits.memfd_huge_policy() in ("never", "deny"):
        yield Finding(
            "the kernel uses no huge pages for shared memory: each process pays 2 MiB of page tables per GiB of a cache.",
            f"as root: echo advise > {limits.SHMEM_HUGE} (for caches without a name)",
            kind="hint",
        )
    if not limits.has_memfd():
        yield Finding(
            f"memfd_create is forbidden: caches without a name are bounded by {SHM_DIR} too.",
            "in Docker: --security-opt seccomp=… with a profile that allows it; or a larger --shm-size",
            kind="hint",
        )


def _named() -> Iterator[Finding]:
    files = listing.find_all(count=True)
    dead = [file for file in files if file.state == "dead"]
    if dead:
        size = format_size(sum(file.memory_bytes for file in dead))
        names = ", ".join(f"states of the samples in {file.name}" if file.kind == "disk" else file.name for file in dead)
        yield Finding(f"left behind by processes that were killed: {names} ({size}).", "stocache rm --dead")
    for file in files:
        if file.state == "bad":
            where = "" if file.problem.startswith(file.path) else f"{file.path}: "
            yield Finding(f"{where}{file.problem}", f"stocache rm --force {file.name}")
    deleted = named.deleted_in_use(os.stat(SHM_DIR).st_dev) if os.path.exists(SHM_DIR) else {}
    cut_off = sorted({pid for path, pids in deleted.items() if path.startswith(f"{directory_of()}/") for pid in pids})
    if cut_off:
        yield Finding(
            f"processes {', '.join(map(str, cut_off))} use a named cache whose file was deleted: no other process can join.",
            "if no person deleted it, systemd did: as root set RemoveIPC=no in /etc/systemd/logind.conf",
        )


def _disks(disk: str | None, limit: int | None) -> Iterator[Finding]:
    """Look at the folders of disk caches: of the folders in use, and of a planned one."""
    places = {cache.folder: cache.limit_bytes for cache in listing.find() if cache.folder and cache.alive}
    if disk is not None:
        path = os.path.abspath(disk)
        places[path] = places.get(path) if limit is None else limit
    for folder, bound in places.items():
        shown = printable(folder)
        try:
            kind, room = place_of(folder)
        except OSError as error:
            yield Finding(str(error), "give a folder of its own, which may be new: disk=...")
            continue
        if problem := unfit(kind):
            yield Finding(f"the disk cache {shown} is on {problem}.", "give a folder on a local disk: disk=...")
        if bound is not None and room < bound:
            yield Finding(
                f"the disk cache {shown} has room for {format_size(room)}, its limit is {format_size(bound)}.",
                f"remove other files from that disk, or lower disk_limit to {format_size(room).replace(' ', '')}",
            )


def _remove_ipc() -> Iterator[Finding]:
    """Look at the setting of systemd-logind: in the last drop-in by name, else in the first logind.conf."""
    uid, user = here.user(), listing.user_name(here.user())
    if uid < 1000 or not _SEATS.is_dir() or (_LINGER / user).exists():
        return  # logind does not run, or spares system users and users who linger
    main = [path for folder in reversed(_LOGIND) if (path := Path(folder, "logind.conf")).is_file()][-1:]
    drop_ins = {path.name: path for folder in reversed(_LOGIND) for path in Path(folder, "logind.conf.d").glob("*.conf")}
    texts = [path.read_text(errors="replace") for path in [*main, *(drop_ins[name] for name in sorted(drop_ins))]]
    *_, setting = "yes", *re.findall(r"^\s*RemoveIPC\s*=\s*(\S+)", "\n".join(texts), re.MULTILINE)  # the last one counts
    if setting.lower() in ("yes", "true", "1", "on"):
        yield Finding(
            f"systemd deletes your files in {SHM_DIR} when you log out, although your jobs still use them (RemoveIPC).",
            f"loginctl enable-linger {user}; or as root: RemoveIPC=no in /etc/systemd/logind.conf, then "
            "systemctl restart systemd-logind",
        )


def _process() -> Iterator[Finding]:
    soft, hard = here.limit_of("NOFILE")
    if soft < _LEAST_DESCRIPTORS:
        more = min(65536, hard)
        yield Finding(
            f"a process may open {soft} files: DataLoader workers that send many tensors fail with 'Too many open files'.",
            f"ulimit -n {more}" + (f" (as root first: the hard limit is {hard})" if more < _LEAST_DESCRIPTORS else ""),
        )
    address_space, _ = here.limit_of("AS")
    if address_space < sys.maxsize:
        yield Finding(
            f"a process may map {format_size(address_space)} (ulimit -v), and an empty cache counts with its full size.",
            "ulimit -v unlimited",
        )
