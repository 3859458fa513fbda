"""Describe the folder of a disk cache, find its damaged samples, and remove it. The content of the folder is not trusted."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from stocache.cache.disk.folder import CONTENT, FILES, LOCK_FILE, MANIFEST_FILE, SAMPLES_FILE, Folder
from stocache.cache.disk.samples_file import entry_of, may_be_true, read, read_index, seed_of
from stocache.errors import DiskError
from stocache.shm import named, registry
from stocache.system.platform import here
from stocache.system.waiting import describe_first, flock_owners

_RUN = 256  # samples that a thread checks at a time
_NAMED = 10  # damaged samples that are named


class Damage(NamedTuple):
    """The result of `find_damage`: how many samples there are, and are damaged, and the first of these."""

    dataset_len: int
    filled: int
    damaged: int
    first: list[int]


def is_disk_cache(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a disk cache's, by the names of its files. It may be damaged."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(path))
        return MANIFEST_FILE in names or (LOCK_FILE in names and names <= FILES)
    return False


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts about a folder, without changing or locking anything.

    Returns:
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

    Raises:
        DiskError: it is not the folder of a disk cache, or is damaged.
    """
    with _opened(path) as folder:
        folder.look()
        identity, size = folder.manifest["identity"], os.fstat(folder.samples).st_size
        index = read_index(folder.index, identity["dataset_len"])
        return {
            "path": folder.path,
            "uid": folder.at.stat().st_uid,
            **{name: folder.manifest[name] for name in ("key", "created", "fingerprint")},
            **{name: identity[name] for name in ("dataset_len", "samples")},
            "filled": sum(int(np.count_nonzero(may_be_true(entries, size))) for _, entries in index),
            "disk_bytes": sum(here.disk_bytes(os.fstat(fd)) for fd in (folder.index, folder.samples)),
            "free_bytes": folder.at.free_bytes(),
            "file_system": folder.file_system,
            "pids": _users(folder),
        }


def find_damage(path: str | os.PathLike[str], threads: int) -> Damage:
    """Read all samples of a folder with a number of ``threads``, and a progress bar. Nothing is changed.

    Raises:
        DiskError: it is not the folder of a disk cache, or its manifest is damaged.
    """
    with _opened(path) as folder, ThreadPoolExecutor(max(1, threads)) as pool:
        folder.look()
        dataset_len, damaged = folder.manifest["identity"]["dataset_len"], list[int]()
        filled = sum(int(np.count_nonzero(entries[:, 0])) for _, entries in read_index(folder.index, dataset_len))
        with tqdm(total=filled, desc="checking", unit="sample") as bar:
            for first, entries in read_index(folder.index, dataset_len):
                there = np.flatnonzero(entries[:, 0])
                there = first + there[np.argsort(entries[there, 0])]  # as they lie on the disk
                runs = [there[begin : begin + _RUN].tolist() for begin in range(0, len(there), _RUN)]
                for run, bad in zip(runs, pool.map(partial(_damaged, folder), runs), strict=True):
                    damaged += bad
                    bar.update(len(run))
    return Damage(dataset_len, filled, len(damaged), sorted(damaged)[:_NAMED])


def remove(path: str | os.PathLike[str], force: bool = False) -> None:
    """Remove a folder. It is emptied only if it cannot be removed, such as a mount point.

    Args:
        path: the folder.
        force: remove it also if it is in use, damaged, or another user's. Processes that use it keep it.

    Raises:
        DiskError: it is in use, damaged or another user's; or it is not the folder of a disk cache, or has other files.
        OSError: the disk does not allow it.
    """
    key = None
    with _opened(path) as folder:
        if os.path.islink(folder.path):
            raise DiskError(f"{folder.shown} is a symbolic link. Give the folder itself.")
        folder.check_names()
        anyway = f"To remove it anyway: stocache rm --force {folder.shown}"
        if (owner := folder.at.stat().st_uid) != here.user() and not force:
            raise DiskError(f"{folder.shown} belongs to user {owner}. {anyway}")
        try:
            key = folder.read_manifest()["key"]
        except OSError:
            if not force:
                raise
        if not force and not here.lock_file(lock := folder.open_with(LOCK_FILE, os.O_RDWR)):
            raise DiskError(f"{folder.shown} is in use by {describe_first(flock_owners(lock))}. {anyway}")
        folder.at.remove(*CONTENT, LOCK_FILE)
    with contextlib.suppress(OSError):
        os.rmdir(folder.path)
    if key is not None:
        with contextlib.suppress(OSError):  # shared memory that killed processes left
            named.remove(registry.path_of(f"disk.{key}"), dead=True)


def place_of(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the type of the file system of a folder, and the bytes that a disk cache may have there. It may be new.

    Raises:
        DiskError: it is a file.
        OSError: it cannot be reached.
    """
    path = parent = os.path.abspath(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    with _opened(parent) as folder:
        taken = 0
        if parent == path:
            with contextlib.suppress(FileNotFoundError):
                taken = here.disk_bytes(folder.at.stat(SAMPLES_FILE))
        return folder.file_system, folder.at.free_bytes() + taken


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Folder]:
    """Open a folder. An error of the system that concerns one of its files is a DiskError."""
    with contextlib.closing(Folder(path)) as folder:
        try:
            yield folder
        except OSError as error:
            if error.filename is None:
                raise
            raise DiskError(
                f"{folder.shown}/{os.path.basename(error.filename)} cannot be used: {error.strerror}. To remove the cache: "
                f"stocache rm --force {folder.shown}"
            ) from None


def _users(folder: Folder) -> list[int]:
    """Return the processes that have a flock of the folder. Nothing is locked: that could disturb one that opens it."""
    with contextlib.suppress(OSError):
        return flock_owners(folder.open_with(LOCK_FILE, os.O_RDONLY))
    return []


def _damaged(folder: Folder, indices: list[int]) -> list[int]:
    """Return which samples are damaged. Look twice: one may be written again, or the cache cleared, at this moment."""
    return [idx for idx in indices if not _is_sound(folder, idx) and not _is_sound(folder, idx)]


def _is_sound(folder: Folder, idx: int) -> bool:
    """Return whether a sample is not there, or passes its checksum."""
    with contextlib.suppress(OSError, OverflowError, MemoryError):  # its place or its size may be false, and huge
        at, nbytes = entry_of(folder.index, idx)
        return at == 0 or read(folder.samples, at, nbytes, seed_of(folder.seed, idx)) is not None
    return False
