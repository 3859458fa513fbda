"""A KeyedCache as a mapping."""

import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

from stocache.cache.keyed.keys import Key, key_of
from stocache.cache.stats import MISSING


class KeyedMapping(MutableMapping[Any, Any]):
    """A `KeyedCache` as a mutable mapping. A full cache serves each thread the value that it has set last."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._uncached: dict[int, tuple[Key, Any]] = {}  # by thread

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedMapping, (self.cache,)

    def __getitem__(self, key: object) -> Any:
        value = self.cache.get(key, MISSING)
        if value is not MISSING:
            return value
        last, value = self._uncached.get(threading.get_ident(), (None, None))
        if last != key_of(key):
            raise KeyError(key)
        return value

    def __setitem__(self, key: object, value: object) -> None:
        if self.cache.put(key, value):
            self._uncached.pop(threading.get_ident(), None)
        else:
            self._uncached[threading.get_ident()] = key_of(key), value

    def __delitem__(self, key: object) -> None:
        last, _ = self._uncached.get(threading.get_ident(), (None, None))
        if last == key_of(key):
            del self._uncached[threading.get_ident()]
        elif not self.cache.remove(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def clear(self) -> None:
        """Forget all keys; see `KeyedCache.clear`."""
        self._uncached.clear()
        self.cache.clear()

    def __iter__(self) -> Iterator[Any]:
        yield from self.cache.keys()

    def __len__(self) -> int:
        return len(self.cache)
