"""Put a shared cache into a graph. It keeps the results of maps, under the numbers that elements have at their source.

NOTE [ The key travels along ]
    Shuffling and sharding bring an element to another worker in each epoch, so a cache in one process would often miss. Here
    elements get numbers at a place at which their order is always the same. They pass shuffles and shards with their numbers,
    before they are read and mapped. The cache is behind these pipes: a hit in any worker skips the reading and mapping. The
    shuffle's buffer then holds numbers and names instead of images.
"""

import copy
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter, Shuffler

from stocache.cache.disk.cache import DiskCache
from stocache.cache.disk.tiers import Tiers
from stocache.cache.options import ALL_OPTIONS, AuditOptions, CacheOptions, take_options
from stocache.cache.ragged import RaggedCache
from stocache.datasets.audit import Audit
from stocache.errors import DatasetError
from stocache.reading.graph.graph import DataPipe, is_random, pipes_of, relink, removed, replaced, sources
from stocache.reading.graph.pipes import Prefetcher, register
from stocache.reading.graph.seeds import holds_no_generator, is_dispatching, is_sharding_point
from stocache.samples.indices import length_of
from stocache.system.generators import Kept

logger = logging.getLogger("stocache")

_PASS_THROUGH = (Shuffler, ShardingFilter, Prefetcher)  # they do not read elements


class Keyed(NamedTuple):
    """An element with its number."""

    key: int
    element: Any


class Numbered(IterDataPipe[Keyed]):
    """Numbers the elements of a pipe.

    Attributes:
        skipped: elements that the source leaves out at the beginning of the next iteration.
    """

    def __init__(self, datapipe: DataPipe) -> None:
        self.datapipe, self.skipped = datapipe, 0

    def __iter__(self) -> Iterator[Keyed]:
        for key, element in enumerate(self.datapipe, self.skipped):
            yield Keyed(key, element)

    def __len__(self) -> int:
        return len(self.datapipe)


@register("shared_cache")
class SharedCacher(IterDataPipe[Any]):
    """Cache the results of the maps right before it in shared memory, for all processes (functional name: ``shared_cache``).

        pipe = paths.shuffle().sharding_filter().map(decode).shared_cache(number_of.__getitem__, 32, dataset_len=len(paths))

    The maps become part of this pipe, and run only for elements that are not in the cache. A result that was made with the
    global random number generators is not kept. Values and order are the same as with the graph without a cache.

    Args:
        datapipe: the pipe whose elements are kept, commonly a ``map``.
        key_fn: called with an element before the first of the maps; returns its key, a unique integer in ``[0, dataset_len)``.
            None if elements are `Keyed` already.
        size_limit_gib: GiB for the cache on this machine, as for `RaggedCache`.
        dataset_len: number of keys; by default the length of ``datapipe``.
        audit, on_change: as for `CachedDataset`: the maps run for some cached elements as well, to compare the results.
        options: ``name``, ``persist``, ``fingerprint``, ``admission``, ``codec``, ``allow_pickle``, ``disk``, ``disk_limit``:
            see `CacheOptions`. Results that do not fit in memory are kept on the disk, also for later runs with the same
            fingerprint.

    Attributes:
        cache: the `RaggedCache`.
        disk_cache: the `DiskCache` behind it, or None.

    Raises:
        DatasetError: ``datapipe`` has no length, and ``dataset_len`` is not given; while iterating: a result differs from the
            one that is cached, and ``on_change`` is "raise".
        SampleIndexError: while iterating: a key is outside ``[0, dataset_len)``.
        LimitError, CacheNameError, CodecError, MismatchError, SegmentError: as for `RaggedCache`.
        DiskError: as for `DiskCache`.
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        key_fn: Callable[[Any], int] | None,
        size_limit_gib: float | str | CacheOptions = "auto",
        *,
        dataset_len: int | None = None,
        maps: "list[Mapper[Any]] | None" = None,
        **options: Any,
    ) -> None:
        before: Any = datapipe
        if maps is None:
            maps = []
            while type(before) is Mapper:
                maps.insert(0, before)
                before = before.datapipe
        self.datapipe, self.key_fn = before, key_fn
        if dataset_len is None:
            dataset_len = length_of(datapipe)
            if dataset_len is None:
                raise DatasetError("shared_cache needs the number of keys, and the pipe has no length. Pass dataset_len=.")
        kinds = {kind: ALL_OPTIONS[kind] for kind in (CacheOptions, AuditOptions)}
        where, checks = take_options("shared_cache", [size_limit_gib], options, kinds)
        self._tiers = Tiers.of_any_size(where, dataset_len)
        self._dataset_len = dataset_len
        self._maps = Maps(maps, dataset_len)
        self._audit = Audit(self._maps, dataset_len, checks)
        self._warned = False

    @property
    def cache(self) -> RaggedCache:
        """The cache in memory."""
        return cast(RaggedCache, self._tiers.memory)

    @property
    def disk_cache(self) -> DiskCache | None:
        """The cache behind it."""
        return self._tiers.disk

    def __iter__(self) -> Iterator[Any]:
        key_fn = self.key_fn
        self._audit.doubt()
        for element in self.datapipe:
            if key_fn is None:
                key, element = element
            else:
                key = operator.index(key_fn(element))
            yield self._value(key, element)

    def _value(self, key: int, element: object) -> Any:
        if self.key_fn is None and key >= self._dataset_len:  # the source is longer than its length
            return self._maps(element)
        if self._audit.is_due(1):
            self._maps.take(element)
            if not self._audit.allows((key,), self.cache):
                return self._maps(element)

        def load(_: int) -> Any:
            watch = Kept()
            value = self._maps(element)
            if watch.drawn():
                raise _RandomError(value)
            return value

        try:
            return self._tiers.get_or_load(key, load, strict=False)
        except _RandomError as random:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s draw random numbers, so their results are not cached. Put the cache before them.", self._maps
                )
            return random.value

    def __len__(self) -> int:
        return len(self.datapipe)


class _RandomError(Exception):
    """A value was made with random numbers, so it is not kept."""

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value


class Maps:
    """A chain of maps that is called with one element at a time. It is not part of the graph."""

    def __init__(self, maps: "list[Mapper[Any]]", dataset_len: int) -> None:
        self._dataset_len = dataset_len
        self._element: deque[Any] = deque(maxlen=1)
        self._end: Any = self._element
        self._names = ", ".join(getattr(pipe.fn, "__name__", repr(pipe.fn)) for pipe in maps)
        for pipe in maps:
            twin: Any = copy.copy(pipe)
            twin.datapipe = self._end
            self._end = twin

    def __call__(self, element: object) -> Any:
        """Return the result for an element."""
        self.take(element)
        return self[0]

    def take(self, element: object) -> None:
        """Set the element that is mapped next."""
        self._element.append(element)

    def __getitem__(self, key: int) -> Any:
        """Return the result for the element that was set."""
        return next(iter(self._end))

    def __len__(self) -> int:
        return self._dataset_len

    def __str__(self) -> str:
        return self._names or "no maps"


def put_cache(
    datapipe: DataPipe,
    key_fn: Callable[[Any], int] | None,
    size_limit_gib: float | str,
    dataset_len: int | None,
    **options: Any,
) -> "tuple[DataPipe, SharedCacher | None]":
    """Put a cache into a graph, for its last chain of maps before the first random pipe.

    Args:
        key_fn, size_limit_gib, dataset_len, options: as for `SharedCacher`. Without a ``key_fn`` elements are numbered before
            the chain.

    Returns:
        The graph and the cache. Without such a chain, or without a length, the unchanged graph and None, and a warning.
    """
    # see NOTE [ The key travels along ]
    chain = _chain(datapipe)
    if not any(type(pipe) is Mapper for pipe in chain):
        logger.warning(
            "nothing is cached: no map comes before the first random pipe. Put .shared_cache(key_fn) after the maps."
        )
        return datapipe, None
    (before,), maps = sources(chain[0]), [pipe for pipe in chain if type(pipe) is Mapper]
    dataset_len = length_of(before) if dataset_len is None else dataset_len
    if dataset_len is None:
        logger.warning("nothing is cached: %s has no length. Pass dataset_len=, the number of its elements.", before)
        return datapipe, None
    if key_fn is None:
        if any(map(is_sharding_point, pipes_of(before))):  # each worker would count its own elements
            logger.warning("nothing is cached: the elements of %s are sharded already. Pass key_fn= to identify them.", before)
            return datapipe, None
        relink(chain[0], before, Numbered(before))
    others = [pipe for pipe in chain if type(pipe) is not Mapper]
    for pipe in maps:
        datapipe = removed(datapipe, pipe)
    last = others[-1] if others else maps[0].datapipe
    cacher = SharedCacher(last, key_fn, size_limit_gib, dataset_len=dataset_len, maps=maps, **options)
    return replaced(datapipe, last, cacher), cacher


def _chain(datapipe: DataPipe) -> list[Any]:
    """Return the pipes of the chain: the maps, and the pipes between and behind them that do not read elements."""
    readers: dict[int, list[DataPipe]] = {id(pipe): [] for pipe in pipes_of(datapipe)}
    for pipe in pipes_of(datapipe):
        for source in sources(pipe):
            readers[id(source)].append(pipe)
    firsts = [pipe for pipe in pipes_of(datapipe) if is_random(pipe) and not any(map(is_random, pipes_of(pipe)[1:]))]
    ends = [below[0] for pipe in firsts if len(below := sources(pipe)) == 1] if firsts else [datapipe]
    for at in ends:
        found: Any = at
        while not _is_map(found) and len(sources(found)) == 1:
            (found,) = sources(found)
        if _is_map(found):
            break
    else:
        return []
    chain = [found]
    while (
        len(below := sources(chain[0])) == 1
        and len(readers[id(below[0])]) == 1
        and (_is_map(below[0]) or _passes_through(below[0]))
    ):
        chain.insert(0, below[0])
    while len(above := readers[id(chain[-1])]) == 1 and _passes_through(above[0]):
        chain.append(above[0])
    return chain


def _passes_through(pipe: Any) -> bool:
    return type(pipe) in _PASS_THROUGH or is_dispatching(pipe)


def _is_map(pipe: object) -> bool:
    return type(pipe) is Mapper and holds_no_generator(pipe.fn)
