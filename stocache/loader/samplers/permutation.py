"""Compute random permutations that take no memory: each number of the order is computed from its place.

NOTE [ Permutations ]
    A shuffled list of 10^9 numbers takes 8 GB in every rank. A Feistel network is a permutation by construction, whatever its
    round function is: it splits the bits of a number into two parts, and each round mixes one part with a hash of the other,
    which can be undone. It permutes the 2^k numbers of k bits. A result of n or more is put through the network again, until it
    is below n, which takes less than two steps on average (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    With a good hash, the result cannot be distinguished from a random permutation (Luby and Rackoff, 1988).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_LISTED = 1 << 24
"""Orders of at most this many samples are lists; longer ones are computed."""

_ROUNDS = 8  # even, so that the two parts end where they began
_CHUNK = 1 << 15  # numbers at a time, which fit the CPU cache

Indices = NDArray[np.int64]


class Permutation:
    """The numbers 0 to n - 1 in a random order. Any stretch of it can be computed alone.

    Args:
        n: how many numbers, at most 2^62.
        key: integers, 0 or more. The order depends only on the key and on ``n``.

    Takes about 50 ns for each requested number; up to twice as long for an ``n`` just above a power of two.
    """

    def __init__(self, n: int, *key: int) -> None:
        self._len = n
        bits = max(2, (n - 1).bit_length())
        self._low = bits // 2  # bits of the part that is hashed first; the other part has as many, or one more
        self._high = bits - self._low
        # with lengths, to distinguish the keys (0, 1), (2^32,) and (0, 1, 0)
        entropy = [len(key), *(word for part in key for word in (part.bit_length(), part))]
        words = np.random.SeedSequence(entropy).generate_state(2 * _ROUNDS, np.uint32)
        self._keys = [(int(a), int(b)) for a, b in words.reshape(-1, 2)]

    def __len__(self) -> int:
        return self._len

    def at(self, places: Indices) -> Indices:
        """Return the numbers at these places of the order; places count from 0 to n - 1."""
        out = self._encrypt(places)
        outside = np.flatnonzero(out >= self._len)
        while len(outside):
            again = self._encrypt(out[outside])
            out[outside] = again
            outside = outside[again >= self._len]
        return out

    def _encrypt(self, numbers: Indices) -> Indices:
        out = np.empty(len(numbers), np.int64)
        for begin in range(0, len(numbers), _CHUNK):
            chunk = numbers[begin : begin + _CHUNK]
            left, right = (part.astype(np.uint32) for part in (chunk >> self._low, chunk & (1 << self._low) - 1))
            for number in range(_ROUNDS):
                left, right = right, self._mix(left, right, number)
            out[begin : begin + _CHUNK] = left.astype(np.int64) << self._low | right
        return out

    def _mix(self, part: object, other: object, number: int) -> Any:
        """Return ``part``, mixed with a hash of ``other`` in round ``number``: the finalizer of MurmurHash3 (A. Appleby)."""
        offset, factor = self._keys[number]
        width = self._low if number % 2 else self._high
        hashed = other + np.uint32(offset)
        hashed *= np.uint32(factor | 1)
        hashed ^= hashed >> np.uint32(16)
        hashed *= np.uint32(0x85EBCA6B)
        hashed ^= hashed >> np.uint32(13)
        hashed *= np.uint32(0xC2B2AE35)
        hashed ^= hashed >> np.uint32(16)
        hashed >>= np.uint32(32 - width)
        hashed ^= part
        return hashed
