"""The rooms of the package: the table on its page, their code lines, and what each imports."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import stocache
from tests.support.sources import code_lines as code_lines
from tests.support.sources import tree_of

PACKAGE = Path(stocache.__file__).parent
ROOT = PACKAGE.parent


class Room(NamedTuple):
    """A row of the table."""

    names: tuple[str, ...]
    imports: list[str]
    lines: int
    budget: int

    @property
    def files(self) -> list[Path]:
        found = []
        for name in self.names:
            folder = PACKAGE / name if (PACKAGE / name).is_dir() else ROOT / name
            found += sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]
        return found


def rooms() -> list[Room]:
    """Return the rows of the table on the page of the package, from the ground up."""
    text = (PACKAGE / "README.md").read_text()
    found = re.findall(r"^\| (.+?) \|.*\| *([^|]*?) *\| +([\d,]+) \| +([\d,]+) \|$", text, re.MULTILINE)
    return [
        Room(
            tuple(re.findall(r"`([\w/]+)`", names)),
            [name for name in imports.split(", ") if name],
            *(int(number.replace(",", "")) for number in numbers),
        )
        for names, imports, *numbers in found
    ]


def module_of(path: Path) -> str:
    """Return the dotted name of a file, below stocache."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of the package by their dotted names below stocache; not modules that lie in the package itself."""
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE}


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the modules below stocache that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "stocache":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "stocache"}
    return {module for name in found if (module := _module(name.removeprefix("stocache").lstrip(".")))}


def _module(name: str) -> str:
    """Return the module of a name in it; "" for what lies in the package itself and is not a module of a room."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def room_of(name: str) -> str:
    """Return the room of a module."""
    return name.partition(".")[0]
