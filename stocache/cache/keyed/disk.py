"""The values of a `KeyedCache` on a local disk, behind the memory and for the next run: in an LMDB database in a folder.

NOTE [ The database ]
    LMDB (H. Chu, OpenLDAP) is shared by processes, survives any kill, and reads without a lock. Its keys are short, so a value
    is found by the hash of its key, and begins with the bytes of the key, which are compared. A process opens the database
    once. A forked child closes it, which leaves that of the parent alone, and opens it again: LMDB does not work there.
"""

import contextlib
import importlib.util
import logging
import os
import weakref
from typing import Any

from stocache.cache.keyed.keys import Key
from stocache.cache.options import CacheOptions
from stocache.cache.stats import MISSING
from stocache.errors import DiskError, SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.record_decoder import Records
from stocache.samples.type_lookup import NotImported
from stocache.system.hashing import checksum
from stocache.system.limits import parse_size

logger = logging.getLogger("stocache")

_IDENTITY = b"stocache"
_READERS = 1024  # processes and threads that read at a time


class _Database:
    """An open database of this process; it is closed with the last reference to it."""

    def __init__(self, folder: str, nbytes: int) -> None:
        import lmdb

        self.pid = os.getpid()
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self.environment = lmdb.open(folder, map_size=nbytes, metasync=False, readahead=False, max_readers=_READERS)
        except (OSError, lmdb.Error) as error:
            raise DiskError(f"{folder} cannot be the folder of values: {error}") from None

    def __del__(self) -> None:
        if "environment" in vars(self):
            self.environment.close()


_databases: "weakref.WeakValueDictionary[tuple[int, str], _Database]" = weakref.WeakValueDictionary()


class DiskValues:
    """The values on a disk. It pickles as the path of their folder.

    Raises:
        DiskError: the folder cannot be used, or lmdb is not installed.
    """

    def __init__(self, options: CacheOptions) -> None:
        if importlib.util.find_spec("lmdb") is None:
            raise DiskError("disk= of a KeyedCache needs lmdb: pip install 'stocache[disk]'.")
        self._folder = os.path.realpath(os.fspath(options.disk or ""))
        self._nbytes, self._options = parse_size(options.disk_limit or 0, "disk_limit"), options
        self._records = Records(options.allow_pickle, None if options.codec is None else Codec(options.codec))
        self._database: _Database | None = None
        self._full = False
        self._prepare()

    def __reduce__(self) -> Any:
        return DiskValues, (self._options,)

    def _prepare(self) -> None:
        """Empty the folder if its database is for other data."""
        options = self._options
        identity = checksum(repr((options.fingerprint, options.codec, options.allow_pickle, 1)).encode()).encode()
        with self._begin() as transaction:
            found = transaction.get(_IDENTITY)
            known = None if found is None else bytes(found)
        if known == identity:
            return
        if known is not None:  # to drop the values would need room, which a full database does not have
            logger.warning("the values in %s were left behind for other data. The folder is emptied.", self._folder)
            self._database = None
            for name in ("data.mdb", "lock.mdb"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))
        with self._begin(write=True) as transaction:
            transaction.put(_IDENTITY, identity)

    def _begin(self, write: bool = False) -> Any:
        return self._opened().begin(write=write, buffers=True)

    def _opened(self) -> Any:
        if self._database is None or self._database.pid != os.getpid():
            place = os.getpid(), self._folder
            if self._database is not None:
                self._database.environment.close()
            self._database = _databases.get(place) or _databases.setdefault(place, _Database(self._folder, self._nbytes))
        return self._database.environment

    @property
    def takes(self) -> bool:
        """Whether another value may be written."""
        return not self._full

    def read(self, key: Key) -> Any:
        """Return the value of a key, which the caller may keep; MISSING if it is not there, damaged, or of an unknown class."""
        prefix, number = key
        with self._begin() as transaction:
            data = transaction.get(_digest(number))
            if data is None or data[: len(prefix)] != prefix:
                return MISSING
            record = bytearray(data[len(prefix) :])
        try:
            return self._records.decode(record, len(record))
        except (SegmentError, NotImported) as error:
            logger.debug("a value in %s cannot be read: %s", self._folder, str(error))
            return MISSING

    def write(self, key: Key, value: object) -> bool:
        """Write a value; False if the disk takes no more, or it cannot be stored. Raises SampleError."""
        import lmdb

        prefix, number = key
        data = b"".join([prefix, *self._records.encode(value, "value")])
        try:
            with self._begin(write=True) as transaction:
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
