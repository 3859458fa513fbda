# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,import-not-found,untyped-decorator"
"""The kernel of `copy_rows`, in Triton, which reads annotations itself. Import it only if there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(rows, numbers, out, positions, words, count, chunks, SCATTERS: tl.constexpr, WORDS: tl.constexpr):
    """Copy ``count`` rows of ``words`` words; each program copies every n-th of all ``chunks`` of rows."""
    for item in range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        row = item // chunks
        number = tl.load(numbers + row)
        to = row.to(tl.int64)
        if SCATTERS:
            to = tl.load(positions + row)
        at = (item % chunks) * WORDS + tl.arange(0, WORDS)
        inside = at < words
        tl.store(out + to * words + at, tl.load(rows + number * words + at, mask=inside), mask=inside)
