"""The launcher that ranks have in common is found, whatever has started them, and nothing else is taken for it."""

import os

import pytest

from stocache.shm import job
from stocache.shm.job import job_here

SELF = os.getpid()
RANKED, TORCH = {"RANK", "LOCAL_RANK"}, {"LOCAL_RANK": "1", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.fixture
def tree(monkeypatch):
    """Set a process tree, from this process upwards (number, program, variables it was started with), and our variables."""
    for names in (*job._RANKS, job._RANKS_HERE, ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_NODES")):
        for name in names:
            monkeypatch.delenv(name, raising=False)

    def make(processes, ours=(), parent=None):
        for name, value in dict(ours).items():
            monkeypatch.setenv(name, value)
        numbers = [pid for pid, _, _ in processes]
        monkeypatch.setattr(job, "parent_of", lambda pid: dict(zip(numbers, [*numbers[1:], 0], strict=True)).get(pid, 0))
        monkeypatch.setattr(
            job, "_environment", lambda pid: dict.fromkeys({pid: names for pid, _, names in processes}[pid], "1")
        )
        monkeypatch.setattr(job, "_program", lambda pid: {pid: program for pid, program, _ in processes}[pid])
        monkeypatch.setattr(job, "_started", lambda pid: "7")
        monkeypatch.setattr(job.multiprocessing, "parent_process", lambda: parent)
        return job_here()

    return make


class Parent:
    pid = 9


AGENT, SHELL, SLURM = (9, "python3.11", {"PATH"}), (9, "bash", {"PATH"}), {"SLURM_STEP_NUM_TASKS"}
PORT = {"MASTER_ADDR": "node", "MASTER_PORT": "29500"}
RANK, PLAIN, OTHER = (SELF, "python3", RANKED), (SELF, "python3", set()), (9, "python3", set())
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
ALONE = f"{SELF}-7"
RAY = [(SELF, "python3", {"RAY_RAYLET_PID"}), (9, "raylet", set())]
JOBS = {  # processes, our variables, and the job; and the parent by multiprocessing
    "a launcher": ([RANK, AGENT], TORCH, ("9-7", True, 2, False)),
    "a launcher in a task of Slurm": (
        [(SELF, "python3", RANKED | SLURM), (9, "python3", SLURM)], TORCH | {"SLURM_STEP_NUM_TASKS": "2"},
        ("9-7", True, 2, False),
    ),
    "a program that starts several, by the port": (
        [RANK, SHELL], {"RANK": "1", "WORLD_SIZE": "2", **PORT}, ("9-7-node:29500", True, 2, False)
    ),
    "a step of Slurm": ([(SELF, "python3", SLURM), (9, "", set())], STEP, ("9-7-:", True, 4, False)),
    "MPI": (
        [(SELF, "python3", {"OMPI_COMM_WORLD_RANK"}), (9, "mpirun", set())], {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
        ("9-7-:", True, 3, False),
    ),
    "Ray, without a number": (RAY, {}, (ALONE, False, 1, False)), "Ray": (RAY, TORCH, ("9-7-:", True, 2, False)),
    "a child of multiprocessing that sets them itself": ([PLAIN, OTHER], TORCH, ("9-7", True, 2, False), Parent),
    "Lightning's first, whom the others find above them": ([PLAIN, OTHER], TORCH, (ALONE, True, 2, False)),
    "alone": ([PLAIN, (9, "bash", set())], {"WORLD_SIZE": "4", "MASTER_PORT": "1"}, (ALONE, False, 4, False)),
    "a launcher of one": ([RANK, OTHER], {"RANK": "0", "WORLD_SIZE": "1"}, (ALONE, False, 1, False)),
    "a number without how many there are": ([RANK, OTHER], {"LOCAL_RANK": "0"}, ("9-7", True, 1, False)),
    "a container for each rank": ([RANK, (1, "tini", RANKED)], TORCH, (ALONE, False, 2, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_the_job_is_that_of_the_launcher_and_nothing_else_is_taken_for_it(name, tree):
    processes, ours, job, *parent = JOBS[name]
    assert tree(processes, ours, *parent) == job


ABOVE = {2: 1, 3: 2, 4: 3, 5: 2, 6: 1, 7: 99}  # 1 is rank 0, 5 a fork server or a shell
RANKS = {2: "1", 3: "1", 4: "1", 5: "1", 6: "0"}


@pytest.mark.parametrize(("pid", "holders", "started"), [
    (6, {1, 6}, True), (3, {1, 2, 3}, True), (4, {1, 2, 4}, True), (2, {1, 2}, False), (1, {1, 2}, False), (7, {1, 7}, False),
], ids=["worker of 0", "worker of 1", "grandchild", "rank 1 of Lightning", "rank 0", "another job"])  # fmt: skip
def test_what_a_rank_has_started_is_a_worker_unless_it_has_a_number_of_its_own(pid, holders, started, monkeypatch):
    monkeypatch.setattr(job, "parent_of", lambda pid: ABOVE.get(pid, 0))
    monkeypatch.setattr(job, "_environment", lambda pid: {"LOCAL_RANK": RANKS[pid]} if pid in RANKS else {})
    assert job.is_started_by(pid, holders) is started
