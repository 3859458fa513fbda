"""Preparation by Ray: the same bytes as in this process, also with workers that are killed half-way.

Most run with a stand-in for Ray that runs tasks in this process. Tests with a real Ray are slow: they show what it alone can.
"""

import itertools
import os
import pickle
import signal
import sys
import types
from pathlib import Path
from unittest.mock import ANY

import pytest

import stocache.storage.preparation
from stocache import SampleError, StorageError
from stocache.errors import WorkerError
from tests.support.preparing import Faulty, FaultyTogether, Images, Locks, Preparer, content, prepared, written
from tests.support.processes import run_python
from tests.support.ray_programs import by_ray


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(repr(cause))
        self.cause = cause


class Task(types.SimpleNamespace):
    """A value, or a call of which it is not known yet what it returns."""

    value = call = None
    numbers = itertools.count()  # an address may be the address of an earlier one

    def __init__(self, **attributes):
        super().__init__(number=next(self.numbers), **attributes)

    def hex(self):
        return f"{self.number:x}"


class StandIn(types.ModuleType):
    """As much of Ray as is used here. Of several tasks the first and the last end in turn; they run in a different directory.

    Attributes:
        at: the number of the block that is in work.
        most: the most tasks at a time.
        connected: the arguments that it was connected with; None at first, as if it had been connected before.
        cancelled: of each task that was cancelled, whether by force.
        dead: blocks whose workers die.
    """

    def __init__(self):
        super().__init__("ray")
        self.cloudpickle, self.exceptions = pickle, types.ModuleType("ray.exceptions")
        vars(self.exceptions).update(RayError=RayError, RayTaskError=RayTaskError)
        self.at, self.most, self.connected, self.cancelled, self.dead = None, 0, None, [], ()
        self.initialized, self.turn = True, 0
        self.is_initialized, self.cluster_resources = lambda: self.initialized, lambda: {"CPU": 2.0}
        self.put = lambda value: Task(value=value)

    def init(self, address, **options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has a handler of its own
        self.connected = address, options

    def shutdown(self):
        self.connected = *self.connected, "and ended"

    def remote(self, max_retries):
        assert max_retries == 3
        return lambda function: types.SimpleNamespace(remote=lambda *arguments: Task(call=(function, *arguments)))

    def cancel(self, task, force):
        self.cancelled.append(force)
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
        self.at = pickle.loads(arguments[-1])[0]
        if self.at in self.dead:
            raise RayError("the worker died\nof a signal")
        home = os.getcwd()
        os.chdir("/")
        try:
            return function(*arguments)
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
    monkeypatch.delitem(sys.modules, "stocache.storage.preparation.ray", raising=False)
    monkeypatch.delattr(stocache.storage.preparation, "ray", raising=False)
    yield stand_in
    sys.modules.pop("stocache.storage.preparation.ray", None)
    vars(stocache.storage.preparation).pop("ray", None)


@pytest.mark.parametrize(("make", "options", "most"), [
    (lambda: Images(seeded=True), {"num_workers": 1}, 1), (FaultyTogether, {"shuffle_seed": 3, "num_workers": 3}, 3),
    (lambda: Images(0), {}, 0), (Preparer, {}, 4), (lambda: Faulty([3, 5, 60, 95, 99]), {"on_error": "skip"}, 4),
])  # fmt: skip
def test_content_is_that_of_one_process_and_num_workers_blocks_are_in_work(tmp_path, monkeypatch, ray, make, options, most):
    monkeypatch.chdir(tmp_path)
    by_ray(make(), "ray", **options)  # a relative folder is one of this process
    assert content(tmp_path / "ray") == prepared(make(), tmp_path / "here", **options)
    assert (ray.connected, ray.most) == (None, most)


def only_here(dataset, idx):
    if sys.modules["ray"].at is not None:
        raise FileNotFoundError(f"photo {idx} is on another machine")


FAULTS = [
    (Faulty(at=only_here), {"on_error": "skip"}, {}, FileNotFoundError, "is on another machine"),
    (Faulty(), {}, {"dead": {9}}, WorkerError, r"block 9 was not written: its Ray worker died, .*RayError: the worker died"),
    (Locks(), {}, {}, SampleError, "sample 100: value is a lock, which has no bytes of its own"),
    (Faulty([60]), {}, {}, ValueError, "photo 60 cannot\nbe read"),
]


@pytest.mark.parametrize(("source", "options", "rays", "error", "message"), FAULTS)
def test_a_fault_comes_out_as_itself_and_running_tasks_are_ended(tmp_path, ray, source, options, rays, error, message):
    vars(ray).update(rays)
    with pytest.raises(error, match=message) as raised:
        by_ray(source, tmp_path, **options)
    assert not {"index.json", "skipped.json"} & set(os.listdir(tmp_path))
    if error is ValueError:
        assert type(raised.value.__cause__) is RayTaskError
        assert set(ray.cancelled) == {False}
        assert len(written(tmp_path)) == 8


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


def test_a_ray_that_is_not_there_or_not_installed_is_an_error(tmp_path, monkeypatch, ray):
    ray.initialized, ray.connected, before = False, (), signal.getsignal(signal.SIGTERM)
    with pytest.raises(StorageError, match=r"Ray cannot be connected to at 127\.0\.0\.1:1: ConnectionRefusedError"):
        by_ray(Images(), tmp_path / "a", address="127.0.0.1:1")
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stocache.storage.preparation.ray")
    vars(stocache.storage.preparation).pop("ray")
    with pytest.raises(StorageError, match=r"engine='ray' needs Ray, .*: pip install 'stocache\[ray\]'"):
        by_ray(Images(), tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["in_a_real_ray", "in_its_own_ray"])
def test_a_real_ray_loses_workers_and_its_own_is_quiet_and_ends_with_the_preparation(tmp_path, function):
    pytest.importorskip("ray", reason="comes with the extra ray")
    # Its workers hardly run on a busy machine with the niceness of 15, Ray's own choice
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_worker_niceness": "0"}
    arguments = "-m", "tests.support.ray_programs", function, tmp_path
    done = run_python(*arguments, cwd=Path(__file__).parents[3], env=environment, timeout_s=240)
    if function == "in_its_own_ray":
        assert (done.stdout, done.stderr) == ("", "")
        assert content(tmp_path) == prepared(Images(), tmp_path / "here")
