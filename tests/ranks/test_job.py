"""The launcher that ranks have in common is found, whatever has started them, and nothing else is taken for it."""

import os

import pytest

from stocache.ranks import job
from stocache.ranks.job import job_here

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
        monkeypatch.setattr(job, "_environment", lambda pid: set({pid: names for pid, _, names in processes}[pid]))
        monkeypatch.setattr(job, "_program", lambda pid: {pid: program for pid, program, _ in processes}[pid])
        monkeypatch.setattr(job, "_started", lambda pid: "7")
        monkeypatch.setattr(job.multiprocessing, "parent_process", lambda: parent)
        return job_here()

    return make


def test_ranks_of_launchers_share_the_process_that_started_them(tree):
    agent = (9, "python3.11", {"PATH"})
    assert tree([(SELF, "python3.11", RANKED), agent], TORCH) == ("9-7", True, 2, False)
    wrapped = [(SELF, "python3.11", RANKED), (8, "bash", RANKED), agent, (1, "init", set())]
    assert tree(wrapped, TORCH) == ("9-7", True, 2, False)
    in_slurm = [(SELF, "python3", {*RANKED, "SLURM_STEP_NUM_TASKS"}), (9, "python3", {"SLURM_STEP_NUM_TASKS"})]
    assert tree(in_slurm, {**TORCH, "SLURM_STEP_NUM_TASKS": "2"}).key == "9-7"


def test_of_programs_that_start_several_jobs_the_port_counts(tree):
    port = {"MASTER_ADDR": "node", "MASTER_PORT": "29500"}
    shell = [(SELF, "python3", RANKED), (9, "bash", {"PATH"})]
    assert tree(shell, {"RANK": "1", "WORLD_SIZE": "2", **port}) == ("9-7-node:29500", True, 2, False)


def test_a_step_of_slurm_and_of_mpi_and_a_raylet(tree):
    step = [(SELF, "python3", {"SLURM_STEP_NUM_TASKS"}), (9, "", set())]
    assert tree(step, {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}) == ("9-7-:", True, 4, False)


def test_mpi_and_ray(tree):
    mpi = [(SELF, "python3", {"OMPI_COMM_WORLD_RANK"}), (9, "mpirun", set())]
    assert tree(mpi, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == ("9-7-:", True, 3, False)


def test_a_task_of_ray_is_a_rank_only_if_it_has_a_number(tree):
    worker = [(SELF, "python3", {"RAY_RAYLET_PID"}), (9, "raylet", set())]
    assert tree(worker) == (f"{SELF}-7", False, 1, False)
    assert tree(worker, TORCH) == ("9-7-:", True, 2, False)


def test_what_sets_the_variables_itself_is_a_child_of_multiprocessing_or_lightnings_first_rank(tree):
    class Parent:
        pid = 9

    processes = [(SELF, "python3", set()), (9, "python3", set())]
    assert tree(processes, TORCH, Parent) == ("9-7", True, 2, False)
    assert tree(processes, TORCH) == (f"{SELF}-7", True, 2, False)  # as Lightning's others find it above themselves


def test_alone_and_with_some_of_the_variables(tree, monkeypatch):
    processes = [(SELF, "python3", set()), (9, "bash", set())]
    for ours in ({}, {"WORLD_SIZE": "4"}, {"MASTER_PORT": "1"}, {"LOCAL_WORLD_SIZE": "x"}):
        assert tree(processes, ours) == (f"{SELF}-7", False, int(ours.get("WORLD_SIZE", 1)), False)
        for name in ours:
            monkeypatch.delenv(name)
    one = [(SELF, "python3", RANKED), (9, "python3", set())]
    assert tree(one, {"RANK": "0", "WORLD_SIZE": "1"}) == (f"{SELF}-7", False, 1, False)


def test_a_number_without_how_many_there_are(tree):
    assert tree([(SELF, "python3", RANKED), (9, "python3", set())], {"LOCAL_RANK": "0"}) == ("9-7", True, 1, False)


def test_a_container_for_each_rank_is_alone(tree):
    assert tree([(SELF, "python3", RANKED), (1, "tini", RANKED)], TORCH) == (f"{SELF}-7", False, 2, True)


def test_this_process_is_read_from_proc():
    assert job.parent_of(SELF) == os.getppid()
    assert job._started(SELF).isdecimal()
    assert "python" in job._program(SELF)
    assert "PATH" in job._environment(SELF)
    nobody = 2**22 + 1
    assert (job.parent_of(nobody), job._started(nobody), job._program(nobody), job._environment(nobody)) == (0, "", "", set())
