"""What to call a function where its name is to tell which data it made: many lambdas have one name."""

from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from stocache.system.hashing import checksum


def callable_text(function: Any) -> str:
    """Return what tells a callable from others, the same in all processes with one version of Python.

    A function of a module is its name. A lambda, a function within a function and one of the script that runs are their code,
    too, and what they close over. Of an object that is callable it is the class.
    """
    if isinstance(function, partial):
        return f"partial({callable_text(function.func)}, {function.args!r}, {function.keywords!r})"
    its = function if hasattr(function, "__qualname__") else type(function)  # a function, or another callable
    text, code = f"{its.__module__}.{its.__qualname__}", getattr(its, "__code__", None)
    if code is None or not ("<" in its.__qualname__ or its.__module__ in ("__main__", "__mp_main__")):
        return text
    cells = [_value_text(cell.cell_contents) for cell in its.__closure__ or () if cell != CellType()]
    values = [_code_text(code), _value_text(its.__defaults__), _value_text(its.__kwdefaults__), *cells]
    return f"{text.replace('__mp_main__', '__main__')} {checksum(repr(values).encode('utf-8', 'surrogatepass'))}"


def _code_text(code: CodeType) -> str:
    values = [_value_text(value) for value in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, values))


def _value_text(value: Any) -> str:
    """Return a value that code refers to as text: of what is not plain its type, for its repr may be of this process alone."""
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
