"""Agreement: which ranks' samples a rank has found equal to its own, in a cache that they share without a name.

NOTE [ Ranks that agree ]
    Nothing is known of the samples that a program gives to a `SharedCache` or a `RaggedCache` itself. So a rank does not serve
    samples of another rank until it has made some of them itself, and found them equal: until then they are misses.
    If one differs, the rank keeps its own samples in a cache of its own, and serves nothing of that other rank.

    A word for each sample has one bit for each rank that has stored or made it. A table has, for each pair of ranks, digests of
    the samples that were equal. Only samples that differ from each other count: empty masks and small labels prove little.
"""

import logging
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stocache.shm import claims
from stocache.shm.segment import Segment
from stocache.shm.siblings import MOST_RANKS
from stocache.system.describe import describe

logger = logging.getLogger("stocache")

_ENOUGH = 8  # samples that were equal, and differ from each other
_DIFFERS = 1  # in place of a digest

_Indices = NDArray[np.int64]


class OwnCache(Protocol):
    """A cache of one rank alone, with the methods of `SampleCache`."""

    def holds(self, idx: int) -> bool:
        """Whether a sample is cached."""

    def get_or_load(self, idx: int, load: Callable[[int], object], *, strict: bool) -> Any:
        """Cache a sample."""

    def hit(self, idx: int, copy: bool) -> Any:
        """Return a sample, if it is cached."""

    def grow_beside(self, shared: Segment) -> None:
        """Grow to the part of the limit that a shared segment leaves."""


def control_bytes(before: int, dataset_len: int) -> int:
    """Return the control bytes with those of an agreement, which come after the ``before`` others."""
    return -(-before // 8) * 8 + 8 * dataset_len + 4 * _ENOUGH * MOST_RANKS**2


def has_agreement(segment: Segment, before: int, dataset_len: int) -> bool:
    """Whether a segment has the control bytes of an agreement."""
    return len(segment.control) > claims.with_words(before, dataset_len)


class Agreement:
    """The agreement of this process's rank with the others.

    Attributes:
        own: a cache of this rank alone for samples that differ from those of other ranks.
    """

    def __init__(self, segment: Segment, before: int, dataset_len: int, own: OwnCache) -> None:
        begin, end = -(-before // 8) * 8, control_bytes(before, dataset_len)
        self._words = np.frombuffer(segment.control[begin : begin + 8 * dataset_len], np.uint64)
        table = np.frombuffer(segment.control[begin + 8 * dataset_len : end], np.uint32)
        self._table = table.reshape(MOST_RANKS, MOST_RANKS, _ENOUGH)
        self._rank, self._own_bit = segment.rank - 1, np.uint64(1 << (segment.rank - 1))
        self._segment, self.own = segment, own
        self._trusted = self._own_bit

    @property
    def row(self) -> Any:
        """For each rank, digests of the samples that were equal, then zeros."""
        return self._table[self._rank]

    def note(self, indices: Any) -> None:
        """Record that this rank is about to store samples. The caller holds the claims to write them."""
        self._words[indices] = self._own_bit

    def allows(self, idx: int) -> bool:
        """Whether this rank may serve a sample that is set."""
        return bool(self._words[idx] & self._trusted) or bool(self._words[idx] & self._trusted_now())

    def allowed(self, indices: _Indices) -> "NDArray[np.bool_]":
        """Return which of some samples that are set this rank may serve."""
        mask: NDArray[np.bool_] = (self._words[indices] & self._trusted_now()) != 0
        return mask

    def judge(self, idx: int, held: object, value: object) -> None:
        """Compare a sample that another rank has stored with the one that this rank has made."""
        ranks = [rank for rank in range(MOST_RANKS) if int(self._words[idx]) >> rank & 1]
        row, mine = self.row, describe(value, strides=False)
        if not (row[ranks] == _DIFFERS).any() and describe(held, strides=False) == mine:
            self._words[idx] |= self._own_bit
            digest = zlib.crc32(repr(mine).encode(errors="replace")) | 2
            for rank in ranks:
                known = row[rank]
                if digest not in known and (free := np.flatnonzero(known == 0)).size:
                    known[free[0]] = digest
            return
        if not (row == _DIFFERS).any():
            self._warn(idx)
        row[ranks, 0] = _DIFFERS
        if not self.own.holds(idx):
            self.own.get_or_load(idx, lambda _: value, strict=False)

    def _trusted_now(self) -> Any:
        trusted = np.flatnonzero((self.row > _DIFFERS).all(axis=1)).tolist()
        self._trusted = np.uint64(sum(1 << rank for rank in (self._rank, *trusted)))
        return self._trusted

    def _warn(self, idx: int) -> None:
        self.own.grow_beside(self._segment)
        logger.warning(
            "sample %d of this rank is not the one that another rank has cached. So this rank keeps its own samples apart, in "
            "its part of the limit. If the ranks have different samples, pass share_ranks=False.", idx,
        )  # fmt: skip
