"""Describe a function as a text that changes with its code: a name is not enough, since all lambdas have the same."""

from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from stocache.system.hashing import checksum


def callable_text(function: Any) -> str:
    """Return a text that identifies a callable, the same in all processes with one version of Python.

    For a function of a module it is the name. For a lambda, a nested function and a function of the main script it also holds a
    checksum of the code and of the values that the function closes over. For another callable object it is the class.
    """
    if isinstance(function, partial):
        return f"partial({callable_text(function.func)}, {function.args!r}, {function.keywords!r})"
    named = function if hasattr(function, "__qualname__") else type(function)  # a function, or another callable
    text, code = f"{named.__module__}.{named.__qualname__}", getattr(named, "__code__", None)
    if code is None or not ("<" in named.__qualname__ or named.__module__ in ("__main__", "__mp_main__")):
        return text
    cells = [_value_text(cell.cell_contents) for cell in named.__closure__ or () if cell != CellType()]
    values = [_code_text(code), _value_text(named.__defaults__), _value_text(named.__kwdefaults__), *cells]
    return f"{text.replace('__mp_main__', '__main__')} {checksum(repr(values).encode('utf-8', 'surrogatepass'))}"


def _code_text(code: CodeType) -> str:
    values = [_value_text(value) for value in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, values))


def _value_text(value: Any) -> str:
    """Return the text of a value that code refers to; for other objects their type, because a repr may hold an address."""
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, frozenset | set):
        return f"set({sorted(map(_value_text, value))})"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({list(map(_value_text, value))})"
    if isinstance(value, dict):
        return f"dict({[(_value_text(key), _value_text(item)) for key, item in value.items()]})"
    if isinstance(value, str | bytes | int | float | complex | None):
        return repr(value)
    if isinstance(value, FunctionType):  # which may close over itself
        return f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
