"""The shared cache within a graph: what maps make of an element is kept, under the number the element had at its source.

NOTE [ The key travels along ]
    Shuffling and sharding bring an element to another worker in each epoch, so a cache of one process is asked for what others
    have. Here the elements are numbered where their order is always the same, and go through shuffles and shards unread, with
    their numbers; what reading and mapping makes of them is looked up behind these. Then a hit skips the work, in whichever
    worker, and the shuffle holds numbers and names instead of images.
"""

import copy
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter, Shuffler

from stocache.cache.ragged import RaggedCache
from stocache.errors import DatasetError
from stocache.reading.graph.graph import DataPipe, end_of, is_random, pipes_of, relink, remove_dp, sources, traverse_dps
from stocache.reading.graph.pipes import Prefetcher, register
from stocache.reading.graph.seeds import is_dispatching, is_pure, is_sharding_point
from stocache.samples.indices import length_of
from stocache.system.rng import RngMonitor

logger = logging.getLogger("stocache")

_PASS_THROUGH = (Shuffler, ShardingFilter, Prefetcher)  # which never look at an element


class Keyed(NamedTuple):
    """An element with its number."""

    key: int
    element: Any


class Numbered(IterDataPipe[Keyed]):
    """Gives the elements of a pipe numbers.

    Attributes:
        skipped: elements the pipe will leave out, at the beginning of the next iteration.
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
    """Keep what the maps right before make of each element in shared memory, for all processes (functional name:
    ``shared_cache``).

        pipe = paths.shuffle().sharding_filter().map(decode).shared_cache(number_of.__getitem__, 32, dataset_len=len(paths))

    The maps become part of this pipe, and run for those elements only that the cache does not have. Where they draw from the
    global random number generators, nothing is kept. Values and order are those of the graph without.

    Args:
        datapipe: the pipe whose elements are kept, commonly a ``map``.
        key_fn: called with an element as it comes to the first of the maps; returns its key, an integer in
            ``[0, dataset_len)``, which no other has. None where elements are `Keyed` already.
        size_limit_gib: GiB for the cache on this machine, as for `RaggedCache`.
        dataset_len: how many keys there are; by default the length of ``datapipe``.
        options: ``name``, ``persist``, ``fingerprint``, ``admission``, ``codec`` and ``allow_pickle``, as for `RaggedCache`.

    Attributes:
        cache: the `RaggedCache`.

    Raises:
        DatasetError: ``datapipe`` has no length, and none is given.
        SampleIndexError: while iterating, for a key that is none.
        LimitError, CacheNameError, CodecError, MismatchError, SegmentError: as for `RaggedCache`.
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        key_fn: Callable[[Any], int] | None,
        size_limit_gib: float | str = "auto",
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
                raise DatasetError(
                    "shared_cache needs to know how many keys there are, as the pipe has no length: dataset_len=."
                )
        self.cache, self._dataset_len = RaggedCache(size_limit_gib, dataset_len, **options), dataset_len
        self._maps = _Maps(maps)
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        key_fn = self.key_fn
        for element in self.datapipe:
            if key_fn is None:
                key, element = element
            else:
                key = operator.index(key_fn(element))
            yield self._value(key, element)

    def _value(self, key: int, element: Any) -> Any:
        if self.key_fn is None and key >= self._dataset_len:  # the source is longer than it said
            return self._maps(element)

        def load(_: int) -> Any:
            watch = RngMonitor()
            value = self._maps(element)
            if watch.changed():
                raise _RandomError(value)
            return value

        try:
            return self.cache.get_or_load(key, load, strict=False)
        except _RandomError as random:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s draw random numbers, so what they make is not cached. Put the cache before them.", self._maps
                )
            return random.value

    def __len__(self) -> int:
        return len(self.datapipe)


class _RandomError(Exception):
    """A value was made with random numbers, and is not to be kept."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


class _Maps:
    """A chain of maps for one element at a time; no part of the graph."""

    def __init__(self, maps: "list[Mapper[Any]]") -> None:
        self._element: list[Any] = []
        self._end: Any = self._element
        self._names = ", ".join(getattr(its.fn, "__name__", repr(its.fn)) for its in maps)
        for its in maps:
            twin: Any = copy.copy(its)
            twin.datapipe = self._end
            self._end = twin

    def __call__(self, element: Any) -> Any:
        self._element[:] = [element]
        return next(iter(self._end))

    def __str__(self) -> str:
        return self._names or "no maps"


def put_cache(
    datapipe: DataPipe,
    key_fn: Callable[[Any], int] | None,
    size_limit_gib: float | str,
    dataset_len: int | None,
    **options: Any,
) -> "tuple[DataPipe, SharedCacher | None]":
    """Put a cache into a graph, for its last chain of maps before the first random pipe, and return the graph and the cache.

    Args:
        key_fn, size_limit_gib, dataset_len, options: as for `SharedCacher`; without a ``key_fn`` elements are numbered where
            they come to the chain.

    Returns:
        The graph, and None where it has no such chain, or no length: then it is as it was, and a warning says why.
    """
    # see NOTE [ The key travels along ]
    chain = _chain(datapipe)
    if not any(type(pipe) is Mapper for pipe in chain):
        logger.warning(
            "nothing is cached: there is no map before the first random pipe. Put .shared_cache(key_fn) after the maps."
        )
        return datapipe, None
    (before,), maps = sources(chain[0]), [pipe for pipe in chain if type(pipe) is Mapper]
    dataset_len = length_of(before) if dataset_len is None else dataset_len
    if dataset_len is None:
        logger.warning("nothing is cached: %s has no length. Say dataset_len=, the number of its elements.", before)
        return datapipe, None
    if key_fn is None:
        if any(map(is_sharding_point, pipes_of(before))):  # each worker would count its own elements
            logger.warning(
                "nothing is cached: the elements of %s are sharded already, and need a key_fn to be known by.", before
            )
            return datapipe, None
        relink(chain[0], before, Numbered(before))
    blind = [pipe for pipe in chain if type(pipe) is not Mapper]
    for pipe in maps:
        datapipe = end_of(remove_dp(traverse_dps(datapipe), pipe))
    last = blind[-1] if blind else maps[0].datapipe
    cacher = SharedCacher(last, key_fn, size_limit_gib, dataset_len=dataset_len, maps=maps, **options)
    if last is datapipe:
        return cacher, cacher
    for pipe in pipes_of(datapipe):
        relink(pipe, last, cacher)
    return datapipe, cacher


def _chain(datapipe: DataPipe) -> list[Any]:
    """Return the pipes of the chain: its maps, and between and behind them those that never look at an element."""
    readers: dict[int, list[DataPipe]] = {id(pipe): [] for pipe in pipes_of(datapipe)}
    for pipe in pipes_of(datapipe):
        for source in sources(pipe):
            readers[id(source)].append(pipe)
    firsts = [pipe for pipe in pipes_of(datapipe) if is_random(pipe) and not any(map(is_random, pipes_of(pipe)[1:]))]
    ends = [its[0] for pipe in firsts if len(its := sources(pipe)) == 1] if firsts else [datapipe]
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
        len(below := sources(chain[0])) == 1 and len(readers[id(below[0])]) == 1 and (_is_map(below[0]) or _is_blind(below[0]))
    ):
        chain.insert(0, below[0])
    while len(above := readers[id(chain[-1])]) == 1 and _is_blind(above[0]):
        chain.append(above[0])
    return chain


def _is_blind(pipe: Any) -> bool:
    return type(pipe) in _PASS_THROUGH or is_dispatching(pipe)


def _is_map(pipe: Any) -> bool:
    return type(pipe) is Mapper and is_pure(pipe.fn)
