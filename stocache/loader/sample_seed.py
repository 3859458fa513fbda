"""Give each sample random numbers of its own: `SampleSeed`.

NOTE [ Seeding samples ]
    Before a sample is made, the generators are seeded with numbers that come from (seed, epoch, index): the global ones, which
    takes about 10 us; in a worker thread the generators of the thread, 2 us. So a dataset that makes samples together
    (``__getitems__``) is asked for one at a time. Samples that draw nothing are not seeded: cached samples, if no transform
    runs after the cache; samples that are loaded for a cache, see NOTE [ The audit ]; and samples of the datasets in
    `draws_nothing`. If the audit finds that loads draw, it makes the cache be left, and the samples of the batch are made
    again.

    Without worker processes, the user's own numbers come from the same generators. So they are set back after each batch.
"""

import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map  # documented, for extending default_collate

from stocache.datasets.batches.rows import Load
from stocache.datasets.batches.spec import only_collates
from stocache.datasets.batches.views import DatasetView, behind_views
from stocache.datasets.cached import draws_nothing, is_cache
from stocache.errors import DatasetError, LimitError
from stocache.loader.threads.info import CollateRng
from stocache.loader.workers.requests import EpochIndices, answering
from stocache.samples.indices import after_each
from stocache.system.generators import Kept, seed_all
from stocache.system.objects import attribute_of
from stocache.system.walking import through_subsets, walk

_MAX_SEED = 2**64 - 1
_NUMBERS = struct.Struct("<4Q")  # one for each generator, and one for the hooks
_PURE = (default_collate, default_convert)  # collate functions that draw no random numbers


_BeforeEach: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class SampleSeed:
    """The seed from which each sample of a `DataLoader` gets random numbers of its own.

        loader = DataLoader(dataset, batch_size=32, num_workers=8, sample_seed=17)

    The global generators of Python, numpy and torch (of the CPU) are set from (seed, epoch, index) before each sample is made.
    So a sample is the same whichever worker or rank makes it, in whatever batch, loaded or cached, before or after a restart.
    The index is the one that the sampler yields. The epoch is the one of the loader's ``set_epoch``; else of a sampler that has
    an ``epoch`` and ``set_epoch``; else the number of iterations that the loader began before. A ``collate_fn`` of your own has
    the generators set from (seed, epoch, first index of the batch).

    Other generators are not set: the generators that belong to an object (of MONAI and albumentations,
    ``np.random.default_rng``), of other libraries, of a GPU. Set them in a hook. A dataset that seeds a generator itself, from
    ``torch.initial_seed()`` or the seed of the worker, gets a different seed in each worker. Samples that draw before the cache
    are cached as they were drawn first, as always. A dataset with ``__getitems__`` is asked for one sample at a time.

    Args:
        seed: from 0 to 2**64 - 1.
        hooks: functions that are called before each sample, in the process that makes it, with a number below 2**32 that is the
            sample's own; also before a ``collate_fn`` of your own. They must pickle if workers are spawned.

    Raises:
        LimitError: ``seed`` is not such a number; a hook is not callable.

    Examples:
        >>> noise = torch.Generator()  # not a global one, so a hook sets it
        >>> seed = SampleSeed(17, hooks=(noise.manual_seed,))
        >>> with CachedDataset(torch.zeros(4, 2), "1MB", transform=lambda x: x + torch.rand(2, generator=noise)) as dataset:
        ...     one_by_one = list(DataLoader(dataset, batch_size=1, sample_seed=seed))
        ...     together = list(DataLoader(dataset, batch_size=4, sample_seed=seed))
        >>> torch.equal(torch.cat(one_by_one), together[0])
        True
    """

    seed: int
    hooks: tuple[Callable[[int], object], ...] = ()

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed <= _MAX_SEED:
            raise LimitError(f"sample_seed={self.seed!r:.100} is not a seed. Use an int from 0 to 2**64 - 1, or a SampleSeed.")
        if not isinstance(self.hooks, tuple) or not all(map(callable, self.hooks)):
            raise LimitError(f"hooks={self.hooks!r:.100} is not a tuple of functions. Use hooks=(function,).")

    def of_batch(self, batched: bool) -> tuple[int, ...]:
        """Return four 64-bit numbers for the batch that this thread makes. ``batched``: whether it has several samples."""
        epoch, index = answering.indices
        first = index if not batched else index[0] if len(index) else None
        return self.numbers(epoch, first, " batch")

    def numbers(self, epoch: int, index: Any, purpose: str = "") -> tuple[int, ...]:
        """Return four 64-bit numbers for a sample: for the generators of Python, numpy and torch, and for the hooks.

        Integers of all types count as int. Any other index counts as its ``repr``.
        """
        if type(index) is not int:
            try:
                index = operator.index(index)
            except TypeError:
                index = repr(index)
        return _NUMBERS.unpack(blake2b(f"{self.seed} {epoch} {index}{purpose}".encode(), digest_size=32).digest())


def as_sample_seed(value: Any, dataset: Any) -> SampleSeed | None:
    """Return the ``sample_seed`` argument of a loader as an object.

    Raises:
        LimitError: it is not a seed.
        DatasetError: the dataset is iterable.
    """
    if value is None:
        return None
    if isinstance(dataset, IterableDataset):
        raise DatasetError(
            "sample_seed needs a map-style dataset: the samples of an iterable dataset have no index. Leave it out."
        )
    return value if isinstance(value, SampleSeed) else SampleSeed(value)


def is_pure(collate_fn: object) -> bool:
    """Whether a collate function draws no random numbers.

    That is known of the functions of torch, if the user has not extended them, and of ``list`` and ``tuple``.
    """
    is_of_torch = collate_fn in _PURE and all(map(only_collates, default_collate_fn_map.values()))
    return is_of_torch or collate_fn in (list, tuple)


def seeded(dataset: Any, collate_fn: Any, sample_seed: SampleSeed, lazy: bool, batched: bool) -> tuple[Any, Any]:
    """Return a dataset and a collate function that set the generators, for an iterator whose indices are `EpochIndices`.

    Args:
        lazy: whether the dataset returns a `LazyBatch`.
        batched: whether the loader makes batches of samples.
    """
    if not lazy and not is_pure(collate_fn):
        collate_fn = SeededCollate(collate_fn, sample_seed, batched)
    return SeededDataset(dataset, sample_seed, lazy), collate_fn


class SeededDataset(DatasetView):
    """A dataset whose samples are made with generators that were seeded for each; see NOTE [ Seeding samples ]."""

    __slots__ = ("_lazy", "_sample_seed")

    def __init__(self, dataset: Any, sample_seed: SampleSeed, lazy: bool) -> None:
        self.dataset, self._sample_seed, self._lazy = dataset, sample_seed, lazy

    def __reduce__(self) -> Any:
        return SeededDataset, (self.dataset, self._sample_seed, self._lazy)

    def __getitem__(self, key: EpochIndices) -> Any:
        """Return a sample, for a loader that does not batch."""
        with self._seeding(key.epoch, [key.indices]) as before_each:
            (sample,) = _each(partial(operator.getitem, self.dataset), [key.indices], before_each)
        answering.indices = key
        return sample

    def __getitems__(self, key: EpochIndices) -> Any:
        """Return the samples of a batch."""
        epoch, indices = key
        if self._lazy:
            batch = self.dataset.__getitems__(indices)
            batch.load_with(partial(self._load_missing, epoch, indices))
            batch.before_each = partial(self._seed, epoch, indices)
            return batch
        with self._seeding(epoch, indices) as before_each:
            samples = _get_batch(self.dataset, indices, before_each)
        answering.indices = key
        return samples

    def _load_missing(self, epoch: int, outer: Sequence[object], load: Load, inner: Sequence[int], missing: list[int]) -> Any:
        """Return samples that a `LazyBatch` misses. ``inner`` are the indices in its cache, ``outer`` the sampler's."""
        positions = {int(idx): position for position, idx in enumerate(inner)}
        with self._seeding(epoch, [outer[positions[idx]] for idx in missing]) as before_each:
            if before_each is None:
                return list(load(missing))
            if not _is_left(self.dataset):
                samples = list(load(missing))
                if not _is_left(self.dataset):
                    return samples
            return _each(lambda idx: next(iter(load([idx]))), missing, before_each)

    @contextmanager
    def _seeding(self, epoch: int, indices: Sequence[object]) -> Iterator[_BeforeEach | None]:
        """Yield a function that seeds the generators for the sample at a position of ``indices``; None if none draws."""
        seed = self._sample_seed
        if not seed.hooks and draws_nothing(behind_views(self.dataset)):
            yield None
            return
        with _kept_here():
            yield partial(self._seed, epoch, indices)

    def _seed(self, epoch: int, indices: Sequence[object], position: int) -> None:
        seed_here(self._sample_seed.numbers(epoch, indices[position]), self._sample_seed.hooks)


def _is_left(dataset: object) -> bool:
    """Whether a cache is not served any more, because loads draw random numbers, say."""
    return any(is_cache(each) and each.is_left for each in walk(behind_views(dataset)))


def _kept_here() -> Any:
    """Return a ``with`` block that sets the global generators back, unless this is a worker, in which nobody else draws."""
    return Kept() if get_worker_info() is None else nullcontext()


def seed_here(numbers: tuple[int, ...], hooks: tuple[Callable[[int], object], ...] = ()) -> None:
    """Seed the global generators, or in a worker thread the generators of the thread, and call the hooks."""
    info: Any = get_worker_info()
    is_thread = getattr(info, "worker_method", None) == "thread"
    if is_thread:
        info.rng.own.seed(*numbers[:3])
        info.rng.draws = info.rng.own.itself
    if not is_thread or isinstance(info.rng, CollateRng):
        seed_all(numbers)
    for hook in hooks:
        hook(numbers[-1] & 0xFFFFFFFF)


def _get_batch(dataset: object, indices: Sequence[object], before_each: _BeforeEach | None) -> Any:
    """Return samples as torch's DataLoader gets them, or one by one."""
    get_many = attribute_of(dataset, "__getitems__")
    if before_each is None and get_many:
        return get_many(indices)
    inner, inner_indices = through_subsets(dataset, indices)
    if before_each is not None and is_cache(inner):
        was_left, samples = inner.is_left, inner.__getitems__(inner_indices, before_each)
        return samples if inner.is_left == was_left else inner.__getitems__(inner_indices, before_each)
    if before_each is None or not attribute_of(inner, "__getitems__"):
        return _each(partial(operator.getitem, dataset), indices, before_each)
    batches = _each(lambda idx: inner.__getitems__([idx]), inner_indices, before_each)
    if not all(isinstance(batch, list | tuple) and len(batch) == 1 for batch in batches):
        raise DatasetError(
            f"sample_seed makes one sample at a time, but __getitems__ of {type(inner).__name__} does not return a list of "
            f"samples. Let it return one, and join the samples in collate_fn."
        )
    return [batch[0] for batch in batches]


def _each(get: Callable[[Any], object], indices: Sequence[object], before_each: _BeforeEach | None) -> list[Any]:
    return list(map(get, after_each(before_each, indices)))


class SeededCollate:
    """Calls a collate function with generators that were seeded for the batch."""

    def __init__(self, collate_fn: Callable[[Any], object], sample_seed: SampleSeed, batched: bool) -> None:
        self._collate_fn, self._sample_seed, self._batched = collate_fn, sample_seed, batched

    def __call__(self, samples: object) -> Any:
        """Return the batch."""
        with _kept_here():
            seed_here(self._sample_seed.of_batch(self._batched), self._sample_seed.hooks)
            return self._collate_fn(samples)
