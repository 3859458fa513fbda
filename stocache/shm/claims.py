"""Claim samples, many at a time, so that one process loads or writes each of them. A claim ends with its process.

NOTE [ Claims ]
    Each sample has a word in the control bytes: 0, or the *holder* of its claim. A holder is a process attached to this cache:
    the number of its counter row, and the generation of that row (see `Segment.holder`). One more bit, `_WRITING`, says that
    the holder is writing the sample.

    A word is set with the lock of all claims held: one kernel file lock for any number of samples, held for microseconds. A
    claim of a process that has ended is free, because the kernel has dropped the lock of its row. Only a claim to write
    excludes other writers. A claim to load keeps others from loading the sample too: a process that wants to write may take it.

    Blocks of samples are claimed to load in the same way. `BLOCKS` more words stand for all of them: two blocks with one word
    exclude each other, too.

    A holder that has written a sample sets the word to 0 without the lock: no other process may change it. It does so after it
    has set the state byte of the sample. So a process that finds the word 0 finds the state byte too.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stocache.shm.locks import WEAKLY_ORDERED, fence
from stocache.shm.segment import Segment

_WRITING = 1 << 31
_LOCK = 0  # of the owner's locks

BLOCKS = 1024
"""The words of blocks, which follow the words of the samples."""

_Indices = NDArray[np.int64]


def with_words(control_bytes: int, dataset_len: int) -> int:
    """Return the number of control bytes of a cache with the words, which come last: 4 per sample, and the words of blocks."""
    return -(-control_bytes // 8) * 8 + 4 * (dataset_len + BLOCKS)


class Claims:
    """The claims of the samples of a cache.

    The claims of one batch are added to a set, which the caller makes before. So it can release them after an interrupt at any
    step.
    """

    def __init__(self, segment: Segment, dataset_len: int) -> None:
        self._segment = segment
        self._word = segment.control[len(segment.control) - 4 * (dataset_len + BLOCKS) :].cast(
            "I"
        )  # for one sample: faster than numpy
        self._words = np.frombuffer(self._word, np.uint32)
        self._holder = -1
        self._loading: set[int] = set()  # claimed by threads of this process
        self._writing: set[int] = set()

    def to_load(self, indices: _Indices | list[int], taken: set[int]) -> None:
        """Claim samples to load them; add to ``taken`` the samples that no other thread or process has claimed."""
        self._take(indices, 0, self._loading, taken)

    def to_write(self, indices: _Indices | list[int], taken: set[int]) -> None:
        """Claim samples to write them; add to ``taken`` the samples that no other thread or process is writing."""
        self._take(indices, _WRITING, self._writing, taken)
        if WEAKLY_ORDERED:
            fence()  # the caller reads the state bytes after the words

    def _take(self, indices: _Indices | list[int], mark: int, ours: set[int], taken: set[int]) -> None:
        with self._segment.guard:
            self._enter_process()
            if self._holder:
                marks = self._mark if len(indices) > 1 else self._mark_one
                self._segment.run_locked(_LOCK, lambda: marks(indices, mark, ours, taken), None)

    def _enter_process(self) -> None:
        """Forget the claims of the parent in a forked child, which starts without claims. Call it with the guard held."""
        if self._holder != self._segment.holder:
            self._holder = self._segment.holder
            self._loading.clear()
            self._writing.clear()

    def _mark_one(self, indices: _Indices | list[int], mark: int, ours: set[int], taken: set[int]) -> None:
        for idx in map(int, indices):
            word = self._word[idx]
            if word & ~_WRITING not in (0, self._holder):
                self._mark(indices, mark, ours, taken)
            elif not word or (idx not in ours and idx not in self._writing):  # or of an interrupted thread of this process
                taken.add(idx)
                ours.add(idx)
                self._word[idx] = self._holder | mark

    def _mark(self, indices: _Indices | list[int], mark: int, ours: set[int], taken: set[int]) -> None:
        indices = np.asarray(indices)
        words = self._words[indices]
        if words.any():
            free = np.ones(len(words), bool)
            for word in set(words[words != 0].tolist()):
                holder, alike = word & ~_WRITING, words == word
                if holder == self._holder:  # a thread of this process, or one that an interrupt has stopped
                    free[alike] = [idx not in ours and idx not in self._writing for idx in indices[alike].tolist()]
                elif (word & _WRITING or not mark) and self._segment.is_held(holder):
                    free &= ~alike
            indices = indices[free]
        taken.update(indices.tolist())
        ours.update(taken)
        self._words[indices] = self._holder | mark

    def end_writing(self, taken: set[int]) -> None:
        """Release claims to write, after the state bytes were set."""
        with self._segment.guard:  # else another thread could claim a sample between the two, and be forgotten
            if len(taken) > 1:
                indices = np.fromiter(taken, np.int64, len(taken))
                self._words[indices[self._words[indices] == self._holder | _WRITING]] = 0
            else:
                for idx in taken:
                    if self._word[idx] == self._holder | _WRITING:
                        self._word[idx] = 0
            self._writing -= taken

    def end_loading(self, taken: set[int]) -> None:
        """Release claims to load, except the claims that a process has taken to write."""
        with self._segment.guard:
            self._loading -= taken
            if any(self._word[idx] == self._holder for idx in taken):
                self._segment.run_locked(_LOCK, lambda: self._drop(taken), None)

    def _drop(self, taken: set[int]) -> None:
        for idx in taken:
            if self._word[idx] == self._holder:
                self._word[idx] = 0

    def wait_to_load(self, idx: int, taken: set[int], timeout_s: float, over: Callable[[], bool]) -> None:
        """Wait until this thread has claimed a sample to load, or ``over()`` is true, or ``timeout_s`` has passed."""

        def ready() -> bool:
            self.to_load([idx], taken)
            return bool(taken) or over()

        if not ready():
            self._segment.wait_for_holder(self._word[idx] & ~_WRITING, ready, timeout_s)

    def run_unwritten(self, work: Callable[[], None]) -> bool:
        """Run ``work`` while no process can claim a sample. Return False if a process is writing one."""
        with self._segment.guard:
            self._enter_process()
            return not self._writing and self._segment.run_locked(_LOCK, lambda: self._run_unwritten(work), False)

    def _run_unwritten(self, work: Callable[[], None]) -> bool:
        if self.writer():
            return False
        work()
        return True

    def writer(self) -> int:
        """Return the holder of another process's claim to write; 0 if no other process writes."""
        words = np.unique(self._words[self._words >= _WRITING]).tolist()
        holders = [word & ~_WRITING for word in words]
        return next((holder for holder in holders if holder != self._holder and self._segment.is_held(holder)), 0)
