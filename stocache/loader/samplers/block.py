"""Read blocks one after the other, and still shuffle their samples.

NOTE [ Windows ]
    Random access to samples that are stored in blocks reads every block many times. So the blocks are put into random order and
    taken in windows of several blocks, and the samples of each window are shuffled. Each block is read during one window only.
    With a window of as many blocks as a batch has samples, the order is hardly worse than a full shuffle
    (`tests/loader/samplers/test_orders.py` measures that).

    All ranks know the whole order, which depends only on (seed, epoch). Each rank takes one stretch of it, so no sample is
    taken by two ranks, and few windows are read by more than one.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from stocache.errors import LimitError, StateError
from stocache.loader.samplers.permutation import MAX_LISTED, Indices, Permutation
from stocache.samples.indices import check_indices
from stocache.system.ranks import torch_ranks
from stocache.system.state import StateForm

_AT_ONCE = 1 << 16  # blocks whose sizes are computed together


def sampler_form(what: str, **position: tuple[type, ...]) -> StateForm:
    """Return the form of the states of a `ResumableSampler`; ``position`` are the fields that it adds to the position."""
    mismatch = "load_state_dict: the state is of another order ({name}={saved}; this {what} has {name}={own}). "
    fields = {"epoch": (int,), "done": (int,)} | position
    return StateForm(what, 2, fields, {}, mismatch=mismatch + "Make the sampler with the same arguments.")


class ResumableSampler(DistributedSampler[int]):
    """Yields one rank's share of each epoch, and can save and resume its position.

    It is a DistributedSampler, so that trainers do not replace it by one. The position of its states: ``epoch``, and how many
    of this rank's samples are ``done``.
    """

    _form: StateForm
    advances_epoch = True  # whether each iteration is the next epoch, unless `set_epoch` was called

    def __init__(self) -> None:
        self.epoch = self._done = 0  # the epoch that begins next, and how many of its samples to skip
        self._running: tuple[int, int, Iterator[int]] | None = None
        """The running epoch, how many of its samples are planned, and an iterator over planned samples that are left."""

    @abstractmethod
    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        """Yield this rank's samples of an epoch in lists, without the first ``done`` samples."""

    def _identity(self) -> dict[str, Any]:
        """Return the values that a state and the sampler that resumes from it must have in common."""
        return {
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def __iter__(self) -> Iterator[int]:
        epoch, done = self.epoch, self._done
        self._running = epoch, done, iter(())
        self.epoch, self._done = epoch + self.advances_epoch, 0
        return self._iterate(epoch, done)

    def _iterate(self, epoch: int, planned: int) -> Iterator[int]:
        for samples in self._order(epoch, planned):
            planned += len(samples)
            left = iter(samples)
            self._running = epoch, planned, left
            yield from left
        self._running = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins next."""
        if epoch != self.epoch:
            self.epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order: after the last yielded sample; between two epochs, at the start of the next."""
        if self._running is None:
            return self.upcoming()
        epoch, planned, left = self._running
        return self._state(epoch, planned - operator.length_hint(left))

    def upcoming(self) -> dict[str, Any]:
        """Return the state at the start of the next epoch, also while another epoch runs or after it was interrupted."""
        return self._state(self.epoch, self._done)

    def _state(self, epoch: int, done: int) -> dict[str, Any]:
        return self._form.make(self._identity(), {"epoch": epoch, "done": done} | self._position(epoch))

    def _position(self, epoch: int) -> dict[str, Any]:
        """Return the fields that this class adds to the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next iteration yields the samples that were left.

        Raises:
            StateError: the state is damaged, or of a different order.
        """
        position, _ = self._form.read(state, self._identity())
        done = self._resume(position)
        self.epoch, self._done, self._running = position["epoch"], done, None

    def _resume(self, position: dict[str, Any]) -> int:
        """Check the position of a state, and return how many samples of this rank are done.

        Raises:
            StateError: it is damaged.
        """
        if position["done"] > len(self):
            raise StateError(f"the state is damaged: {position['done']} of {len(self)} samples are done.")
        return position["done"]  # type: ignore[no-any-return]


class BlockSampler(ResumableSampler):
    """Yields the samples of a dataset block by block, shuffled within windows of several blocks.

        sampler = BlockSampler(dataset.indices, storage.block_size, shuffle=True, prefetch=dataset.prefetch_blocks)
        loader = DataLoader(dataset, batch_size=256, sampler=sampler)

    Args:
        indices: global indices of the samples of the dataset, as in `StorageDataset`. The sampler yields local indices.
        block_size: samples in each block of the storage.
        shuffle: False yields blocks, and the samples in them, in ascending order.
        window: blocks whose samples are shuffled together; 1 shuffles within each block only.
        seed: the same for all ranks.
        rank, world_size: number of this process, and of all processes that share each epoch. None takes the numbers of
            torch.distributed if it is initialised; else this process takes all samples.
        drop_last: True leaves out the last samples, so that all ranks have equally many; else some ranks have one more.
        prefetch: called with the numbers of the blocks of each window while the window before it is yielded: the
            ``prefetch_blocks`` of the dataset, which reads them ahead from the disk.

    Raises:
        LimitError: the block size, window, seed or rank is out of range.
        SampleIndexError: an index is not an integer, or is negative.

    The order depends only on (seed, epoch, rank, world_size). Each iteration begins the next epoch, unless `set_epoch` was
    called. If ``indices`` is a range, the sampler keeps no list of it; and above 2^24 samples no list of the blocks.
    Source: the article on block storage in PyTorch Lightning, for windows of one block.

    Examples:
        >>> list(BlockSampler(range(12), block_size=3, shuffle=True, window=2))  # two blocks together, then the others
        [0, 6, 1, 7, 2, 8, 10, 4, 5, 11, 9, 3]
        >>> list(BlockSampler(range(12), block_size=3, shuffle=False, rank=1, world_size=2))
        [6, 7, 8, 9, 10, 11]
    """

    _form = sampler_form("BlockSampler")

    def __init__(
        self,
        indices: Sequence[int] | Indices,
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
            torch_rank, world_size = torch_ranks() or (0, 1)
            rank = torch_rank if rank is None else rank
        rank = rank or 0
        for name, value in {"block_size": block_size, "window": window, "world_size": world_size}.items():
            if type(value) is not int or value < 1:
                raise LimitError(f"{name}={value!r} is not an integer above 0.")
        if type(seed) is not int or seed < 0:
            raise LimitError(f"seed={seed!r} is not an integer of 0 or more.")
        if not 0 <= rank < world_size:
            raise LimitError(f"rank={rank} is out of range for world_size={world_size}.")
        if isinstance(indices, range) and indices.step == 1 and indices.start >= 0:
            self._blocks: _BlockList = _BlockRange(indices, block_size)
        else:
            self._blocks = _BlockList(check_indices(indices, 2**62, "BlockSampler"), block_size)
        self._block_size, self._shuffle, self._window, self._seed = block_size, shuffle, window, seed
        self._rank, self._world_size, self._drop_last, self._prefetch = rank, world_size, drop_last, prefetch

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        begin, end = self._share()
        return end - begin

    def _share(self) -> tuple[int, int]:
        """Return the begin and end of this rank's stretch of the order."""
        each, over = divmod(self._blocks.samples, self._world_size)
        if self._drop_last:
            over = 0
        begin = self._rank * each + min(self._rank, over)
        return begin, begin + each + (self._rank < over)

    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        begin, end = self._share()
        ended = end, np.empty(0, np.int64)
        for (window_begin, blocks), _ in pairwise(chain(self._windows(epoch, begin + done, end), [ended])):  # one ahead
            samples = np.concatenate([self._blocks.samples_in(block) for block in blocks.tolist()])
            if self._shuffle:
                np.random.default_rng((self._seed, epoch, 1 + int(blocks[0]))).shuffle(samples)
            yield samples[max(0, begin + done - window_begin) : end - window_begin].tolist()

    def _windows(self, epoch: int, begin: int, end: int) -> Iterator[tuple[int, Indices]]:
        """Yield the position in the order and the blocks of each window that overlaps positions ``begin`` to ``end - 1``.

        The blocks are prefetched.
        """
        count, position = self._blocks.count, 0
        blocks_at = self._order_of_blocks(epoch, count)
        at_once = max(1, _AT_ONCE // self._window) * self._window
        for first in range(0, count if begin < end else 0, at_once):
            blocks = blocks_at(np.arange(first, min(first + at_once, count)))
            ends = position + np.cumsum(self._blocks.sizes(blocks))
            for at in range(0, len(blocks), self._window) if ends[-1] > begin else ():
                window = blocks[at : at + self._window]
                window_end = int(ends[at + len(window) - 1])
                if position >= end:
                    return
                if window_end > begin:
                    if self._prefetch is not None:
                        self._prefetch(self._blocks.numbers(window).tolist())
                    yield position, window
                position = window_end
            position = int(ends[-1])

    def _order_of_blocks(self, epoch: int, count: int) -> Callable[[Indices], Indices]:
        """Return a function that returns the blocks at given places of the order."""
        if not self._shuffle:
            return np.asarray
        if self._blocks.samples > MAX_LISTED:
            return Permutation(count, self._seed, epoch).at
        order: Indices = np.random.default_rng((self._seed, epoch)).permutation(count)
        return order.__getitem__

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": self._blocks.samples,
            "block_size": self._block_size,
            "shuffle": self._shuffle,
            "window": self._window,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "world_size": self._world_size,
        }  # not the rank: trainers save the state of one rank for all


class _BlockList:
    """The blocks that hold samples of a dataset, in ascending order, with a list of the samples of each."""

    def __init__(self, indices: Indices, block_size: int) -> None:
        blocks = indices // block_size
        self._by_block = np.lexsort((indices, blocks))
        ordered = blocks[self._by_block]
        self._bounds = np.append(np.flatnonzero(np.diff(ordered, prepend=-1)), len(blocks))
        self._numbers = ordered[self._bounds[:-1]]
        self.samples, self.count = len(indices), len(self._numbers)

    def numbers(self, blocks: Indices) -> Indices:
        """Return the numbers of blocks in the storage."""
        numbers: Indices = self._numbers[blocks]
        return numbers

    def sizes(self, blocks: Indices) -> Indices:
        """Return the numbers of samples in blocks."""
        sizes: Indices = self._begin(blocks + 1) - self._begin(blocks)
        return sizes

    def samples_in(self, block: int) -> Indices:
        """Return the local indices of the samples in a block."""
        samples: Indices = self._by_block[self._begin(block) : self._begin(block + 1)]
        return samples

    def _begin(self, block: Any) -> Any:
        return self._bounds[block]


class _BlockRange(_BlockList):
    """As `_BlockList`, for samples with consecutive indices: computed, without a list."""

    def __init__(self, indices: range, block_size: int) -> None:
        self._start, self._size, self.samples = indices.start, block_size, len(indices)
        self._first = indices.start // block_size
        self.count = -(-indices.stop // block_size) - self._first if indices else 0

    def numbers(self, blocks: Indices) -> Indices:
        return self._first + blocks

    def samples_in(self, block: int) -> Indices:
        return np.arange(self._begin(block), self._begin(block + 1))

    def _begin(self, block: Any) -> Any:
        return np.clip((self._first + block) * self._size - self._start, 0, self.samples)
