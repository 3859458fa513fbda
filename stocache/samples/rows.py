"""Rows: records of samples of one structure, without what is the same in all of them.

NOTE [ Rows ]
    A row has the leaves of a record (NOTE [ Records ]), in its streams, up to a multiple of 8 bytes. The head and the integers
    are the same for all samples of a structure, and lie elsewhere. So a row is a record, and the leaves of a slot, in other
    places.
"""

import contextlib
from functools import cached_property
from typing import Any

from stocache.samples.record_encoder import RecordEncoder
from stocache.samples.spec import Structure


class RowLayout:
    """Where the leaves of a sample lie in a row.

    Attributes:
        nbytes: bytes of a row.
        order: the numbers of the leaves, in the order in which they lie.
        begins: of each leaf, where it begins.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure, self._sizes = structure, [leaf.nbytes for leaf in structure.leaves]
        self.order = sorted(range(len(self._sizes)), key=lambda number: structure.leaves[number].kind.stream)
        self.begins, self.nbytes = [0] * len(self._sizes), 0
        for number in self.order:
            self.begins[number] = self.nbytes
            self.nbytes += self._sizes[number]
        self.gap = -self.nbytes & 7
        self.nbytes += self.gap

    @cached_property
    def row(self) -> tuple[bytes, int, tuple[int, ...]] | None:
        """The treedef of the samples, the bytes of their leaves, and their integers.

        None if leaves are narrow, or a class of the samples refuses the zeros of an example.
        """
        if not self._structure.is_narrow:
            with contextlib.suppress(Exception):
                record = RecordEncoder(allow_pickle=False).pack(self._structure.example(), "example")
                return record.treedef, record.nbytes, record.integers
        return None

    def leaves_of(self, row: Any) -> list[Any]:
        """Return the bytes of each leaf in a row, as `Structure.encode` returns them."""
        return [row[begin : begin + size] for begin, size in zip(self.begins, self._sizes, strict=True)]
