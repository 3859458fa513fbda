"""Which of all processes of a distributed training this is, and on which of its machines."""

import os
from typing import NamedTuple

import torch


class Ranks(NamedTuple):
    """A process of a distributed training: number ``rank`` of ``world_size``, on machine ``node`` of ``nodes``."""

    rank: int
    world_size: int
    node: int
    nodes: int


def ranks_here() -> Ranks:
    """Return what torch.distributed says where it is initialised, else what torchrun or Slurm's srun say; else one process.

    Of the machines only the launchers know: torch.distributed started in another way counts as one machine.
    """
    world = torch_ranks() or _numbers("RANK", "WORLD_SIZE") or _numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or (0, 1)
    machines = _numbers("GROUP_RANK", "GROUP_WORLD_SIZE") or _numbers("SLURM_NODEID", "SLURM_STEP_NUM_NODES") or (0, 1)
    return Ranks(*world, *machines)


def torch_ranks() -> tuple[int, int] | None:
    """Return the rank and the number of ranks that torch.distributed says; None where it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def is_first_rank() -> bool:
    """Whether this is the process that speaks for all ranks."""
    if (ranks := torch_ranks()) is not None:
        return ranks[0] == 0
    return os.environ.get("RANK", "0") == "0"


def _numbers(*names: str) -> tuple[int, int] | None:
    """Return two numbers from the environment; None where it lacks one (or has, within Slurm, no step: there srun sets all)."""
    first, second = (os.environ.get(name, "") for name in names)
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else None
