"""Orders in which blocks are read one after the other, and yet their samples are shuffled.

NOTE [ Windows ]
    Random access to samples that are stored in blocks reads every block many times. So the blocks are put into a random order,
    taken by windows of so many, and the samples of a window are shuffled: each block is read during one window only, and with a
    window of as many blocks as a batch has samples, the order is hardly worse than a full shuffle (`shuffle_quality`).

    All ranks know the whole order, which is a function of (seed, epoch), and each takes one stretch of it: no sample is taken
    by two, and few windows are read by more than one.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from stocache.errors import LimitError, StateError
from stocache.samplers.permutation import LISTED, Numbers, Permutation
from stocache.samples.indices import check_indices
from stocache.system.deprecation import renamed_arguments
from stocache.system.ranks import torch_ranks

_AHEAD = 1 << 16  # blocks whose sizes are looked at together


class ResumableSampler(DistributedSampler[int]):
    """A rank's share of each epoch, in an order that says where it stands and goes on from there.

    It is a DistributedSampler, so that trainers do not put one in its place.
    """

    _counts_epochs = True  # whether each iteration is the next epoch, unless `set_epoch` says which

    def __init__(self) -> None:
        self.epoch = self._done = 0  # the epoch that begins next, and how many of its samples are to be passed by
        self._running: tuple[int, int, Iterator[int]] | None = None
        """The epoch that runs, how many of its samples are planned, and those of them that are not yet yielded."""

    @abstractmethod
    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        """Yield this rank's samples of an epoch, many at a time, but for the first ``done``."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return what a state must have in common with the sampler that goes on from it."""

    def __iter__(self) -> Iterator[int]:
        epoch, done = self.epoch, self._done
        self._running = epoch, done, iter(())
        self.epoch, self._done = epoch + self._counts_epochs, 0
        return self._yielding(epoch, done)

    def _yielding(self, epoch: int, planned: int) -> Iterator[int]:
        for samples in self._order(epoch, planned):
            planned += len(samples)
            left = iter(samples)
            self._running = epoch, planned, left
            yield from left
        self._running = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins next."""
        if epoch != self.epoch:
            self.epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the order stands: after the last sample that was yielded; between two epochs, at the next."""
        if self._running is None:
            return self.upcoming()
        epoch, planned, left = self._running
        return self._state(epoch, planned - operator.length_hint(left))

    def upcoming(self) -> dict[str, Any]:
        """Return the state of the epoch that begins next, also when another one runs, or was broken off."""
        return self._state(self.epoch, self._done)

    def _state(self, epoch: int, done: int) -> dict[str, Any]:
        return {"epoch": epoch, "done": done, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next iteration yields what was left.

        Raises:
            StateError: it is the state of another order.
        """
        own = self._identity()
        differing = [name for name in own if state.get(name) != own[name]]
        if differing or not {"epoch", "done"} <= state.keys():
            names = ", ".join(f"{name}={state.get(name)!r}" for name in differing)
            raise StateError(f"load_state_dict: the state is of another order ({names}). Make the sampler as it was.")
        self.epoch, self._done, self._running = state["epoch"], state["done"], None


class BlockSampler(ResumableSampler):
    """Yields the samples of a dataset block by block, shuffled within windows of several blocks.

        sampler = BlockSampler(dataset.indices, storage.block_size, shuffle=True, prefetch=dataset.prefetch_blocks)
        loader = DataLoader(dataset, batch_size=256, sampler=sampler)

    Args:
        indices: global indices of the samples of the dataset, as in `StorageDataset`; what is yielded is local indices.
        block_size: samples in each block of the storage.
        shuffle: False yields blocks, and the samples in them, in ascending order.
        window: blocks whose samples are shuffled together; 1 shuffles within each block only.
        seed: the same for all ranks.
        rank, world_size: this process's number among those that share each epoch. None for what torch.distributed says where it
            is initialised, else all is this process's.
        drop_last: leave out the last samples so that all ranks have equally many; else some have one more.
        prefetch: called with the numbers of the blocks of each window while the one before is yielded: the
            ``prefetch_blocks`` of the dataset, which has them read ahead from the disk.

    Raises:
        LimitError: no such block size, window, or rank.
        SampleIndexError: an index is no integer, or negative.

    The order depends on (seed, epoch, rank, world_size) and on nothing else. Each time it is iterated over, the next epoch
    begins, unless `set_epoch` says which. With ``indices`` that are a range it keeps no list of them, and above 2^24 samples
    none of the blocks.
    Source: the article on block storage in PyTorch Lightning, for windows of one block.
    """

    @renamed_arguments(ahead="prefetch")
    def __init__(
        self,
        indices: Sequence[int] | Numbers,
        block_size: int,
        shuffle: bool,
        *,
        window: int = 16,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        prefetch: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        super().__init__()
        if world_size is None:
            its_rank, world_size = torch_ranks() or (0, 1)
            rank = its_rank if rank is None else rank
        rank = rank or 0
        for name, value in {"block_size": block_size, "window": window, "world_size": world_size}.items():
            if type(value) is not int or value < 1:
                raise LimitError(f"{name}={value!r} is not a number above 0.")
        if type(seed) is not int or seed < 0:
            raise LimitError(f"seed={seed!r} is not a number of 0 or more.")
        if not 0 <= rank < world_size:
            raise LimitError(f"rank={rank} is none of world_size={world_size}.")
        if isinstance(indices, range) and indices.step == 1 and indices.start >= 0:
            self._shelf: _Range | _List = _Range(indices, block_size)
        else:
            self._shelf = _List(check_indices(indices, 2**62, "BlockSampler"), block_size)
        self._shuffle, self._window, self._seed = shuffle, window, seed
        self._rank, self._world_size, self._drop_last, self._prefetch = rank, world_size, drop_last, prefetch

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        begin, end = self._share()
        return end - begin

    def _share(self) -> tuple[int, int]:
        """Return which stretch of the order is this rank's."""
        each, over = divmod(self._shelf.samples, self._world_size)
        if self._drop_last:
            over = 0
        begin = self._rank * each + min(self._rank, over)
        return begin, begin + each + (self._rank < over)

    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        begin, end = self._share()
        following = self._windows(epoch, begin + done, end)
        window = next(following, None)
        self._tell(window)
        while window is not None:
            upcoming = next(following, None)
            self._tell(upcoming)
            passed, chosen = window
            samples = np.concatenate([self._shelf.block(b) for b in chosen.tolist()])
            if self._shuffle:
                np.random.default_rng((self._seed, epoch, 1 + int(chosen[0]))).shuffle(samples)
            yield samples[max(0, begin + done - passed) : end - passed].tolist()
            window = upcoming

    def _windows(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, Numbers]]:
        """Yield where each window begins in the order, and its blocks; those that have to do with a stretch of it."""
        count, passed = self._shelf.blocks, 0
        blocks = self._order_of_blocks(epoch, count)
        together = max(1, _AHEAD // self._window) * self._window
        for first in range(0, count if begin < end else 0, together):
            chosen = blocks(np.arange(first, min(first + together, count)))
            ends = passed + np.cumsum(self._shelf.sizes(chosen))
            for at in range(0, len(chosen), self._window) if ends[-1] > begin else ():
                window = chosen[at : at + self._window]
                window_end = int(ends[at + len(window) - 1])
                if passed >= end:
                    return
                if window_end > begin:
                    yield passed, window
                passed = window_end
            passed = int(ends[-1])

    def _order_of_blocks(self, epoch: int, count: int) -> Callable[[Numbers], Numbers]:
        """Return the function that says which blocks are at given places."""
        if not self._shuffle:
            return np.asarray
        if self._shelf.samples > LISTED:
            return Permutation(count, self._seed, epoch).at
        order: Numbers = np.random.default_rng((self._seed, epoch)).permutation(count)
        return order.__getitem__

    def _tell(self, window: tuple[int, Numbers] | None) -> None:
        if self._prefetch is not None and window is not None:
            self._prefetch(self._shelf.numbers(window[1]).tolist())

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": self._shelf.samples,
            "shuffle": self._shuffle,
            "window": self._window,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


class _List:
    """The samples of a dataset by blocks, those that hold any: where each is, in a list of all."""

    def __init__(self, indices: Numbers, block_size: int) -> None:
        blocks = indices // block_size
        self._by_block = np.lexsort((indices, blocks))
        ordered = blocks[self._by_block]
        self._bounds = np.append(np.flatnonzero(np.diff(ordered, prepend=-1)), len(blocks))
        self._numbers = ordered[self._bounds[:-1]]
        self.samples, self.blocks = len(indices), len(self._numbers)

    def numbers(self, blocks: Numbers) -> Numbers:
        """Return the numbers of blocks in the storage."""
        numbers: Numbers = self._numbers[blocks]
        return numbers

    def sizes(self, blocks: Numbers) -> Numbers:
        """Return how many samples blocks have."""
        sizes: Numbers = self._bounds[blocks + 1] - self._bounds[blocks]
        return sizes

    def block(self, block: int) -> Numbers:
        """Return the local indices of a block's samples."""
        samples: Numbers = self._by_block[self._bounds[block] : self._bounds[block + 1]]
        return samples


class _Range:
    """As `_List`, of samples that follow one another: computed."""

    def __init__(self, indices: range, block_size: int) -> None:
        self._start, self._size, self.samples = indices.start, block_size, len(indices)
        self._first = indices.start // block_size
        self.blocks = -(-indices.stop // block_size) - self._first if indices else 0

    def numbers(self, blocks: Numbers) -> Numbers:
        return self._first + blocks

    def sizes(self, blocks: Numbers) -> Numbers:
        sizes: Numbers = self._begin(blocks + 1) - self._begin(blocks)
        return sizes

    def block(self, block: int) -> Numbers:
        return np.arange(self._begin(block), self._begin(block + 1))

    def _begin(self, block: Any) -> Any:
        return np.clip((self._first + block) * self._size - self._start, 0, self.samples)


@dataclass(frozen=True)
class ShuffleQuality:
    """How well an order mixes the blocks.

    Attributes:
        same_block: the share of pairs of samples in a batch that are of one block.
        same_block_ratio: that, by the share in a full shuffle: 1 is perfect; windows of k among n blocks give about n / k.
        correlation: of the labels within blocks (intraclass): 0 where samples were assigned to them at random, 1 where each has
            one label. Without labels 1, the worst case.
        design_effect: by how much the variance of a batch's mean exceeds that of independent samples:
            1 + (batch_size - 1) * same_block * correlation (Kish).
    """

    same_block: float
    same_block_ratio: float
    correlation: float
    design_effect: float


def shuffle_quality(
    order: Sequence[int] | Numbers, block_size: int, labels: Sequence[Any] | None = None, *, batch_size: int = 256
) -> ShuffleQuality:
    """Return how well ``order``, an epoch of global indices, mixes blocks of ``block_size`` samples in batches.

    Args:
        order: global indices in the order in which they come.
        block_size: samples in each block.
        labels: classes or numbers, one for each global index; None supposes the worst.
        batch_size: samples in a batch; what is left over at the end is not looked at, unless it is all.

    Raises:
        SampleIndexError: an index is no integer, or negative.
        LimitError: no such sizes, or fewer labels than indices.
    """
    index = check_indices(order, 2**62, "shuffle_quality")
    if block_size < 1 or batch_size < 2 or len(index) < 2:
        sizes = f"{block_size}, {batch_size} and {len(index)}"
        raise LimitError(f"shuffle_quality needs block_size >= 1, batch_size >= 2 and two indices, got {sizes}.")
    blocks = np.unique(index // block_size, return_inverse=True)[1]
    batch_size = min(batch_size, len(index))
    batches = blocks[: len(blocks) // batch_size * batch_size].reshape(-1, batch_size)
    same_block = float(np.mean([_pairs(np.unique(batch, return_counts=True)[1]) for batch in batches]))
    expected = _pairs(np.bincount(blocks))
    correlation = 1.0
    if labels is not None:
        if len(labels) <= index.max():
            raise LimitError(f"shuffle_quality: {len(labels)} labels, and indices up to {index.max()}. Give one each.")
        correlation = _intraclass(np.asarray(labels)[index], blocks)
    ratio = same_block / expected if expected else 1.0
    return ShuffleQuality(same_block, ratio, correlation, 1 + (batch_size - 1) * same_block * correlation)


def _pairs(counts: Numbers) -> float:
    """Return the share of pairs that are of one group, given how many each group has."""
    total = counts.sum()
    return float((counts * (counts - 1.0)).sum() / (total * (total - 1.0)))


def _intraclass(labels: Numbers, blocks: Numbers) -> float:
    """Return the intraclass correlation of labels by one-way analysis of variance; of classes, over their indicators."""
    if labels.dtype.kind in "fc":
        values = labels.astype(float)[:, None]
    else:
        classes, numbers = np.unique(labels, return_inverse=True)
        values = np.eye(len(classes))[numbers] if len(classes) <= 64 else numbers[:, None].astype(float)
    counts = np.bincount(blocks).astype(float)
    groups, total = len(counts), len(blocks)
    if groups < 2 or total == groups:
        return 0.0
    means = np.stack([np.bincount(blocks, column) for column in values.T], axis=1) / counts[:, None]
    between = float((counts[:, None] * (means - values.mean(axis=0)) ** 2).sum()) / (groups - 1)
    within = float(((values - means[blocks]) ** 2).sum()) / (total - groups)
    usual = (total - (counts**2).sum() / total) / (groups - 1)  # samples in a block, on the average of the analysis
    scale = between + (usual - 1) * within
    return float(max(0.0, (between - within) / scale)) if scale else 0.0
