"""Source files, read and parsed once in a process: trees, docstrings, comments, and the code without both."""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_STRING_OR_COMMENT = re.compile(
    r'''("""|\'{3})(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)''', re.DOTALL
)


@functools.lru_cache(300)  # the package; of other files only facts are kept
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def docstrings_of(path: Path) -> list[ast.Constant]:
    """Return the strings that stand for themselves."""
    values = [node.value for node in statements(tree_of(path)) if isinstance(node, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in a node, without a look at expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def comments_of(path: Path) -> str:
    """Return the comments of a file, without the code. A comment behind code is a paragraph of its own."""
    found = []
    for line in _lines(path, lambda string: "\n" * string.count("\n"), str):
        code, _, comment = line.partition("#")
        found.append(f"\n{comment}\n" if code.strip() else comment)
    return "\n".join(found)


@functools.cache
def code_of(path: Path) -> str:
    """Return a file without docstrings and comments, whose lines are empty."""
    return "\n".join(_code(path, str))


@functools.cache
def code_lines(path: Path) -> int:
    """Return the lines of a file that hold code: not blank, and more than a comment or a docstring."""
    return sum(bool(line.strip()) for line in _code(path, lambda string: "\n".join("s" * (string.count("\n") + 1))))


def _code(path: Path, string: Callable[[str], str]) -> list[str]:
    """Return the lines of a file without docstrings and comments, with a function applied to its strings."""
    lines = _lines(path, string, lambda comment: "")
    for node in docstrings_of(path):
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return lines


def _lines(path: Path, string: Callable[[str], str], comment: Callable[[str], str]) -> list[str]:
    """Return the lines of a file, with functions applied to its strings and comments."""
    return _STRING_OR_COMMENT.sub(lambda found: (comment if found[2] else string)(found[0]), path.read_text()).split("\n")
