"""The tests themselves: each file stands alone, lies where its subject lies, and no test leaves a trace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stocache
from tests.support import traces
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
PACKAGE = Path(stocache.__file__).parent


@pytest.mark.quick
def test_no_file_imports_a_test_file_and_benchmarks_import_programs_and_support_only():
    for path in (path for folder in ("tests", "benchmark") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"(?:from|import) +(?:[\w.]+\.)?(?:conftest|test_\w+)\b", text), path
        assert not re.search(r"\btests(?:\.\w+)*\.(?:conftest|test_\w+)\b", text), path  # in a program that runs elsewhere
        if path.is_relative_to(ROOT / "benchmark"):
            assert not re.findall(r"(?:from|import) +tests\b(?!\.support|\.programs)", text), path


@pytest.mark.quick
def test_the_folders_are_those_of_the_package():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} == {*folders, "programs"}


TESTS = """
import multiprocessing, os, time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from tests.support import traces

resource_tracker.ensure_running()
traces.PATIENCE_S = 0.1
FOLDER = Path(f"/dev/shm/stocache-{os.geteuid()}")
kept = []

@pytest.fixture(scope="module", autouse=True)
def clean():
    yield
    for path in kept:
        if isinstance(path, Path):
            path.unlink()
    if FOLDER.exists() and not list(FOLDER.iterdir()):
        FOLDER.rmdir()

def test_leaves_a_file():
    kept.append(Path(f"/dev/shm/torch_{os.getpid()}_left"))
    kept[-1].write_text("x")

def test_leaves_a_named_segment():
    FOLDER.mkdir(exist_ok=True)
    kept.append(FOLDER / f"left-{os.getpid()}")
    kept[-1].write_text("x")

def test_leaves_a_semaphore():
    kept.append(multiprocessing.get_context("spawn").Lock())

def test_leaves_a_descriptor():
    kept.append(os.open("/dev/null", os.O_RDONLY))

def test_leaves_a_child():
    kept.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True))
    kept[-1].start()

def test_leaves_what_another_program_makes():
    Path("begun").touch()
    while not Path("made").exists():
        time.sleep(0.01)
    assert traces.private or any(Path("/dev/shm").glob("torch_*_foreign"))

def test_leaves_nothing():
    multiprocessing.get_context("spawn").Lock()
    Path(f"/dev/shm/torch_{os.getpid()}_gone").touch()
    os.unlink(f"/dev/shm/torch_{os.getpid()}_gone")
"""

FOREIGN = """
import multiprocessing, os, time
from pathlib import Path

while not Path("begun").exists():
    time.sleep(0.01)
lock = multiprocessing.get_context("spawn").Lock()
folder = f"/dev/shm/stocache-{os.geteuid()}"
os.makedirs(folder, exist_ok=True)
paths = [f"/dev/shm/torch_{os.getpid()}_foreign", f"{folder}/foreign-{os.getpid()}"]
files = [open(path, "w") for path in paths]
Path("made").touch()
input()
for path in paths:
    os.unlink(path)
if not os.listdir(folder):
    os.rmdir(folder)
"""

WITHOUT_MOUNTING = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 21)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("mounting", [True, False], ids=["private mount", "by names"])
def test_a_test_that_leaves_something_fails_whatever_other_programs_make(tmp_path, mounting):
    if mounting and not traces.private:
        pytest.skip("this process may not mount")
    (tmp_path / "test_traces.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [*([] if mounting else ["-c", WITHOUT_MOUNTING]), "-m", "pytest", "-rA", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.traces", "-n", "auto", tmp_path]
    with subprocess.Popen([sys.executable, "-c", FOREIGN], cwd=tmp_path, stdin=subprocess.PIPE) as foreign:
        run = run_python(*command, ok=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=200)
        foreign.communicate(b"\n", timeout=60)
    assert foreign.returncode == 0
    left = {"file", "named_segment", "semaphore", "descriptor", "child"}
    assert set(re.findall(r"^ERROR .*::test_leaves_(?:an?_)?(\w+)", run.stdout, re.MULTILINE)) == left, run.stdout
    assert "7 passed, 5 errors" in run.stdout
    assert ("2 workers" in run.stdout) == mounting


def test_every_test_is_compared_before_and_after(request):
    assert "leaves_no_trace" in request.fixturenames
