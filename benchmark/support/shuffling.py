"""Measure how near an order of samples in blocks is to a full shuffle."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stocache.errors import LimitError
from stocache.loader.samplers.permutation import Indices
from stocache.samples.indices import check_indices


@dataclass(frozen=True)
class ShuffleQuality:
    """How well an order mixes the blocks.

    Attributes:
        same_block: share of the pairs of samples in a batch that are of one block.
        same_block_ratio: ``same_block``, divided by the share in a full shuffle. 1 is perfect; windows of k among n blocks give
            about n / k.
        correlation: intraclass correlation of the labels within blocks: 0 where samples are in random blocks, 1 where each
            block has one label. Without labels 1, the worst case.
        design_effect: variance of a batch's mean, relative to independent samples:
            1 + (batch_size - 1) * same_block * correlation (Kish).
    """

    same_block: float
    same_block_ratio: float
    correlation: float
    design_effect: float


def shuffle_quality(
    order: Sequence[int] | Indices, block_size: int, labels: Sequence[Any] | None = None, *, batch_size: int = 256
) -> ShuffleQuality:
    """Return how well ``order``, an epoch of global indices, mixes blocks of ``block_size`` samples in batches.

    Args:
        order: global indices in their order.
        block_size: samples in each block.
        labels: classes or numbers, one for each global index; None assumes the worst.
        batch_size: samples in a batch. A last batch that is not full is left out, unless it is the only one.

    Raises:
        SampleIndexError: an index is not an integer, or is negative.
        LimitError: a size is out of range, or there are fewer labels than indices.
    """
    index = check_indices(order, 2**62, "shuffle_quality")
    if block_size < 1 or batch_size < 2 or len(index) < 2:
        sizes = f"{block_size}, {batch_size} and {len(index)}"
        raise LimitError(f"shuffle_quality needs block_size >= 1, batch_size >= 2 and two indices, got {sizes}.")
    blocks = np.unique(index // block_size, return_inverse=True)[1]
    batch_size = min(batch_size, len(index))
    batches = blocks[: len(blocks) // batch_size * batch_size].reshape(-1, batch_size)
    same_block = float(np.mean([_pairs(np.unique(batch, return_counts=True)[1]) for batch in batches]))
    expected = _pairs(np.bincount(blocks))
    correlation = 1.0
    if labels is not None:
        if len(labels) <= index.max():
            raise LimitError(f"shuffle_quality: {len(labels)} labels, and indices up to {index.max()}. Give one each.")
        correlation = _intraclass(np.asarray(labels)[index], blocks)
    ratio = same_block / expected if expected else 1.0
    return ShuffleQuality(same_block, ratio, correlation, 1 + (batch_size - 1) * same_block * correlation)


def _pairs(counts: Indices) -> float:
    """Return the share of pairs that are of one group, given the size of each group."""
    total = counts.sum()
    return float((counts * (counts - 1.0)).sum() / (total * (total - 1.0)))


def _intraclass(labels: Indices, blocks: Indices) -> float:
    """Return the intraclass correlation of labels by one-way analysis of variance; for classes, over their indicators."""
    if labels.dtype.kind in "fc":
        values = labels.astype(float)[:, None]
    else:
        classes, numbers = np.unique(labels, return_inverse=True)
        values = np.eye(len(classes))[numbers] if len(classes) <= 64 else numbers[:, None].astype(float)
    counts = np.bincount(blocks).astype(float)
    groups, total = len(counts), len(blocks)
    if groups < 2 or total == groups:
        return 0.0
    means = np.stack([np.bincount(blocks, column) for column in values.T], axis=1) / counts[:, None]
    between = float((counts[:, None] * (means - values.mean(axis=0)) ** 2).sum()) / (groups - 1)
    within = float(((values - means[blocks]) ** 2).sum()) / (total - groups)
    usual = (total - (counts**2).sum() / total) / (groups - 1)  # samples in a block, as the analysis averages them
    scale = between + (usual - 1) * within
    return float(max(0.0, (between - within) / scale)) if scale else 0.0
