"""Break the library in one place after the other: which breaks do the tests of the room notice?

    python -m benchmark mutations --seed 1 --rounds 40     # 40 places
    python -m benchmark mutations --seed 1 --only "#7 "    # one of them again; or all of a room: --only shm/

A break drops a lock, adds one to an integer, skips a check or a call, does not hand over an option, or turns a comparison. The
places are drawn with a seed: as many of each room, of each kind and of each module as possible. The tests stop at the first
failure. A test that fails without the break, too, does not count.
"""

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmark.support.harness import Run, experiment

CLAIM = "The tests notice most breaks of the library."

ROOT = Path(__file__).parents[1]
LIMIT_S = 300  # a room takes two minutes at most
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
    source, module = path.read_bytes(), str(path.relative_to(ROOT))
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def found(kind: str, node: ast.expr | ast.keyword | ast.stmt, text: str) -> Break:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Break(kind, module, node.lineno, begin, end, text)

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
                        each = found("option ignored", option, "")
                        yield each._replace(end=each.end + re.match(rb"\s*,?", source[each.end :]).end())


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
    """Return breaks: each of one of the rooms that were drawn least, there of such a kind, and there in such a module."""
    generator, chosen = random.Random(seed), list[Break]()
    left = [each for path in sorted((ROOT / "stocache").glob("*/**/*.py")) for each in breaks_of(path)]
    for _ in range(count):
        among = left
        for key in (lambda each: each.module.split("/")[1], lambda each: each.kind, lambda each: each.module):
            times = Counter(map(key, chosen))
            groups = sorted(set(map(key, among)))
            least = min(map(times.__getitem__, groups))
            group = generator.choice([group for group in groups if times[group] == least])
            among = [each for each in among if key(each) == group]
        chosen.append(generator.choice(among))
        left.remove(chosen[-1])
    return chosen


def first_failure(folder: Path, arguments: list[str], left_out: list[str]) -> str:
    """Run tests until one fails; return its name, "hang", "no start", or "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
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


def notice(folder: Path, intact: Path, arguments: list[str]) -> str:
    """Return the test that notices a break, which is in the checkout at ``folder`` but not in ``intact``; "" if none does."""
    left_out: list[str] = []
    while "::" in (name := first_failure(folder, arguments, left_out)) and first_failure(intact, ["-n0", name], []):
        left_out.append(name)
    return name


@experiment(rounds=40)
def breaks(run: Run) -> None:
    """Break the library in as many places as there are rounds; run the tests of the room of each."""
    table = run.table("place", "break", "noticed by", "s")
    places = {f"#{number} {each.module}:{each.line}": each for number, each in enumerate(drawn(run.rounds, run.seed))}
    with tempfile.TemporaryDirectory() as temporary:
        intact, folder = Path(temporary, "intact"), Path(temporary, "broken")
        for copy in (intact, folder):
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".*_cache", "__pycache__"))
        for place, each in run.chosen(places).items():
            path, began = folder / each.module, time.monotonic()
            source = path.read_bytes()
            path.write_bytes(source[: each.begin] + each.text.encode() + source[each.end :])
            name = notice(folder, intact, [f"tests/{each.module.split('/')[1]}", *run.size([], ["-m", "quick"])])
            path.write_bytes(source)
            table.row(place, each.kind, f"`{name}`" if name else None, time.monotonic() - began)
    run.claim("the share of the breaks that the tests notice", len(table.column("noticed by")) / len(table.rows), least=0.5)
