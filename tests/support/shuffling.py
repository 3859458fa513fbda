"""How near an order of samples in blocks is to a full shuffle."""

import numpy as np


def same_block(order, block_size, batch_size):
    """Return the share of the pairs of samples in a batch that are of one block. One batch: as a full shuffle."""
    blocks = np.asarray(order) // block_size
    batches = blocks[: len(blocks) // batch_size * batch_size].reshape(-1, batch_size)
    return np.mean([_pairs(np.unique(batch, return_counts=True)[1]) for batch in batches])


def _pairs(counts):
    """Return the share of pairs that are of one group, given the size of each group."""
    return (counts * (counts - 1.0)).sum() / (counts.sum() * (counts.sum() - 1.0))
