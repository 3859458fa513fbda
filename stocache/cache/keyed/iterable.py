"""CachedIterable: record the first pass over an iterable dataset, and replay it afterwards.

NOTE [ Parts of a stream ]
    Each worker of each rank iterates over its own part of the source, as the source divides itself. Samples are kept under the
    part and their number in it, and at the end of a part its length, in a small cache of its own. A pass that is left early has
    no length: the next one replays what there is, and goes on behind it in the source. There it compares the last sample that
    it skips, because a source with a different order in each pass cannot be continued.

    With a different number of workers, parts that were recorded to their end are divided among them. Else they are recorded
    again.
"""

import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import TypeVar

from stocache.cache.keyed.cache import KEYED, KeyedCache
from stocache.cache.keyed.keys import key_of
from stocache.cache.options import CacheOptions, shows_options, take_options
from stocache.cache.stats import MISSING, CacheStats
from stocache.errors import DatasetError
from stocache.system.describe import describe, difference
from stocache.system.ranks import ranks_here

logger = logging.getLogger("stocache")

_T = TypeVar("_T", default=Any)  # the samples
_MARKS = "1MB"  # for the lengths of parts


class CachedIterable(IterableDataset[_T]):
    """An iterable dataset, recorded in its first pass and replayed in later ones: of Hugging Face, webdataset, your own.

        dataset = CachedIterable(load_dataset("c4", streaming=True)["train"].map(tokenize), size_limit_gib=32)
        loader = DataLoader(dataset, batch_size=32, num_workers=4)

    Each worker and rank records its part, in the order in which the samples come. In later passes the source is not read,
    except for samples that did not fit: then it is iterated over up to them. Samples come back equal. They are the samples of
    the first pass: random numbers that the source draws are frozen, so augment afterwards.

    Args:
        dataset: has ``__iter__``, and yields each worker its part, as iterable datasets do.
        size_limit_gib: GiB for the cache on this machine; "auto" for the memory that the machine can spare.
        shuffle: True replays a part in a different random order each time, if all of it is cached: by ``seed`` and the epoch of
            `set_epoch`; without an epoch by torch's random numbers, as a sampler.
        seed: for ``shuffle``.
        name, persist, fingerprint, on_busy, codec, allow_pickle, disk, disk_limit: as for `KeyedCache`. Without a name, each
            rank has a cache of its own, with its part of the limit.

    Raises:
        DatasetError: the dataset cannot be iterated over.
        LimitError, CodecError, DiskError, CacheNameError, MismatchError, SegmentError, BusyError: as for `KeyedCache`.

    Examples:
        >>> class Squares:
        ...     def __iter__(self):
        ...         print("reading the source")
        ...         yield from (number**2 for number in range(4))
        >>> with CachedIterable(Squares(), size_limit_gib="1MB") as dataset:
        ...     print(list(dataset), list(dataset))
        reading the source
        [0, 1, 4, 9] [0, 1, 4, 9]
    """

    @shows_options(*KEYED)
    def __init__(
        self,
        dataset: Iterable[_T],
        size_limit_gib: float | str | CacheOptions = "auto",
        *,
        shuffle: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        used_up = isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset)  # LitData's streams are both
        if used_up or not hasattr(type(dataset), "__iter__"):
            raise DatasetError(
                f"{type(dataset).__name__} cannot be iterated over again and again. Give an object whose __iter__ begins anew. "
                f"A map-style dataset goes into CachedDataset."
            )
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        (taken,) = take_options("CachedIterable", [size_limit_gib], options, {CacheOptions: KEYED})
        marks = {"size_limit_gib": _MARKS, "name": taken.name and f"{taken.name}.lengths"}
        if taken.disk is not None:  # each of the two has a folder of its own in that folder
            marks |= {"disk": os.path.join(taken.disk, "lengths"), "disk_limit": _MARKS}
            taken = dataclasses.replace(taken, disk=os.path.join(taken.disk, "samples"))
        self.cache: KeyedCache[Any, _T] = KeyedCache(taken)
        self._marks = KeyedCache(dataclasses.replace(taken, **marks))  # has room when the cache is full
        self.epoch: int | None = None
        self._ranks: tuple[int, ...] = 0, 1
        self._passes = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_ranks": ranks_here()[:2]}  # a spawned worker may not know them

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for ``shuffle`` and for the source, if it has one. Call it before workers start."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # a TypeError if the source has no length

    def __iter__(self) -> Iterator[_T]:
        self._passes += 1
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        here = ranks_here()
        rank, ranks = self._ranks if here.world_size == 1 else here[:2]
        parts = [(rank, ranks, workers, number)]
        recorded = self._marks.get((rank, ranks), MISSING)
        if recorded not in (MISSING, workers):
            others = [(rank, ranks, recorded, part) for part in range(recorded)]
            if all(map(self._holds, others)):  # else this worker would read the source for parts of several workers
                parts = others[number::workers]
        return itertools.chain.from_iterable(map(self._samples, parts))

    def _holds(self, part: tuple[int, ...]) -> bool:
        """Whether a part was recorded to its end, and all its samples are cached."""
        length = self._marks.get(part, MISSING)
        return length is not MISSING and all((*part, at) in self.cache for at in range(length))

    def _found(self, *key: int) -> Any:
        return self.cache.find(key_of(key))

    def _samples(self, part: tuple[int, ...]) -> Iterator[_T]:
        """Yield the samples of a part. Samples that are not cached are read from the source, and recorded."""
        length = self._marks.get(part, MISSING)
        is_new = length is MISSING
        source = _SourcePass(self.dataset, partial(self._found, *part) if is_new else None)
        order: Iterable[int] = itertools.count() if is_new else range(length)
        if self.shuffle and self._holds(part):
            order = self._order(length)
        for at in order:
            sample = self._found(*part, at)
            if sample is MISSING:
                sample = source.read(at)
                if sample is MISSING:
                    break
                _keep(self.cache, (*part, at), sample)
            yield sample
        else:
            return
        if is_new:
            _keep(self._marks, part, at)
            _keep(self._marks, part[:2], part[2])
        else:
            logger.warning("%s ends earlier than when it was recorded.", type(self.dataset).__name__)

    def _order(self, length: int) -> list[int]:
        worker = get_worker_info()
        seed: tuple[int, ...]
        if self.epoch is not None:
            seed = self.seed, self.epoch, 0 if worker is None else worker.id
        elif worker is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()), 0
        else:
            seed = worker.seed, self._passes  # persistent workers keep their seed
        generator = torch.Generator().manual_seed(hash(seed) % 2**63)
        return torch.randperm(length, generator=generator, dtype=torch.int64, device="cpu").tolist()

    def stats(self) -> CacheStats:
        """Return the counts of the cache, over all processes. Misses are the samples that were read of the source."""
        return self.cache.stats()

    def close(self) -> None:
        """Release the memory in this process. Twice is fine."""
        self.cache.close()
        self._marks.close()

    def __enter__(self) -> "CachedIterable[_T]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _keep(cache: KeyedCache[Any, Any], key: tuple[int, ...], value: Any) -> None:
    cache.get_or_load(key, lambda _: value, strict=False)


class _SourcePass:
    """One pass over a dataset, which is begun when it is read from.

    ``cached`` returns a sample if it is cached: the last one that the pass skips is compared with it.
    """

    def __init__(self, dataset: Iterable[Any], cached: Callable[[int], Any] | None) -> None:
        self._dataset, self._cached = dataset, cached
        self._items: Iterator[Any] = iter(())
        self._at = sys.maxsize

    def read(self, at: int) -> Any:
        """Return sample ``at``; MISSING at the end."""
        begins, last = at < self._at, MISSING  # even if the cache was cleared meanwhile
        if begins:
            self._items, self._at = iter(self._dataset), 0
        for _ in range(at - self._at):  # not islice, which calls iter again: a stream of LitData begins anew then
            last = next(self._items, MISSING)
        self._at = at + 1
        before = self._cached(at - 1) if begins and self._cached is not None and last is not MISSING else MISSING
        place = None if before is MISSING else difference(describe(before, strides=False), describe(last, strides=False))
        if place is not None:
            logger.warning(
                "sample %d of %s is another one in this pass (%.200s), so the rest of the pass may repeat samples. Give "
                "the source one order, and let shuffle=True shuffle.", at - 1, type(self._dataset).__name__, place,
            )  # fmt: skip
        return next(self._items, MISSING)
