"""Open the folder of a disk cache: check its file system, its owner, its content, and which other processes use it.

NOTE [ Who uses a folder ]
    Each process that uses a folder has a shared flock on its file ``lock``; forked children share it. The kernel drops it when
    the last of them ends. A process that gets the exclusive flock is alone: it writes its *domain* into the file, loads the
    index into shared memory, and then takes the shared flock instead. The domain says on which machine that shared memory is. A
    process of another domain (a second machine on a network file system, another container with a /dev/shm of its own) would
    not see the room that others take in the files, so it is refused as long as the folder is in use.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stocache.errors import DiskError, MismatchError
from stocache.shm.named import Identity
from stocache.system import limits
from stocache.system.hashing import ZEROS, embed_checksum, read_checksum
from stocache.system.limits import filesystem_of
from stocache.system.platform import here
from stocache.system.waiting import describe_first, flock_owners, printable, wait_until

logger = logging.getLogger("stocache")

MANIFEST_FILE, LOCK_FILE, INDEX_FILE, SAMPLES_FILE = "cache.json", "lock", "index", "samples"
CONTENT = MANIFEST_FILE, f"{MANIFEST_FILE}.new", INDEX_FILE, SAMPLES_FILE
"""In the order in which they are removed: without a manifest, nobody reads the others."""
FILES = frozenset({*CONTENT, LOCK_FILE, "lost+found"})
_MARK, _VERSION = b'"checksum": "', 2
_LONGEST_S = 60.0  # to wait for a process that loads the index
_MOST = 1 << 20  # bytes of a manifest
MOST_TEXT = 1 << 16
"""Bytes of one of its facts."""
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}

_MACHINE, _BOOT = "/etc/machine-id", "/proc/sys/kernel/random/boot_id"
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "fuse.sshfs"}
NETWORK |= {"fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"}


class Folder:
    """An open folder of samples.

    Attributes:
        path: the absolute path.
        key: 16 hexadecimal digits, drawn when the folder was made. Another folder at the same path has another one.
        seed: for the checksums of its samples.
        facts: noted by the process that made the folder.
        writable: whether samples can be added.
        alone: whether no other process uses the folder; until `share`.
        index, samples: descriptors of the two files.

    Raises:
        DiskError: the path is not a folder, or not one of this user's alone, or holds other files; or it is in use by another
            machine or container.
        MismatchError: the folder is for other samples.
        OSError: the disk does not take a folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], identity: Identity, fingerprint: str | None, private: bool, facts: dict[str, Any]
    ) -> None:
        with self._closed_on_error(os.path.abspath(os.fspath(path))):
            self._open(dict(identity), fingerprint, private, facts)

    @classmethod
    def reopen(cls, path: str, key: str) -> "Folder":
        """Return the folder that another process has open. Raises OSError or DiskError where it has been replaced."""
        folder = cls.__new__(cls)
        with folder._closed_on_error(path):
            folder._open_directory()
            if folder._read_manifest()["key"] != key:  # before anything is made there
                raise DiskError(f"{printable(path)} is another cache by now.")
            folder._take_lock()
            folder._set(key)
            folder.share()
        return folder

    @contextlib.contextmanager
    def _closed_on_error(self, path: str) -> Iterator[None]:
        self.path, self._open_files = path, contextlib.ExitStack()
        self._open_files.enter_context(contextlib.suppress(OSError))
        self._close = weakref.finalize(self, self._open_files.close)
        self._close.atexit = False  # samples may still be written then
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _open(self, identity: dict[str, Any], fingerprint: str | None, private: bool, facts: dict[str, Any]) -> None:
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.makedirs(self.path, 0o700)
        self._open_directory()
        self._check(private)
        self._take_lock()
        manifest = self._read_manifest() if self._has(MANIFEST_FILE) else None
        changed = manifest is not None and manifest["fingerprint"] != fingerprint
        if manifest is not None:  # other data may be more or fewer samples
            fixed = {key: value for key, value in identity.items() if not changed or key != "dataset_len"}
            self._check_identity(manifest, fixed)
        if manifest is None or changed:
            manifest = self._make(manifest, identity, fingerprint, facts)
        elif fingerprint is None and self.alone and self._has(INDEX_FILE) and here.disk_bytes(self._at.stat(INDEX_FILE)):
            logger.warning(
                "the disk cache %s is from an earlier run, of %s. Without a fingerprint it is unknown whether its data has "
                "changed since: pass fingerprint=…, or remove it: stocache rm %s",
                self.path, time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest["created"])), self.path,
            )  # fmt: skip
        self.facts = dict(manifest["facts"])
        self._set(manifest["key"])

    def _set(self, key: str) -> None:
        self.key, self.seed = key, int(key, 16)
        mode = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY  # without one of them, all samples are misses
        self.index, self.samples = (self._open_file(name, mode) for name in (INDEX_FILE, SAMPLES_FILE))

    def _open_directory(self) -> None:
        try:
            self._at = here.Directory(self.path)
        except NotADirectoryError:
            raise DiskError(f"disk={self.path!r} is a file or below one. Give a folder of its own; it may be new.") from None
        self._open_files.callback(self._at.close)

    def _check(self, private: bool) -> None:
        """Raise DiskError unless the folder is this user's alone; warn if it is in memory or on a network."""
        status, path = self._at.stat(), printable(self.path)
        if status.st_uid != here.user():
            raise DiskError(f"{path} belongs to user {status.st_uid}, not to {here.user()}. Give a folder of your own.")
        forbidden = stat.S_IWOTH | (stat.S_IWGRP if private else 0)
        if status.st_mode & forbidden:
            raise DiskError(f"others may write to {path} (mode {status.st_mode & 0o777:o}). Change it: chmod 700 {path}")
        names = set(self._at.names())
        if others := sorted(names - FILES):
            raise DiskError(
                f"{path} holds {printable(others[0])!r}, which is not of a disk cache. Give a folder of its own; it may be new."
            )
        self._kind = filesystem_of(status.st_dev)
        if self._kind in IN_MEMORY:
            logger.warning("disk=%r is on %s, which is memory. Give a folder on a local disk.", self.path, self._kind)
        elif self._kind in NETWORK:
            logger.warning(
                "disk=%r is on a network file system (%s): it may be as slow as the source. Give a folder on a local disk.",
                self.path, self._kind,
            )  # fmt: skip

    def _check_identity(self, manifest: dict[str, Any], identity: dict[str, Any]) -> None:
        held = manifest["identity"]
        wrong = [f"{key} {held.get(key)!r}, now {value!r}" for key, value in identity.items() if held.get(key) != value]
        if wrong:
            raise MismatchError(
                f"the disk cache {printable(self.path)} is for other samples: {'; '.join(wrong)}. Give another folder, or "
                f"remove it: stocache rm {printable(self.path)}"
            )

    def _take_lock(self) -> None:
        """Lock the folder: alone, or together with other processes of this machine. See NOTE [ Who uses a folder ]."""
        lock = self._lock = self._open_lock()

        def taken() -> bool:
            self.alone = here.lock_file(lock)
            if self.alone:
                return True
            if not here.lock_file(lock, shared=True):
                return False
            if self.writable and not (self._has(MANIFEST_FILE) and os.fstat(lock).st_size):
                here.unlock_file(lock)  # the process that was alone has ended before it was done
                return False
            return True

        self._wait_for_lock(taken)
        found, ours = here.pread(lock, 4096, 0).decode("utf-8", "replace"), domain()
        if self.alone and self._is_of_another_machine(found, ours):
            raise DiskError(
                f"{printable(self.path)} was made by another machine, and is on a network file system. Give each machine a "
                f"folder of its own, on a local disk."
            )
        if not self.alone and self.writable and found != ours:  # a process that only reads takes no room
            raise DiskError(
                f"{printable(self.path)} is in use by another machine, or by a container with another {limits.SHM_DIR}. Give "
                f"each of them a folder of its own."
            )
        if self.alone and self.writable:
            text = ours.encode()
            here.pwrite(lock, text, 0)
            os.ftruncate(lock, len(text))

    def _is_of_another_machine(self, found: str, ours: str) -> bool:
        machines = [text.partition(" ")[0] for text in (found, ours)]
        return bool(found) and getattr(self, "_kind", "") in NETWORK and all(machines) and machines[0] != machines[1]

    def share(self) -> None:
        """Let other processes of this machine use the folder, too."""
        if self.alone and here.SHARES_MEMORY:
            self.alone = False
            self._wait_for_lock(lambda: here.lock_file(self._lock, shared=True))  # another process may come between

    def _wait_for_lock(self, taken: Callable[[], bool]) -> None:
        if not wait_until(taken, _LONGEST_S if here.SHARES_MEMORY else 0):
            if not here.SHARES_MEMORY:
                raise DiskError(f"{printable(self.path)} is in use by another process. On this system it serves one at a time.")
            holder = describe_first(flock_owners(self._lock))
            raise DiskError(f"{printable(self.path)} has been locked by {holder} for {_LONGEST_S:.0f} s.")

    def _open_lock(self) -> int:
        self.writable = True
        try:
            return self._open_file(LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.writable = False
            try:
                return self._open_file(LOCK_FILE, os.O_RDONLY)
            except FileNotFoundError:
                raise error from None

    def _has(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._at.stat(name)
            return True
        return False

    def _open_file(self, name: str, flags: int) -> int:
        """Open a file of the folder. Raises DiskError where something else has its name."""
        with contextlib.suppress(FileNotFoundError):
            status = self._at.stat(name)  # opening a device may have effects
            if not stat.S_ISREG(status.st_mode) or status.st_uid != here.user():
                raise DiskError(f"{printable(self.path)}/{name} is not a file of this user. Remove it.")
        fd = self._at.open(name, flags)
        self._open_files.callback(os.close, fd)
        return fd

    def _read_manifest(self) -> dict[str, Any]:
        path = printable(self.path)
        try:
            if not stat.S_ISREG(self._at.stat(MANIFEST_FILE).st_mode):
                raise ValueError("it is not a file")
            return read_manifest(self._at)
        except ValueError as error:
            raise DiskError(
                f"{path}/{MANIFEST_FILE} is damaged: {error}. Remove the cache: stocache rm --force {path}"
            ) from None

    def _make(
        self, before: dict[str, Any] | None, identity: dict[str, Any], fingerprint: str | None, facts: dict[str, Any]
    ) -> dict[str, Any]:
        """Recreate the files: they are missing, or hold samples of another fingerprint. Raises OSError."""
        if not self.writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if before is not None:
            difference = f"fingerprint {before['fingerprint']!r}, now {fingerprint!r}"
            if not self.alone:
                raise MismatchError(f"the disk cache {printable(self.path)} is in use for other data: {difference}.")
            logger.warning("the disk cache %s was left behind for other data: %s. It is emptied.", self.path, difference)
        self._at.remove(*CONTENT)
        for name in (INDEX_FILE, SAMPLES_FILE):
            os.close(self._at.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        manifest = {
            "format": "stocache disk cache",
            "version": _VERSION,
            "key": secrets.token_hex(8),
            "created": time.time(),
            "fingerprint": fingerprint,
            "identity": identity,
            "facts": facts,
        }
        text = embed_checksum(json.dumps(manifest | {"checksum": ZEROS}, indent=1).encode(), _MARK)
        draft = self._at.open(f"{MANIFEST_FILE}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if os.write(draft, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(draft)
        finally:
            os.close(draft)
        self._at.rename(f"{MANIFEST_FILE}.new", MANIFEST_FILE)
        return manifest

    @property
    def free_bytes(self) -> int:
        """The bytes that this user may still write on the disk."""
        return self._at.free_bytes() if self.writable else 0

    def close(self) -> None:
        """Close all files. Twice is fine."""
        self._close()


def read_manifest(at: here.Directory) -> dict[str, Any]:
    """Return the manifest of an open folder.

    Raises:
        ValueError: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    fd = at.open(MANIFEST_FILE, os.O_RDONLY)
    try:
        text = os.read(fd, _MOST)
    finally:
        os.close(fd)
    if _MARK not in text:
        raise ValueError("it has no checksum")
    read_checksum(text, _MARK)
    try:
        manifest = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(manifest, dict):
        raise ValueError("it is not a mapping")
    if manifest.get("version") != _VERSION:
        raise ValueError(f"it has format version {manifest.get('version')}, this stocache reads version {_VERSION}")
    if not _is_sane(manifest):
        raise ValueError("it holds other values")
    return dict(manifest)


def _is_sane(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest has all entries that are read, each of the right type."""
    key, created = manifest.get("key"), manifest.get("created", -1)
    identity, facts = manifest.get("identity"), manifest.get("facts")
    return (
        isinstance(key, str)
        and re.fullmatch("[0-9a-f]{16}", key) is not None
        and type(created) in (int, float)
        and 0 <= created < 2**32
        and isinstance(manifest.get("fingerprint", 0), str | None)
        and isinstance(identity, dict)
        and type(identity.get("dataset_len")) is int
        and identity["dataset_len"] >= 0
        and isinstance(identity.get("samples"), str)
        and isinstance(facts, dict)
        and type(facts.get("memory_slots")) is int
        and 0 <= facts["memory_slots"] < 2**60
        and isinstance(facts.get("example"), str | None)
    )


def manifest_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of the folder at a path; None if there is no cache that can be read."""
    with contextlib.suppress(OSError, ValueError), contextlib.closing(here.Directory(path)) as at:
        return read_manifest(at)
    return None


def domain() -> str:
    """Return a text that is the same in all processes with the same shared memory, and in no others."""
    if not here.SHARES_MEMORY:
        return ""
    return f"{_read(_MACHINE)} {_read(_BOOT)} {os.stat(limits.SHM_DIR).st_dev if os.path.isdir(limits.SHM_DIR) else 0}"


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
