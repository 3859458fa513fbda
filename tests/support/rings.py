"""Batches for a ring, and its free buffers."""

import gc

import torch


def numbers(start):
    return torch.arange(start, start + 1000)


def free(ring):
    gc.collect()
    ring.reap()
    return sum(word & 3 == 0 for word in ring._words)
