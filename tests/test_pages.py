"""What the pages name in code exists: paths, modules, classes, attributes, functions and options."""

import builtins
import functools
import inspect
import pkgutil
import re
from enum import Enum
from pathlib import Path

import pytest
import typer

import stocache
from stocache.tools.cli.app import app
from stocache.tools.run import run
from tests.support.sources import code_of

ROOT = Path(__file__).parents[1]
CODE = [ROOT / name for name in ("stocache", "tests", "benchmark")]
TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "benchmark/README")]
PAGES = [str(path.relative_to(ROOT)) for path in (*TOP, ROOT / "docs/design.md", *ROOT.glob("stocache/**/*.md"))]

OTHERS = """
Array Title YourDataset add_scalar basicConfig create_loader emit_nvtx ignore_data_skip log_dict to_dataloader
--ipc --shm-size --check data.py train.py results/today.csv results/today.png stocache.json
blocks/000000.safetensors info.safetensors skipped.json index.json cache.json
"""
OTHER = set(OTHERS.split())  # names, options and files of other programs, and what examples and folders hold

WORD = re.compile(r"(?<![\w/.$…'\"])(?:--[a-z][\w-]*|[\w.]+(?:/[\w.]+)+|[A-Za-z_][\w.]*)")


FILES = [path for folder in CODE for path in folder.rglob("*.py") if path != Path(__file__)]


@functools.cache
def code() -> str:
    """Return all code, without docstrings and comments."""
    return "\n".join(map(code_of, FILES))


@functools.cache
def names() -> set[str]:
    return {*dir(builtins), *(path.stem for path in FILES), *re.findall(r"\w+", code())}


@functools.cache
def options() -> set[str]:
    commands = typer.main.get_command(app).commands.values()
    of_run = {option for action in run.parser()._actions for option in action.option_strings}
    return of_run | {option for command in commands for each in command.params for option in each.opts} | {"--version"}


def has(cls: type, name: str) -> bool:
    return hasattr(cls, name) or bool(re.search(rf"^ +(self\.)?{name}\b *[:=,]", inspect.getsource(cls), re.MULTILINE))


def exists(word: str, folder: Path) -> bool:
    if word in OTHER or re.search(r"(^|/)[A-Z]{2,}$|^stocache_", word):  # what stands for a name; metrics have a test
        return True
    if word.startswith("--"):
        return word in options() or f'"{word}"' in code()
    if "/" in word or word.endswith((".py", ".md", ".json", ".safetensors")):
        return any((place / word).exists() for place in (folder, ROOT, *CODE))
    if word.startswith("stocache."):
        module = ROOT / word.replace(".", "/")  # some need an extra
        return module.is_dir() or module.with_suffix(".py").exists() or bool(pkgutil.resolve_name(word))
    first, _, rest = word.partition(".")
    if rest and first in stocache.__all__ and isinstance(cls := getattr(stocache, first), type):
        return has(cls, rest.partition(".")[0])
    return all(part in OTHER or part in names() for part in word.split(".") if re.search("_|[A-Z][a-z]", part))


def test_what_a_page_names_exists():
    pytest.importorskip("zarr", reason="pages name what needs it")
    missing = {}
    for page in PAGES:
        text = re.sub(r"```.*?```|^    .*?$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        codes = [code for code in re.findall(r"`([^`]+)`", text) if "://" not in code]
        words = {word.rstrip(".") for code in codes for word in WORD.findall(code)}
        missing[page] = sorted(word for word in words if not exists(word, (ROOT / page).parent))
    assert {page: words for page, words in missing.items() if words} == {}


def test_docstrings_describe_each_argument():
    for name in stocache.__all__:
        exported = getattr(stocache, name)
        if not issubclass(exported if isinstance(exported, type) else object, Enum):
            text = " ".join(each.__doc__ or "" for each in getattr(exported, "__mro__", [exported]))
            arguments = inspect.signature(exported).parameters
            assert [argument for argument in arguments if not re.search(rf"\b{argument}\b", text)] == [], name
