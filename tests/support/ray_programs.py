"""Prepare by a real Ray, in a process of its own: ``python -m tests.support.ray_programs FUNCTION FOLDER``."""

import copy
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray

from stocache import SampleError, StorageError, WorkerError
from stocache.storage.manifest import block_name
from tests.support.preparing import Faulty, Images, Locks, N, Preparer, content, loaded, prepare_quietly, prepared
from tests.support.processes import run_python


def by_ray(source, folder, **options):
    prepare_quietly(source, folder, engine="ray", **options).close()


def die_once(dataset, idx):
    death = dataset.log.with_name("death")
    if idx == 45 and not death.exists():
        death.touch()
        (dataset.log.parent / "ray" / f"{block_name(45 // 7)}.123.tmp").touch()  # as a writer leaves it
        os.kill(os.getpid(), signal.SIGKILL)


def die(dataset, idx):
    if idx == 63:
        os.kill(os.getpid(), signal.SIGKILL)


def only_in(pid, dataset, idx):
    if os.getpid() != pid:
        raise FileNotFoundError(f"photo {idx} is on another machine")


FAULTS = [
    (Faulty(at=partial(only_in, os.getpid())), {"on_error": "skip"}, FileNotFoundError, "is on another machine"),
    (Locks(), {}, SampleError, "sample 100: value is a lock, which has no bytes of its own"),
    (Faulty([60]), {}, ValueError, "photo 60 cannot\nbe read"),
    (Faulty(at=die), {}, WorkerError, "block 9 was not written: its Ray worker died"),
]


def a_killed_worker_costs_the_block_it_was_at(folder):
    by_ray(Faulty(log=folder / "log", seeded=True, at=die_once), folder / "ray")
    assert loaded(folder / "log") == Counter([*range(N), *range(42, 45)])
    assert content(folder / "ray") == prepared(Faulty(seeded=True), folder / "here")


def in_a_real_ray(path):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.chdir(path)
    a_killed_worker_costs_the_block_it_was_at(Path(path))
    for source, options in ((Preparer(), {}), (Faulty([3, 5, 60, 95, 99]), {"on_error": "skip", "shuffle_seed": 3})):
        name = type(source).__name__  # a relative folder is one of this process
        by_ray(copy.copy(source), name, **options)
        assert content(name) == prepared(source, f"{name} here", **options)
    for number, (source, options, error, message) in enumerate(FAULTS):
        with pytest.raises(error, match=message):
            by_ray(source, f"faulty {number}", **options)
        assert not {"index.json", "skipped.json"} & set(os.listdir(f"faulty {number}"))
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    run_python("-m", "tests.support.ray_programs", "in_a_ray_there", path, cwd=Path(__file__).parents[2], timeout_s=100)
    ray.shutdown()


def in_a_ray_there(path):
    with pytest.raises(StorageError, match=r"Ray cannot be connected to at 127\.0\.0\.1:1: ConnectionRefusedError"):
        by_ray(Images(), f"{path}/nowhere", address="127.0.0.1:1")
    by_ray(Images(), f"{path}/there")


def in_its_own_ray(path):
    before, handler = ray.wait, signal.getsignal(signal.SIGTERM)
    with mock.patch("ray.wait", side_effect=before) as wait:
        by_ray(Images(), path, num_workers=2)
    assert max(len(call.args[0]) for call in wait.call_args_list) == 2  # blocks in work
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "raylet" in name or "gcs" in name], names


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
