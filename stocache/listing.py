"""What named caches there are on this machine, seen without attaching to them."""

import os
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from stocache import arena, directory, named
from stocache.errors import SegmentError, StocacheError
from stocache.layout import EXTENTS_AT, ROWS_AT, Layout, persists, sum_rows
from stocache.named import Descriptor
from stocache.opening import SET
from stocache.stats import CacheStats


@dataclass(frozen=True)
class Holder:
    """A process that has a cache attached, and its command line."""

    pid: int
    command: str


@dataclass(frozen=True)
class NamedCache:
    """One entry in a user's directory of named caches.

    Attributes:
        memory_bytes: memory the file takes now.
        alive: whether any process holds it. One that nobody holds is a leftover, unless ``persistent``.
        holders: who they are, as far as this process can see them.
        created: seconds since 1970.
        samples: what a sample looks like.
        stats: what it has done since its oldest holder came; None when ``problem`` says why it cannot be read.
    """

    name: str
    user: str
    path: str
    memory_bytes: int = 0
    alive: bool = False
    persistent: bool = False
    holders: list[Holder] = field(default_factory=list)
    created: float = 0.0
    samples: str = ""
    fingerprint: str | None = None
    stats: CacheStats | None = None
    problem: str = ""

    @property
    def state(self) -> str:
        """In a word: "live", "dead", "kept" (persistent, held by nobody) or "bad"."""
        if self.problem:
            return "bad"
        return "live" if self.alive else "kept" if self.persistent else "dead"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        extra = {"hit_rate": self.stats.hit_rate, "fill_fraction": self.stats.fill_fraction} if self.stats else {}
        return asdict(self) | {"state": self.state} | extra


def find(uid: int | None = None) -> list[NamedCache]:
    """Return the named caches of one user, by default this process's, or (-1) of all users."""
    uids = directory.users() if uid == -1 else [os.geteuid() if uid is None else uid]
    pids = named.holders()
    return [cache for each in uids for cache in _find(each, pids)]


def _find(uid: int, pids: dict[directory.Key, list[int]]) -> Iterator[NamedCache]:
    folder, user = directory.directory_of(uid), user_name(uid)
    try:
        with directory.locked(folder) as at:
            for name in sorted(os.listdir(at)) if at is not None else ():
                assert at is not None
                try:
                    yield _read(at, f"{folder}/{name}", user, pids)
                except StocacheError as error:
                    yield NamedCache(name, user, f"{folder}/{name}", problem=str(error))
    except PermissionError:
        yield NamedCache("?", user, folder, problem="belongs to another user; root can look.")
    except SegmentError as error:
        yield NamedCache("?", user, folder, problem=str(error))


def _read(at: int, path: str, user: str, pids: dict[directory.Key, list[int]]) -> NamedCache:
    with named.peek(at, path) as (fd, held):
        layout = Layout.read(fd)
        descriptor = Descriptor.read(layout)
        control = os.pread(fd, layout.control_bytes, layout.control_at)
        facts, identity = descriptor.facts, descriptor.identity
        filled = control.count(SET, 0, facts["dataset_len"])
        stats = CacheStats.of(
            sum_rows(os.pread(fd, EXTENTS_AT - ROWS_AT, ROWS_AT)),
            dataset_len=facts["dataset_len"],
            filled=filled,
            reserved_bytes=layout.reserved_bytes(os.pread(fd, layout.extent_count, EXTENTS_AT)),
            **_amounts(facts, control, filled),
        )
        return NamedCache(
            os.path.basename(path),
            user,
            path,
            memory_bytes=os.fstat(fd).st_blocks * 512,
            alive=held,
            persistent=persists(fd),
            holders=[holder for pid in pids.get(directory.identify(fd), []) if (holder := _holder(pid))],
            created=descriptor.created,
            samples=str(identity["samples"]),
            fingerprint=None if identity["fingerprint"] is None else str(identity["fingerprint"]),
            stats=stats,
        )


def _amounts(facts: Mapping[str, Any], control: bytes, filled: int) -> dict[str, int]:
    capacity = facts["capacity"]
    if "slot_bytes" in facts:  # a SharedCache, whose capacity is in slots
        return {"slots": capacity, "slot_bytes": facts["slot_bytes"], "capacity_bytes": capacity * facts["slot_bytes"]}
    return arena.amounts(control, facts["dataset_len"], capacity, filled)


def _holder(pid: int) -> Holder | None:
    try:
        return Holder(pid, " ".join(psutil.Process(pid).cmdline()))
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return Holder(pid, "?")


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
