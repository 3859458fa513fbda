"""Find the named caches of this machine, and read their state without attaching to them.

A disk cache that is in use is one of them: its samples are in a folder, and their states are in shared memory.
"""

import os
import pwd
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import psutil

from stocache.cache import arena
from stocache.cache.stats import OOB, SET, CacheStats
from stocache.errors import SegmentError, StocacheError
from stocache.shm import named, registry
from stocache.shm.layout import EXTENTS_AT, ROWS_AT, Layout, persists, read_chunks, sum_rows
from stocache.shm.named import Descriptor
from stocache.system.limits import parse_size
from stocache.system.waiting import FileKey, identify, printable


@dataclass(frozen=True)
class Holder:
    """A process that uses a cache, and its command line."""

    pid: int
    command: str


@dataclass(frozen=True)
class NamedCache:
    """One file in a user's directory of named caches.

    Attributes:
        name: of the cache; the folder of a disk cache.
        memory_bytes: memory that the file takes now: what is reserved for samples, their states, and counters.
        max_memory_bytes: memory that it takes once all its samples have memory.
        alive: whether a process uses it. If none does, it is a leftover, unless ``persistent``.
        holders: the processes that use it, as far as this process can see them.
        created: seconds since 1970.
        samples: shape and dtype of a sample, or its structure.
        stats: its statistics since its oldest holder attached; None if it cannot be read, and ``problem`` says why.
        folder: the folder of a disk cache; "" if the samples are in memory.
        limit_bytes: what the folder of a disk cache may take.
    """

    name: str
    user: str
    path: str
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    alive: bool = False
    persistent: bool = False
    holders: list[Holder] = field(default_factory=list)
    created: float = 0.0
    samples: str = ""
    fingerprint: str | None = None
    stats: CacheStats | None = None
    problem: str = ""
    folder: str = ""
    limit_bytes: int | None = None

    @property
    def kind(self) -> Literal["memory", "disk"]:
        """Where the samples are."""
        return "disk" if self.folder else "memory"

    @property
    def size_bytes(self) -> int:
        """The memory that the file takes; of a disk cache, the bytes of samples on the disk."""
        return self.stats.reserved_bytes if self.folder and self.stats else self.memory_bytes

    @property
    def state(self) -> str:
        """One word: "live", "dead", "kept" (persistent, not in use) or "bad"."""
        if self.problem:
            return "bad"
        return "live" if self.alive else "kept" if self.persistent else "dead"

    @property
    def age(self) -> str:
        """The time since the cache was created, as "3 h"; "" if unknown."""
        return age_of(self.created) if self.created else ""

    @property
    def hit_percent(self) -> str:
        """The hit rate, as "97.1%"; "-" before the first get."""
        return f"{self.stats.hit_rate:.1%}" if self.stats and self.stats.hits + self.stats.misses else "-"

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes, as JSON can hold them."""
        extra = {"hit_rate": self.stats.hit_rate, "fill_fraction": self.stats.fill_fraction} if self.stats else {}
        return asdict(self) | {"kind": self.kind, "state": self.state} | extra


def age_of(created: float) -> str:
    """Return the time since ``created``, in seconds since 1970, as "3 h"."""
    seconds = max(0.0, time.time() - created)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def find(uid: int | None = None) -> list[NamedCache]:
    """Return the named caches of the user ``uid``; None for the user of this process, -1 for all users."""
    uids = registry.users() if uid == -1 else [os.geteuid() if uid is None else uid]
    pids = named.holders()
    return [cache for each in uids for cache in _find(each, pids)]


def _find(uid: int, pids: dict[FileKey, list[int]]) -> Iterator[NamedCache]:
    user = user_name(uid)
    for folder in registry.directories_of(uid):
        try:
            yield from registry.run_locked(folder, partial(_list, folder=folder, user=user, pids=pids))
        except PermissionError:
            yield NamedCache("?", user, folder, problem="belongs to another user; root can look.")
        except OSError as error:
            yield NamedCache("?", user, folder, problem=printable(str(error)))


def _list(at: int | None, folder: str, user: str, pids: dict[FileKey, list[int]]) -> list[NamedCache]:
    return [] if at is None else [_look_at(at, folder, name, user, pids) for name in sorted(os.listdir(at))]


def _look_at(at: int, folder: str, name: str, user: str, pids: dict[FileKey, list[int]]) -> NamedCache:
    """Describe a file. It is not trusted: it may belong to another user, and may change at any moment."""
    shown = printable(name)
    try:
        return _read(at, f"{folder}/{name}", shown, user, pids)
    except (StocacheError, OSError) as error:
        return NamedCache(shown, user, f"{folder}/{shown}", problem=printable(str(error)))


def _read(at: int, path: str, shown: str, user: str, pids: dict[FileKey, list[int]]) -> NamedCache:
    with named.peek(at, path) as (fd, held):
        layout = Layout.read(fd)
        descriptor = Descriptor.read(layout)
        facts, identity = descriptor.facts, descriptor.identity
        samples, folder, limit = facts["dataset_len"], "", None
        chunks = [(states.count(SET), states.count(OOB)) for _, states in read_chunks(fd, layout.control_at, samples)]
        filled, outside = (sum(counts) for counts in zip((0, 0), *chunks, strict=True))
        rows = os.pread(fd, EXTENTS_AT - ROWS_AT, ROWS_AT)
        if "disk" in identity:
            folder, limit = str(identity["disk"]), parse_size(str(identity.get("limit")), "disk_limit")
            amounts = _amounts_on_disk(fd, layout, samples, filled, limit) | {"slots": samples - outside}
        else:
            amounts = {"reserved_bytes": layout.count_reserved(fd)} | _amounts(fd, layout, facts, filled)
        stats = CacheStats.of(sum_rows(rows), dataset_len=samples, filled=filled, **amounts)
        memory_bytes = os.fstat(fd).st_blocks * 512
        return NamedCache(
            printable(folder) or shown,
            user,
            f"{os.path.dirname(path)}/{shown}",
            memory_bytes=memory_bytes,
            max_memory_bytes=max(memory_bytes, layout.memory_bytes(layout.data_bytes)),  # huge pages take more
            alive=held,
            persistent=persists(fd),
            holders=find_holders(pids.get(identify(fd), [])),
            created=descriptor.created,
            samples=printable(str(identity.get("samples", "?"))),
            fingerprint=None if identity.get("fingerprint") is None else printable(str(identity["fingerprint"])),
            stats=stats,
            folder=folder,
            limit_bytes=limit,
        )


def _amounts(fd: int, layout: Layout, facts: Mapping[str, Any], filled: int) -> dict[str, int]:
    capacity, samples = facts["capacity"], facts["dataset_len"]
    if "slot_bytes" in facts:  # a SharedCache, whose capacity is in slots
        return {"slots": capacity, "slot_bytes": facts["slot_bytes"], "capacity_bytes": capacity * facts["slot_bytes"]}
    return arena.amounts(_words(fd, layout, samples), samples, capacity, filled)


def _amounts_on_disk(fd: int, layout: Layout, samples: int, filled: int, limit: int) -> dict[str, int]:
    from stocache.disk.samples_file import BEGIN, index_bytes  # with numpy, which other caches do not need

    used = max(0, int.from_bytes(_words(fd, layout, samples)[:8], sys.byteorder) - BEGIN)
    capacity = max(0, limit - index_bytes(samples) - BEGIN)
    return {"slot_bytes": used // max(1, filled), "capacity_bytes": capacity, "reserved_bytes": used}


def _words(fd: int, layout: Layout, samples: int) -> bytes:
    """Return the words of an arena or a disk cache, which lie at the same place."""
    words = os.pread(fd, arena.WORDS_BYTES, layout.control_at + arena.words_at(samples))
    if len(words) < arena.WORDS_BYTES or arena.control_bytes(samples) > layout.control_bytes:
        raise SegmentError("is damaged: its control is too small.")
    return words


def find_holders(pids: list[int]) -> list[Holder]:
    """Describe processes, as far as they still run."""
    return [holder for pid in pids if (holder := _holder(pid))]


def _holder(pid: int) -> Holder | None:
    try:
        return Holder(pid, printable(" ".join(psutil.Process(pid).cmdline())))
    except psutil.NoSuchProcess:
        return None
    except (psutil.Error, OSError):
        return Holder(pid, "?")


def user_name(uid: int) -> str:
    """Return the name of a user, or its id if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
