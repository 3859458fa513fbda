"""What docstrings, comments and the ways of a sample name is there: constants, classes, functions and files."""

import ast
import builtins
import errno
import fcntl
import io
import mmap
import os
import pkgutil
import re
import select
import signal
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.house import PACKAGE

SYSTEM = {name for module in (errno, fcntl, mmap, os, select, signal) for name in dir(module)}
OTHERS = {  # of Linux and CUDA
    "IOV_MAX", "FUTEX_PRIVATE_FLAG", "IOCB_CMD_PREADV", "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
}  # fmt: skip
CONSTANT = re.compile(r"(?<![\w.$])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w(])")
QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")


def prose_and_names(source: str) -> tuple[str, set[str]]:
    """Return the docstrings and comments of a module, and the names and words of strings in its code."""
    tree = ast.parse(source)
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    names = set()
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and node not in docstrings:
                names |= set(re.findall(r"\w+", value))
    return "\n".join([*(node.value for node in docstrings if isinstance(node.value, str)), *comments]), names


def defined(source: str) -> set[str]:
    """Return the names that a module defines, in classes and functions, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
PLACES = defaultdict(set)
for path, source in SOURCES.items():
    for name in defined(source):
        PLACES[name].add(path)


def is_there(word: str, names: set[str]) -> bool:
    """Return whether a name in backticks is one of the module, of the package, or of a library."""
    parts = word.split(".")
    stems = [path for path in SOURCES if path.stem == parts[0]]
    if len(parts) > 1 and stems and parts[0] not in names:
        return any(path in PLACES[parts[1]] for path in stems)
    if all(part in names or part in PLACES or hasattr(builtins, part) for part in parts) or word in OF_LIBRARIES:
        return True
    try:
        return len(parts) > 1 and bool(pkgutil.resolve_name(word))
    except (ImportError, AttributeError, ValueError):
        return False


OF_LIBRARIES = {
    "default_collate", "get_worker_info", "thread_safe_generator", "torch.random.thread_safe_generator", "__main__", "linux",
    "multiprocessing",
}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_what_docstrings_and_comments_name_is_there(path):
    prose, names = prose_and_names(SOURCES[path])
    constants = {word for word in CONSTANT.findall(prose) if word not in names | SYSTEM | OTHERS}
    named = {word for word in constants if any(each.relative_to(PACKAGE).as_posix() in prose for each in PLACES[word])}
    assert sorted(constants - named) == []
    assert sorted(word for word in set(QUOTED.findall(prose)) if not is_there(word, names)) == []


WAY = (PACKAGE / "README.md").read_text().split("## How one sample travels")[1]


@pytest.mark.parametrize("number", range(len(re.findall(r"`[\w.]+` \(`[\w/]+\.py`", WAY))))
def test_a_step_on_the_way_of_a_sample_is_in_the_file_that_is_named(number):
    name, file = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`", WAY)[number]
    tree = ast.parse(SOURCES[PACKAGE / file])
    *classes, last = name.split(".")
    scopes = [node for node in tree.body if getattr(node, "name", None) in classes] if classes else [tree]
    assert any(last in defined(ast.unparse(scope)) for scope in scopes), f"{file} has no {name}"


def test_the_text_of_a_note_is_written_once():
    titles = defaultdict(list)
    for path, source in SOURCES.items():
        for title in re.findall(r"^#? ?NOTE \[ (.+?) \]$", source, re.MULTILINE):
            titles[title].append(path.name)
    assert {title: found for title, found in titles.items() if len(found) > 1} == {}


def test_each_module_logs_to_the_logger_that_adds_where_a_warning_is_explained():
    for path, source in SOURCES.items():
        assert {*re.findall(r"getLogger\((.*?)\)", source)} <= {'"stocache"'}, path


def test_lists_of_test_files_name_files_that_exist():
    lists = re.findall(r"^(?:QUICK|SLOW|LINUX) = \{.*?^\}", Path(__file__).with_name("conftest.py").read_text(), re.M | re.S)
    tests = Path(__file__).parent
    there = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")} | {path.name for path in tests.rglob("*")}
    assert {name for text in lists for name in re.findall(r'"(\w+)"', text)} <= there
