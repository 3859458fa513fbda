"""Describe the folder of a disk cache, find its damaged samples, and remove it. The content of the folder is not trusted."""

import contextlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from stocache.cache.disk.folder import (
    CONTENT,
    FILES,
    INDEX_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    SAMPLES_FILE,
    read_manifest,
)
from stocache.cache.disk.samples_file import CHECKSUM_BYTES, CHUNK, ENTRY_BYTES, SamplesFile, may_be_true, read_entries, seed_of
from stocache.errors import DiskError
from stocache.shm import named, registry
from stocache.system.limits import filesystem_of
from stocache.system.platform import here
from stocache.system.waiting import describe_first, flock_owners, printable

_RUN = 256  # samples that a thread checks at a time
_PIECE = 4 << 20  # bytes that are read at a time
_NAMED = 10  # damaged samples that are named

_Numbers = NDArray[np.uint64]


@dataclass(frozen=True)
class DiskFolder:
    """The facts about the folder of a disk cache.

    Attributes:
        path: the absolute path.
        uid: the user to whom it belongs.
        key: 16 hexadecimal digits; the shared memory of the cache is named after them.
        created: seconds since 1970.
        dataset_len: samples in the dataset.
        filled: samples that the index has.
        samples: the structure of a sample, as text; "any size" if sizes vary.
        fingerprint: the user's text that identifies the samples.
        disk_bytes: bytes that the files take on the disk.
        free_bytes: bytes that are free on the disk.
        file_system: its type; "" if it is not known.
        pids: processes that use the folder, as far as this process can see them.
    """

    path: str
    uid: int
    key: str
    created: float
    dataset_len: int
    filled: int
    samples: str
    fingerprint: str | None
    disk_bytes: int
    free_bytes: int
    file_system: str
    pids: list[int]


class Damage(NamedTuple):
    """The result of `find_damage`: how many samples there are, and are damaged, and the first of these."""

    dataset_len: int
    filled: int
    damaged: int
    first: list[int]


def is_disk_cache(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of a disk cache, by the names of its files. It may be damaged."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(path))
        return MANIFEST_FILE in names or (LOCK_FILE in names and names <= FILES)
    return False


def describe(path: str | os.PathLike[str]) -> DiskFolder:
    """Describe a folder, without changing or locking anything.

    Raises:
        DiskError: it is not the folder of a disk cache, or is damaged.
    """
    with _open(path) as files:
        filled = 0
        for _, rows in _index(files):
            filled += int(np.count_nonzero(may_be_true(rows[:, 0], rows[:, 1], os.fstat(files.samples_fd).st_size)))
        folder = files.at.stat()
        identity = files.manifest["identity"]
        return DiskFolder(
            files.path,
            folder.st_uid,
            files.manifest["key"],
            files.manifest["created"],
            identity["dataset_len"],
            filled,
            identity["samples"],
            files.manifest["fingerprint"],
            sum(here.disk_bytes(os.fstat(fd)) for fd in (files.index_fd, files.samples_fd)),
            files.at.free_bytes(),
            filesystem_of(folder.st_dev),
            _users(files.at),
        )


def find_damage(path: str | os.PathLike[str], threads: int) -> Damage:
    """Read all samples of a folder with a number of ``threads``, and a progress bar. Nothing is changed.

    Raises:
        DiskError: it is not the folder of a disk cache, or its manifest is damaged.
    """
    with _open(path) as files, ThreadPoolExecutor(max(1, threads)) as pool:
        filled, damaged = 0, list[int]()
        total = sum(int(np.count_nonzero(entries[:, 0])) for _, entries in _index(files))
        with tqdm(total=total, desc="checking", unit="sample") as bar:
            for first, entries in _index(files):
                there = np.flatnonzero(entries[:, 0])
                rows = np.column_stack([there.astype(np.uint64) + np.uint64(first), entries[there]])
                rows = rows[np.argsort(rows[:, 1])]  # as they lie on the disk
                filled += len(rows)
                runs = [rows[begin : begin + _RUN] for begin in range(0, len(rows), _RUN)]
                for run, bad in zip(runs, pool.map(partial(_damaged, files), runs), strict=True):
                    damaged += bad
                    bar.update(len(run))
    return Damage(files.manifest["identity"]["dataset_len"], filled, len(damaged), sorted(damaged)[:_NAMED])


def remove(path: str | os.PathLike[str], force: bool = False) -> None:
    """Remove a folder. It is emptied only where it cannot be removed, such as a mount point.

    Args:
        path: the folder.
        force: remove it also if it is in use, damaged, or another user's. Processes that use it keep it.

    Raises:
        DiskError: it is in use, damaged or another user's; or it is not the folder of a disk cache, or has other files.
        OSError: the disk does not allow it.
    """
    path = os.path.abspath(path)
    shown = printable(path)
    if os.path.islink(path):
        raise DiskError(f"{shown} is a symbolic link. Give the folder itself.")
    key = None
    with _directory(path) as at, contextlib.ExitStack() as stack:
        _check_names(at, shown)
        if (owner := at.stat().st_uid) != here.user() and not force:
            raise DiskError(f"{shown} belongs to user {owner}. To remove it anyway: stocache rm --force {shown}")
        with contextlib.nullcontext() if not force else contextlib.suppress(DiskError):
            key = _read_manifest(at, path)["key"]
        if not force:
            lock = _open_file(stack, at, path, LOCK_FILE, os.O_RDWR)
            if not here.lock_file(lock):
                user = describe_first(flock_owners(lock))
                raise DiskError(f"{shown} is in use by {user}. To remove it anyway: stocache rm --force {shown}")
        at.remove(*CONTENT, LOCK_FILE)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    if key is not None:
        with contextlib.suppress(OSError):  # shared memory that killed processes left
            named.remove(registry.path_of(f"disk.{key}"), dead=True)


def place_of(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the type of the file system of a folder, and the bytes that a disk cache may have there. It may be new.

    Raises:
        DiskError: it is a file.
        OSError: it cannot be reached.
    """
    path = folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    with _directory(folder) as at:
        taken = 0
        if folder == path:
            with contextlib.suppress(FileNotFoundError):
                taken = here.disk_bytes(at.stat(SAMPLES_FILE))
        return filesystem_of(at.stat().st_dev), at.free_bytes() + taken


class _Files(NamedTuple):
    path: str
    at: here.Directory
    manifest: dict[str, Any]
    index_fd: int
    samples_fd: int


@contextlib.contextmanager
def _directory(path: str) -> Iterator[here.Directory]:
    try:
        at = here.Directory(path)
    except OSError as error:
        raise DiskError(f"{printable(path)} is not the folder of a disk cache: {error.strerror}.") from None
    with contextlib.closing(at):
        yield at


@contextlib.contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[_Files]:
    path = os.path.abspath(path)
    with _directory(path) as at, contextlib.ExitStack() as stack:
        manifest = _read_manifest(at, path)
        fds = [_open_file(stack, at, path, name, os.O_RDONLY) for name in (INDEX_FILE, SAMPLES_FILE)]
        if _read_manifest(at, path)["key"] != manifest["key"]:
            raise DiskError(f"{printable(path)} is being recreated by another process. Try again.")
        yield _Files(path, at, manifest, *fds)


def _open_file(stack: contextlib.ExitStack, at: here.Directory, path: str, name: str, mode: int) -> int:
    """Open a regular file of a folder, until a stack ends. Raises DiskError."""
    path = printable(path)
    try:
        fd = at.open(name, mode)
        stack.callback(os.close, fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        problem = f"is not a regular file. {_remedy(path)}"
    except FileNotFoundError:
        problem = f"is missing. {_remedy(path)}"
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}."
    raise DiskError(f"{path}/{name} {problem}")


def _remedy(shown: str) -> str:
    return f"Remove the cache: stocache rm --force {shown}"


def _check_names(at: here.Directory, shown: str) -> None:
    """Raise DiskError if there are files that do not belong to a disk cache, or neither a manifest nor a lock."""
    names, others = set(at.names()), set[str]()
    for name in names - {"lost+found"}:
        with contextlib.suppress(FileNotFoundError):
            if name not in FILES or stat.S_ISDIR(at.stat(name).st_mode):
                others.add(name)
    if others:
        raise DiskError(f"{shown} is not the folder of a disk cache: it holds {printable(min(others))!r}.")
    if not names & {MANIFEST_FILE, LOCK_FILE}:
        raise DiskError(f"{shown} is not the folder of a disk cache: it holds no {MANIFEST_FILE}.")


def _read_manifest(at: here.Directory, path: str) -> dict[str, Any]:
    """Return the manifest. Raises DiskError."""
    shown = printable(path)
    try:
        manifest = read_manifest(at)
    except FileNotFoundError:
        _check_names(at, shown)
        problem = (
            f"is missing: the cache is being made, or its making was interrupted. The next run makes it. To remove it: "
            f"stocache rm --force {shown}"
        )
    except OSError as error:
        problem = f"cannot be read: {error.strerror}."
    except ValueError as error:
        problem = f"is damaged: {printable(str(error))}. {_remedy(shown)}"
    else:
        return manifest
    raise DiskError(f"{shown}/{MANIFEST_FILE} {problem}")


def _users(at: here.Directory) -> list[int]:
    """Return the processes that have a flock of the folder. Nothing is locked: that could disturb one that opens it."""
    with contextlib.suppress(OSError):
        lock = at.open(LOCK_FILE, os.O_RDONLY)
        try:
            return flock_owners(lock)
        finally:
            os.close(lock)
    return []


def _index(files: _Files) -> Iterator[tuple[int, _Numbers]]:
    """Yield the index in pieces, each with the number of its first sample: rows of offset and size."""
    length = min(files.manifest["identity"]["dataset_len"], os.fstat(files.index_fd).st_size // ENTRY_BYTES)
    for first in range(0, length, CHUNK):
        yield first, read_entries(files.index_fd, first, min(CHUNK, length - first))


def _damaged(files: _Files, rows: _Numbers) -> list[int]:
    """Return which samples of rows of (index, offset, size) are damaged."""
    return [row[0] for row in rows.tolist() if not _is_sound(files, *row) and not _is_sound_now(files, row[0])]


def _is_sound_now(files: _Files, idx: int) -> bool:
    """Look again at a sample: it may have been written again, or the cache may have been cleared."""
    return all(at == 0 or _is_sound(files, idx, at, nbytes) for at, nbytes in read_entries(files.index_fd, idx, 1).tolist())


def _is_sound(files: _Files, idx: int, at: int, nbytes: int) -> bool:
    """Return whether the bytes of a sample pass their checksum. Read them in pieces: a false index may claim a huge size."""
    end = at + SamplesFile.room(nbytes) - CHECKSUM_BYTES
    digest = xxhash.xxh3_64(seed=seed_of(int(files.manifest["key"], 16), idx))
    try:
        while at < end:
            data = here.pread(files.samples_fd, min(_PIECE, end - at), at)
            if not data:
                return False
            digest.update(data)
            at += len(data)
        return digest.intdigest() == int.from_bytes(here.pread(files.samples_fd, CHECKSUM_BYTES, end), "little")
    except (OSError, OverflowError):
        return False
