"""Find the siblings of this process: segments of this job's ranks, without a name, which end with their last process.

NOTE [ Found without a name ]
    Each process locks its counter row in each segment that it is attached to. The kernel lists these locks, with the process
    and the file. A descriptor of that process leads to the file. So ranks find the segments of other ranks, and no kill leaves
    anything in /dev/shm. The lock of the directory of named segments makes finding and making exclude each other.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stocache.errors import SegmentError
from stocache.shm import registry
from stocache.shm.job import is_started_by
from stocache.shm.layout import LIMIT, LIMIT_AT, RANKS_AT, Layout
from stocache.shm.named import Descriptor, holders
from stocache.shm.segment import Segment, abandon, all_attached, attached
from stocache.system.platform import here
from stocache.system.waiting import FileKey, identify


class Sibling(NamedTuple):
    """A segment of another process of this user that this process is not attached to, open for a moment."""

    key: FileKey
    fd: int
    layout: Layout
    descriptor: Descriptor
    backing: str


def join(
    job: str, agrees: Callable[[Sibling], bool] | None, new: Callable[[list[Sibling]], Segment]
) -> tuple[Segment, Descriptor | None]:
    """Return a segment that a rank of this job has made and that ``agrees`` accepts; else a new one.

    Args:
        job: the key of the job.
        agrees: whether this process may attach to a segment of the job; None if each rank has its own segment.
        new: called with the segments of the job that this process is not attached to; returns the segment to use instead.

    Returns:
        The segment; and its descriptor, None for a new one.

    Raises:
        SegmentError: another user has taken the directory, or it is open to others.
        BusyError: another process holds the lock of the directory.
        OSError: /dev/shm does not take the directory.
    """

    def find_or_make(_: int | None) -> tuple[Segment, Descriptor | None]:
        with siblings(job) as found:
            for sibling in found:
                if agrees is not None and agrees(sibling):
                    found.remove(sibling)
                    _count_rank(sibling.fd)
                    return _attach(sibling), sibling.descriptor
            segment = new(found)
            if segment.backing != "none":
                if segment.key not in holders():
                    raise SegmentError("/proc/locks does not list the locks of processes.")
                if agrees is not None:
                    _count_rank(segment.fd)
            return segment, None

    return registry.run_locked(registry.directory_of(), find_or_make, create=True)


@contextlib.contextmanager
def siblings(job: str | None = None) -> Iterator[list[Sibling]]:
    """Yield the segments of other processes of this user, of one job or of all, the oldest first.

    They are closed at the end, except the descriptors that were removed from the list. Call it with `registry.attaching` held:
    to close a file to which another thread attaches would drop the locks of this process.
    """
    found: list[Sibling] = []
    try:
        for key, pids in holders().items():
            if attached(key) is None and (sibling := _open(key, pids)) is not None:
                found.append(sibling)
                if job is not None and sibling.descriptor.identity.get("job") != job:
                    os.close(found.pop().fd)
        found.sort(key=lambda sibling: sibling.descriptor.created)
        yield found
    finally:
        while found:
            os.close(found.pop().fd)


def count_ranks(key: FileKey) -> int:
    """Return how many processes hold a segment, without the processes that one of them has started, such as workers."""
    pids = set(holders().get(key, []))
    return sum(not is_started_by(pid, pids) for pid in pids)


def promised_bytes() -> int:
    """Return the memory that the caches of this user on this machine may still take. With `registry.attaching` held."""
    # Segments of others, such as a ring, have no descriptor, and far more data than they ever reserve
    promised = sum(segment.extents.promised_bytes for segment in all_attached() if segment.layout.descriptor)
    with siblings() as found:
        for sibling in found:
            (limit,) = LIMIT.unpack(os.pread(sibling.fd, LIMIT.size, LIMIT_AT))
            promised += sibling.layout.promised_bytes(sibling.layout.count_reserved(sibling.fd), limit)
    return promised


def limit_growth(sibling: Sibling, limit: int) -> int:
    """Limit a segment to ``limit`` bytes, or to its reserved bytes if these are more. Return its limit."""
    limit = max(limit, sibling.layout.count_reserved(sibling.fd))
    os.pwrite(sibling.fd, LIMIT.pack(max(1, limit)), LIMIT_AT)
    return limit


def _open(key: FileKey, pids: list[int]) -> Sibling | None:
    """Open a segment through a process that has it; None if none of them lets us, or it is not one that can be shared."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended or closed the file, or is another user's
            for path in registry.paths_of(pid, key):
                sibling = None
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    with contextlib.suppress(SegmentError):  # without a descriptor, or of a different version
                        if identify(fd) == key and os.fstat(fd).st_uid == here.user():
                            layout = Layout.read(fd)
                            sibling = Sibling(key, fd, layout, Descriptor.read(layout), registry.backing_of(path))
                            return sibling
                finally:
                    if sibling is None:
                        os.close(fd)
                break
    return None


def _attach(sibling: Sibling) -> Segment:
    fds = [sibling.fd]
    try:
        return Segment(fds, sibling.layout, sibling.backing)
    except BaseException:
        abandon(sibling.key, fds)
        raise


def _count_rank(fd: int) -> None:
    """Count a rank that attaches to a segment, up to 255. The caller holds the lock of the directory."""
    os.pwrite(fd, bytes([min(os.pread(fd, 1, RANKS_AT)[0] + 1, 255)]), RANKS_AT)
