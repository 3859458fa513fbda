"""Find or make the segment of a name, which all processes of this user on this machine share.

A new segment is made without a name. Its header and control bytes are written, and only then is it linked under its name: no
process ever finds half of a segment, and a process that is killed before that leaves nothing. A segment that exists is attached
to if it was made for the same data. One for other data is replaced if no process holds it, and refused otherwise.
"""

import contextlib
import ctypes
import gc
import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stocache.errors import MismatchError, SegmentError
from stocache.shm import registry
from stocache.shm.layout import COUNTER_ROWS, COUNTERS_AT, EXTENTS_AT, REFUSED_EXTENT, UNRESERVED_EXTENT, WARNED_AT, Layout
from stocache.shm.locks import ROW_LOCKS
from stocache.shm.segment import Segment, abandon, attached
from stocache.system import limits
from stocache.system.platform import here
from stocache.system.waiting import FileKey, identify

logger = logging.getLogger("stocache")

Identity: TypeAlias = Mapping[str, str | int | None]

NewSegment: TypeAlias = tuple[Layout, Callable[[memoryview], None]]
"""The layout of a new segment, and a function that initialises its control bytes, which are zero, before others see them."""

FINGERPRINT_STEPS_SEPARATOR = " | before the cache: "
"""Stands in a fingerprint between the user's own and a description of the steps before the cache."""

_AT_EMPTY_PATH = 0x1000  # flag of linkat: link the descriptor itself

_LONGEST = 400  # characters of a value of an identity; longer values are truncated and compared by their hash


@dataclass(frozen=True)
class Descriptor:
    """The description of a named segment, which its header holds in JSON.

    Attributes:
        identity: must be equal before a process may attach.
        facts: numbers for the processes that attach: ``dataset_len``, ``capacity``, and ``slot_bytes`` if slots have one size.
        created: seconds since 1970.
    """

    identity: Identity
    facts: Mapping[str, Any]
    created: float = field(default_factory=time.time)

    @classmethod
    def read(cls, layout: Layout) -> "Descriptor":
        """Return the descriptor in a layout.

        Raises:
            SegmentError: it is not a descriptor.
        """
        try:
            descriptor = cls(**json.loads(layout.descriptor))
        except (ValueError, TypeError, RecursionError) as error:
            raise SegmentError(f"has a header without a descriptor ({error}).") from None
        if not (isinstance(descriptor.identity, dict) and isinstance(descriptor.facts, dict) and descriptor._is_sane(layout)):
            raise SegmentError("has a header with another descriptor.")
        return descriptor

    def _is_sane(self, layout: Layout) -> bool:
        """Return whether all values have the right type, and do not claim more than the file has."""
        samples, capacity, slot = (self.facts.get(name, 0) for name in ("dataset_len", "capacity", "slot_bytes"))
        return (
            type(self.created) in (int, float)
            and 0 <= self.created < 2**40
            and all(type(value) in (str, int, bool, type(None)) for value in self.identity.values())
            and {"dataset_len", "capacity"} <= self.facts.keys()
            and all(type(number) is int and number >= 0 for number in (samples, capacity, slot))
            and samples <= layout.control_bytes
            and capacity * max(1, slot) <= max(samples, layout.data_bytes)
        )

    def pack(self) -> bytes:
        """Return the descriptor as bytes for a layout."""
        identity = {key: _brief(value) for key, value in self.identity.items()}
        return json.dumps({"identity": identity, "facts": self.facts, "created": self.created}).encode()

    def differences(self, wanted: Identity) -> str:
        """Say in what ``wanted`` differs from this identity, for its own keys only; "" if it does not differ."""
        pairs = [(key, self.identity.get(key), _brief(value)) for key, value in wanted.items()]
        return "; ".join(f"{key} {held!r}, now {asked!r}" for key, held, asked in pairs if held != asked)


def _brief(value: str | int | None) -> str | int | None:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}… (sha256 {hashlib.sha256(value.encode()).hexdigest()})"


def join(name: str, wanted: Identity, persist: bool, new: Callable[[], NewSegment | None]) -> tuple[Segment, Descriptor] | None:
    """Return the segment of that name, attached to or new.

    Args:
        name: letters, digits, ".", "_", "-".
        wanted: the identity that a segment must have to attach to it.
        persist: True keeps the segment when no process holds it. It applies to all processes, and cannot be undone.
        new: called when there is no such segment. It returns the segment to make, or None; then `join` returns None.

    Raises:
        CacheNameError: the name is not valid.
        MismatchError: the name is in use for other data.
        ForeignError: another user has taken the directory of this user's caches.
        BusyError: another process holds the lock of the directory.
        SegmentError: the file of that name is not a segment, or is damaged.
        OSError: /dev/shm does not take more files.
    """
    with contextlib.suppress(MismatchError):
        return _join(name, wanted, persist, new)
    gc.collect()  # the cache for other data may be one of this process that nothing refers to
    return _join(name, wanted, persist, new)


def _join(
    name: str, wanted: Identity, persist: bool, new: Callable[[], NewSegment | None]
) -> tuple[Segment, Descriptor] | None:
    path = registry.path_of(name)

    def find_or_make(at: int | None) -> tuple[Segment, Descriptor] | None:
        assert at is not None
        found = _attach(at, path, wanted)
        if found is None:
            _warn_of_deleted(at, path)
            segment = new()
            if segment is None:
                return None
            found = _make(at, path, segment, wanted)
        if persist:
            found[0].persist()
        return found

    return registry.run_locked(registry.directory_of(), find_or_make, create=True)


def identity_of(name: str) -> Identity | None:
    """Return the identity of the segment of a name; None if it does not exist or is damaged."""
    path = registry.path_of(name)

    def read(at: int | None) -> Identity | None:
        if at is None:
            return None
        with peek(at, path) as (fd, _):
            return Descriptor.read(Layout.read(fd)).identity

    try:
        return registry.run_locked(os.path.dirname(path), read)
    except OSError:
        return None


@contextlib.contextmanager
def peek(at: int, path: str) -> Iterator[tuple[int, bool]]:
    """Yield a descriptor to read the file at ``path`` without attaching, and whether a process holds the file.

    Raises:
        SegmentError: the file does not exist, or is not of the kind that segments are.
    """
    key = registry.key_of(at, path)
    segment = attached(key) if key else None
    if segment is not None:  # then use its descriptor: closing a different one would drop the locks of this process
        yield segment.fd, True
        return
    fd = registry.open_file(at, path) if key else None
    if fd is None:
        raise SegmentError(f"there is no cache {os.path.basename(path)!r}.")
    try:
        yield fd, registry.is_held(fd)
    finally:
        registry.close(fd)


def remove(path: str, force: bool = False, dead: bool = False) -> None:
    """Remove a named segment. Processes that hold it keep using it, but no process can find it any more.

    Args:
        force: remove it also if a process holds it, or it is not a segment.
        dead: never remove a segment that a process holds, or a file that is not a segment, even with ``force``.

    Raises:
        SegmentError: it does not exist, or may not be removed.
    """
    name = os.path.basename(path)

    def unlink(at: int | None) -> None:
        if at is None:
            raise SegmentError(f"there is no cache {name!r}.")
        if dead or not force:
            with peek(at, path) as (fd, held):
                Layout.read(fd)
                if held:
                    users = _users(holders().get(identify(fd), []))
                    raise SegmentError(f"cache {name!r} is in use by {users}. To remove it anyway: stocache rm --force {name}")
        try:
            os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            raise SegmentError(f"there is no cache {name!r}.") from None

    registry.run_locked(os.path.dirname(path), unlink)


def holders() -> dict[FileKey, list[int]]:
    """Return the processes attached to each segment, if they are visible from here."""
    return registry.lock_owners(ROW_LOCKS, COUNTER_ROWS)


def deleted_in_use(device: int) -> dict[str, list[int]]:
    """Return the former paths of deleted segments on a device, with the processes attached to them.

    Another container's /dev/shm is a different device, although the paths are the same.
    """
    found: dict[str, list[int]] = {}
    for pid in sorted({pid for key, pids in holders().items() if key[0] == device for pid in pids}):
        for path in registry.deleted_files(pid, device):
            found.setdefault(path, []).append(pid)
    return found


def _attach(at: int, path: str, wanted: Identity, new: bool = False) -> tuple[Segment, Descriptor] | None:
    """Attach to the segment at a path. None if it does not exist; or if no process held it and it was for other data."""
    key = registry.key_of(at, path)
    if key is None:
        return None
    segment = attached(key)
    if segment is not None:
        _, descriptor = _read(segment.fd, path)  # raises if the file was truncated: reading there would kill this process
        _check(path, key, descriptor, wanted)
        return segment, descriptor
    fd = registry.open_file(at, path)
    if fd is None:
        return None
    fds = [fd]
    try:
        layout, descriptor = _read(fd, path)
        if registry.is_held(fd):
            _check(path, key, descriptor, wanted)
        elif difference := descriptor.differences(wanted):
            logger.warning("cache %r was left behind for other data: %s. It is replaced.", os.path.basename(path), difference)
            os.unlink(os.path.basename(path), dir_fd=at)
            abandon(key, fds)
            return None
        elif not new:
            _take_over(fd, path, layout, descriptor)
        registry.hold(fd)
        return Segment(fds, layout, os.path.dirname(os.path.dirname(path)), path), descriptor
    except BaseException:
        abandon(key, fds)
        raise


def _read(fd: int, path: str) -> tuple[Layout, Descriptor]:
    """Read the header of a segment.

    Raises:
        SegmentError: it is damaged. The message says how to remove it.
    """
    try:
        layout = Layout.read(fd)
        return layout, Descriptor.read(layout)
    except SegmentError as error:
        raise SegmentError(f"{path} {error} Remove it: stocache rm --force {os.path.basename(path)}") from None


def _check(path: str, key: FileKey, descriptor: Descriptor, wanted: Identity) -> None:
    """Raise MismatchError unless a segment that is in use is for the wanted data."""
    if difference := descriptor.differences(wanted):
        pids = holders().get(key, [])
        users, remedy = _users(pids), "wait for them to end"
        if pids == [os.getpid()]:
            users, remedy = "this process", "close() the earlier one"
        raise MismatchError(
            f"cache {os.path.basename(path)!r} is in use by {users} for other data: {difference}. "
            f"Use another name, or {remedy}."
        )


def _users(pids: list[int]) -> str:
    """Describe the processes that have a segment attached."""
    return "processes " + (", ".join(map(str, pids)) or "of another container")


def _take_over(fd: int, path: str, layout: Layout, descriptor: Descriptor) -> None:
    """Reset the counters, the given warnings and the refused extents of a segment that no process holds."""
    if str(descriptor.identity.get("fingerprint") or FINGERPRINT_STEPS_SEPARATOR).startswith(FINGERPRINT_STEPS_SEPARATOR):
        logger.warning(
            "cache %r is from an earlier run, of %s. Without a fingerprint it is unknown whether its data has changed since: "
            "pass fingerprint=…, or remove it: stocache rm %s",
            os.path.basename(path), time.strftime("%Y-%m-%d %H:%M", time.localtime(descriptor.created)), os.path.basename(path),
        )  # fmt: skip
    states = os.pread(fd, layout.extent_count, EXTENTS_AT)
    os.pwrite(fd, states.replace(bytes([REFUSED_EXTENT]), bytes([UNRESERVED_EXTENT])), EXTENTS_AT)
    os.pwrite(fd, bytes(EXTENTS_AT - COUNTERS_AT), COUNTERS_AT)
    os.pwrite(fd, b"\0", WARNED_AT)


def _make(at: int, path: str, new: NewSegment, wanted: Identity) -> tuple[Segment, Descriptor]:
    """Make a new segment, and attach to it."""
    found = None
    try:
        _draft(at, path, *new)
        found = _attach(at, path, wanted, new=True)
        assert found is not None
        return found
    finally:
        if found is None:  # an interrupt came: the file is not in use, and no process would remove it
            with contextlib.suppress(OSError):
                os.unlink(os.path.basename(path), dir_fd=at)


def _draft(at: int, path: str, layout: Layout, initialise: Callable[[memoryview], None]) -> None:
    """Make and initialise the file of a new segment, and then give it its name."""
    draft = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        layout.allocate(draft)
        with (
            mmap.mmap(draft, layout.control_at + layout.control_bytes) as memory,
            memoryview(memory)[layout.control_at :] as control,
        ):
            initialise(control)
        _link(at, draft, os.path.basename(path))
    finally:
        os.close(draft)


def _link(at: int, draft: int, name: str) -> None:
    """Give a name to a file without one, in a directory in which the name is free."""
    try:
        # With a directory's descriptor, Python calls linkat, which follows this link to the file
        os.link(f"/proc/self/fd/{draft}", name, dst_dir_fd=at)
    except FileNotFoundError:  # /proc is hidden; then only root can do it
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.linkat(draft, b"", at, name.encode(), _AT_EMPTY_PATH):
            raise OSError(ctypes.get_errno(), "a new file cannot be given a name without /proc") from None


def _warn_of_deleted(at: int, path: str) -> None:
    """Warn if a segment of this name was deleted while processes use it."""
    if pids := deleted_in_use(os.fstat(at).st_dev).get(path):
        logger.warning(
            "the file of cache %r was deleted while processes %s use it. They go on; this is a second copy. systemd deletes "
            "the files of a user in %s at the last logout. To prevent that: set RemoveIPC=no in /etc/systemd/logind.conf, or "
            "loginctl enable-linger %d",
            os.path.basename(path), ", ".join(map(str, pids)), limits.SHM_DIR, here.user(),
        )  # fmt: skip
