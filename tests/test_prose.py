"""What docstrings, comments and the ways of a sample name is there: constants, classes, functions and files."""

import ast
import builtins
import errno
import fcntl
import functools
import mmap
import os
import pkgutil
import re
import select
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.support.house import PACKAGE
from tests.support.sources import code_of, comments_of, docstrings_of, tree_of

SYSTEM = {name for module in (errno, fcntl, mmap, os, select, signal) for name in dir(module)}
OTHERS = {  # of Linux and CUDA
    "IOV_MAX", "FUTEX_PRIVATE_FLAG", "IOCB_CMD_PREADV", "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
}  # fmt: skip
OF_LIBRARIES = {
    "default_collate", "get_worker_info", "thread_safe_generator", "torch.random.thread_safe_generator", "__main__", "linux",
    "multiprocessing",
}  # fmt: skip
CONSTANT = re.compile(r"(?<![\w.$])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w(])")
QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted({name.partition("/")[0] for name in SOURCES})


def defined(tree: ast.AST) -> set[str]:
    """Return the names that are defined in a tree, in classes and functions, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@functools.cache
def places() -> dict[str, set[str]]:
    """Return the modules in which a name is defined."""
    found = defaultdict(set)
    for file, path in SOURCES.items():
        for name in defined(tree_of(path)):
            found[name].add(file)
    return found


def is_there(word: str, names: set[str]) -> bool:
    """Return whether a name in backticks is one of the module, of the package, or of a library."""
    parts = word.split(".")
    stems = [file for file in SOURCES if Path(file).stem == parts[0]]
    if len(parts) > 1 and stems and parts[0] not in names:
        return any(file in places()[parts[1]] for file in stems)
    if all(part in names or part in places() or hasattr(builtins, part) for part in parts) or word in OF_LIBRARIES:
        return True
    try:
        return len(parts) > 1 and bool(pkgutil.resolve_name(word))
    except (ImportError, AttributeError, ValueError):
        return False


@pytest.mark.parametrize("room", ROOMS)
def test_what_docstrings_and_comments_name_is_there(room):
    for file, path in SOURCES.items():
        if file.partition("/")[0] == room:
            prose = "\n".join([*(node.value for node in docstrings_of(path)), comments_of(path)])
            names = set(re.findall(r"\w+", code_of(path)))
            constants = {word for word in CONSTANT.findall(prose) if word not in names | SYSTEM | OTHERS}
            assert [word for word in constants if not any(place in prose for place in places()[word])] == [], file
            assert [word for word in set(QUOTED.findall(prose)) if not is_there(word, names)] == [], file


def test_each_way_of_a_sample_has_at_most_eight_steps_that_are_in_the_files_they_name():
    ways = (PACKAGE / "README.md").read_text().split("\n### ")[1:]
    assert len(ways) == 5
    for way in ways:
        assert re.findall(r"^\d+", way, re.MULTILINE) == [str(step) for step in range(1, 9)]
        for name, file in re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`", way):
            *classes, last = name.split(".")
            tree = tree_of(PACKAGE / file)
            scopes = [node for node in tree.body if getattr(node, "name", None) in classes] if classes else [tree]
            assert any(last in defined(scope) for scope in scopes), f"{file} has no {name}"


def test_the_text_of_a_note_is_written_once():
    titles = Counter()
    for path in SOURCES.values():
        titles.update(re.findall(r"^#? ?NOTE \[ (.+?) \]$", path.read_text(), re.MULTILINE))
    assert [title for title, count in titles.items() if count > 1] == []


def test_each_module_logs_to_the_logger_that_adds_where_a_warning_is_explained():
    for file, path in SOURCES.items():
        assert {*re.findall(r"getLogger\((.*?)\)", path.read_text())} <= {'"stocache"'}, file


def test_lists_of_test_files_name_files_that_exist():
    lists = re.findall(r"^(?:QUICK|SLOW|LINUX) = \{.*?^\}", Path(__file__).with_name("conftest.py").read_text(), re.M | re.S)
    tests = Path(__file__).parent
    there = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")} | {path.name for path in tests.rglob("*")}
    assert {name for text in lists for name in re.findall(r'"(\w+)"', text)} <= there
