"""Preparation by Ray: the same bytes as in this process, also with workers that are killed half-way.

Most run with a stand-in for Ray that runs tasks in this process. Those with a real Ray are slow: they show what it alone can.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
from typer.testing import CliRunner

import stocache.preparation
from stocache import OnDiskBlockDataStorage, SampleError, StorageError
from stocache.cli.app import app
from stocache.errors import WorkerError
from stocache.storage.manifest import block_name
from tests.support.preparing import Faulty, FaultyTogether, Images, N, Preparer, content, prepare_quietly, prepared, written
from tests.support.processes import run_python, wait_until


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(repr(cause))
        self.cause = cause


class Task:
    """A value, or a call of which it is not known yet what it returns."""

    def __init__(self, value=None, call=None):
        self.value, self.call = value, call

    def hex(self):
        return f"{id(self):x}"


class StandIn(types.ModuleType):
    """As much of Ray as is used here. Of several tasks the first and the last end in turn; they run in another directory.

    Attributes:
        at: the number of the block that is in work.
        most: the most tasks at a time.
        connected: the arguments that it was connected with; None at first, as if it had been connected before.
        cancelled: of each task that was cancelled, whether by force.
        stubborn, dead: tasks end by force only; blocks whose workers die.
    """

    def __init__(self):
        super().__init__("ray")
        self.cloudpickle, self.exceptions = pickle, types.ModuleType("ray.exceptions")
        vars(self.exceptions).update(RayError=RayError, RayTaskError=RayTaskError)
        self.at, self.most, self.connected, self.cancelled, self.stubborn, self.dead = None, 0, None, [], False, ()
        self.initialized, self.turn = True, 0

    def is_initialized(self):
        return self.initialized

    def init(self, address, **options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has a handler of its own
        self.connected = address, options

    def shutdown(self):
        self.connected = *self.connected, "and ended"

    def cluster_resources(self):
        return {"CPU": 2.0}

    def put(self, value):
        return Task(value)

    def remote(self, max_retries):
        assert max_retries == 3
        return lambda function: types.SimpleNamespace(remote=lambda *arguments: Task(call=(function, *arguments)))

    def cancel(self, task, force):
        self.cancelled.append(force)
        if force or not self.stubborn:
            task.call = None

    def wait(self, tasks, num_returns=1, timeout=None):
        if timeout is None:
            self.most, self.turn = max(self.most, len(tasks)), ~self.turn
            return [tasks[self.turn]], [task for task in tasks if task is not tasks[self.turn]]
        return [task for task in tasks if task.call is None], [task for task in tasks if task.call is not None]

    def get(self, task):
        if task.call is None:
            return task.value
        function, *arguments = task.call
        self.at, home = pickle.loads(arguments[-1])[0], os.getcwd()
        os.chdir("/")
        try:
            if self.at in self.dead:
                raise RayError("the worker died\nof a signal")
            return function(*arguments)
        except RayError:
            raise
        except Exception as error:
            raise RayTaskError(error) from error
        finally:
            self.at = None
            os.chdir(home)


@pytest.fixture
def ray(monkeypatch):
    stand_in = StandIn()
    for name, module in (("ray", stand_in), ("ray.exceptions", stand_in.exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "stocache.preparation.ray", raising=False)
    monkeypatch.delattr(stocache.preparation, "ray", raising=False)
    yield stand_in
    sys.modules.pop("stocache.preparation.ray", None)
    vars(stocache.preparation).pop("ray", None)


def by_ray(source, folder, **options):
    prepare_quietly(source, folder, engine="ray", **options).close()


@pytest.mark.parametrize(("make", "options"), [
    (lambda: Images(seeded=True), {}), (FaultyTogether, {"shuffle_seed": 3}), (lambda: Images(0), {}), (Preparer, {}),
    (lambda: Preparer(30), {"shuffle_seed": 3}), (lambda: Faulty([3, 5, 60, 95, 99]), {"on_error": "skip"}),
])  # fmt: skip
def test_content_is_that_of_one_process(tmp_path, monkeypatch, ray, make, options):
    monkeypatch.chdir(tmp_path)
    by_ray(make(), "ray", **options)  # a relative folder is one of this process
    assert content(tmp_path / "ray") == prepared(make(), tmp_path / "here", **options)
    assert ray.connected is None


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (3, 3), (0, 4)])
def test_num_workers_are_how_many_blocks_are_in_work_at_one_time(tmp_path, ray, workers, most):
    by_ray(Images(), tmp_path, num_workers=workers)
    assert ray.most == most


def only_here(dataset, idx):
    if sys.modules["ray"].at is not None:
        raise FileNotFoundError(f"photo {idx} is on another machine")


def test_a_worker_that_sees_no_sample_at_all_is_an_error(tmp_path, ray):
    with pytest.raises(FileNotFoundError, match="is on another machine"):
        by_ray(Faulty(at=only_here), tmp_path, on_error="skip")
    assert not (tmp_path / "skipped.json").exists()


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_error_of_the_dataset_comes_out_as_itself_and_running_tasks_are_ended(tmp_path, ray, stubborn):
    ray.stubborn = stubborn
    with pytest.raises(ValueError, match="photo 60 cannot\nbe read") as raised:
        by_ray(Faulty([60]), tmp_path)
    assert type(raised.value.__cause__) is RayTaskError
    assert set(ray.cancelled) == ({False, True} if stubborn else {False})
    assert len(written(tmp_path)) == 8


class OddError(Exception):
    """One that pickles, and does not unpickle."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def odd(dataset, idx):
    if sys.modules["ray"].at == 8:
        raise OddError("this", "that")


def test_an_error_that_does_not_pickle_and_a_worker_that_dies_are_named(tmp_path, ray):
    with pytest.raises(WorkerError, match="OddError: this and that"):
        by_ray(Faulty(at=odd), tmp_path)
    ray.dead = {9}
    with pytest.raises(WorkerError, match=r"block 9 was not written: its Ray worker died, .*\(RayError: the worker died\)\."):
        by_ray(Faulty(), tmp_path)
    assert not OnDiskBlockDataStorage(tmp_path).is_prepared()


class Locks(Preparer):
    def prepare_data(self):
        yield from super().prepare_data()
        yield threading.Lock()


def test_a_sample_that_does_not_pickle_is_named_as_elsewhere_and_an_interrupted_preparation_goes_on(tmp_path, ray):
    with pytest.raises(SampleError, match="sample 100: value is a lock, which has no bytes of its own"):
        by_ray(Locks(), tmp_path / "locks")
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        by_ray(Preparer(stop_at=60), tmp_path / "ray")
    by_ray(Preparer(), tmp_path / "ray")
    assert content(tmp_path / "ray") == prepared(Preparer(), tmp_path / "here")


LOCAL = {"include_dashboard": False}
QUIET = {"log_to_driver": False, "logging_level": ANY}


@pytest.mark.parametrize(("address", "variable", "workers", "used", "options"), [
    (None, None, 0, "local", LOCAL | {"num_cpus": None}), (None, None, 2, "local", LOCAL | {"num_cpus": 2}),
    (None, "auto", 2, "auto", {}), ("auto", "another", 0, "auto", {}),
])  # fmt: skip
def test_a_ray_is_connected_to_or_started_and_ended(tmp_path, monkeypatch, ray, address, variable, workers, used, options):
    monkeypatch.setenv("RAY_ADDRESS", variable) if variable else monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.initialized, before = False, signal.getsignal(signal.SIGTERM)
    by_ray(Images(9), tmp_path, address=address, num_workers=workers)
    assert ray.connected == (used, options | QUIET, "and ended")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_ray_that_is_not_there_is_an_error(tmp_path, monkeypatch, ray):
    ray.initialized, ray.connected, before = False, (), signal.getsignal(signal.SIGTERM)
    with pytest.raises(StorageError, match=r"Ray cannot be connected to at 127\.0\.0\.1:1: ConnectionRefusedError"):
        by_ray(Images(), tmp_path / "a", address="127.0.0.1:1")
    monkeypatch.setattr(ray, "init", lambda address, **options: [][0])
    for address, what in (("nonsense", "connected to at nonsense"), ("local", "started here")):
        with pytest.raises(StorageError, match=f"Ray cannot be {what}: IndexError"):
            by_ray(Images(), tmp_path / "a", address=address)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("ray")
def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StorageError, match=r"engine='ray' needs Ray, .*: pip install 'stocache\[ray\]'"):
        by_ray(Images(), tmp_path / "a")


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["--ray"], "20 samples in 7 blocks of 3"), (["--ray", "auto"], "20 samples in 7 blocks of 3"),
    (["auto"], "auto is one argument too many, or the address of a Ray: then give --ray too."),
    (["--ray", "127.0.0.1:1"], "Ray cannot be connected to at 127.0.0.1:1: ConnectionRefusedError"),
])  # fmt: skip
def test_the_command_takes_ray_with_and_without_an_address(tmp_path, monkeypatch, ray, arguments, wanted):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.initialized, ray.connected = False, ()
    table = tmp_path / "table.csv"
    table.write_text("number,text\n" + "".join(f"{number},row {number}\n" for number in range(20)))
    result = CliRunner().invoke(app, ["prepare", str(table), str(tmp_path / "out"), *arguments, "--block-size", "3"])
    assert wanted in " ".join(result.output.split())
    assert (result.exit_code == 0) == ("20 samples" in wanted) == (tmp_path / "out" / "index.json").exists()
    assert ray.connected[:1] == (("local" if arguments == ["--ray"] else "auto"),) or result.exit_code


# ---------------------------------------------------------------------------------------------------- a real Ray


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
        left_by_a_writer = dataset.log.parent / "ray" / f"{block_name(45 // 7)}.123.tmp"
        left_by_a_writer.touch()
        log(dataset, "deaths", idx)
        os.kill(os.getpid(), signal.SIGKILL)


def a_killed_worker_costs_the_block_it_was_at(folder):
    by_ray(Unpickled(log=folder / "log", seeded=True, at=die_once), folder / "ray")
    assert Counter(map(int, logged(folder / "log"))) == Counter([*range(N), *range(42, 45)])
    assert set(Counter(logged(folder / "log.unpickled")).values()) == {1}
    assert content(folder / "ray") == prepared(Unpickled(seeded=True), folder / "here")


def wait_for_an_end(dataset, idx):
    """At sample 60 an error, once another block has begun; those that come later swallow the interruption, and go on."""
    if idx == 60:
        wait_until(Path(f"{dataset.log}.pids").exists)
        raise ValueError("photo 60 cannot be read")
    if idx > 63:
        log(dataset, "pids", os.getpid())
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                ended = time.monotonic() + 60
                while time.monotonic() < ended:
                    time.sleep(0.01)  # a cancelled task is interrupted between two of these, not within one


def after_an_error_of_the_dataset_nothing_is_written_any_more(folder):
    with pytest.raises(ValueError, match="photo 60 cannot be read") as raised:
        by_ray(Faulty(log=folder / "log", at=wait_for_an_end), folder / "error")
    before = content(folder / "error")
    assert "RayTaskError" in type(raised.value.__cause__).__name__
    pids = set(map(int, logged(folder / "log.pids")))
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert content(folder / "error") == before
    assert len([name for name in before if name.startswith("blocks/")]) == 8


def in_a_real_ray(path):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    a_killed_worker_costs_the_block_it_was_at(Path(path))
    after_an_error_of_the_dataset_nothing_is_written_any_more(Path(path))
    ray.shutdown()


def in_its_own_ray(path):
    before = signal.getsignal(signal.SIGTERM)
    by_ray(Images(), path, num_workers=2)
    assert not sys.modules["ray"].is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "raylet" in name or "gcs" in name], names


@pytest.mark.slow
@pytest.mark.parametrize("function", ["in_a_real_ray", "in_its_own_ray"])
def test_a_real_ray_loses_workers_and_its_own_is_quiet_and_ends_with_the_preparation(tmp_path, function):
    pytest.importorskip("ray", reason="comes with the extra ray")
    # Its workers hardly run on a busy machine with the niceness of 15, Ray's own choice
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_worker_niceness": "0"}
    code = f"import sys; from tests.preparation.test_ray import {function}; {function}(sys.argv[1])"
    done = run_python("-c", code, tmp_path, cwd=Path(__file__).parents[2], env=environment, timeout_s=240)
    if function == "in_its_own_ray":
        assert (done.stdout, done.stderr) == ("", "")
        assert content(tmp_path) == prepared(Images(), tmp_path / "here")
