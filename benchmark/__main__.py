"""List the benchmarks with their claims, or run one after naming the packages that it needs.

    python -m benchmark                     # the list
    python -m benchmark NAME [ARGUMENTS]    # one; --help for its arguments

A benchmark is a module of this folder. Its CLAIM is one sentence. Its NEEDS are rows: a module that it imports, the argument of
``pip install`` for it, and, where only some experiments need it, their arguments. Both are read without importing it.
"""

import ast
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

FOLDER = Path(__file__).parent
BASE = ("torch", "-e .")


class Benchmark(NamedTuple):
    """The constants of a module."""

    claim: str
    needs: tuple[tuple[str, ...], ...]


def benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks of this folder by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def _read(path: Path) -> Benchmark:
    found: dict[str, Any] = {"NEEDS": ()}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("CLAIM", "NEEDS"):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return Benchmark(found["CLAIM"], found["NEEDS"])


def requirements(benchmark: Benchmark, arguments: list[str]) -> dict[str, str]:
    """Return the modules that a benchmark imports with these arguments, each with its argument of ``pip install``."""
    rows = [row for row in benchmark.needs if not row[2:] or set(row[2:]) & set(arguments)]
    if not any(row[1].startswith("-e") for row in rows):  # an extra of this package installs the package, too
        rows.insert(0, BASE)
    return {name: argument for name, argument, *_ in rows}


def pip_install(arguments: list[str]) -> str:
    """Return the command that installs these, each named once."""
    return " && ".join(f"pip install {argument}" for argument in dict.fromkeys(arguments))


def is_missing(module: str) -> bool:
    """Whether a module, or a package that it is in, is not installed."""
    try:
        return find_spec(module) is None
    except ImportError:
        return True


def main(arguments: list[str]) -> NoReturn:
    """List the benchmarks; or run the one named by the first argument, with the other arguments."""
    known = benchmarks()
    if not arguments:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {benchmark.claim}" for name, benchmark in known.items()))
        sys.exit()
    name, *rest = arguments
    if name not in known:
        sys.exit(f"benchmark {name!r} does not exist. Use one of {', '.join(known)}.")
    needs = requirements(known[name], rest)
    print(f"{name}: {known[name].claim}\nneeds: {pip_install(list(needs.values()))}\n", flush=True)
    if missing := [module for module in needs if is_missing(module)]:
        sys.exit(f"{', '.join(missing)} cannot be imported. Run: {pip_install([needs[module] for module in missing])}")
    os.execv(sys.executable, [sys.executable, "-m", f"{FOLDER.name}.{name}", *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
