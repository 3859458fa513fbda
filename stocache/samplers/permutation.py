"""Random orders that take no memory: which number stands at a place is computed.

NOTE [ Permutations ]
    A shuffled list of 10^9 numbers takes 8 GB, in every rank. A Feistel network is a permutation by construction, whatever its
    round function: the bits of a number are split into two parts, and in each round one part is mixed with a hash of the other,
    which can be undone. It permutes the 2^k numbers of k bits; from those that are no numbers below n one walks on along the
    cycle, with less than two steps on the average, until one is (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002). Rounds of a good hash make it as random as one can tell (Luby and Rackoff, 1988).
"""

from typing import Any

import numpy as np

from stocache.errors import LimitError

LISTED = 1 << 24
"""Up to so many samples, orders are lists; of more, they are computed."""

_ROUNDS = 8  # even, so that the parts end up where they were
_CHUNK = 1 << 15  # numbers at a time: what the processor has close by

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Permutation:
    """The numbers 0 to n - 1 in a random order, of which any stretch is computed by itself.

    Args:
        n: how many numbers, up to 2^62.
        key: integers of 0 or more. The order depends on them and on ``n``, and on nothing else.

    Raises:
        LimitError: ``n`` or the key are none.

    Some 50 ns for each number that is asked for, or for twice as many just above a power of two.
    """

    def __init__(self, n: int, *key: int) -> None:
        if not (isinstance(n, int) and 0 <= n <= 2**62):
            raise LimitError(f"n={n!r} is no number of numbers from 0 to 2^62.")
        if not all(isinstance(part, int) and part >= 0 for part in key):
            raise LimitError(f"key={key!r} is not of integers of 0 or more.")
        self._len = n
        bits = max(2, (n - 1).bit_length())
        self._low = bits // 2  # bits of the part that is hashed first; the other part has as many, or one more
        self._high = bits - self._low
        told_apart = [len(key), *(word for part in key for word in (part.bit_length(), part))]  # (0, 1), (2^32,) and (0, 1, 0)
        words = np.random.SeedSequence(told_apart).generate_state(2 * _ROUNDS, np.uint32)
        self._keys = [(int(a), int(b)) for a, b in words.reshape(-1, 2)]

    def __len__(self) -> int:
        return self._len

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers that stand at these places, from 0 to n - 1."""
        return self._walked(places, self._encrypt)

    def places(self, numbers: Numbers) -> Numbers:
        """Return the places at which these numbers stand."""
        return self._walked(numbers, self._decrypt)

    def _walked(self, numbers: Numbers, step: Any) -> Numbers:
        out = _by_chunks(step, numbers)
        outside = np.flatnonzero(out >= self._len)
        while len(outside):
            again = _by_chunks(step, out[outside])
            out[outside] = again
            outside = outside[again >= self._len]
        return out

    def _encrypt(self, numbers: Numbers) -> Numbers:
        left, right = self._split(numbers)
        for number in range(_ROUNDS):
            left, right = right, self._mixed(left, right, number)
        return self._joined(left, right)

    def _decrypt(self, numbers: Numbers) -> Numbers:
        left, right = self._split(numbers)
        for number in reversed(range(_ROUNDS)):
            left, right = self._mixed(right, left, number), left
        return self._joined(left, right)

    def _split(self, numbers: Numbers) -> tuple[Any, Any]:
        return (numbers >> self._low).astype(np.uint32), (numbers & (1 << self._low) - 1).astype(np.uint32)

    def _joined(self, left: Any, right: Any) -> Numbers:
        joined: Numbers = left.astype(np.int64)
        joined <<= self._low
        joined |= right
        return joined

    def _mixed(self, part: Any, other: Any, number: int) -> Any:
        """Return ``part``, mixed in this round with a hash of ``other``: the finalizer of MurmurHash3 (A. Appleby)."""
        offset, factor = self._keys[number]
        width = self._low if number % 2 else self._high
        hashed = other + np.uint32(offset)
        hashed *= np.uint32(factor | 1)
        hashed ^= hashed >> np.uint32(16)
        hashed *= np.uint32(0x85EBCA6B)
        hashed ^= hashed >> np.uint32(13)
        hashed *= np.uint32(0xC2B2AE35)
        hashed ^= hashed >> np.uint32(16)
        hashed >>= np.uint32(32 - width) if width else np.uint32(0)
        hashed ^= part
        return hashed


def _by_chunks(step: Any, numbers: Numbers) -> Numbers:
    out = np.empty(len(numbers), np.int64)
    for begin in range(0, len(numbers), _CHUNK):
        out[begin : begin + _CHUNK] = step(numbers[begin : begin + _CHUNK])
    return out
