"""Prepare by a real Ray, in a process of its own: ``python -m tests.support.ray_programs FUNCTION FOLDER``."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import psutil

from stocache.storage.manifest import block_name
from tests.support.preparing import Faulty, Images, N, content, prepare_quietly, prepared


def by_ray(source, folder, **options):
    prepare_quietly(source, folder, engine="ray", **options).close()


def log(dataset, name, word):
    with open(f"{dataset.log}.{name}", "a") as file:
        file.write(f"{word}\n")


def logged(path):
    return path.read_text().split() if path.exists() else []


class Unpickled(Faulty):
    """A dataset that writes down which processes have unpickled it."""

    def __setstate__(self, state):
        vars(self).update(state)
        log(self, "unpickled", os.getpid())


def die_once(dataset, idx):
    if idx == 45 and not logged(Path(f"{dataset.log}.deaths")):
        (dataset.log.parent / "ray" / f"{block_name(45 // 7)}.123.tmp").touch()  # as a writer leaves it
        log(dataset, "deaths", idx)
        os.kill(os.getpid(), signal.SIGKILL)


def a_killed_worker_costs_the_block_it_was_at(folder):
    by_ray(Unpickled(log=folder / "log", seeded=True, at=die_once), folder / "ray")
    assert Counter(map(int, logged(folder / "log"))) == Counter([*range(N), *range(42, 45)])
    assert set(Counter(logged(folder / "log.unpickled")).values()) == {1}
    assert content(folder / "ray") == prepared(Unpickled(seeded=True), folder / "here")


def in_a_real_ray(path):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    a_killed_worker_costs_the_block_it_was_at(Path(path))
    ray.shutdown()


def in_its_own_ray(path):
    before = signal.getsignal(signal.SIGTERM)
    by_ray(Images(), path, num_workers=2)
    assert not sys.modules["ray"].is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "raylet" in name or "gcs" in name], names


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
