"""``stocache run``: run a program as Python would, with stocache's loader in place of torch's, and report where time goes.

It does without typer, and imports torch only when the program does.
"""

import argparse
import atexit
import importlib.machinery
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
from typing import Any, NoReturn

from stocache.errors import StocacheError
from stocache.loader.threads import METHODS
from stocache.system.ranks import ranks_here
from stocache.tools.run import compare
from stocache.tools.run.compare import CHECK
from stocache.tools.run.everywhere import OFF, Everywhere, replace_name, use_everywhere
from stocache.tools.run.messages import EpochLines, keep_log_apart, say, say_apart
from stocache.tools.run.use import ProgramOptions

_HELP = """\
Run a Python program, with stocache's DataLoader in place of torch's, and report what its training waits for.

The program runs as "python SCRIPT" or "python -m MODULE" would run it, and its results are the same. With torchrun:
torchrun ... -m stocache run train.py. STOCACHE_RUN=off in the environment switches everything off."""

SPAWNED = "STOCACHE_SPAWNED"  # for spawned processes: the main module, the options, what to print and write; in JSON


def main(arguments: list[str]) -> None:
    """Run the command ``stocache run`` with these arguments."""
    command = parser()
    given = command.parse_args(arguments)
    if arguments[-1 - len(given.arguments)] == "--":  # the program's; argparse takes it for its own
        given.arguments = ["--", *given.arguments]
    options = {field.name: getattr(given, field.name) for field in fields(ProgramOptions)}
    if given.check is not None and CHECK not in os.environ:
        sys.exit(compare.compare(given.check, arguments))
    try:
        everywhere = use_everywhere(**options)
    except (StocacheError, ValueError) as error:
        command.error(str(error))
    if CHECK in os.environ:
        compare.seed()
        compare.record(everywhere, os.environ.pop(CHECK))
        given.quiet = True
    code, program = (_load_module if given.module else _load_script)(given.program)
    sys.argv = [str(program.__file__) if given.module else given.program, *given.arguments]
    if os.environ.get(OFF) != "off":
        observe(everywhere, given, options)
        everywhere.use.reports_in = os.getpid()
        atexit.register(_report, everywhere, given)
    _execute(code, program)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="stocache run",
        usage="stocache run [options] (SCRIPT | -m MODULE) [arguments of the program]",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--cache", metavar="auto|SIZE", help="cache the datasets of all loaders, under one limit, as 32GiB")
    add("--workers", choices=["auto"], dest="num_workers", help="choose the number of workers of each loader")
    add("--worker-method", choices=METHODS, help="what the workers are")
    add("--disk", metavar="DIR", help="a folder for the samples that do not fit into memory")
    add("--disk-limit", metavar="SIZE", help="the bytes that this folder may have")
    add("--stateful", action="store_true", help="stand in for torchdata's StatefulDataLoader, too")
    add("--share", action="store_true", help="give workers one copy of the large lists and tables of datasets")
    add("--check", nargs="?", const=300, type=int, metavar="STEPS", help="run twice, without and with, and compare batches")
    add("--json", metavar="FILE", help="write the report to a file")
    add("--trace", metavar="FILE", help="write when batches came to a file for ui.perfetto.dev")
    add("--quiet", action="store_true", help="print nothing")
    add("-m", action="store_true", dest="module", help=argparse.SUPPRESS)
    add("program", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return command


_NAMES: dict[str, Any] = {"__builtins__": sys.modules["builtins"]}  # of each main module
if sys.version_info < (3, 14):
    _NAMES["__annotations__"] = {}


def _load_script(path: str) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of a script, or of the ``__main__`` in a folder or zip file, and the main module for it."""
    path = os.path.abspath(path)
    is_archive = not isinstance(pkgutil.get_importer(path), importlib.machinery.FileFinder | None)
    if os.path.isdir(path) or is_archive:
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            _fail(f"can't find '__main__' module in {path!r}", 1)
        _set_path(path)
        return spec.loader.get_code("__main__"), _main_module(spec)  # type: ignore[union-attr]
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)  # of a compiled file; else None
            file.seek(0)
            source = file.read() if code is None else b""
    except OSError as error:
        _fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    _set_path(os.path.dirname(os.path.realpath(path)))
    program = types.ModuleType("__main__")
    vars(program).update(_NAMES, __file__=path, __cached__=None)
    program.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return (_compiled(source, path) if code is None else code), program


def _compiled(source: bytes, path: str) -> types.CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)


class _NotFound(Exception):
    pass


def _load_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of a module, or of the ``__main__`` of a package, and the main module for it."""
    _set_path(os.getcwd())
    try:
        _, spec, code = runpy._get_module_details(name, _NotFound)  # type: ignore[attr-defined]
    except _NotFound as error:
        _fail(str(error), 1)
    return code, _main_module(spec)


def _main_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    program = types.ModuleType("__main__")
    facts = {"__file__": spec.origin, "__cached__": spec.cached, "__spec__": spec, "__package__": spec.parent}
    vars(program).update(_NAMES, __loader__=spec.loader, **facts)
    return program


def _set_path(first: str) -> None:
    """Put the folder of the program first, where Python puts it, unless it was started not to (``-P``, ``-I``)."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = first


def _fail(problem: str, status: int) -> NoReturn:
    say(f"{sys.executable}: {problem}")
    sys.exit(status)


def _execute(code: types.CodeType, program: types.ModuleType) -> None:
    """Run the program. An error leaves with its traceback, without the frames of this package, and Python's exit status."""
    sys.modules["__main__"] = program
    try:
        exec(code, vars(program))
    except SystemExit:
        raise
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.excepthook = lambda *arguments: None
        raise


def _follow_spawned(settings: dict[str, Any]) -> None:
    """Let spawned processes find our loader, too: they run spawned.py, which runs the program's main module."""

    def with_settings(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
        data = prepare(name)
        main = {key: data.pop(key) for key in ("init_main_from_path", "init_main_from_name") if key in data}
        if main:
            os.environ[SPAWNED] = json.dumps({"main": main} | settings)
            data["init_main_from_path"] = os.path.join(os.path.dirname(__file__), "spawned.py")
        return data

    replace_name("multiprocessing.spawn", "get_preparation_data", lambda prepare: partial(with_settings, prepare))


def observe(everywhere: Everywhere, given: argparse.Namespace, options: dict[str, Any]) -> None:
    """Have a process of the program print the verdicts of its epochs and report when it ends, and those that it starts."""
    use = everywhere.use
    keep_log_apart(given.quiet)
    if not given.quiet:
        use.on_epoch = EpochLines(use)
    use.traces = given.trace is not None
    use.report = partial(_report, everywhere, given)
    observed = {name: getattr(given, name) for name in ("quiet", "json", "trace")}
    _follow_spawned({"options": options, "observed": observed})


def _report(everywhere: Everywhere, given: argparse.Namespace) -> None:
    use = everywhere.use
    if use.reports_in != os.getpid():  # it is that of a forked process, or has reported
        return
    use.reports_in, use.rank = 0, use.rank or ranks_here().rank
    text = everywhere.report()
    if use.process:
        text = text.replace("stocache:", f"stocache, {use.process}:", 1)
    elif not text:
        text = everywhere.why_nothing()
    if text and not given.quiet and use.rank == 0:
        say_apart(text)
    process = f".{use.rank}" * (use.rank > 0) + f".{use.process}" * bool(use.process)
    if given.json:
        _write(given.json + process, [lines.as_dict() for lines in everywhere.lines()])
    if given.trace:
        _write(given.trace + process, {"traceEvents": getattr(use.loaders, "events", [])})


def _write(path: str, content: object) -> None:
    try:
        with open(path, "w") as file:
            json.dump(content, file)
    except OSError as error:
        say_apart(f"stocache: {path}: {error.strerror}")
