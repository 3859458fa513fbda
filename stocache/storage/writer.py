"""Samples as they come, into a folder of blocks: how many go into one, and a preparation sample by sample."""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

from stocache.errors import LimitError
from stocache.samples.column_encoder import Columns
from stocache.storage.local import Folder
from stocache.storage.manifest import BlockFolderWriter, Entry
from stocache.system.limits import MIB, parse_size

BLOCK_BYTES = 8 * MIB
PROBE = 32
"""Samples by which the size of the others is told."""


def check_block_bytes(block_size: int | None, block_bytes: int | str) -> int:
    """Return the bytes that a block is to have.

    Raises:
        LimitError: a size is none.
    """
    if block_size is not None and (type(block_size) is not int or block_size < 1):
        raise LimitError(f"block_size={block_size!r} is no number of samples. Use 1 or more.")
    nbytes = parse_size(block_bytes, "block_bytes") if isinstance(block_bytes, str) else block_bytes
    if type(nbytes) is not int or nbytes < 1:
        raise LimitError(f"block_bytes={block_bytes!r} is no number of bytes. Use for example 8_000_000, or '8MB'.")
    return nbytes


def size_for(samples: Sequence[Any], block_bytes: int, allow_pickle: bool) -> int:
    """Return how many samples like these make a block of so many bytes."""
    tensors = Columns(samples, 0, allow_pickle).tensors.values()
    each = sum(tensor.nbytes for tensor in tensors) / max(1, len(samples)) + 8  # its checksum
    return max(1, round(block_bytes / each))


def snapshot(sample: Any) -> Any:
    """Return a copy of a sample, whose owner may use its memory for the next one."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # whatever its class raises; when it is encoded, it is said what is wrong with it
        return sample


class SampleWriter:
    """A preparation, sample by sample; of a folder that is locked until its end."""

    def __init__(self, folder: Folder, block_size: int | None, block_bytes: int, allow_pickle: bool) -> None:
        self._workshop, self._size, self._bytes = BlockFolderWriter(folder, allow_pickle), block_size, block_bytes
        self._samples: list[Any] = []
        self._entries: list[Entry] = []
        self._plan = {"source": "samples", "block_size": block_size, "block_bytes": block_bytes}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._workshop.folder.locked(wait=False))
            self._workshop.begin(self._plan, resume=False)
            self._stack = stack.pop_all()

    def save(self, sample: Any) -> None:
        """Take the next sample; write the blocks that are full."""
        self._samples.append(snapshot(sample))
        if self._size is None and len(self._samples) == PROBE:
            self._size = size_for(self._samples, self._bytes, self._workshop.allow_pickle)
        while self._size is not None and len(self._samples) >= self._size:
            self._write(self._samples[: self._size])
            del self._samples[: self._size]

    def _write(self, samples: list[Any]) -> None:
        first = sum(entry.samples for entry in self._entries)
        self._entries.append(self._workshop.write_block(len(self._entries), samples, first))

    def finish(self, info: Any) -> None:
        """Write what is left, the info and the index."""
        if self._size is None:
            self._size = size_for(self._samples, self._bytes, self._workshop.allow_pickle)
        for begin in range(0, len(self._samples), self._size):
            self._write(self._samples[begin : begin + self._size])
        self._workshop.finish(self._entries, self._size, info, self._plan)
        self.end()

    def end(self) -> None:
        """Let others prepare here."""
        self._stack.close()
