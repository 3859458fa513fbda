"""Find out which job this process belongs to: the ranks that one launcher has started on this machine.

NOTE [ The launcher ]
    Ranks of a job have a process in common that started them: the agent of torchrun, the launcher of accelerate or DeepSpeed,
    a step of Slurm, ``mpirun``, the raylet of Ray, the process that called `torch.multiprocessing.spawn`. Its number and its
    start time identify the job, even if an earlier job had the same port. Scripts may lie between it and a rank.

    Launchers set a rank's number in its environment. So the launcher is the nearest process above a rank that was started
    without it. If the rank has set the variables itself, it was started by multiprocessing, or it is the first rank of
    Lightning, which starts the others: then it is the launcher.

    One process of a shell, Slurm, MPI or Ray may start several jobs. There the port of the job is a part of the key.

    A process that knows of no other ranks counts as a launcher: Lightning's first rank may make its caches before it starts
    the others. Workers of a loader that make caches themselves share them as ranks do.
"""

import multiprocessing
import os
from pathlib import Path
from typing import NamedTuple

from stocache.system.ranks import torch_ranks
from stocache.system.waiting import parent_of, status_of

_PROC = Path("/proc")
_OF_TORCH = ("LOCAL_RANK", "RANK")
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_OF_SLURM = ("SLURM_STEP_NUM_TASKS",)  # set by srun, not by sbatch
_OF_RAY = ("RAY_RAYLET_PID",)  # also in tasks that are not ranks
_RANKS = (_OF_TORCH, _OF_MPI, _OF_SLURM, _OF_RAY)
"""Variables that a launcher sets for each rank. The variables of torchrun come first: Slurm may have started torchrun."""
_RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
_ROOT = "STOCACHE_ROOT"  # of a tree of processes: the number and the start time of the first
_STARTS_ONE_JOB = "python"  # programs with such a name start one job each


ANYWHERE = "anywhere "
"""The key of a job begins so if its processes share a cache wherever in the program they make it."""


class Job(NamedTuple):
    """The job of this process.

    Attributes:
        key: equal in all ranks of the job on this machine, and in no other job.
        launched: whether this process was started as a rank.
        ranks: how many ranks of the job this machine has, as far as the launcher says; at least 1.
        alone: whether the other ranks of this machine cannot be seen from here: they run in other containers.
    """

    key: str
    launched: bool
    ranks: int
    alone: bool = False


def job_here() -> Job:
    """Return the job of this process; see NOTE [ The launcher ]."""
    own, ranks, pid = _environment(os.getpid()), _ranks_here(), os.getpid()
    if ranks != 1:
        for names in _RANKS:
            if not own.keys().isdisjoint(names) and (names is not _OF_RAY or _is_rank()):
                launcher = _above(pid, names)
                return Job(_key(launcher or pid), bool(launcher), max(1, ranks), not launcher)
    from torch.utils.data import get_worker_info  # here: commands that list caches do without torch

    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and (_is_rank() or get_worker_info() is not None):
        return Job(_key(parent.pid), True, max(1, ranks))
    return Job(_key(pid), ranks > 1 and _is_rank(), max(1, ranks))


def job_of_process_tree() -> Job:
    """Return this process and all that it starts, as a job. The first process to ask is the root.

    Its children inherit a variable. So a module that is imported in a spawned child finds what it has made in the parent.
    """
    root = os.environ.setdefault(_ROOT, _key(os.getpid()))
    return Job(f"tree {root}", True, 1)


def _is_rank() -> bool:
    """Whether this process knows that it is a rank."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    spawned = getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
    return spawned or torch_ranks() is not None or any(name in os.environ for name in _OF_TORCH)


def _ranks_here() -> int:
    """Return how many ranks this machine has; 0 if that is unknown."""
    here = next(filter(None, map(_number, _RANKS_HERE)), 0)
    world = (torch_ranks() or (0, 0))[1] or _number("WORLD_SIZE") or _number("SLURM_STEP_NUM_TASKS")
    return here or -(-world // max(1, _number("GROUP_WORLD_SIZE") or _number("SLURM_STEP_NUM_NODES")))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _above(pid: int, names: tuple[str, ...]) -> int | None:
    """Return the nearest process above one that was started without the variables; None if it cannot be seen."""
    while (pid := parent_of(pid)) > 0:
        environment = _environment(pid)
        if not any(name in environment for name in names):
            return pid
    return None


def _key(pid: int) -> str:
    key = f"{pid}-{_started(pid)}"
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return key if pid == os.getpid() or _program(pid).startswith(_STARTS_ONE_JOB) else f"{key}-{address}:{port}"


def _environment(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        texts = (_PROC / f"{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or is another user's
        return {}
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def is_started_by(pid: int, others: set[int]) -> bool:
    """Whether one of other processes has started a process that is not a rank of its own: a worker, or what that has started.

    Lightning's first rank, which has no number at first, starts the others.
    """
    number, above = _rank_of(pid), pid
    while (above := parent_of(above)) > 0:
        if above in others:
            return _rank_of(above) == number
    return False


def _rank_of(pid: int) -> str:
    environment = _environment(pid)
    return next((environment[name] for names in _RANKS for name in names if name in environment), "0")


def _started(pid: int) -> str:
    """Return when a process was started, in clock ticks since the machine started."""
    fields = status_of(pid)
    return fields[19] if fields else ""


def _program(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(_PROC / f"{pid}/exe"))
    except OSError:
        return ""
