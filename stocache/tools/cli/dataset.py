"""Get the dataset and the functions of the user that ``stocache bench`` and ``stocache advise`` measure."""

import importlib
import os
import re
import sys
import traceback
from typing import Any

from stocache.errors import DatasetError
from stocache.tools.advise import check_measurable


def load_function(where: str) -> Any:
    """Return a function, given as "module:function".

    The module is looked for in the current directory first. It runs, so it is trusted as any program of the user is.

    Raises:
        DatasetError: the module cannot be imported, or there is no such function.
    """
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise DatasetError(f"{where!r} is not module:function.")
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())  # as `python -m` does; worker processes get the same path
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise DatasetError(f"module {module_name!r} cannot be imported: {describe_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"is not a function but {_describe(function)}" if hasattr(module, name) else "does not exist"
        raise DatasetError(f"function {name!r} of {module.__file__ or module_name} {problem}.")
    return function


def load_dataset(where: str) -> Any:
    """Return the map-style dataset that a function returns, given as "module:function".

    Raises:
        DatasetError: as `load_function`; or the function raises an error, or returns something that cannot be measured.
    """
    function = load_function(where)
    try:
        dataset = function()
    except (Exception, SystemExit) as error:
        raise DatasetError(f"{where} raised {describe_error(error)}") from error
    try:
        check_measurable(dataset)
    except DatasetError as error:
        raise DatasetError(f"{where} returned {_describe(dataset)}: {error}") from error
    except Exception as error:
        kind = type(dataset).__name__
        raise DatasetError(f"{where} returned {kind}, whose __len__ raised {describe_error(error)}") from error
    return dataset


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


def describe_error(error: BaseException) -> str:
    """Return, in one line, the type and text of an error, and where it was raised; or the error of a DataLoader worker."""
    text = " ".join(str(error).split())
    if "Original Traceback" in text:
        lines = str(error).strip().splitlines()
        last = max(number for number, line in enumerate(lines) if line.startswith(" "))
        return " ".join(lines[last + 1 :])
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    if frames := _FRAME.findall(str(error.__cause__)):  # of a child process
        file, line = frames[-1]
    known = os.path.isfile(file) and file != __file__  # importlib itself has no file
    place = f" ({os.path.basename(file)}, line {line})" if known else ""
    return f"{type(error).__name__}: {text}{place}"


def _describe(value: object) -> str:
    return "None" if value is None else f"{' '.join(repr(value).split()):.60} ({type(value).__name__})"
