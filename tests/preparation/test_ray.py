"""Preparation by Ray: the same bytes as in this process, also with workers that are killed half-way."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
from tqdm import tqdm
from typer.testing import CliRunner

import stocache.preparation
from stocache import LimitError, OnDiskBlockDataStorage, SampleError, StorageError, prepare
from stocache.cli.app import app
from stocache.errors import WorkerError
from stocache.preparation import sources
from stocache.storage.manifest import block_name
from tests.support.photos import PHOTOS
from tests.support.preparing import Batched, Faulty, Images, N, Preparer, content, digest, written
from tests.support.processes import wait_until

ray = pytest.importorskip("ray")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster

OPTIONS = {"block_size": 7, "progress": False}
FAIR = {"RAY_worker_niceness": "0"}  # at 15, Ray's own choice, its workers hardly run on a busy machine


def _drive(calls):
    global _cluster
    tqdm.get_lock()  # a named semaphore, in a process that was spawned
    os.environ.update(FAIR)
    _cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(_cluster.address, log_to_driver=False, logging_level="ERROR")
    calls.send(("it runs", None))
    for function, arguments, options in iter(calls.recv, None):
        try:
            calls.send((function(*arguments, **options), None))
        except BaseException as error:
            calls.send((None, error))
    ray.shutdown()
    _cluster.shutdown()


@pytest.fixture(scope="module")
def driver():
    """Call a function in a process of its own that has a Ray with two workers, which keeps descriptors and threads."""
    context = multiprocessing.get_context("spawn")
    calls, other = context.Pipe()
    process = context.Process(target=_drive, args=(other,), daemon=True)
    process.start()
    other.close()

    def answer():
        if not calls.poll(50):
            process.kill()  # a late answer would be taken for that of the next call
            pytest.fail("Ray does not answer")
        result, error = calls.recv()
        if error is not None:
            raise error
        return result

    def call(function, *arguments, **options):
        calls.send((function, arguments, options))
        return answer()

    answer()
    yield call
    calls.send(None)
    process.join(50)
    assert process.exitcode == 0
    process.close()
    calls.close()


def by_ray(source, folder, **options):
    prepare(source, folder, engine="ray", **OPTIONS | options).close()


def here(source, folder, **options):
    prepare(source, folder, **OPTIONS | options).close()


def logged(path):
    return path.read_text().split() if path.exists() else []


class Logged:
    """A dataset that writes down what is loaded, and which processes have unpickled it; something happens at one sample.

    Args:
        folder: for what is written down.
        at: the sample.
        happens: a function of this dataset, in this module or one that pickles.
    """

    def __init__(self, dataset, folder, at=None, happens=None):
        self.dataset, self.folder, self.at, self.happens = dataset, Path(folder), at, happens
        self.folder.mkdir(exist_ok=True)

    def log(self, name, word):
        with open(self.folder / name, "a") as file:
            file.write(f"{word}\n")  # at once, so that several processes can

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, idx):
        self.log("loads", idx)
        if idx == self.at:
            self.happens(self)
        return self.dataset[idx]

    def __setstate__(self, state):
        vars(self).update(state)
        self.log("unpickled", os.getpid())


def die_once(dataset):
    flag = dataset.folder / "died"
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_while_a_flag_is_there(dataset):
    if (dataset.folder / "flag").exists():
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("source", [Images(seeded=True), Batched(), Preparer()], ids=lambda source: type(source).__name__)
@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.sampled(3)
def test_content_is_that_of_one_process(tmp_path, driver, source, shuffle_seed):
    driver(by_ray, source, tmp_path / "ray", shuffle_seed=shuffle_seed)
    here(source, tmp_path / "here", shuffle_seed=shuffle_seed)
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


@pytest.mark.parametrize("source", [Images(), Preparer()], ids=lambda source: type(source).__name__)
def test_content_at_a_url_is_that_of_one_process(tmp_path, driver, source):
    driver(by_ray, source, f"file://{tmp_path}/ray")
    here(source, tmp_path / "here")
    assert content(tmp_path / "ray") == content(tmp_path / "here")


def test_samples_that_cannot_be_loaded_are_skipped_as_in_one_process(tmp_path, driver):
    source = Faulty([3, 5, 60, 95, 99])
    driver(by_ray, source, tmp_path / "ray", on_error="skip")
    here(source, tmp_path / "here", on_error="skip")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")
    assert (tmp_path / "ray" / "skipped.json").exists()


class OnlyInTheDriver(Images):
    """A dataset whose files are on one machine only."""

    def __init__(self):
        super().__init__()
        self.home = os.getpid()

    def __getitem__(self, idx):
        if self.home not in (os.getpid(), os.getppid()):
            raise FileNotFoundError(f"photo {idx} is on another machine")
        return super().__getitem__(idx)


def skip_by_ray(folder):
    by_ray(OnlyInTheDriver(), folder, on_error="skip")


def test_a_worker_that_sees_no_sample_at_all_is_an_error(tmp_path, driver):
    with pytest.raises(FileNotFoundError, match="is on another machine"):
        driver(skip_by_ray, tmp_path / "ray")
    assert not (tmp_path / "ray" / "skipped.json").exists()


def test_no_samples_are_no_blocks(tmp_path, driver):
    driver(by_ray, Images(0), tmp_path / "ray")
    here(Images(0), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


def test_a_relative_folder_is_one_of_this_process(tmp_path, driver):
    driver(os.chdir, tmp_path)
    driver(by_ray, Images(), "ray")
    assert OnDiskBlockDataStorage(tmp_path / "ray").is_prepared()


@pytest.mark.skipif(not PHOTOS, reason="no photographs here")
def test_photographs_are_prepared_the_same_with_a_worker_killed_half_way(tmp_path, driver):
    photos = sources.open_source(PHOTOS[0].parent, size=64)
    driver(by_ray, Logged(photos, tmp_path / "log", len(photos) // 2, die_once), tmp_path / "ray")
    assert (tmp_path / "log" / "died").exists()
    here(Logged(photos, tmp_path / "log"), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


# ---------------------------------------------------------------------------------------------------- workers


def test_a_killed_worker_costs_the_block_it_was_at(tmp_path, driver):
    at = 45
    left_by_a_writer = tmp_path / "ray" / f"{block_name(at // 7)}.123.tmp"

    driver(by_ray, Logged(Images(), tmp_path / "log", at, Leaving(left_by_a_writer)), tmp_path / "ray")
    again = range(at // 7 * 7, at + 1)
    assert Counter(map(int, logged(tmp_path / "log" / "loads"))) == Counter([*range(N), *again])
    here(Logged(Images(), tmp_path / "log"), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")
    assert set(Counter(logged(tmp_path / "log" / "unpickled")).values()) == {1}


class Leaving:
    """Dies once, and leaves a file."""

    def __init__(self, path):
        self.path = path

    def __call__(self, dataset):
        if not self.path.exists():
            self.path.touch()
        die_once(dataset)


def with_another_node(folder):
    """Prepare with one more node, which is killed at the first sample that it loads."""
    _cluster.add_node(num_cpus=1)
    home = ray.get_runtime_context().get_node_id()
    by_ray(Logged(Images(), folder / "log", ANY, DiesElsewhere(home)), folder / "ray")


class DiesElsewhere:
    """Kills the process and its node, unless that is ``home``, whose processes wait for it."""

    def __init__(self, home):
        self.home = home

    def __call__(self, dataset):
        flag = dataset.folder / "died"
        if ray.get_runtime_context().get_node_id() != self.home:
            flag.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(flag.exists)


@pytest.mark.slow
def test_a_killed_node_costs_the_block_it_was_at(tmp_path, driver):
    driver(with_another_node, tmp_path)
    (again,) = Counter(map(int, logged(tmp_path / "log" / "loads"))) - Counter(range(N))
    assert again % 7 == 0  # the first of a block
    here(Logged(Images(), tmp_path / "other"), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


@pytest.mark.slow
def test_a_worker_that_dies_each_time_is_an_error_and_whole_blocks_stay(tmp_path, driver):
    source = Logged(Images(), tmp_path / "log", 60, die_while_a_flag_is_there)
    (tmp_path / "log" / "flag").touch()
    with pytest.raises(WorkerError, match=r"block 8 was not written: its Ray worker died, and so did those that tried again"):
        driver(by_ray, source, tmp_path / "ray")
    assert logged(tmp_path / "log" / "loads").count("60") == 1 + 3
    assert not OnDiskBlockDataStorage(tmp_path / "ray").is_prepared()
    kept = written(tmp_path / "ray")
    assert kept
    (tmp_path / "log" / "flag").unlink()
    driver(by_ray, source, tmp_path / "ray")
    assert {name: when for name, when in kept.items() if not name.endswith(".tmp")}.items() <= written(tmp_path / "ray").items()
    here(source, tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


class Overlaps(Images):
    """Tells whether two are loaded at one time."""

    def __init__(self, folder):
        super().__init__(20)
        self.folder = folder

    def __getitem__(self, idx):
        (self.folder / f"now {idx}").touch()
        time.sleep(0.01)
        if len(list(self.folder.glob("now *"))) > 1:
            (self.folder / "two").touch()
        (self.folder / f"now {idx}").unlink()
        return super().__getitem__(idx)


def test_num_workers_are_how_many_blocks_are_written_at_one_time(tmp_path, driver):
    driver(by_ray, Overlaps(tmp_path), tmp_path / "ray", num_workers=1, block_size=1)
    assert not (tmp_path / "two").exists()


# ---------------------------------------------------------------------------------------------------- errors


class Waiting(Images):
    """At sample 60 an error, once another block has begun; those that come later wait for their end."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __getitem__(self, idx):
        if idx == 60:
            wait_until((self.folder / "another").exists)
            raise ValueError("photo 60 cannot be read")
        if idx > 63:
            at_it = self.folder / str(os.getpid())
            try:
                at_it.touch()
                (self.folder / "another").touch()
                self.wait()
            finally:
                at_it.unlink(missing_ok=True)
        return super().__getitem__(idx)

    def wait(self):
        ended = time.monotonic() + 20
        while time.monotonic() < ended:
            time.sleep(0.01)  # a cancelled task is interrupted between two of these, not within one


class Stubborn(Waiting):
    """One that swallows the interruption."""

    def wait(self):
        with contextlib.suppress(KeyboardInterrupt):
            super().wait()
        super().wait()


def error_of(source, folder):
    """Return what is known of the error and of what is written, as soon as it is raised."""
    try:
        by_ray(source, folder)
    except Exception as error:
        return type(error), str(error), type(error.__cause__).__name__, content(folder)


@pytest.mark.parametrize("waiting", [Waiting, Stubborn])
def test_an_error_of_the_dataset_comes_out_as_itself_and_nothing_is_written_any_more(tmp_path, driver, waiting):
    log = tmp_path / "log"
    log.mkdir()
    kind, message, cause, before = driver(error_of, waiting(log), tmp_path / "ray")
    (log / "another").unlink()
    wait_until(lambda: not any(psutil.pid_exists(int(path.name)) for path in log.iterdir()))
    assert (kind, message) == (ValueError, "photo 60 cannot be read")
    assert "RayTaskError" in cause
    assert content(tmp_path / "ray") == before
    assert len([name for name in before if name.startswith("blocks/")]) == 8


class OddError(Exception):
    """One that pickles, and does not unpickle."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def odd(dataset):
    raise OddError("this", "that")


def test_an_error_that_does_not_pickle_is_told(tmp_path, driver):
    kind, message, cause, _ = driver(error_of, Logged(Images(), tmp_path / "log", 60, odd), tmp_path / "ray")
    assert (kind, message) == (WorkerError, "OddError: this and that")
    assert "RayTaskError" in cause


class Locks(Preparer):
    def prepare_data(self):
        yield from super().prepare_data()
        yield threading.Lock()


def test_a_sample_that_does_not_pickle_is_told_as_elsewhere(tmp_path, driver):
    with pytest.raises(SampleError, match="sample 100: value is a lock, which has no bytes of its own"):
        driver(by_ray, Locks(), tmp_path / "ray")


def test_an_interrupted_preparation_goes_on(tmp_path, driver):
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        driver(by_ray, Preparer(stop_at=60), tmp_path / "ray")
    assert not OnDiskBlockDataStorage(tmp_path / "ray").is_prepared()
    driver(by_ray, Preparer(), tmp_path / "ray")
    here(Preparer(), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


def test_wrong_engines_and_addresses_are_errors_before_anything_is_written(tmp_path):
    with pytest.raises(LimitError, match=r"engine='spark' is unknown\. Use 'local' or 'ray'\."):
        here(Images(), tmp_path / "a", engine="spark")
    with pytest.raises(LimitError, match=r"address='auto' is that of a Ray.* Use engine='ray'\."):
        here(Images(), tmp_path / "a", address="auto")
    assert not (tmp_path / "a").exists()


def test_a_ray_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StorageError, match=r"Ray cannot be connected to at 127\.0\.0\.1:1: ConnectionRefusedError"):
        here(Images(), tmp_path / "a", engine="ray", address="127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(StorageError, match=r"Ray cannot be connected to at nonsense: ValueError"):
        here(Images(), tmp_path / "a", engine="ray")
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stocache.preparation.ray", raising=False)
    monkeypatch.delattr(stocache.preparation, "ray", raising=False)
    with pytest.raises(StorageError, match=r"engine='ray' needs Ray, .*: pip install 'stocache\[ray\]'"):
        here(Images(), tmp_path / "a", engine="ray")


# ---------------------------------------------------------------------------------------------------- a Ray of its own


ALONE = """
import signal, sys

import psutil
import ray
from stocache import prepare
from tests.support.preparing import Images

before = signal.getsignal(signal.SIGTERM)
prepare(Images(), sys.argv[1], engine="ray", num_workers=2, block_size=7, progress=False).close()
assert not ray.is_initialized()
assert signal.getsignal(signal.SIGTERM) is before
names = [process.name() for process in psutil.Process().children(recursive=True)]
assert not [name for name in names if "raylet" in name or "gcs" in name], names
"""


@pytest.mark.slow
def test_a_ray_of_its_own_is_quiet_and_ends_with_the_preparation(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | FAIR
    command = [sys.executable, "-c", ALONE, str(tmp_path / "ray")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    here(Images(), tmp_path / "here")
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


# ---------------------------------------------------------------------------------------------------- on the command line


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("number,text\n" + "".join(f"{number},row {number}\n" for number in range(20)))
    return path


def test_the_command_takes_ray_with_and_without_an_address(tmp_path, driver, table):
    options = ("--block-size", 3)
    assert run("prepare", table, tmp_path / "here", "--workers", 0, *options)[0] == 0
    for folder, more in {"a": ["--ray"], "b": ["--ray", "auto"], f"file://{tmp_path}/c": ["--ray"]}.items():
        code, output = driver(run, "prepare", table, folder if "://" in folder else tmp_path / folder, *more, *options)
        assert code == 0, output
        assert "20 samples in 7 blocks of 3" in output
        assert "20/20" in output
    assert content(tmp_path / "here") == content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["auto"], "auto is one argument too many, or the address of a Ray: then give --ray too."),
        (["--ray", "127.0.0.1:1"], "Ray cannot be connected to at 127.0.0.1:1: ConnectionRefusedError"),
    ],
)
def test_the_command_explains_what_it_cannot_do(tmp_path, table, arguments, message):
    code, output = run("prepare", table, tmp_path / "out", *arguments)
    assert code != 0
    assert message in " ".join(output.split())
