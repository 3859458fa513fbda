"""Decide by cost which samples of different sizes to keep: those that cost most to load per byte.

A cache saves the time that its samples take to load. For limited bytes, the samples with the highest cost per byte save most
(Dantzig's rule for the knapsack, whose error is less than one sample). If all costs are equal, these are the smallest samples:
of log-normal sizes (sigma 1) the smallest 56 % of samples fit into 20 % of the bytes.

NOTE [ Measuring and admitting ]
    The first load of each sample is timed, and its bytes are added to a histogram over cost per byte, in shared memory: 255
    bins of 15 % each. From the top down, bins are admitted as long as their bytes (scaled up from the measured samples to all
    samples) fit into the capacity. Of the next bin, as many samples are admitted as fit into the rest. So most samples to keep
    are kept in the first epoch, if its order is random. Those that came too early to decide are decided at their next load.
"""

import math

import numpy as np

_BINS = 256  # bin 0: not measured yet
_PER_OCTAVE = 5
_LOWEST = -40  # log2 of seconds per byte: a picosecond
_ENOUGH = 32  # samples measured before any is admitted
_NEARLY_ALL = 0.95  # share of the samples measured, before one is refused for good

YES, LATER, NEVER = "yes", "later", "never"


def control_bytes(dataset_len: int) -> int:
    """Return the number of control bytes for `CostAdmission`: 1 per sample, and 4 KiB."""
    return -(-dataset_len // 8) * 8 + 2 * 8 * _BINS


class CostAdmission:
    """Decides which samples are worth their bytes. Call it with the arena's lock held.

    Args:
        control: `control_bytes` bytes of shared memory. They are zero at first.
        capacity: bytes for all samples.
    """

    def __init__(self, control: memoryview, dataset_len: int, capacity: int) -> None:
        self._bins = control[:dataset_len]  # the bin of each sample
        at = -(-dataset_len // 8) * 8
        self._bytes = np.frombuffer(control, np.uint64, _BINS, at)  # of the samples in each bin; bin 0 has the number measured
        self._kept = np.frombuffer(control, np.uint64, _BINS, at + 8 * _BINS)  # of the admitted samples in each bin
        self._dataset_len, self._capacity = dataset_len, capacity

    def clear(self) -> None:
        """Note that no sample is kept any more. The costs stay known."""
        self._kept.fill(0)

    def decide(self, idx: int, cost_s: float, nbytes: int, used: int = 0) -> str:
        """Return whether to keep a sample that took ``cost_s`` to load: YES; LATER (decide again); or NEVER.

        ``used``: bytes of the arena that are taken, which may be more than those of the admitted samples.
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
            rest *= measured / self._dataset_len  # it is still an estimate
        if float(self._kept[1 : number + 1].sum()) + nbytes <= rest:
            self._kept[number] += np.uint64(nbytes)
            return YES
        return NEVER if again and measured >= _NEARLY_ALL * self._dataset_len else LATER
