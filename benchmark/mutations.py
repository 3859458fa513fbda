"""Break the library in one place after the other: which breaks do the tests notice?

    python -m benchmark mutations                               # 40 places, seed 0
    python -m benchmark mutations --tests ../other/tests        # the same places, with other tests
    python -m benchmark mutations --only 3,17                   # some of them again
    python -m benchmark mutations --folder-only                 # in a third of the time

A break drops a lock, adds one to an integer, skips a check or a call, does not hand over an option, or turns a comparison. The
places are drawn with a seed, as many of each kind, each in another module where possible. The tests of the module's folder run
first, then all; at the first failure they stop. A test that fails without the break, too, does not count.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CLAIM = "The tests notice most breaks of the library."

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
QUIET = re.compile(r"^(logger|_logger|log|warnings|logging|progress|console)\b")


class Break(NamedTuple):
    """One place of a module, as offsets in bytes, and what stands there instead."""

    kind: str
    module: str
    line: int
    begin: int
    end: int
    text: str


def breaks_of(path: Path) -> Iterator[Break]:
    """Return all places of a module that can be broken."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def found(kind: str, node: ast.expr | ast.keyword | ast.stmt, text: str) -> Break:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Break(kind, str(path.relative_to(ROOT)), node.lineno, begin, end, text)

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name in ("__repr__", "__str__", "__del__"):
            continue
        parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for node in nodes_of(function):
            if isinstance(node, ast.With):
                for item in node.items:
                    if not item.optional_vars and re.search(r"lock|claim|guard|exclusive", ast.unparse(item), re.IGNORECASE):
                        yield found("lock dropped", item.context_expr, '__import__("contextlib").nullcontext()')
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield found("one more", node, str(node.value + 1))
            elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
                yield found("check skipped", node.test, "False")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not QUIET.match(ast.unparse(node)):
                yield found("call skipped", node, "pass")
            elif isinstance(node, ast.Compare) and len(node.ops) == 1:
                left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
                yield found("comparison turned", node, f"(({left}) {TURNED[type(node.ops[0])]} ({right}))")
            elif isinstance(node, ast.Call):
                for option in node.keywords:
                    if option.arg and isinstance(option.value, ast.Name) and option.value.id in parameters:
                        begin, end = found("", option, "")[3:5]
                        after = re.match(rb"\s*,?", source[end:])
                        yield Break("option ignored", str(path.relative_to(ROOT)), option.lineno, begin, end + after.end(), "")


def nodes_of(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Return what a function runs: not its annotations, defaults, docstring, messages, or inner functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr)):
            continue
        yield node
        if not isinstance(node, ast.AnnAssign):
            waiting += ast.iter_child_nodes(node)
        elif node.value:
            waiting.append(node.value)


def drawn(count: int, seed: int) -> list[Break]:
    """Return breaks of all kinds, in turn; of each kind, in another module as long as there is one."""
    generator = random.Random(seed)
    by_kind: dict[str, list[Break]] = {}
    for path in sorted((ROOT / "stocache").rglob("*.py")):
        for each in breaks_of(path):
            by_kind.setdefault(each.kind, []).append(each)
    chosen: list[Break] = []
    for number in range(count):
        kind = sorted(by_kind)[number % len(by_kind)]
        modules = {each.module for each in chosen}
        among = [each for each in by_kind[kind] if each.module not in modules] or by_kind[kind]
        chosen.append(generator.choice(among))
        by_kind[kind].remove(chosen[-1])
    return chosen


def first_failure(folder: Path, paths: list[str], left_out: list[str]) -> str:
    """Run tests until one fails; return its name, "hang", "no start", or "" where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
    command += [part for name in left_out for part in ("--deselect", name)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "hang"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else "no start" if process.returncode not in (0, 5) else ""


def notice(folder: Path, whole: Path, each: Break, folder_only: bool) -> str:
    """Return the test that notices a break, which is in the checkout at ``folder`` but not in ``whole``."""
    room = Path(each.module).relative_to("stocache").parts[0]
    steps = [[f"tests/{room}"]] if (folder / "tests" / room).is_dir() else []
    left_out: list[str] = []
    for paths in steps if folder_only and steps else [*steps, ["tests"]]:
        while (name := first_failure(folder, paths, left_out)) and "::" in name:
            if not first_failure(whole, ["-n0", name], []):
                return name
            left_out.append(name)
        if name:
            return name
    return ""


def main() -> None:
    """Print a row for each break."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="numbers of breaks, with commas between")
    parser.add_argument("--folder-only", action="store_true", help="run the tests of the module's folder, not the others")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of tests")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else map(int, options.only.split(","))
    breaks = drawn(options.count, options.seed)
    print("| | break | place | noticed by | s |\n| ---: | --- | --- | --- | ---: |")
    with tempfile.TemporaryDirectory() as temporary:
        whole, folder = Path(temporary, "whole"), Path(temporary, "broken")
        for copy in (whole, folder):
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".*_cache", "tests", "__pycache__"))
            shutil.copytree(options.tests, copy / "tests")
            shutil.copytree(options.tests.parent / "benchmark", copy / "benchmark", dirs_exist_ok=True)
        for number in numbers:
            each = breaks[number]
            path, began = folder / each.module, time.monotonic()
            source = path.read_bytes()
            path.write_bytes(source[: each.begin] + each.text.encode() + source[each.end :])
            name = notice(folder, whole, each, options.folder_only)
            path.write_bytes(source)
            place, took_s = f"{each.module}:{each.line}", time.monotonic() - began
            print(f"| {number} | {each.kind} | {place} | {f'`{name}`' if name else 'no test'} | {took_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
