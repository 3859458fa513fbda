"""Fixtures and hooks of all tests; see `tests.support.traces` for what each test must leave as it found it.

Functions import what needs torch: of three processes one only hands out the tests to the others.
"""

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch is loaded, whose threads would spin while others wait for a core
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network
os.environ["PYTHONWARNINGS"] = "ignore:This DataLoader will create"  # on one core, of torch, in programs
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="stocache-tests-")  # removed at exit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as after `nohup … &`; children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "--portable" in sys.argv:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [f"{Path(__file__).parent}/system/platform/portable", os.environ.get("PYTHONPATH", "")]
    )
    import tests.system.platform.portable.sitecustomize  # noqa: F401  # processes that are started import it by themselves

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from stocache.cache.stats import OOB
from stocache.errors import CacheNameError
from stocache.system.platform import here

pytest.register_assert_rewrite("tests.support")  # so that assertions there tell the values, too
pytest_plugins = ["tests.support.traces"]

settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("seeded")

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

QUICK = {  # files of units and contracts that start few processes
    "function_hash", "limits", "states", "histogram", "spec", "round_trips", "blocks",
    "type_lookup", "placement", "shared", "segment", "orders", "ring", "pinned", "pickling", "storage",
    "verdict", "choice", "parsers", "formats", "reading_graph", "rooms", "disk_tiers",
    "contract", "batches", "wrapping", "thread_datasets", "sources", "lines",
    "neighbours", "listing",
}  # fmt: skip
SLOW = {  # files of slow tests alone
    "accelerate", "trainers", "transformers", "datamodule", "launchers", "container", "libraries", "programs",
}  # fmt: skip
PORTABLE = not here.SHARES_MEMORY
LINUX = {  # files, and folders, of tests of what only Linux gives: processes that share memory, and names
    "shm", "ring", "kill", "processes", "reading", "reading_ranks", "reading_resume", "children", "listing", "metrics",
    "dataloader", "stalls", "torch_iterators", "interrupts", "ends_of_programs", "everywhere",
    "resume", "accelerate", "loader_stats",
}  # fmt: skip
START_METHODS = ("fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow))  # which imports torch once more
if PORTABLE:
    START_METHODS = ("spawn",)
    multiprocessing.set_start_method("spawn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--portable", action="store_true", help="hide from stocache what only Linux gives, and spawn processes")
    parser.addoption("--seed", type=int, default=0, help="seed of the random numbers that each test starts with (default: 0)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that `-m quick` or `-m "not slow"` asks for: to import Lightning takes 8 seconds."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return not is_quick(collection_path) or None
    return (config.option.markexpr == "not slow" and collection_path.stem.removeprefix("test_") in SLOW) or None


def is_quick(path: Path) -> bool:
    return path.stem.removeprefix("test_") in QUICK


def is_for_linux(item: pytest.Item) -> bool:
    return item.get_closest_marker("linux") is not None or not LINUX.isdisjoint((item.path.stem[5:], item.path.parent.name))


def skipping_names():
    """Skip a test that asks for a named cache if there are none."""
    try:
        return (yield)
    except CacheNameError as error:
        if "Linux only" in str(error):
            pytest.skip(str(error))
        raise


if PORTABLE:
    pytest_fixture_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True)(skipping_names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Say in the report of a failure how to repeat it."""
    report = yield
    if report.failed:
        seed = item.config.getoption("seed")
        command = f"pytest --seed {seed} -n 0 -m '' {shlex.quote(item.nodeid)}"
        report.sections.append(("Seed, and the command that repeats it", f"seed {seed}\n{command}"))
    return report


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Start each test with random numbers of its own, which depend on the seed and on nothing else."""
    import numpy
    import torch

    seed = zlib.crc32(f"{request.config.getoption('seed')} {request.node.nodeid}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _unaudited(request: pytest.FixtureRequest):
    """Turn the audit off for tests that count the loads of a dataset."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("unaudited"):
            from stocache.cache.options import AuditOptions

            init: Any = AuditOptions.__init__
            patch.setattr(init, "__kwdefaults__", init.__kwdefaults__ | {"audit": 0})
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `sampled` tests leave out, and the tests of some files as quick. Leave out what is for Linux only."""
    if PORTABLE:
        left_out = [item for item in items if is_for_linux(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_for_linux(item)]
    seen: Counter[str] = Counter()
    for item in items:
        if is_quick(item.path):
            item.add_marker("quick")
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("slow")
            seen[name] += 1


@pytest.fixture(scope="session", autouse=True)
def _begun() -> None:
    """Begin what is begun once and then kept, before the first look at the descriptor table."""
    import torch
    from tqdm import tqdm

    from stocache.datasets.cut import surveying

    multiprocessing.set_forkserver_preload(["torch", "pytest", "hypothesis.extra.numpy"])  # what is spawned imports them itself
    if "forkserver" in multiprocessing.get_all_start_methods():
        forkserver.ensure_running()
        resource_tracker.ensure_running()
    multiprocessing.Barrier(1)  # whose memory comes from a file it keeps
    with contextlib.suppress(ImportError):
        import pyarrow.csv

        pyarrow.csv.read_csv(pyarrow.BufferReader(b"1\n2\n"))  # which keeps a pipe
    tqdm.get_lock()  # under forkserver, the default from Python 3.14, its semaphore has a name
    given(none())(lambda _: None)()  # asks once who refers to its generator: Python 3.14 would not find what `gc.freeze` froze
    surveying.seconds_of_hit = lambda state: 0.0  # the samples of tests are small: a hit takes no time when a cut is weighed
    for accelerator in (torch.cuda, torch.xpu, torch.mtia):  # if it is not in use, torch.manual_seed formats the stack, in 2 ms
        accelerator.traceback = SimpleNamespace(format_stack=list)
    for name, logger in logging.root.manager.loggerDict.items():  # pytest has handlers for each that does not, in 2 ms a test
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run_processes(start_method: str) -> Callable[..., None]:
    """Run ``target(number, *args)`` in ``count`` processes of the start method, and demand that each ends well."""
    from tests.support.processes import run_all

    return functools.partial(run_all, multiprocessing.get_context(start_method))


@pytest.fixture
def resident(cache) -> list[int]:
    """Indices of the samples that may be cached; any keys of a cache by key."""
    from stocache import KeyedCache

    return list(range(12)) if isinstance(cache, KeyedCache) else _indices(cache, outside=False)


@pytest.fixture
def outside(cache) -> list[int]:
    """Indices of the others."""
    return _indices(cache, outside=True)


def _indices(cache, outside: bool) -> list[int]:
    return [idx for idx, state in enumerate(cache.aux_array.tolist()) if (state == OOB) is outside]
