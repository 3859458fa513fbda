"""Find the rank of this process in a distributed training, and the number of its machine."""

import os
import sys
from typing import NamedTuple


class Ranks(NamedTuple):
    """The place of a process in a distributed training: ``rank`` of ``world_size``, on machine ``node`` of ``nodes``."""

    rank: int
    world_size: int
    node: int
    nodes: int


def ranks_here() -> Ranks:
    """Return the ranks from torch.distributed if it is initialised, else from torchrun, else from Slurm's srun, else 0 of 1.

    Only the launchers know the machines. Without one of them, all processes count as one machine.
    """
    world = torch_ranks() or _numbers("RANK", "WORLD_SIZE") or _numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or (0, 1)
    machines = _numbers("GROUP_RANK", "GROUP_WORLD_SIZE") or _numbers("SLURM_NODEID", "SLURM_STEP_NUM_NODES") or (0, 1)
    return Ranks(*world, *machines)


def torch_ranks() -> tuple[int, int] | None:
    """Return the rank and the world size of torch.distributed; None if it is not initialised."""
    torch = sys.modules.get("torch")  # which takes seconds to import
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def is_first_rank() -> bool:
    """Whether this is rank 0, which logs for all ranks."""
    if (ranks := torch_ranks()) is not None:
        return ranks[0] == 0
    return os.environ.get("RANK", "0") == "0"


def _numbers(*names: str) -> tuple[int, int] | None:
    """Return two numbers from the environment; None if one is missing (in Slurm: outside of a step, for srun sets them)."""
    first, second = (os.environ.get(name, "") for name in names)
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else None
