"""Copy rows on a GPU: `copy_rows`.

NOTE [ Few programs ]
    A GPU reads the memory of the host at the rate of the bus, however many of its processors ask. torch's index_select has all
    of them wait for it, which slows a training step beside it. A kernel of `_PROGRAMS` programs takes few. On an H200, a step
    of 19.8 ms took 20.0 beside a gather of 38.5 MB by 8 programs, and 20.1 by 16; both copied at 48 GB/s. On an H100, 30
    products of 8192 x 8192 matrices took 46 ms alone, 51 ms beside 10 gathers of 154 MB by 16 programs, and 74 ms beside those
    of index_select. Below `_LARGE` bytes the products took as long beside both, and index_select costs the CPU 40 µs less.
    Rows of 12 KB come at 32 GB/s from 8 programs, and at 46 from index_select. Copies by the copy engine, one for each row,
    are slower than both up to 600 KB (cudaMemcpyBatchAsync: 1.7 to 3.6 GB/s for 12 KB, 10 to 25 for 48 KB, 22 to 41 for 150
    KB, 39 to 50 for 600 KB), and cost the CPU 250 µs or more for 256 rows. See benchmark/notes/gpu.md.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from stocache.system.limits import MIB

logger = logging.getLogger("stocache")

_PROGRAMS, _WARPS = 8, 8
_LARGE = 16 * MIB  # bytes of a batch, from which the kernel copies it
_WIDE = 16384  # bytes of a row, from which the kernel copies it
_WORDS = 2048  # of a row that a program copies at a time


def copy_rows(rows: Tensor, numbers: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
    """Copy rows of host memory that a GPU can read: ``out[positions[i]] = rows[numbers[i]]``.

    Args:
        rows, out: contiguous, of two dimensions, and of the same dtype and row length.
        numbers, positions: int64, of one dimension. ``positions`` None: all rows of ``out``, in order.
    """
    words = rows.shape[1]
    row_bytes = words * rows.itemsize
    kernel = _kernel() if rows.is_cuda and row_bytes >= _WIDE and len(numbers) * row_bytes >= _LARGE else None
    if kernel is not None:
        chunks = -(-words // _WORDS)
        kernel[(_PROGRAMS,)](
            rows, numbers, out, numbers if positions is None else positions, words, len(numbers), chunks,
            SCATTERS=positions is not None, WORDS=_WORDS, num_warps=_WARPS,
        )  # fmt: skip
    else:
        select_rows(rows, numbers, out, positions)


def select_rows(rows: Tensor, numbers: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
    """Copy rows as `copy_rows` does, with functions of torch: for rows on the device itself."""
    if positions is None:
        torch.index_select(rows, 0, numbers, out=out)
    else:
        out.index_copy_(0, positions, rows.index_select(0, numbers))


@functools.cache
def _kernel() -> Any:
    """Return the kernel; None if Triton cannot compile it: it needs a C compiler."""
    try:
        from stocache.loader.device.copy_kernel import copy_kernel

        row = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
        copy_kernel[(1,)](row, row, row, row, 1, 1, 1, SCATTERS=False, WORDS=_WORDS, num_warps=_WARPS)
    except Exception as error:
        logger.info("no Triton kernel (%.200s): batches are gathered by index_select, beside which a step is slower", error)
        return None
    return copy_kernel
