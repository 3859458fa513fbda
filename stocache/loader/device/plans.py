"""Where the samples of batches come from that a GPU gathers: `Plan`.

NOTE [ Batches that are planned together ]
    A call of CUDA costs the CPU 2 to 60 µs, whatever its size. So without workers, and where all samples are cached and
    registered, up to 64 batches are planned together (`GroupPart`): their rows are found at once and go to the GPU in one
    copy, and it gathers their small columns at once, too. Small batches are gathered by one kernel, up to 64 MiB together,
    and then copied to memory of their own: a batch that the user holds keeps no others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stocache.loader.device.cuda import Staging
from stocache.loader.device.kernels import select_rows
from stocache.loader.device.tier import DeviceTier

Rows: TypeAlias = NDArray[np.int64]
"""Numbers of rows, or positions in batches."""


class RowSource:
    """Rows that the device can read, and their positions in the batches of a plan.

    Args:
        kind: the attribute of `DeviceStats` that counts them.
        positions: in all batches, ascending; None for all.
        numbers: of the rows.
        rows: returns all rows of the k-th large column, as words; None for those of the tier.
        copy: `copy_rows` or `select_rows`.
    """

    def __init__(
        self,
        kind: str,
        positions: Rows | None,
        numbers: Rows,
        rows: Callable[[int], Tensor] | None,
        copy: Callable[..., None] = select_rows,
    ) -> None:
        self.kind, self.positions, self.numbers, self._rows, self._copy = kind, positions, numbers, rows, copy

    def stage(self, staging: Staging, starts: Rows) -> None:
        """Add the numbers, and the positions in their step, to what goes to the device.

        ``starts``: the positions at which the steps start, and the end.
        """
        if self.positions is None:
            bounds, places = starts, [self.numbers]
        else:
            bounds = np.searchsorted(self.positions, starts)
            places = [self.numbers, self.positions - np.repeat(starts[:-1], np.diff(bounds))]
        self._places, self.sizes = list(map(staging.add, places)), np.diff(bounds).tolist()

    def receive(self, staging: Staging) -> None:
        """Take the arrays on the device, for each step."""
        self._steps = list(zip(*(torch.split(staging.indices(place), self.sizes) for place in self._places), strict=True))

    def copy_to(self, out: Tensor, k: int, step: int, of_tier: list[Tensor]) -> None:
        """Copy the rows of the k-th large column into the batches of a step. ``of_tier``: all rows of the tier."""
        if self.sizes[step]:
            numbers, *positions = self._steps[step]
            self._copy(of_tier[k] if self._rows is None else self._rows(k), numbers, out, *positions)


class Admitted:
    """Samples of a batch that get rows of the tier.

    Args:
        tier: the tier.
        slots, positions, numbers: of the samples: their slots, their positions in the batch, and the rows.
        staging: what goes to the device.
    """

    def __init__(self, tier: DeviceTier, slots: Rows, positions: Rows, numbers: Rows, staging: Staging) -> None:
        self._tier, self._slots, self._numbers = tier, slots, numbers
        self._places = staging.add(positions), staging.add(numbers)

    def receive(self, staging: Staging) -> None:
        """Take the arrays on the device."""
        self._positions, self._rows = map(staging.indices, self._places)

    def copy_from(self, batch: Tensor, k: int, of_tier: list[Tensor]) -> None:
        """Copy the rows of the k-th large column out of a batch, to those of the tier."""
        of_tier[k].index_copy_(0, self._rows, batch.index_select(0, self._positions))

    def keep(self, version: int) -> None:
        """Serve the samples from the tier from now on."""
        self._tier.keep(self._slots, self._numbers, version)


@dataclass
class Plan:
    """Batches of which is known where their samples come from. The numbers of the rows are on the device.

    Attributes:
        sizes: of the batches.
        together: how many batches a step has.
        version: of the tier when the plan was made; -1 without one.
        sources: of the samples.
        small: the tensors of each small column, by its number, for each batch.
        admitted: samples of a plan of one batch; None without any.
    """

    sizes: list[int]
    together: int
    version: int
    sources: list[RowSource]
    small: Mapping[int, Sequence[Tensor]]
    admitted: Admitted | None = None

    def __post_init__(self) -> None:
        self.gathered: dict[int, list[Tensor]] = {}  # the large columns of batches that were gathered, and not asked for
        self.event: Any = None  # the end of the last step
