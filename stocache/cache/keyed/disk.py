"""The values of a `KeyedCache` in a folder on a local disk, behind the memory and for the next run.

NOTE [ Places of keys ]
    The folder is a `DiskCache`'s, whose samples are values behind the bytes of their keys. A key is kept in one of
    `_NEAR` places, from the place of its hash on. The search for a key ends at the first place that no value has ever had, or
    after the last of them. It compares the bytes of keys before it reads a value. If several processes write one key at
    the same time, it may be in two places, with the same value. So a key is removed from all its places.

    A place whose value was removed is free for a different key, and searches continue past it. Room in the file is not used
    again. When the folder is opened again, a search may end at such a place: then the value behind it is loaded once more.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from stocache.cache.disk.cache import DiskCache
from stocache.cache.disk.folder import manifest_of
from stocache.cache.keyed.keys import Key
from stocache.cache.options import CacheOptions
from stocache.cache.stats import EMPTY, MISSING, SET
from stocache.samples.record_encoder import EncodedRecord
from stocache.system.limits import parse_size

_NEAR = 16  # places in which a key may be
_PLACE_BYTES = 4096  # of the limit, for each place
_FEWEST, _MOST = 1024, 1 << 21  # places; each takes 21 bytes of shared memory


class KeyedDisk(DiskCache[Any]):
    """The values on a disk. See NOTE [ Places of keys ]."""

    _by_key: ClassVar[bool] = True

    def read(self, key: Key) -> Any:
        """Return the value of a key, which the caller may keep; MISSING if it is not there, damaged, or of an unknown class."""
        for place in self._places_of(key):
            found = self._load(place, True)
            if found is not MISSING and found[0] == key[0]:  # else a different value has taken its place
                return found[1]
        return MISSING

    def has(self, key: Key) -> bool:
        """Return whether a key is there. Its value may be damaged."""
        return next(self._places_of(key), None) is not None

    def keep(self, key: Key, record: EncodedRecord) -> None:
        """Write the record of a value, unless the key is there or the disk takes no more."""
        encoded = self._disk.encode((key[0], record), "value")
        if not self.takes or not self._disk.has_room([encoded]):
            return self._note_full()
        for place in self._near(key):
            if self._states[place] == EMPTY:
                self._publish([place], [encoded], count_races=False)
            if self._has(place, key):
                return

    def remove(self, key: Key) -> bool | None:
        """Remove a key, for later runs too. Return whether it was there; see `DiskStore.remove`."""
        return self._disk.remove(self._near(key), lambda place: self._has(place, key))

    @property
    def takes(self) -> bool:
        """Whether one more value may be written."""
        return self._segment.holder > 0 and not self._disk.refused(0)

    def _note_full(self) -> None:
        """Note that the disk is full, and warn once; unless a value like the others would still fit."""
        if self.takes and self.stats().slot_bytes > self._disk.free:
            self._disk.stop("takes no more values: its limit is reached. Further values are loaded in each run.")

    def _near(self, key: Key) -> list[int]:
        """Return the places in which a key may be."""
        return [(key[1] + step) % self._dataset_len for step in range(_NEAR)]

    def _places_of(self, key: Key) -> Iterator[int]:
        """Yield the places in which a search finds a key."""
        for place in self._near(key):
            if self._has(place, key):
                yield place
            elif not self._disk.was_taken(place):
                return

    def _has(self, place: int, key: Key) -> bool:
        return self._states[place] == SET and self._disk.begins_with(place, key[0])


def count_places(options: CacheOptions) -> int:
    """Return the number of places of a folder; of one that holds values of the same fingerprint, as many as it has."""
    manifest = manifest_of(options.disk or "")
    if manifest is not None and manifest["fingerprint"] == options.fingerprint:
        return int(manifest["identity"]["dataset_len"])
    return max(_FEWEST, min(_MOST, parse_size(options.disk_limit or 0, "disk_limit") // _PLACE_BYTES))
