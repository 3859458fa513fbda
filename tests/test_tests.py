"""The tests themselves: each file stands alone, lies where its subject lies, and no test leaves a trace."""

import ast
import contextlib
import multiprocessing
import os
import re
import time
from pathlib import Path

import psutil
import pytest

import stocache
from stocache.system.limits import Memory
from tests.support import traces
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
PACKAGE = Path(stocache.__file__).parent


def test_no_file_imports_a_test_file_and_benchmarks_import_programs_and_support_only():
    for path in (path for folder in ("tests", "benchmark") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"(?:from|import) +(?:[\w.]+\.)?(?:conftest|test_\w+)\b", text), path
        assert not re.search(r"\btests(?:\.\w+)*\.(?:conftest|test_\w+)\b", text), path  # in a program that runs elsewhere
        if path.is_relative_to(ROOT / "benchmark"):
            assert not re.findall(r"(?:from|import) +tests\b(?!\.support|\.programs)", text), path


def test_what_benchmarks_import_is_there():
    for path in (ROOT / "benchmark").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tests", "benchmark"):
                module = ROOT / node.module.replace(".", "/")
                text = module.with_suffix(".py").read_text() if not module.is_dir() else " ".join(map(str, module.iterdir()))
                assert all(re.search(rf"\b{name.name}\b", text) for name in node.names), (path, node.module)


def test_the_folders_are_the_rooms():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")} == {
        *folders,
        "programs",
    }


@contextlib.contextmanager
def file(path):
    made = not path.parent.exists()
    path.parent.mkdir(exist_ok=True)
    path.touch()
    yield
    path.unlink()
    if made:
        path.parent.rmdir()


@contextlib.contextmanager
def child():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    yield
    process.kill()
    process.join()
    process.close()


LEFT = {
    "a file": lambda: file(Path(f"/dev/shm/torch_{os.getpid()}_left")),
    "a named segment": lambda: file(Path(f"/dev/shm/stocache-{os.geteuid()}/left-{os.getpid()}")),
    "a semaphore": lambda: contextlib.nullcontext(multiprocessing.get_context("spawn").Lock()),
    "a descriptor": Path("/dev/null").open,
    "a child": child,
}


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_noticed(what, private, monkeypatch):
    def left():
        return bool(traces.changes(holdings)), bool(traces.names_that_stay(names))

    monkeypatch.setattr(traces, "PATIENCE_S", 0.1)
    monkeypatch.setattr(traces, "private", private)
    holdings, names = traces.holdings(), traces.shm_names()
    with LEFT[what]() as kept:
        assert left() == ((True, False) if what in ("a descriptor", "a child") else (False, True))
    del kept
    assert left() == (False, False)
    monkeypatch.setattr(traces, "mount_private", lambda: private)
    for total, processes in ((3 << 30, 2), (2 << 30, 0)):
        monkeypatch.setattr(traces, "memory", lambda total=total: Memory(total, total))
        assert traces.pytest_xdist_auto_num_workers() == (processes if private else 0)


def test_what_other_programs_make_is_not_ours(monkeypatch):
    monkeypatch.setattr(traces, "PATIENCE_S", 0.1)
    monkeypatch.setattr(traces, "private", False)
    before, path = traces.shm_names(), Path(f"/dev/shm/torch_{os.getpid()}_foreign")
    with open(path, "w"), child():  # which has it open
        assert traces.names_that_stay(before) == {str(path)}
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
        assert traces.names_that_stay(before) == set()
    path.unlink()


def test_a_test_that_leaves_something_fails_and_a_failure_says_how_to_repeat_it(tmp_path):
    (tmp_path / "test_traces.py").write_text(
        "import os, pytest\n"
        "from tests.support import processes, traces\n"
        "traces.PATIENCE_S, left, path = 0.1, [], f'/dev/shm/torch_{os.getpid()}_left'\n"
        "def test_leaves_a_descriptor(): left.append(open('/dev/null'))\n"
        "def test_leaves_a_file(): open(path, 'w').close()\n"
        "def test_leaves_nothing(): os.unlink(path)\n"
        "@pytest.mark.leaves_descriptors\n"
        "def test_leaves_what_may_end_later(): left.append(open('/dev/null'))\n"
        "def test_ends_it(): left.pop().close()\n"
        "def test_leaves_less(): left.pop().close()\n"
        "def test_fails(): processes.run_python('-c', 'print(5 * 5); exit(3)')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = leaves_descriptors")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = ["-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--seed", "7", "-n", "0", tmp_path]
    run = run_python(*command, ok=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=200)
    assert re.findall(r"^ERROR .*::test_leaves_(\w+)", run.stdout, re.MULTILINE) == ["a_descriptor", "a_file", "less"], (
        run.stdout
    )
    assert "1 failed, 6 passed, 3 errors" in run.stdout
    assert re.search(r"exit\(3\)' ended with 3\n.*stdout: …25", run.stdout)  # the end of what the child printed
    assert "pytest --seed 7 -n 0 -m '' test_traces.py::test_fails" in run.stdout
