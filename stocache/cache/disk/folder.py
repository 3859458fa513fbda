"""Open the folder of a disk cache, to use it or to look at it: check its owner, its content, and which processes use it.

NOTE [ Who uses a folder ]
    Each process that uses a folder has a shared flock on its file ``lock``; forked children share it. The kernel drops it when
    the last of them ends. A process that gets the exclusive flock is alone: it writes its *domain* into the file, loads the
    index into shared memory, and then takes the shared flock instead. The domain says on which machine that shared memory is. A
    process of a different domain (a second machine on a network file system, another container with a /dev/shm of its own)
    would not see the room that others take in the files, so this process is refused as long as the folder is in use.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable
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

_MACHINE, _BOOT = "/etc/machine-id", "/proc/sys/kernel/random/boot_id"
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "fuse.sshfs"}
_NETWORK |= {"fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"}


class Folder:
    """An open folder of samples: to use it (`take`, `join`) or to look at it (`look`).

    Args:
        path: of the folder.
        may_be_new: whether to make the folder if there is none.

    Attributes:
        path, shown: the absolute path, and as messages show it.
        at: the directory.
        manifest: see `read_manifest`.
        key: 16 hexadecimal digits, drawn when the folder was made. A different folder at the same path has a different one.
        seed: for the checksums of its samples.
        alone: whether no other process uses the folder; until `share`.
        index, samples: descriptors of the two files.

    Raises:
        DiskError: the path is not a folder.
        OSError: the disk does not take a folder.
    """

    def __init__(self, path: str | os.PathLike[str], may_be_new: bool = False) -> None:
        self.path, self._may_be_new = os.path.abspath(os.fspath(path)), may_be_new
        self.shown, self.alone = printable(self.path), False
        self._files = contextlib.ExitStack()
        self._files.enter_context(contextlib.suppress(OSError))
        self._close = weakref.finalize(self, self._files.close)
        self._close.atexit = False  # samples may still be written then
        try:
            if may_be_new:
                with contextlib.suppress(FileExistsError, NotADirectoryError):
                    os.makedirs(self.path, 0o700)
            self.at = here.Directory(self.path)
        except OSError as error:
            if may_be_new and not isinstance(error, NotADirectoryError):
                raise
            raise self._is_not_a_cache(str(error.strerror)) from None
        self._files.callback(self.at.close)

    def _is_not_a_cache(self, problem: str) -> DiskError:
        hint = " Give a folder of its own; it may be new." if self._may_be_new else ""
        return DiskError(f"{self.shown} is not the folder of a disk cache: {problem}.{hint}")

    def close(self) -> None:
        """Close all files. Twice is fine."""
        self._close()

    def take(self, identity: Identity, fingerprint: str | None, private: bool, facts: dict[str, Any]) -> None:
        """Use the folder for samples, and make its files if they are missing or hold samples of a different fingerprint.

        Args:
            identity: of the samples.
            fingerprint: the user's text that identifies them.
            private: whether to refuse a folder that the group may write to.
            facts: for later runs, if the files are made.

        Raises:
            DiskError: the folder is not one of this user's alone, or holds other files; or it is in use by another machine or
                container.
            MismatchError: the folder is for other samples.
            OSError: the disk does not take a folder.
        """
        self._check_owner(private)
        self.check_names()
        self._lock()
        manifest = self.read_manifest() if MANIFEST_FILE in self.at.names() else None
        changed = manifest is not None and manifest["fingerprint"] != fingerprint
        for name, value in identity.items():
            held = value if manifest is None else manifest["identity"].get(name)
            if held != value and not (changed and name == "dataset_len"):  # other data may be more or fewer samples
                raise MismatchError(
                    f"the disk cache {self.shown} is for other samples: {name} {held!r}, now {value!r}. Give another folder, "
                    f"or remove it: stocache rm {self.shown}"
                )
        if manifest is None or changed:
            manifest = self._make(manifest, {"fingerprint": fingerprint, "identity": identity, "facts": facts})
        elif fingerprint is None and self.alone and INDEX_FILE in self.at.names() and here.disk_bytes(self.at.stat(INDEX_FILE)):
            logger.warning(
                "the disk cache %s is from an earlier run, of %s. Without a fingerprint it is unknown whether its data has "
                "changed since: pass fingerprint=…, or remove it: stocache rm %s",
                self.path, time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest["created"])), self.path,
            )  # fmt: skip
        self._open_files(manifest, os.O_RDWR | os.O_CREAT)

    def join(self, key: str) -> None:
        """Use the folder that another process has open. Raises OSError or DiskError if it has been replaced."""
        manifest = self.read_manifest()
        if manifest["key"] != key:  # before anything is made there
            raise DiskError(f"{self.shown} is another cache by now.")
        self._lock()
        self._open_files(manifest, os.O_RDWR | os.O_CREAT)
        self.share()

    def look(self) -> None:
        """Open the files to read them, without a lock. Raises OSError or DiskError."""
        self._open_files(self.read_manifest(), os.O_RDONLY)
        if self.read_manifest()["key"] != self.key:
            raise DiskError(f"{self.shown} is being recreated by another process. Try again.")

    def _open_files(self, manifest: dict[str, Any], flags: int) -> None:
        self.manifest, self.key, self.seed = manifest, manifest["key"], int(manifest["key"], 16)
        self.index, self.samples = (self.open_with(name, flags) for name in (INDEX_FILE, SAMPLES_FILE))

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file. Raises OSError; DiskError if it is not a file, or another user's."""
        with contextlib.suppress(FileNotFoundError):
            status = self.at.stat(name)  # opening a device may have effects
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self.at.stat().st_uid:
                raise DiskError(f"{self.shown}/{name} is not a file of the user of the folder. Remove it.")
        return self.at.open(name, flags)

    def open_with(self, name: str, flags: int) -> int:
        """Return a descriptor as `open` does, which is closed with the folder."""
        fd = self.open(name, flags)
        self._files.callback(os.close, fd)
        return fd

    def check_names(self) -> None:
        """Raise DiskError if there are files that do not belong to a disk cache; or none, and the folder may not be new."""
        names, others = set(self.at.names()), set[str]()
        for name in names - {"lost+found"}:
            with contextlib.suppress(FileNotFoundError):
                if name not in FILES or stat.S_ISDIR(self.at.stat(name).st_mode):
                    others.add(name)
        if others:
            raise self._is_not_a_cache(f"it holds {printable(min(others))!r}")
        if not self._may_be_new and not names & {MANIFEST_FILE, LOCK_FILE}:
            raise self._is_not_a_cache(f"it holds no {MANIFEST_FILE}")

    def _check_owner(self, private: bool) -> None:
        """Raise DiskError unless the folder is this user's alone; warn if it is in memory or on a network."""
        status = self.at.stat()
        if status.st_uid != here.user():
            raise DiskError(f"{self.shown} belongs to user {status.st_uid}, not to {here.user()}. Give a folder of your own.")
        forbidden = stat.S_IWOTH | (stat.S_IWGRP if private else 0)
        if status.st_mode & forbidden:
            raise DiskError(
                f"others may write to {self.shown} (mode {status.st_mode & 0o777:o}). Change it: chmod 700 {self.shown}"
            )
        if problem := unfit(self.file_system):
            logger.warning("disk=%r is on %s. Give a folder on a local disk.", self.path, problem)

    @property
    def file_system(self) -> str:
        """The type of the file system; "" if it is not known."""
        return filesystem_of(self.at.stat().st_dev)

    def _lock(self) -> None:
        """Lock the folder: alone, or together with other processes of this machine. See NOTE [ Who uses a folder ]."""
        lock = self._locked = self.open_with(LOCK_FILE, os.O_RDWR | os.O_CREAT)

        def taken() -> bool:
            self.alone = here.lock_file(lock)
            if self.alone or not here.lock_file(lock, shared=True):
                return self.alone
            if MANIFEST_FILE in self.at.names() and os.fstat(lock).st_size:
                return True
            here.unlock_file(lock)  # the process that was alone has ended before it was done
            return False

        self._wait_for_lock(taken)
        ours = domain().encode()
        if self.alone:
            os.ftruncate(lock, 0)
            here.pwrite(lock, ours, 0)
        elif here.pread(lock, 4096, 0) != ours:
            raise DiskError(
                f"{self.shown} is in use by another machine, or by a container with another {limits.SHM_DIR}. Give each of "
                f"them a folder of its own."
            )

    def share(self) -> None:
        """Let other processes of this machine use the folder, too."""
        if self.alone and here.SHARES_MEMORY:
            self.alone = False
            self._wait_for_lock(lambda: here.lock_file(self._locked, shared=True))  # another process may come between

    def _wait_for_lock(self, taken: Callable[[], bool]) -> None:
        patience_s = _LONGEST_S if here.SHARES_MEMORY else 0.0  # else it serves one process at a time
        if not wait_until(taken, patience_s):
            holder = describe_first(flock_owners(self._locked))
            raise DiskError(f"{self.shown} has been locked by {holder} for {patience_s:.0f} s.")

    def _make(self, before: dict[str, Any] | None, content: dict[str, Any]) -> dict[str, Any]:
        """Recreate the files: they are missing, or hold samples of a different fingerprint. Return the manifest."""
        if before is not None:
            difference = f"fingerprint {before['fingerprint']!r}, now {content['fingerprint']!r}"
            if not self.alone:
                raise MismatchError(f"the disk cache {self.shown} is in use for other data: {difference}.")
            logger.warning("the disk cache %s was left behind for other data: %s. It is emptied.", self.path, difference)
        self.at.remove(*CONTENT)
        for name in (INDEX_FILE, SAMPLES_FILE):
            os.close(self.at.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        key, created = secrets.token_hex(8), time.time()
        manifest = {"format": "stocache disk cache", "version": _VERSION, "key": key, "created": created, **content}
        text = embed_checksum(json.dumps(manifest | {"checksum": ZEROS}, indent=1).encode(), _MARK)
        with os.fdopen(self.at.open(f"{MANIFEST_FILE}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as draft:
            draft.write(text)
            draft.flush()
            os.fsync(draft.fileno())
        self.at.rename(f"{MANIFEST_FILE}.new", MANIFEST_FILE)
        return manifest

    def read_manifest(self) -> dict[str, Any]:
        """Return the facts about the folder that the process which made it has written.

        Raises:
            DiskError: they are missing, damaged, or of a different version.
            OSError: they cannot be read.
        """
        try:
            with os.fdopen(self.open(MANIFEST_FILE, os.O_RDONLY), "rb") as file:
                return _parse_manifest(file.read(_MOST))
        except FileNotFoundError:
            self.check_names()
            problem = "is missing: the cache is being made, or its making was interrupted. The next run makes it. To remove it"
        except (ValueError, RecursionError) as error:
            problem = f"is damaged: {printable(str(error))}. Remove the cache"
        raise DiskError(f"{self.shown}/{MANIFEST_FILE} {problem}: stocache rm --force {self.shown}")


def _parse_manifest(text: bytes) -> dict[str, Any]:
    """Return the manifest in a text. Raises ValueError or RecursionError if it is damaged, or of a different version."""
    if _MARK not in text:
        raise ValueError("it has no checksum")
    read_checksum(text, _MARK)
    match manifest := json.loads(text):
        case {"version": version} if version != _VERSION:
            raise ValueError(f"it has format version {version}, this stocache reads version {_VERSION}")
        case {
            "version": _,
            "key": str(key),
            "created": int() | float() as created,
            "fingerprint": str() | None,
            "identity": {"dataset_len": int(count), "samples": str()},
            "facts": {"memory_slots": int(slots), **facts},
        } if (
            re.fullmatch("[0-9a-f]{16}", key)
            and 0 <= created < 2**32
            and count >= 0
            and 0 <= slots < 2**60
            and isinstance(facts.get("example"), str | None)
        ):
            return dict(manifest)
    raise ValueError("it holds other values")


def unfit(file_system: str) -> str:
    """Return a type of file system with the reason why it is not for a disk cache; "" if it is."""
    if file_system in _IN_MEMORY:
        return f"{file_system}, which is memory"
    return f"a network file system ({file_system}): it may be as slow as the source" if file_system in _NETWORK else ""


def manifest_of(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of the folder at a path; None if there is no cache that can be read."""
    with contextlib.suppress(OSError, ValueError), contextlib.closing(Folder(path)) as folder:
        return folder.read_manifest()
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
