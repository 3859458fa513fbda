"""The values of a `KeyedCache` on a local disk, behind the memory and for the next run: in an LMDB database in a folder.

NOTE [ The database ]
    LMDB (H. Chu, OpenLDAP) is shared by processes, survives any kill, and reads without a lock. Its keys are short, so a value
    is found by the hash of its key. It begins with the bytes of the key, which are compared, and a checksum.

    A process opens the database once, and closes it before it forks, when no thread uses it. Both open it again when they use
    it. A child that inherits it could neither use nor close it: closing takes the parent's readers out of the table that all
    processes share, and waits for a write of the parent's.
"""

import contextlib
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import xxhash

from stocache.cache.keyed.keys import Key
from stocache.cache.options import CacheOptions
from stocache.cache.stats import MISSING
from stocache.errors import DiskError, MismatchError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.leaves.type_lookup import NotImported
from stocache.samples.record_decoder import Records
from stocache.system.hashing import checksum
from stocache.system.limits import parse_size
from stocache.system.loading.children import hold_to_fork

logger = logging.getLogger("stocache")

_IDENTITY, _VERSION = b"stocache", 2
_FILES = "data.mdb", "lock.mdb"
_CHECK_BYTES = 8
_READERS = 1024  # processes and threads that read at a time


_in_use = threading.RLock()  # in a transaction, and while this process forks
_databases: "weakref.WeakValueDictionary[str, _Database]" = weakref.WeakValueDictionary()  # by folder


class _Database:
    """A database of this process. It is opened when it is used, and closed before a fork and with the last reference to it."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._folder, self._nbytes = folder, nbytes
        self._environment: Any = None

    @contextlib.contextmanager
    def transaction(self, write: bool = False) -> Iterator[Any]:
        """Begin a transaction, and end it. Raises DiskError."""
        with _in_use, self.open().begin(write=write, buffers=True) as transaction:
            yield transaction

    def open(self) -> Any:
        """Return the open environment. Raises DiskError."""
        import lmdb

        if self._environment is None:
            try:
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
                opened = lmdb.open(self._folder, map_size=self._nbytes, metasync=False, readahead=False, max_readers=_READERS)
            except (OSError, lmdb.Error) as error:
                raise DiskError(f"{self._folder} cannot be the folder of values: {error}") from None
            needed = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
            if os.path.getsize(os.path.join(self._folder, _FILES[0])) < needed:  # reading would end the process
                opened.close()
                raise DiskError(f"{self._folder} is damaged: {_FILES[0]} is truncated. Remove it.")
            self._environment = opened
        return self._environment

    def close(self) -> None:
        """Close the database until it is used again."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def __del__(self) -> None:
        self.close()


def _close_all() -> None:
    for database in list(_databases.values()):
        database.close()


hold_to_fork(_in_use, _close_all)


class DiskValues:
    """The values on a disk. It pickles as the path of their folder.

    Raises:
        DiskError: the folder cannot be used, or lmdb is not installed.
    """

    def __init__(self, options: CacheOptions) -> None:
        if importlib.util.find_spec("lmdb") is None:
            raise DiskError("disk= of a KeyedCache needs lmdb: pip install 'stocache[disk]'.")
        if not options.disk:
            raise DiskError(f"disk={options.disk!r} is not the path of a folder.")
        self._folder = os.path.realpath(os.fspath(options.disk))
        self._nbytes, self._options = parse_size(options.disk_limit or 0, "disk_limit"), options
        self._records = Records(options.allow_pickle, None if options.codec is None else Codec(options.codec))
        self._full = False
        self._database: _Database | None = None
        in_use = self._folder in _databases
        self._prepare(self._opened(), in_use)

    def __reduce__(self) -> Any:
        return DiskValues, (self._options,)

    def _prepare(self, database: _Database, in_use: bool) -> None:
        """Empty the folder if its database is for other data. ``in_use``: whether another cache of this process uses it."""
        options = self._options
        identity = checksum(repr((options.fingerprint, options.codec, options.allow_pickle, _VERSION)).encode()).encode()
        with database.transaction() as transaction:
            found = transaction.get(_IDENTITY)
            known = None if found is None else bytes(found)
            if known is None and transaction.stat()["entries"]:
                raise DiskError(f"{self._folder} has a database of other programs. Give a folder of its own.")
        if known == identity:
            return
        if known is not None:  # to drop the values would need room, which a full database does not have
            if in_use:
                raise MismatchError(f"{self._folder} is in use in this process for other data. Close that cache first.")
            logger.warning("the values in %s were left behind for other data. The folder is emptied.", self._folder)
            database.close()
            for name in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))
        with database.transaction(write=True) as transaction:
            transaction.put(_IDENTITY, identity)

    def _opened(self) -> _Database:
        if self._database is None:
            self._database = _databases.setdefault(self._folder, _Database(self._folder, self._nbytes))
        return self._database

    @property
    def takes(self) -> bool:
        """Whether another value may be written."""
        return not self._full

    def read(self, key: Key) -> Any:
        """Return the value of a key, which the caller may keep; MISSING if it is not there, damaged, or of an unknown class."""
        prefix, number = key
        with self._opened().transaction() as transaction:
            data = transaction.get(_digest(number))
            if data is None or data[: len(prefix)] != prefix:
                return MISSING
            record = bytearray(data[len(prefix) :])
        if record[:_CHECK_BYTES] != xxhash.xxh3_64_digest(memoryview(record)[_CHECK_BYTES:]):
            logger.debug("a value in %s is damaged", self._folder)
            return MISSING
        del record[:_CHECK_BYTES]
        try:
            return self._records.decode(record, len(record))
        except (SegmentError, NotImported) as error:
            logger.debug("a value in %s cannot be read: %s", self._folder, str(error))
            return MISSING

    def write(self, key: Key, value: object) -> bool:
        """Write a value; False if the disk takes no more, or it cannot be stored. Raises SampleError."""
        import lmdb

        prefix, number = key
        record = b"".join(self._records.encode(value, "value"))
        data = b"".join([prefix, xxhash.xxh3_64_digest(record), record])
        try:
            with self._opened().transaction(write=True) as transaction:
                transaction.put(_digest(number), data)
        except lmdb.Error as error:  # MapFullError, or the disk is full
            if not self._full:
                self._full = True
                logger.warning("the values in %s take no more: %s. Further values stay uncached.", self._folder, str(error))
            return False
        return True

    def close(self) -> None:
        """Close the database, if no other cache of this process uses it."""
        self._database = None


def _digest(number: int) -> bytes:
    return number.to_bytes(16, "little")
