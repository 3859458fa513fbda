"""The directory of named segments: one per user under /dev/shm, with a lock, checked files, and who holds them.

NOTE [ Holding a file ]
    Every process that uses a named segment has a shared flock on its open file description; forked children and those that
    were handed the descriptor share it. It goes with the last of them, however they end. So whoever gets the exclusive
    flock, from a description of its own, knows that nobody is left. Making, attaching, leaving and removing exclude each
    other by a flock on the directory, hence what one of them has seen stays true until it is done.

NOTE [ Locks and forks ]
    A flock belongs to the open file description, which a fork shares: a child forked by another thread at the wrong moment
    would keep the lock when its parent is killed. So the descriptors that hold such locks for a moment are listed in
    `_momentary`, and a child closes them first of all.
"""

import contextlib
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from stocache import limits
from stocache.errors import CacheNameError, SegmentError
from stocache.layout import persists

_PREFIX = "stocache-"  # and the number of the user
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")

attaching = threading.RLock()
"""Held while this process makes, attaches or leaves a segment. Reentrant, for garbage collection may come in between."""

_momentary: set[int] = set()
_locked_now: dict[str, int] = {}

Key = tuple[int, int]  # device and inode: what a file is, whatever its name


def path_of(name: str, uid: int | None = None) -> str:
    """Return the path of the named segment of a user, by default of this process's.

    Raises:
        CacheNameError: ``name`` is no plain name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CacheNameError(
            f"name={name!r:.120} cannot name a cache. Use up to 100 letters, digits, '.', '_' and '-', not beginning with '.' "
            f"or '-'."
        )
    return f"{directory_of(uid)}/{name}"


def directory_of(uid: int | None = None) -> str:
    """Return the directory of a user's named segments."""
    return f"{limits.SHM_DIR}/{_PREFIX}{os.geteuid() if uid is None else uid}"


def users() -> list[int]:
    """Return the users that have such a directory."""
    numbers = (path.name.removeprefix(_PREFIX) for path in Path(limits.SHM_DIR).glob(f"{_PREFIX}*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


@contextlib.contextmanager
def locked(path: str, create: bool = False) -> Iterator[int | None]:
    """Hold the lock of a directory; gives a descriptor of it, None where there is none and ``create`` is False.

    On leaving, a directory that is empty goes.

    Raises:
        SegmentError: it is no directory, or others may write to it.
        OSError: it cannot be made.
    """
    with attaching:
        if path in _locked_now:  # garbage collection inside of another call
            yield _locked_now[path]
            return
        fd = _open_locked(path, create)
        if fd is None:
            yield None
            return
        _locked_now[path] = fd
        try:
            yield fd
        finally:
            del _locked_now[path]
            with contextlib.suppress(OSError):
                os.rmdir(path)
            fcntl.flock(fd, fcntl.LOCK_UN)
            close(fd)


def _open_locked(path: str, create: bool) -> int | None:
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            if create:
                continue  # somebody's last segment went, and the directory with it
            return None
        uid = int(os.path.basename(path).removeprefix(_PREFIX))
        if not stat.S_ISDIR(status.st_mode):
            raise SegmentError(f"{path} is not a directory. Whoever put it there must remove it.")
        _check_owner(path, status, uid, "chmod 700")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        _momentary.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:  # an interrupt
            close(fd)
            raise
        if os.fstat(fd).st_nlink:
            return fd
        close(fd)  # it was removed while we waited


def _check_owner(path: str, status: os.stat_result, uid: int, remedy: str) -> None:
    if status.st_uid != uid:
        raise SegmentError(f"{path} belongs to user {status.st_uid}, not to {uid}. It is not used; have its owner remove it.")
    if status.st_mode & 0o077:
        raise SegmentError(f"{path} is open to others (mode {status.st_mode & 0o777:o}). If it is yours: {remedy} {path}")


def key_of(at: int, path: str) -> Key | None:
    """Return what the file ``path`` in the locked directory ``at`` is; None where there is none.

    Raises:
        SegmentError: it is a link, a pipe or the like, of another user, or open to others.
    """
    try:
        status = os.stat(os.path.basename(path), dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}.get(stat.S_IFMT(status.st_mode), "no regular file")
        raise SegmentError(f"{path} is {kind}, no segment. It is not used; remove it.")
    _check_owner(path, status, os.fstat(at).st_uid, "chmod 600")
    return status.st_dev, status.st_ino


def identify(fd: int) -> Key:
    """Return what the file of a descriptor is."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_file(at: int, path: str) -> int | None:
    """Open what `key_of` has found good; None where it went meanwhile. To be given to `hold` or `close`."""
    try:
        fd = os.open(os.path.basename(path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return None
    _momentary.add(fd)
    return fd


def hold(fd: int) -> None:
    """Take the shared flock on a descriptor and keep it; see NOTE [ Holding a file ]."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _momentary.discard(fd)


def close(fd: int) -> None:
    """Close a descriptor of this module."""
    _momentary.discard(fd)
    os.close(fd)


def is_held(fd: int) -> bool:
    """Whether anybody holds the file of a descriptor that does not itself hold it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def remove_unheld(path: str, key: Key) -> bool:
    """Remove a named segment, unless somebody holds it, it is to stay, or the path leads to another one by now."""
    with locked(os.path.dirname(path)) as at:
        if at is None or key_of(at, path) != key:
            return False
        fd = open_file(at, path)
        if fd is None:
            return False
        try:
            if is_held(fd) or persists(fd):
                return False
            os.unlink(os.path.basename(path), dir_fd=at)
            return True
        finally:
            close(fd)


def enter_child() -> None:
    """Make a forked child let go what its parent was just doing; see NOTE [ Locks and forks ]."""
    global attaching
    attaching = threading.RLock()
    for fd in _momentary:
        with contextlib.suppress(OSError):
            os.close(fd)
    _momentary.clear()
    _locked_now.clear()


# ---------------------------------------------------------------------------------------------------- who holds what


def lock_owners(first: int, count: int) -> dict[Key, list[int]]:
    """Return the processes that have record locks at offsets ``[first, first + count)``, for each file that has any.

    As /proc/locks tells, which leaves out processes of other containers.
    """
    owners: dict[Key, set[int]] = {}
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        fields = line.split()
        if len(fields) != 8 or fields[1] != "POSIX" or not first <= int(fields[6]) < first + count:
            continue  # another kind of lock, or one that is waited for
        major, minor, inode = fields[5].split(":")
        owners.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(inode)), set()).add(int(fields[4]))
    return {key: sorted(pids) for key, pids in owners.items()}


def deleted_files(pid: int) -> list[str]:
    """Return the former paths of the deleted files a process has open; none when it ended or is not ours to look into."""
    paths = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                paths.append(os.readlink(link))
    return [path.removesuffix(" (deleted)") for path in paths if path.endswith(" (deleted)")]
