"""zarr: a store whose chunks are read once, for all workers and ranks.

    array = zarr.open_array(CachedStore(FsspecStore.from_url("s3://bucket/volume.zarr"), KeyedCache("16GiB", name="volume")))

Tried with zarr 3.1.6. Chunks come from the cache as they are stored, compressed.
"""

from typing import Any

from zarr.abc.store import Store
from zarr.storage import WrapperStore

from stocache.cache.keyed.cache import KeyedCache
from stocache.cache.stats import MISSING


class CachedStore(WrapperStore[Store]):
    """A store in front of yours. What is written through it is not cached any more; other writers are not noticed."""

    def __init__(self, store: Store, cache: KeyedCache[Any, bytes]) -> None:
        super().__init__(store)
        self.cache, self._written = cache, set[str]()

    def _with_store(self, store: Store) -> "CachedStore":
        made = type(self)(store, self.cache)
        made._written = self._written
        return made

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of a key, or a range of them; None if the key does not exist."""
        if key in self._written:
            return await self._store.get(key, prototype, byte_range)
        found = self.cache.get((key, repr(byte_range)), MISSING)
        if found is MISSING:
            buffer = await self._store.get(key, prototype, byte_range)
            if buffer is not None:  # a missing chunk may be written by others
                self.cache.put((key, repr(byte_range)), buffer.to_bytes())
            return buffer
        return prototype.buffer.from_bytes(found)

    async def set(self, key: str, value: Any, **options: Any) -> None:
        """Write the bytes of a key."""
        self._written.add(key)
        await self._store.set(key, value, **options)

    async def delete_dir(self, prefix: str) -> None:
        """Delete all keys below a prefix."""
        self._written |= {key async for key in self._store.list_prefix(prefix and f"{prefix.rstrip('/')}/")}
        await self._store.delete_dir(prefix)

    async def clear(self) -> None:
        """Delete all keys."""
        self._written |= {key async for key in self._store.list()}
        await self._store.clear()

    async def delete(self, key: str) -> None:
        """Delete a key."""
        self._written.add(key)
        await self._store.delete(key)
