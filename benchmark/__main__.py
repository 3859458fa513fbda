"""List the benchmarks with their claims, or run them.

    python -m benchmark                                # the list
    python -m benchmark NAME [EXPERIMENT...] [OPTIONS] # one, all of its experiments by default
    python -m benchmark NAME --help                    # what it measures, and its experiments
    python -m benchmark all [--quick]                  # all of them; then a table of what holds on this machine

A benchmark is a module of this folder; `benchmark.support.harness` says how to write one. Several experiments run one after the
other, each in a process of its own.
"""

import argparse
import ast
import contextlib
import datetime
import functools
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmark.support import harness
from benchmark.support.harness import BROKEN, NOT_HERE, Experiment, NotHereError, Run

FOLDER = Path(__file__).parent
QUICK_S = 60
"""After which a quick experiment is ended."""


def benchmarks() -> dict[str, str]:
    """Return the claims of the benchmarks of this folder by name, without importing one."""
    return {path.stem: _claim(path) for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def _claim(path: Path) -> str:
    nodes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    return next(str(ast.literal_eval(node.value)) for node in nodes if ast.unparse(node.targets[0]) == "CLAIM")


def experiments(name: str) -> dict[str, Experiment]:
    """Import a benchmark; return its experiments.

    Raises:
        NotHereError: it needs a package that is not installed.
    """
    module = f"{FOLDER.name}.{name}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("stocache", "benchmark", "tests"):
            raise
        raise NotHereError(harness.pip_install(str(error.name))) from error
    return harness.EXPERIMENTS[module]


def run_one(title: str, experiment: Experiment, run: Run) -> NoReturn:
    """Run an experiment, and end this process: with 0 if all that it claims holds, or cannot be seen here."""
    print(f"\n## {title}: {experiment.text}", flush=True)
    warnings.simplefilter("ignore")  # of more workers than CPUs, which is wanted, and of the peers
    logging.disable(logging.WARNING)
    try:
        harness.check_needs(experiment.needs)
        experiment.function(run)
    except NotHereError as error:
        print(f"\n{NOT_HERE}: {title}: {error}", flush=True)
    except Exception as error:
        traceback.print_exc()
        print(f"\n{BROKEN}: {title}: {error!r}", flush=True)
        run.failed = True
    sys.exit(run.failed)


def in_process(work: Callable[[], NoReturn], limit_s: int) -> int:
    """Do work in a forked process, in some seconds at most if ``limit_s`` is not 0. Return the status with which that ended."""
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it would leave the other process
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(limit_s)
        work()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it has left
        signal.signal(signal.SIGTERM, handler)


def run_all(names: list[str], options: list[str]) -> NoReturn:
    """Run all benchmarks; print what became of each claim."""
    rows, failed = [], False
    for name in names:
        began = time.perf_counter()
        command = [sys.executable, "-m", FOLDER.name, name, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                rows += [(name, *found.groups()) for found in [harness.RESULT.match(line)] if found]
        failed |= process.returncode != 0
        print(f"\n{name}: {time.perf_counter() - began:.0f} s", flush=True)
    table = harness.Table("benchmark", "on this machine", "claim")
    for row in rows:
        table.row(*row)
    sys.exit(failed)


def main(arguments: list[str]) -> NoReturn:
    """List the benchmarks, or run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", add_help=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("experiments", nargs="*")
    parser.add_argument("--rounds", type=int, help="rounds, trials or batches")
    parser.add_argument("--quick", action="store_true", help="only see that all works; figures are rough")
    parser.add_argument("--folder", type=Path, help="photographs, by default generated ones; a tree to compare with")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--help", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    known = benchmarks()
    if options.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {claim}" for name, claim in known.items()))
        sys.exit()
    if options.name == "all":
        run_all(list(known), [argument for argument in arguments if argument != "all"])
    if options.name not in known:
        sys.exit(f"benchmark {options.name!r} does not exist. Use one of {', '.join(known)}.")
    print(f"{options.name}: {known[options.name]}", flush=True)
    try:
        found = experiments(options.name)
    except NotHereError as error:
        sys.exit(f"{NOT_HERE}: {options.name}: {error}")
    if options.help:
        width = max(map(len, found))
        print("\n".join(f"    {name:{width}}  {each.text}" for name, each in found.items()), end="\n\n")
        print(sys.modules[f"{FOLDER.name}.{options.name}"].__doc__)
        sys.exit()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs are started often, and installed packages are compiled
    if unknown := [name for name in options.experiments if name not in found]:
        sys.exit(f"{options.name} has no experiment {unknown[0]!r}. Use some of {', '.join(found)}.")
    print(f"`python -m benchmark {' '.join(arguments)}`, {datetime.date.today()}, {harness.machine()}", flush=True)
    chosen = options.experiments or list(found)
    failed = False
    for name in chosen:
        each = found[name]
        rounds = options.rounds or (each.quick if options.quick else each.rounds)
        run = Run(rounds, options.quick, options.folder, options.only, options.seed)
        title = f"{options.name} {name}"
        if len(chosen) == 1 and not options.quick:
            run_one(title, each, run)
        status = in_process(functools.partial(run_one, title, each, run), QUICK_S if options.quick else 0)
        if status not in (0, 1):
            wrong = f"took more than {QUICK_S} s" if status == -signal.SIGALRM else f"ended with {status}"
            print(f"\n{BROKEN}: {title}: {wrong}", flush=True)
        failed |= status != 0
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
