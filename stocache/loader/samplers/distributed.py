"""torch's DistributedSampler with a state that a job with a different number of ranks can resume."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from stocache.errors import StateError
from stocache.loader.samplers.assignment import torch_order
from stocache.loader.samplers.block import ResumableSampler, sampler_form

_AT_ONCE = 1 << 16  # samples whose indices are computed together


class StatefulDistributedSampler(ResumableSampler):
    """torch's DistributedSampler, which can save and resume its position.

        sampler = StatefulDistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=256, sampler=sampler)

    The orders are the same as with torch's sampler. As with torch's sampler, call `set_epoch` for each epoch, or all have the
    same order. The first iteration after `load_state_dict` yields the samples that were left of the state's epoch; `set_epoch`
    with another epoch begins that one instead.

    A state can be resumed with a different number of ranks: then these share the samples that no rank has taken. All ranks must
    have taken equally many, and the new number of ranks must divide the number of samples that all have taken together.

    Args:
        dataset: anything with a length.
        num_replicas, rank: number of ranks, and of this rank. None takes the numbers of torch.distributed.
        shuffle: False takes the samples in ascending order.
        seed: the same for all ranks.
        drop_last: True leaves out the last samples, so that all ranks have equally many; else some samples come twice.

    Source: the interface of torchdata's StatefulDistributedSampler, whose states it loads, too. These do not hold the epoch, so
    call `set_epoch` before or after `load_state_dict`.

    Examples:
        >>> sampler = StatefulDistributedSampler(range(8), num_replicas=2, rank=0, shuffle=False)
        >>> order = iter(sampler)
        >>> next(order), next(order)
        (0, 2)
        >>> resumed = StatefulDistributedSampler(range(8), num_replicas=1, rank=0, shuffle=False)  # both ranks have taken two
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> list(resumed)
        [4, 5, 6, 7]
    """

    _form = sampler_form("StatefulDistributedSampler", num_replicas=(int,))
    advances_epoch = False

    def __init__(
        self,
        dataset: Dataset[object],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        DistributedSampler.__init__(self, dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._any_epoch = False  # whether the position is one of any epoch, as in the states of torchdata

    def _order(self, epoch: int, done: int) -> Iterator[list[int]]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        samples_at = torch_order(samples, self.seed + epoch, self.shuffle)
        for begin in range(done, self.num_samples, _AT_ONCE):
            turns = np.arange(begin, min(begin + _AT_ONCE, self.num_samples))
            yield samples_at((turns * self.num_replicas + self.rank) % samples).tolist()

    def __iter__(self) -> Iterator[int]:
        self._any_epoch = False
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins next."""
        done = self._done
        super().set_epoch(epoch)
        if self._any_epoch:
            self._done = done

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, also of a different number of ranks, or of torchdata.

        Raises:
            StateError: the state is damaged, of a different order, or the ranks do not divide the samples that were taken.
        """
        of_torchdata = isinstance(state, dict) and set(state) == {"yielded"}
        super().load_state_dict(self._state(self.epoch, state["yielded"]) if of_torchdata else state)
        self._any_epoch = of_torchdata

    def _position(self, epoch: int) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas}

    def _resume(self, position: dict[str, Any]) -> int:
        samples, ranks = len(self.dataset), position["num_replicas"]  # type: ignore[arg-type]
        taken: int = position["done"] * ranks
        if not ranks or taken >= samples + ranks:
            raise StateError(f"the state is damaged: {ranks} ranks have taken {taken} of {samples} samples.")
        if taken >= samples:
            return self.num_samples
        if taken % self.num_replicas:
            raise StateError(
                f"load_state_dict: {ranks} ranks have taken {taken} samples, which {self.num_replicas} ranks cannot have taken "
                f"evenly. Resume with {ranks} ranks, or save after another batch."
            )
        return min(taken // self.num_replicas, self.num_samples)
