"""Find the named caches and loaders of this machine, and read their state without attaching to them.

A disk cache that is in use is one of them: its samples are in a folder, and their states are in shared memory. A loader over a
named cache records its times in a file beside the cache; see `stocache.observe.recording.record`.
"""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import psutil

from stocache.cache import arena
from stocache.cache.keyed.layout import BY_KEY, count_keys
from stocache.cache.keyed.layout import CONTROL_BYTES as KEYED_CONTROL
from stocache.cache.stats import OOB, SET, CacheStats
from stocache.errors import SegmentError, StocacheError
from stocache.shm import named, registry
from stocache.shm.layout import COUNTERS_AT, EXTENTS_AT, Layout, persists, read_chunks, sum_rows
from stocache.shm.named import Descriptor
from stocache.system.limits import parse_size
from stocache.system.platform import here
from stocache.system.waiting import FileKey, identify, printable

if TYPE_CHECKING:  # it needs numpy, which ls, stat and rm do not
    from stocache.observe.recording.record import Counted

_LOADER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.loader-[0-9]+-[0-9]+")  # the names that `record.make_named` writes
_MOST_CHARACTERS = 400  # of the name of a cache in the record of a loader


@dataclass(frozen=True)
class NamedCache:
    """One file in the user's directory of named caches.

    Attributes:
        name: of the cache; the folder of a disk cache.
        memory_bytes: memory that the file takes now: reserved extents of samples, their states, and counters.
        max_memory_bytes: memory that it takes once all its samples have memory.
        alive: whether a process uses it. If none does, it is a leftover, unless ``persistent``.
        holders: the processes that use it, as far as this process can see them: the ``pid`` and the ``command`` line of each.
        created: seconds since 1970.
        samples: shape and dtype of a sample, or its structure.
        stats: its statistics since its oldest holder attached; None if it cannot be read, and ``problem`` says why.
        folder: the folder of a disk cache; "" if the samples are in memory.
        limit_bytes: the limit of the folder of a disk cache.
    """

    name: str
    path: str
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    alive: bool = False
    persistent: bool = False
    holders: list[dict[str, Any]] = field(default_factory=list)
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
    def hit_percent(self) -> str:
        """The hit rate, as "97.1%"; "-" before the first get."""
        return f"{self.stats.hit_rate:.1%}" if self.stats and self.stats.hits + self.stats.misses else "-"

    def describe_counts(self) -> dict[str, str]:
        """Return the counts of the cache in words, by name; none if they are not known."""
        stats = self.stats
        return {} if stats is None else {
            "hits": f"{stats.hits}, rate {self.hit_percent}",
            "misses": str(stats.misses),
            "fills": f"{stats.fills}, late {stats.races}, refused {stats.refused}, rejected {stats.rejected}",
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes, as JSON can hold them."""
        extra = {"hit_rate": self.stats.hit_rate, "fill_fraction": self.stats.fill_fraction} if self.stats else {}
        return asdict(self) | {"kind": self.kind, "state": self.state} | extra


@dataclass(frozen=True)
class NamedLoader:
    """The record of a loader over a named cache: a file in the user's directory of named caches.

    Attributes:
        name: of the file: the cache's name, cut after 60 characters, the loader's process, and a number.
        cache: the name of the cache.
        rank: of the loader's process among the ranks that train together.
        pid: of the loader's process.
        alive: whether that process or a worker of it runs. If none does, it was killed, and the record is a leftover.
        created: seconds since 1970.
        counted: the recorded counts; None if they were not requested, or cannot be read, and ``problem`` says why.
    """

    name: str
    path: str
    cache: str = ""
    rank: int = 0
    pid: int = 0
    memory_bytes: int = 0
    alive: bool = False
    created: float = 0.0
    counted: "Counted | None" = None
    problem: str = ""
    kind: ClassVar = "loader"

    @property
    def state(self) -> Literal["live", "dead", "bad"]:
        """One word, as that of a cache."""
        return "bad" if self.problem else "live" if self.alive else "dead"


NamedFile: TypeAlias = NamedCache | NamedLoader


def age_of(created: float) -> str:
    """Return the time since ``created``, in seconds since 1970, as "3 h"."""
    seconds = max(0.0, time.time() - created)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def find() -> list[NamedCache]:
    """Return the named caches of this user."""
    return [file for file in find_all() if isinstance(file, NamedCache)]


def find_all(count: bool = False) -> list[NamedFile]:
    """Return the named caches and the loaders of this user. ``count`` reads the records of the loaders, which needs numpy."""
    folder, pids = registry.directory_of(), named.holders()

    def look(at: int | None) -> list[NamedFile]:
        return [] if at is None else [_look_at(at, folder, name, pids, count) for name in sorted(os.listdir(at))]

    try:
        return registry.run_locked(folder, look)
    except OSError as error:
        return [NamedCache("?", folder, problem=printable(str(error)))]


def _look_at(at: int, folder: str, name: str, pids: dict[FileKey, list[int]], count: bool) -> NamedFile:
    """Describe a file. It is not trusted: another program may have written it, and may change it at any moment."""
    shown = printable(name)
    try:
        return _read(at, f"{folder}/{name}", shown, pids, count)
    except (StocacheError, OSError, ValueError) as error:
        kind = NamedLoader if _LOADER.fullmatch(name) else NamedCache
        return kind(shown, f"{folder}/{shown}", problem=printable(str(error)))


def _read(at: int, path: str, shown: str, pids: dict[FileKey, list[int]], count: bool) -> NamedFile:
    with named.peek(at, path) as (fd, held):
        layout = Layout.read(fd)
        descriptor = Descriptor.read(layout)
        facts, identity = descriptor.facts, descriptor.identity
        if "loader" in identity:
            if not _LOADER.fullmatch(os.path.basename(path)):
                raise SegmentError("has the descriptor of a loader, but not the name of one.")
            loader = NamedLoader(shown, path, alive=held, created=descriptor.created)
            counted = _counted(fd, layout, facts.get("rows")) if count else None
            return replace(loader, memory_bytes=os.fstat(fd).st_blocks * 512, counted=counted, **_loader_of(identity))
        samples, folder, limit = facts["dataset_len"], "", None
        chunks = [(states.count(SET), states.count(OOB)) for _, states in read_chunks(fd, layout.control_at, samples)]
        filled, outside = (sum(counts) for counts in zip((0, 0), *chunks, strict=True))
        rows = os.pread(fd, EXTENTS_AT - COUNTERS_AT, COUNTERS_AT)
        if "disk" in identity:
            folder, limit = str(identity["disk"]), parse_size(str(identity.get("limit")), "disk_limit")
            amounts = _amounts_on_disk(fd, layout, samples, filled, limit) | {"slots": samples - outside}
        elif identity.get("samples") == BY_KEY:
            control = os.pread(fd, min(KEYED_CONTROL, layout.control_bytes), layout.control_at)
            samples = filled = count_keys(control)
            used = arena.amounts(control, filled, facts["capacity"], filled)
            amounts = {"reserved_bytes": layout.count_reserved(fd)} | used
        else:
            amounts = {"reserved_bytes": layout.count_reserved(fd)} | _amounts(fd, layout, facts, filled)
        stats = CacheStats.of(sum_rows(rows), dataset_len=samples, filled=filled, **amounts)
        memory_bytes = os.fstat(fd).st_blocks * 512
        return NamedCache(
            printable(folder) or shown,
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


def _loader_of(identity: Mapping[str, object]) -> dict[str, Any]:
    """Return the attributes of a loader that its descriptor holds.

    Raises:
        SegmentError: it has values that no loader writes.
    """
    cache, rank, pid = (identity.get(name) for name in ("cache", "rank", "pid"))
    if not (type(cache) is str and type(rank) is type(pid) is int and 0 <= rank < 2**31 and 0 < pid < 2**31):
        raise SegmentError("is damaged: its descriptor is not a loader's.")
    return {"cache": printable(cache)[:_MOST_CHARACTERS], "rank": rank, "pid": pid}


def _counted(fd: int, layout: Layout, rows: object) -> "Counted":
    from stocache.observe.recording.record import read_named

    counted = read_named(fd, layout)
    if rows != len(counted.rows):
        raise SegmentError(f"is damaged: it has {len(counted.rows)} rows, its descriptor says {rows!r:.40}.")
    return counted


def _amounts(fd: int, layout: Layout, facts: Mapping[str, Any], filled: int) -> dict[str, int]:
    capacity, samples = facts["capacity"], facts["dataset_len"]
    if "slot_bytes" in facts:  # a SharedCache, whose capacity is in slots
        return {"slots": capacity, "slot_bytes": facts["slot_bytes"], "capacity_bytes": capacity * facts["slot_bytes"]}
    return arena.amounts(_words(fd, layout, samples), samples, capacity, filled)


def _amounts_on_disk(fd: int, layout: Layout, samples: int, filled: int, limit: int) -> dict[str, int]:
    from stocache.cache.disk.samples_file import DATA_OFFSET, index_bytes  # with numpy, which other caches do not need

    used = max(0, int.from_bytes(_words(fd, layout, samples)[:8], sys.byteorder) - DATA_OFFSET)
    capacity = max(0, limit - index_bytes(samples) - DATA_OFFSET)
    return {"slot_bytes": used // max(1, filled), "capacity_bytes": capacity, "reserved_bytes": used}


def _words(fd: int, layout: Layout, samples: int) -> bytes:
    """Return the words of an arena or a disk cache, which lie at the same place."""
    words = os.pread(fd, arena.WORDS_BYTES, layout.control_at + arena.words_at(samples))
    if len(words) < arena.WORDS_BYTES or arena.control_bytes(samples) > layout.control_bytes:
        raise SegmentError("is damaged: its control is too small.")
    return words


def describe_users(holders: list[dict[str, Any]], alive: bool) -> list[str]:
    """Return the processes that use a cache, in words."""
    unknown = "a process of another container" if alive else "nobody that is visible from here"
    return ["{pid} {command}".format(**holder) for holder in holders] or [unknown]


def find_holders(pids: list[int]) -> list[dict[str, Any]]:
    """Describe processes, as far as they still run."""
    return [{"pid": pid, "command": command} for pid in pids if (command := _command_of(pid)) is not None]


def _command_of(pid: int) -> str | None:
    try:
        return printable(" ".join(psutil.Process(pid).cmdline()))
    except psutil.NoSuchProcess:
        return None
    except (psutil.Error, OSError):
        return "?"


def user_name(uid: int) -> str:
    """Return the name of a user, or its id if it has no name."""
    try:
        return here.name_of_user(uid)
    except (KeyError, OverflowError):
        return str(uid)
