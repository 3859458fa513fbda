"""Named segments: found, or made, by any process of this user on this machine that asks for the same name.

A new segment is made without a name, filled in as far as others need it (header, control), and only then linked under its
name: nobody ever finds half of one, and a process killed on the way leaves nothing. An old one is attached to when it was made
for the same data, whether anybody holds it or not; replaced when it was not and nobody holds it; else refused.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stocache import directory, limits
from stocache.errors import MismatchError, SegmentError
from stocache.layout import EXTENTS_AT, REFUSED, ROWS, ROWS_AT, UNRESERVED, WARNED_AT, Layout
from stocache.segment import ROW_LOCKS, Segment, attached

logger = logging.getLogger("stocache")

Identity = Mapping[str, str | int | None]

DETAIL = " | before the cache: "
"""What comes between a user's fingerprint and what else the data depends on."""

_LONGEST = 400  # characters of a value of an identity; what is longer is told apart by its hash


@dataclass(frozen=True)
class Plan:
    """What a new segment is to be.

    Attributes:
        identity: what must agree before another process may attach, as JSON holds it.
        facts: what attachers are told.
        initialise: called with the control bytes, all zero, before anybody else can see them.
    """

    control_bytes: int
    data_bytes: int
    identity: Identity
    facts: Mapping[str, Any]
    initialise: Callable[[memoryview], None]


@dataclass(frozen=True)
class Descriptor:
    """What the header of a named segment tells, in JSON."""

    identity: Identity
    facts: Mapping[str, Any]
    created: float = field(default_factory=time.time)

    @classmethod
    def read(cls, layout: Layout) -> "Descriptor":
        """Return the descriptor in a layout.

        Raises:
            SegmentError: it is none.
        """
        try:
            descriptor = cls(**json.loads(layout.descriptor))
        except (ValueError, TypeError) as error:
            raise SegmentError(f"has a header without a descriptor ({error}).") from None
        if not (isinstance(descriptor.identity, dict) and isinstance(descriptor.facts, dict)):
            raise SegmentError("has a header with another descriptor.")
        return descriptor

    def pack(self) -> bytes:
        """Return the bytes for a layout."""
        identity = {key: _brief(value) for key, value in self.identity.items()}
        return json.dumps({"identity": identity, "facts": self.facts, "created": self.created}).encode()

    def differences(self, wanted: Identity) -> str:
        """Return in words where another identity differs in what it names; "" where it does not."""
        pairs = [(key, self.identity.get(key), _brief(value)) for key, value in wanted.items()]
        return "; ".join(f"{key} {held!r}, now {asked!r}" for key, held, asked in pairs if held != asked)


def _brief(value: str | int | None) -> str | int | None:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}… (sha256 {hashlib.sha256(value.encode()).hexdigest()})"


def join(name: str, wanted: Identity, persist: bool, plan: Callable[[], Plan | None]) -> tuple[Segment, Descriptor] | None:
    """Return the segment of that name, attached to or new.

    Args:
        name: letters, digits, ".", "_", "-".
        wanted: the identity that one to attach to must have.
        persist: whether it shall stay when the last holder leaves. Once said, it holds for all.
        plan: called when a new one is to be made; None when none can be, which `join` then returns.

    Raises:
        CacheNameError: the name is none.
        MismatchError: the name is in use for something else.
        SegmentError: what is there is no segment of this user's, or damaged.
        OSError: /dev/shm takes no more files.
    """
    path = directory.path_of(name)
    with directory.locked(os.path.dirname(path), create=True) as at:
        assert at is not None
        found = _attach(at, path, wanted)
        if found is None:
            _warn_of_deleted(path)
            new = plan()
            if new is None:
                return None
            _make(at, path, new)
            found = _attach(at, path, wanted, new=True)
            assert found is not None
        if persist:
            found[0].persist()
        return found


def identity_of(name: str) -> Identity | None:
    """Return the identity of the named segment that is there; None where there is none, or a damaged one."""
    path = directory.path_of(name)
    with directory.locked(os.path.dirname(path)) as at:
        try:
            if at is None:
                return None
            with peek(at, path) as (fd, _):
                return Descriptor.read(Layout.read(fd)).identity
        except SegmentError:
            return None


@contextlib.contextmanager
def peek(at: int, path: str) -> Iterator[tuple[int, bool]]:
    """Give a descriptor to read the file at ``path`` by, without attaching, and whether anybody holds it.

    Raises:
        SegmentError: there is no file, or not one of a segment.
    """
    key = directory.key_of(at, path)
    segment = attached(key) if key else None
    if segment is not None:  # whose descriptor it must be: closing another would drop the locks of this process
        yield segment.fd, True
        return
    fd = directory.open_file(at, path) if key else None
    if fd is None:
        raise SegmentError(f"there is no cache {os.path.basename(path)!r}.")
    try:
        yield fd, directory.is_held(fd)
    finally:
        directory.close(fd)


def remove(path: str, force: bool = False, dead: bool = False) -> None:
    """Remove a named segment. Those who hold it go on with it, but nobody can find it any more.

    Raises:
        SegmentError: there is none; or, without ``force``, somebody holds it, or it is no segment, or another user's. With
            ``dead``, ``force`` is for another user's alone.
    """
    name = os.path.basename(path)
    with directory.locked(os.path.dirname(path)) as at:
        if at is None:
            raise SegmentError(f"there is no cache {name!r}.")
        if not force and os.fstat(at).st_uid != os.geteuid():
            raise SegmentError(f"cache {name!r} belongs to user {os.fstat(at).st_uid}. Nevertheless: --force")
        if dead or not force:
            with peek(at, path) as (fd, held):
                Layout.read(fd)
                if held:
                    users = _users(directory.identify(fd))
                    raise SegmentError(f"cache {name!r} is in use by {users}. Nevertheless: stocache rm --force {name}")
        try:
            os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            raise SegmentError(f"there is no cache {name!r}.") from None


def holders() -> dict[directory.Key, list[int]]:
    """Return the processes attached to each segment that has any, as far as this process can see them."""
    return directory.lock_owners(ROW_LOCKS, ROWS)


def _attach(at: int, path: str, wanted: Identity, new: bool = False) -> tuple[Segment, Descriptor] | None:
    """Return the segment that is there; None where there is none, or one that nobody holds and that does not fit."""
    key = directory.key_of(at, path)
    if key is None:
        return None
    segment = attached(key)
    if segment is not None:
        return segment, _check(path, key, segment.layout, wanted)
    fd = directory.open_file(at, path)
    if fd is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(directory.close, fd)
        try:
            layout = Layout.read(fd)
            descriptor = Descriptor.read(layout)
        except SegmentError as error:
            raise SegmentError(f"{path} {error} Remove it: stocache rm --force {os.path.basename(path)}") from None
        if directory.is_held(fd):
            _check(path, key, layout, wanted)
        elif difference := descriptor.differences(wanted):
            logger.warning("cache %r was left behind for other data: %s. Starting afresh.", os.path.basename(path), difference)
            os.unlink(os.path.basename(path), dir_fd=at)
            return None
        elif not new:
            _take_over(fd, path, layout, descriptor)
        directory.hold(fd)
        stack.pop_all()
    return Segment(fd, layout, limits.SHM_DIR, path), descriptor


def _check(path: str, key: directory.Key, layout: Layout, wanted: Identity) -> Descriptor:
    descriptor = Descriptor.read(layout)
    if difference := descriptor.differences(wanted):
        raise MismatchError(
            f"cache {os.path.basename(path)!r} is in use by {_users(key)} for other data: {difference}. "
            f"Use another name, or wait for them to end."
        )
    return descriptor


def _users(key: directory.Key) -> str:
    """Return who has a segment attached, in words."""
    return "processes " + (", ".join(map(str, holders().get(key, []))) or "of another container")


def _take_over(fd: int, path: str, layout: Layout, descriptor: Descriptor) -> None:
    """Begin a new life over data that nobody holds: count from 0, warn again, give refused extents another chance."""
    if str(descriptor.identity.get("fingerprint") or DETAIL).startswith(DETAIL):
        logger.warning(
            "cache %r is of an earlier run, from %s. Without a fingerprint nobody can tell whether its data has changed since: "
            "pass fingerprint=…, or remove it: stocache rm %s",
            os.path.basename(path), time.strftime("%Y-%m-%d %H:%M", time.localtime(descriptor.created)), os.path.basename(path),
        )  # fmt: skip
    states = os.pread(fd, layout.extent_count, EXTENTS_AT)
    os.pwrite(fd, states.replace(bytes([REFUSED]), bytes([UNRESERVED])), EXTENTS_AT)
    os.pwrite(fd, bytes(EXTENTS_AT - ROWS_AT), ROWS_AT)
    os.pwrite(fd, b"\0", WARNED_AT)


def _make(at: int, path: str, plan: Plan) -> None:
    """Put a new segment where there is none."""
    layout = Layout.plan(plan.control_bytes, plan.data_bytes, Descriptor(plan.identity, plan.facts).pack())
    draft = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        layout.allocate(draft)
        with (
            mmap.mmap(draft, layout.control_at + plan.control_bytes) as memory,
            memoryview(memory)[layout.control_at :] as control,
        ):
            plan.initialise(control)
        # Given a directory's descriptor Python calls linkat, the one that follows this link to the file
        os.link(f"/proc/self/fd/{draft}", os.path.basename(path), dst_dir_fd=at)
    finally:
        os.close(draft)


def _warn_of_deleted(path: str) -> None:
    """Say so when a segment of this name was deleted while processes use it."""
    device = os.stat(limits.SHM_DIR).st_dev
    pids = [pid for key, pids in holders().items() if key[0] == device for pid in pids if path in directory.deleted_files(pid)]
    if pids:
        logger.warning(
            "the file of cache %r was deleted while processes %s use it. They go on; this is a second copy. If it was systemd, "
            "which deletes what a user has in %s with the last logout: set RemoveIPC=no in /etc/systemd/logind.conf, or "
            "loginctl enable-linger %d",
            os.path.basename(path), ", ".join(map(str, sorted(pids))), limits.SHM_DIR, os.geteuid(),
        )  # fmt: skip
