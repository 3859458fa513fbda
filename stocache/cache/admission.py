"""Admission by cost: of samples of different sizes, keep those that cost most to load per byte.

What a cache of limited bytes saves is the sum of what its samples cost to load, so the best content is that with the highest
cost per byte (Dantzig's rule for the knapsack, whose error is less than one sample). With equal costs these are the smallest
samples: of log-normal sizes (sigma 1) the smallest 56 % of samples fit into 20 % of the bytes.

NOTE [ Measuring and admitting ]
    The first load of each sample is timed, and its bytes are added to a histogram over cost per byte, in shared memory: 255
    bins of 15 % each. From the top down, the bins whose bytes (scaled up from the samples measured to all samples) fit into the
    capacity are admitted, and of the next one as many samples as fit into the rest. So most of what is to be kept is kept in
    the first epoch already, when its order is random; what came too early for a verdict is decided when it is asked for again.
"""

import math

import numpy as np

_BINS = 256  # bin 0: not measured yet
_PER_OCTAVE = 5
_LOWEST = -40  # log2 of seconds per byte: a picosecond
_ENOUGH = 32  # samples measured before any is admitted
_NEARLY_ALL = 0.95  # of the samples measured, before any is refused for good

YES, LATER, NEVER = "yes", "later", "never"


def control_bytes(dataset_len: int) -> int:
    """Return the bytes of control it needs: 1 per sample, and 4 KiB."""
    return -(-dataset_len // 8) * 8 + 2 * 8 * _BINS


class CostAdmission:
    """Says which samples are worth their bytes. Call it with the arena's lock held.

    Args:
        control: `control_bytes` bytes of shared memory, zero at first.
        capacity: bytes for all samples.
    """

    def __init__(self, control: memoryview, dataset_len: int, capacity: int) -> None:
        self._bins = control[:dataset_len]  # of each sample
        at = -(-dataset_len // 8) * 8
        self._bytes = np.frombuffer(control, np.uint64, _BINS, at)  # of the samples in each bin; in bin 0: how many they are
        self._kept = np.frombuffer(control, np.uint64, _BINS, at + 8 * _BINS)  # of those that were admitted
        self._dataset_len, self._capacity = dataset_len, capacity

    def clear(self) -> None:
        """Begin anew with nothing kept; what samples cost is still known."""
        self._kept.fill(0)

    def decide(self, idx: int, cost_s: float, nbytes: int, used: int = 0) -> str:
        """Return whether to keep a sample that took so long to load: YES, or not LATER either: NEVER.

        ``used``: bytes taken by now, which may be more than what was admitted.
        """
        again = self._bins[idx] != 0
        if not again:
            cost_per_byte = max(cost_s, 1e-9) / max(1, nbytes)
            number = round(_PER_OCTAVE * (math.log2(cost_per_byte) - _LOWEST))
            self._bins[idx] = number = min(max(number, 1), _BINS - 1)
            self._bytes[number] += np.uint64(nbytes)
            self._bytes[0] += np.uint64(1)
        measured = int(self._bytes[0])
        if measured < min(_ENOUGH, self._dataset_len):
            return LATER
        number = self._bins[idx]
        capacity = self._capacity - max(0, used - int(self._kept.sum()))
        rest = capacity - float(self._bytes[number + 1 :].sum()) * self._dataset_len / measured
        if not again:
            rest *= measured / self._dataset_len  # which is still a guess
        if float(self._kept[1 : number + 1].sum()) + nbytes <= rest:
            self._kept[number] += np.uint64(nbytes)
            return YES
        return NEVER if again and measured >= _NEARLY_ALL * self._dataset_len else LATER
