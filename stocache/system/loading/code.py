"""The names in code: of the attributes and global variables that making a sample may read, and of those that it does read; and
the random number generators there.
"""

import contextlib
import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from stocache.system.generators import is_generator_class
from stocache.system.objects import attributes_of_class, is_module_of_library, is_of_library, mro, static_attribute
from stocache.system.walking import inner_parts, is_own, is_own_or_dataset, parts_of

_FOR_SAMPLES = "__getitem__", "__getitems__", "__call__"


def names_used(dataset: object) -> tuple[list[tuple[dict[str, Any], set[str]]], set[str]]:
    """Look at the code that a dataset, and the user's objects in it, have for samples.

    Returns:
        For each module, its variables, and the names of those that the code names; and all names of attributes and variables
        that the code reads and nowhere sets.
    """
    parts = [part for _, part in parts_of(dataset, follow=is_own_or_dataset) if is_own(part)]
    waiting = [(static_attribute(kind, name), kind) for kind in set(map(type, parts)) for name in _FOR_SAMPLES]
    waiting += [(part, type(part)) for part in parts if callable(part)]
    seen, found, read, set_here = set[Any](), dict[int, tuple[dict[str, Any], set[str]]](), set[str](), set[str]()
    while waiting:
        function, kind = waiting.pop()
        function = function.__func__ if isinstance(function, MethodType | staticmethod | classmethod) else function
        if not isinstance(function, FunctionType) or (function, kind) in seen or is_of_library(function.__code__.co_filename):
            continue
        seen.add((function, kind))
        codes, scopes = [function.__code__], [function.__globals__]
        for code in codes:
            codes += (inner for inner in code.co_consts if isinstance(inner, CodeType))
        named = [each for code in codes for each in _naming(code)]
        read |= (names := {each.argval for each in named})
        set_here |= {each.argval for each in named if each.opname.startswith(("STORE_", "DELETE_"))}
        for scope in scopes:
            for name, value in [(name, scope[name]) for name in names & scope.keys()]:
                if isinstance(value, ModuleType):
                    is_known = any(vars(value) is each for each in scopes)  # modules import each other
                    scopes += [vars(value)] * (not is_known and not is_of_library(getattr(value, "__file__", None) or ""))
                else:
                    found.setdefault(id(scope), (scope, set()))[1].add(name)
                    its = value if isinstance(value, type) else type(value)
                    waiting += [(part, kind) for part in (value, *(part for _, part in inner_parts(name, value)))]
                    waiting += [(static_attribute(its, each), its) for each in (*names, *_FOR_SAMPLES) if is_own(value)]
        waiting += [(static_attribute(kind, name), kind) for name in names]
    return list(found.values()), read - set_here


def variables_of(used: list[tuple[dict[str, Any], set[str]]]) -> list[tuple[Any, str]]:
    """Return the variables that `names_used` has found, as values with names."""
    return [(scope[name], name) for scope, names in used for name in names if name in scope]


def own_generators(dataset: object, variables: Any = None) -> list[Any]:
    """Return the generators in a dataset, in ``variables`` that its code names, and in the classes and functions of either."""
    roots = [(dataset, "dataset"), *variables_of(names_used(dataset)[0] if variables is None else variables)]
    parts = (part for root in roots for _, part in parts_of(*root, inner=_with_classes))
    return [*{id(part): part for part in parts if is_generator_class(type(part))}.values()]  # type: ignore[arg-type]


def _with_classes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kinds = mro(value if isinstance(value, type) else type(value))
    own = (kind for kind in kinds if kind.__module__ != "builtins" and not is_module_of_library(kind.__module__))
    return chain(inner_parts(name, value), *(attributes_of_class(kind).items() for kind in own))


@lru_cache(4096)  # it takes 100 us for a function of ten lines
def _naming(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions that name an attribute or a variable."""
    return [each for each in dis.get_instructions(code) if each.opcode in dis.hasname or each.opcode in dis.hasfree]


@contextlib.contextmanager
def running_codes(by_line: bool = False) -> Iterator[dict[CodeType, set[int]]]:
    """Yield a dict that collects the codes of the user's functions that are called in the block, each with the number of its
    first line, or ``by_line`` of all that run. For a child process.
    """
    found = dict[CodeType, set[int]]()

    def trace(frame: FrameType, *_: object) -> Any:
        if not is_of_library(frame.f_code.co_filename):
            found.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return trace if by_line and frame.f_code in found else None

    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)


def attributes_in(codes: Iterable[CodeType]) -> tuple[set[str], set[str]]:
    """Return the names of attributes that codes, except constructors, read; and that they set."""
    named = [(each.opname, each.argval) for code in codes if code.co_name != "__init__" for each in _naming(code)]
    sets = {name for operation, name in named if operation == "STORE_ATTR"}
    return {name for operation, name in named if operation in ("LOAD_ATTR", "LOAD_METHOD")}, sets


def names_in(load: Callable[[int], object], indices: Iterable[int]) -> set[str]:
    """Load samples. Return the names of attributes and variables in the user's lines that run. It is slow: for a child."""
    with running_codes(by_line=True) as codes:
        for idx in indices:
            with contextlib.suppress(Exception):  # it is raised again when the sample is requested
                load(idx)
    spans = ((code, [range(start, end) for start, end, number in code.co_lines() if number in codes[code]]) for code in codes)
    return {each.argval for code, run in spans for each in _naming(code) if any(each.offset in span for span in run)}
