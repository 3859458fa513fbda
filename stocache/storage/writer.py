"""Cut a series of samples into blocks, and write a prepared folder sample by sample."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from stocache.errors import LimitError
from stocache.storage.block import encode
from stocache.storage.local import Folder
from stocache.storage.manifest import BlockFolderWriter, Entry
from stocache.system.limits import MIB, parse_size

BLOCK_BYTES = 8 * MIB
PROBE = 32
"""Number of samples from which the block size is estimated."""

NewBlock: TypeAlias = tuple[int, list[Any], int]
"""A block to be written, as arguments of `BlockFolderWriter.write_block`: its number, its samples, the number of the first."""


def check_block_bytes(block_size: int | None, block_bytes: int | str) -> int:
    """Check both arguments, and return the bytes of a block.

    Raises:
        LimitError: a size is not a positive integer, or not a size.
    """
    if block_size is not None and (type(block_size) is not int or block_size < 1):
        raise LimitError(f"block_size={block_size!r} is not a number of samples. Use 1 or more.")
    nbytes = parse_size(block_bytes, "block_bytes") if isinstance(block_bytes, str) else block_bytes
    if type(nbytes) is not int or nbytes < 1:
        raise LimitError(f"block_bytes={block_bytes!r} is not a number of bytes. Use for example 8_000_000, or '8MB'.")
    return nbytes


def estimate_block_size(samples: Sequence[object], block_bytes: int, allow_pickle: bool) -> int:
    """Return how many samples like these make a block of ``block_bytes``."""
    nbytes = sum(map(len, encode(samples, 0, allow_pickle)[0][1:]))  # without the header
    return max(1, round(block_bytes * len(samples) / max(1, nbytes)))


def copy_sample(sample: object) -> Any:
    """Return a deep copy of a sample: its owner may use the memory again for the next one."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # its class may raise anything; encoding the sample raises a better error
        return sample


class BlockCutter:
    """Cuts a series of samples into blocks, each a copy of the samples.

    Attributes:
        block_size: samples in a block; while None, the first `PROBE` samples are kept to estimate it.
    """

    def __init__(self, block_size: int | None, block_bytes: int, allow_pickle: bool) -> None:
        self.block_size, self._block_bytes, self._allow_pickle = block_size, block_bytes, allow_pickle
        self._samples: list[Any] = []
        self._number = 0

    def add(self, sample: object) -> Iterator[NewBlock]:
        """Add a sample, and yield the blocks that are full."""
        self._samples.append(copy_sample(sample))
        if self.block_size is None and len(self._samples) == PROBE:
            self._estimate()
        while self.block_size is not None and len(self._samples) >= self.block_size:
            yield from self._cut(self.block_size)

    def rest(self) -> Iterator[NewBlock]:
        """Yield the blocks of the samples that are left, the last one with as many as there are."""
        size = self.block_size or self._estimate()
        while self._samples:
            yield from self._cut(size)

    def cut(self, samples: Iterable[object]) -> Iterator[NewBlock]:
        """Yield the blocks of a whole series."""
        for sample in samples:
            yield from self.add(sample)
        yield from self.rest()

    def _estimate(self) -> int:
        self.block_size = estimate_block_size(self._samples, self._block_bytes, self._allow_pickle)
        return self.block_size

    def _cut(self, size: int) -> Iterator[NewBlock]:
        yield self._number, self._samples[:size], self._number * size
        del self._samples[:size]  # not before: a block that could not be written is cut again
        self._number += 1


class SampleWriter:
    """Writes a prepared folder sample by sample. Holds the lock of the folder until its end."""

    def __init__(self, folder: Folder, block_size: int | None, block_bytes: int, allow_pickle: bool) -> None:
        self._writer = BlockFolderWriter(folder, allow_pickle)
        self._cutter = BlockCutter(block_size, block_bytes, allow_pickle)
        self._entries: list[Entry] = []
        self._plan = {"source": "samples", "block_size": block_size, "block_bytes": block_bytes}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder.locked(wait=False))
            self._writer.begin(self._plan, resume=False)
            self._stack = stack.pop_all()

    def save(self, sample: object) -> None:
        """Add a sample, and write the blocks that are full."""
        self._write(self._cutter.add(sample))

    def finish(self, info: object) -> None:
        """Write the last block, the info and the index."""
        self._write(self._cutter.rest())
        assert self._cutter.block_size is not None
        self._writer.finish(self._entries, self._cutter.block_size, info, self._plan)
        self.end()

    def _write(self, blocks: Iterable[NewBlock]) -> None:
        for block in blocks:
            self._entries.append(self._writer.write_block(*block)[1])

    def end(self) -> None:
        """Release the lock of the folder."""
        self._stack.close()
