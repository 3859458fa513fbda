"""``stocache run``: run a program as Python would, with stocache's loader in place of torch's, and report where time goes.

It does without typer, and imports torch only when the program does.
"""

import argparse
import atexit
import importlib.machinery
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from stocache.errors import StocacheError
from stocache.loader.threads import METHODS
from stocache.system.ranks import ranks_here
from stocache.tools.run import compare
from stocache.tools.run.compare import CHECK
from stocache.tools.run.everywhere import OFF, Everywhere, replace_name, use_everywhere
from stocache.tools.run.messages import epoch_lines, keep_log_apart, say, say_apart
from stocache.tools.run.use import ProgramOptions, Use

_HELP = """\
Run a Python program, with stocache's DataLoader in place of torch's, and report what its training waits for.

The program runs as "python SCRIPT" or "python -m MODULE" would run it, and its results are the same. With torchrun:
torchrun ... -m stocache run train.py. STOCACHE_RUN=off in the environment switches everything off."""

_FILES = "json", "report"

SPAWNED = "STOCACHE_SPAWNED"  # for spawned processes: the main module, and the command line; in JSON


def main(arguments: list[str]) -> None:
    """Run the command ``stocache run`` with these arguments."""
    command = parser()
    given = command.parse_args(arguments)
    if given.check and given.program.isdigit():
        given = command.parse_args(given.arguments, argparse.Namespace(**vars(given) | {"check": int(given.program)}))
    if arguments[-1 - len(given.arguments)] == "--":  # the program's; argparse takes it for its own
        given.arguments = ["--", *given.arguments]
    if given.check is not None and CHECK not in os.environ:
        sys.exit(compare.compare(given.check, arguments))
    try:
        everywhere = use_everywhere(**options_of(given))
    except (StocacheError, ValueError) as error:
        command.error(str(error))
    if CHECK in os.environ:
        compare.seed()
        compare.record(everywhere, os.environ.pop(CHECK))
        given.quiet = True
    for name in _FILES:
        if path := getattr(given, name):
            setattr(given, name, os.path.abspath(path))  # the program may change its directory
            try:
                open(path, "a").close()
            except OSError as error:
                command.error(f"--{name} {path}: {error.strerror}")
    if given.report and importlib.util.find_spec("matplotlib") is None:
        command.error("--report draws with matplotlib, which is not installed: pip install 'stocache[bench]'")
    run = partial(_run_module, given.program, True) if given.module else _load_script(given.program)
    sys.argv = ["-m" if given.module else given.program, *given.arguments]
    if os.environ.get(OFF) != "off":
        observe(everywhere, given)
        everywhere.reports_in = os.getpid()
        atexit.register(_report, everywhere, given)
    _execute(run, everywhere)


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `use_everywhere` that a command line contains."""
    return {field.name: getattr(given, field.name) for field in fields(ProgramOptions)}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="stocache run",
        usage="stocache run [options] (SCRIPT | -m MODULE) [arguments of the program]",
        description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = command.add_argument
    add("--cache", metavar="auto|SIZE", help="cache the datasets of all loaders, under one limit, as 32GiB")
    add("--workers", choices=["auto"], dest="num_workers", help="choose the number of workers of each loader")
    add("--worker-method", choices=METHODS, help="what the workers are")
    add("--disk", metavar="DIR", help="a folder for the samples that do not fit into memory")
    add("--disk-limit", metavar="SIZE", help="the bytes that this folder may have")
    add("--stateful", action="store_true", help="stand in for torchdata's StatefulDataLoader, too")
    add("--share", action="store_true", help="give workers one copy of the large lists and tables of datasets")
    add("--check", action="store_const", const=300, help="run twice, without and with, and compare 300 batches, or [STEPS]")
    add("--json", metavar="FILE", help="write the report to a file")
    add("--report", metavar="FILE", help="write a page to pass on, as report.html, with pictures")
    add("--quiet", action="store_true", help="print nothing")
    add("-m", action="store_true", dest="module", help=argparse.SUPPRESS)
    add("program", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return command


_SAFE_PATH = bool(getattr(sys.flags, "safe_path", sys.flags.isolated))
"""Whether Python was started not to put the folder of the program first in its path (``-P``, ``-I``)."""

_NAMES: dict[str, Any] = {"__builtins__": sys.modules["builtins"]}  # of each main module
if sys.version_info < (3, 14):
    _NAMES["__annotations__"] = {}


def _load_script(path: str) -> Callable[[dict[str, Any]], object]:
    """Return what runs a script, or the ``__main__`` in a folder or zip file, with the names of the main module."""
    path = os.path.abspath(path)
    if os.path.isdir(path) or not isinstance(pkgutil.get_importer(path), importlib.machinery.FileFinder | None):
        sys.path[: not _SAFE_PATH] = [path]
        return partial(_run_module, "__main__", False)
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)  # of a compiled file; else None
            file.seek(0)
            source = file.read() if code is None else b""
    except OSError as error:
        say(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
        sys.exit(2)
    if not _SAFE_PATH:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = importlib.machinery.SourceFileLoader("__main__", path)

    def run(names: dict[str, Any]) -> None:
        names |= {"__file__": path, "__cached__": None, "__loader__": loader}
        exec(compile(source, path, "exec", dont_inherit=True) if code is None else code, names)

    return run


def _run_module(name: str, is_module: bool, names: dict[str, Any]) -> None:
    """Run a module, or the ``__main__`` of a package or folder, as Python does. It uses the names of the main module."""
    if is_module and not _SAFE_PATH:
        sys.path[0] = os.getcwd()
    runpy._run_module_as_main(name, is_module)  # type: ignore[attr-defined]


def _execute(run: Callable[[dict[str, Any]], object], use: Use) -> None:
    """Run the program. An error leaves with its traceback, without the frames of this package, and Python's exit status.

    The report comes now, not when Python exits: imports there would change the exit status of an interrupted program.
    """
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(program).update(_NAMES)
    try:
        run(vars(program))
    except SystemExit:
        raise
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.excepthook = lambda *arguments: None
        if use.at_end is not None:
            use.at_end()
        raise


def _follow_spawned(given: argparse.Namespace) -> None:
    """Let spawned processes find our loader, too: they run spawned.py, which runs the program's main module."""

    def with_settings(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
        data = prepare(name)
        main = {key: data.pop(key) for key in ("init_main_from_path", "init_main_from_name") if key in data}
        if main:
            os.environ[SPAWNED] = json.dumps({"main": main, "given": vars(given)})
            data["init_main_from_path"] = os.path.join(os.path.dirname(__file__), "spawned.py")
        return data

    replace_name("multiprocessing.spawn", "get_preparation_data", lambda prepare: partial(with_settings, prepare))


def observe(use: Everywhere, given: argparse.Namespace) -> None:
    """Have a process of the program, and those it starts, print the verdicts of its epochs and report when it ends."""
    keep_log_apart(use, given.quiet)
    if not given.quiet:
        use.on_epoch = epoch_lines(use)
    if given.json or given.report:
        use.write = partial(_write_files, use, given, ended=False)
    use.at_end = partial(_report, use, given)
    _follow_spawned(given)


def _report(use: Everywhere, given: argparse.Namespace) -> None:
    if use.reports_in != os.getpid():  # it is that of a forked process, or has reported
        return
    use.reports_in, use.rank = 0, use.rank or ranks_here().rank
    text = use.report()
    if use.process:
        text = text.replace("stocache:", f"stocache, {use.process}:", 1)
    elif not text:
        text = use.why_nothing()
    if text and not given.quiet and use.rank == 0:
        say_apart(text)
    _write_files(use, given, ended=True)


def _write_files(use: Everywhere, given: argparse.Namespace, ended: bool) -> None:
    process = f".{use.rank}" * (use.rank > 0) + f".{use.process}" * bool(use.process)
    if given.json:
        _write(given.json + process, json.dumps([lines.as_dict() for lines in use.lines(ended)]))
    if given.report:
        from stocache.tools.run.page import page_of

        root, ending = os.path.splitext(given.report)
        command = " ".join([given.program, *given.arguments])
        _write(root + process + ending, page_of(use.lines(ended), command, use.tried, ended))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        say_apart(f"stocache: {path}: {error.strerror}")
