"""Look up the names that stored data contains: classes, enum members, default factories, dtypes.

NOTE [ Names in data ]
    Blocks and records name classes and dtypes, and they may be damaged or forged. So a name is looked up, and nothing else: no
    module is imported, no attribute hook, property or descriptor runs, and no constructor written in Python. With
    ``allow_pickle=True`` a reader first imports the modules, as pickle would.

    A class is one of Python's own, or of a module that this process has imported anyway. Its method resolution order says
    whether it may be of a kind:

    dict, list, tuple ...   exactly these types
    tuple        a subclass of tuple, made by ``tuple.__new__``, or by its own if that is written in C (torch.Size)
    namedtuple   a subclass of tuple with these ``_fields``, made by ``tuple.__new__``
    dataclass    made by ``object.__new__``, its attributes set without properties
    tensor       a subclass of Tensor, made by ``as_subclass``
    image        a subclass of PIL's Image, given pixels of the size that its mode and shape take
    enum         members by name; combined flags if the class has no ``_missing_`` and no metaclass of its own

    Writers make the same checks (`pytree.check_class`): a sample that could not be read back is refused, or pickled.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from enum import Enum, EnumMeta, Flag, IntFlag
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype

from stocache.errors import SampleError, SegmentError, StocacheError
from stocache.system.objects import attributes_of_class, mro, static_attribute

_namespace: Callable[[Any], Any] = vars(ModuleType)["__dict__"].__get__  # of a module, past the hooks of its class
_ABSENT = object()


class Unresolved(StocacheError):
    """A name in stored data cannot be used here. The message says why, of "its samples".

    Attributes:
        module: the module to import first; "" if importing would not help.
    """

    def __init__(self, problem: str, module: str = "") -> None:
        super().__init__(problem)
        self.module = module


class NotImported(SegmentError):
    """A record in a cache is of a class whose module this process has not imported."""


class Unfit(SampleError):
    """A part of a sample cannot be stored. The message says why, of the part: "is a lock, which has no bytes of its own".

    The containers around the part add the path to it, from the inside out; see `pytree.sample_error`.

    Attributes:
        problem, remedy: the reason, and the advice; neither ends with a full stop.
        final: whether pickling would not help.
        steps: containers and keys in them, from the inside out.
    """

    def __init__(self, problem: str, remedy: str = "", final: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.final = problem, remedy, final
        self.steps: list[tuple[Any, Any]] = []

    def within(self, container: object, key: object) -> "Unfit":
        """Return the same error after adding a step to its path."""
        self.steps.append((container, key))
        return self


def a(value: object) -> str:
    """Return the name of a value's type, with an article."""
    return f"a {type(value).__name__}"


def is_class(value: object) -> bool:
    """Return whether a value is a class; unlike isinstance it never asks the value."""
    return type in mro(type(value))


def derives(cls: type, base: type) -> bool:
    """Return whether a class has a base in its method resolution order; unlike issubclass it runs no hook."""
    return base in mro(cls)


def find_class(name: object) -> type | None:
    """Return the class of a name, "module:qualname"; None if it is missing, or not a class. Import and call nothing.

    Raises:
        Unresolved: the module is not imported, or ``name`` is not a str.
    """
    if type(name) is not str:
        raise Unresolved(f"its samples are made of {name!r:.50}, which is not a name.")
    if name == "builtins:NoneType":
        return type(None)
    module, _, path = name.partition(":")
    owner: Any = sys.modules.get(module)
    if owner is None:
        raise Unresolved(f"its samples are made of {name:.300}. Import {module:.300} first, or pass allow_pickle=True.", module)
    if ModuleType not in mro(type(owner)):
        return None
    found: Any = owner
    for number, part in enumerate(path.split(".")):
        found = (attributes_of_class(found) if number else _namespace(found)).get(part, _ABSENT)
        if not is_class(found):
            return None
    return found  # type: ignore[no-any-return]


_classes: dict[str, Any] = {}


def name_of(cls: Any) -> str:
    """Return the name by which every process finds a class.

    Raises:
        Unfit: it does not have such a name: it was defined within a function, or replaced.
    """
    module, path = getattr(cls, "__module__", None), getattr(cls, "__qualname__", None)
    name = f"{'__main__' if module == '__mp_main__' else module}:{path}"  # as spawn calls the script in a child
    if _classes.get(name) is not cls:
        try:
            found = find_class(name)
        except Unresolved:
            found = None
        if found is not cls:
            raise Unfit(f"is of a class that other processes do not find as {name}", "Define it at the top of a module")
        _classes[name] = cls
    return name


def enum_class(name: object) -> Any:
    """Return the enum class of a name.

    Raises:
        Unresolved: it is not here, or not an enum.
    """
    cls: Any = find_class(name)
    if not (is_class(cls) and derives(cls, Enum)):
        raise Unresolved(f"its samples have members of {name}, which is not an enum.")
    return cls


def member_of(cls: Any, name: Any) -> Any:
    """Return the member of an enum class that has a name, as `member_name` returns it.

    Raises:
        ValueError: it has no such member.
    """
    members = attributes_of_class(cls).get("_member_map_", {})
    with contextlib.suppress(LookupError, ValueError, TypeError, AttributeError, OverflowError):
        if name in members:
            return members[name]
        if _combines(cls):
            values = [int(part) if part.lstrip("-").isdigit() else members[part]._value_ for part in name.split("|")]
            return cls(functools.reduce(int.__or__, values))
    raise ValueError(f"{cls.__name__} has no member {name!r:.50}")


def member_name(member: Any) -> str | None:
    """Return the name of an enum member; None if the name does not lead back to it.

    Combined flags have the name "A|B", with a number at the end for bits that have no name.
    """
    cls, name, value = type(member), member._name_, member._value_
    try:
        if cls.__members__.get(name) is not member:
            parts = {
                name: one._value_ for name, one in cls.__members__.items() if one._value_ and value & one._value_ == one._value_
            }
            rest = value & ~functools.reduce(int.__or__, parts.values(), 0)
            name = "|".join([*parts] + [str(rest)] * bool(rest or not parts))
        again = member_of(cls, name)
    except Exception:  # the class makes its members in another way
        return None
    return name if again is member or (again == member and type(again) is cls) else None


def _combines(cls: type) -> bool:
    """Return whether the code of Python's enum module combines the flags of a class."""
    return (
        derives(cls, Flag)
        and static_attribute(cls, "_missing_") in (static_attribute(Flag, "_missing_"), static_attribute(IntFlag, "_missing_"))
        and static_attribute(type(cls), "__call__") is attributes_of_class(EnumMeta)["__call__"]
    )


TORCH_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if type(dtype) is torch.dtype and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""The dtypes whose values each have bytes of their own, by name."""


def torch_dtype(name: object) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        ValueError: it is unknown or quantized: quantized tensors hold a scale outside of their bytes.
    """
    dtype = TORCH_DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise ValueError(f"{name!r:.50} is not a dtype of torch that can be stored")
    return dtype


_PLAIN_DTYPE = re.compile(
    r"[|<>]?b1|[|<>]?[iu][1248]|[<>]f(2|4|8|12|16)|[<>]c(8|16|24|32)|[|<>]?[SUV]\d{1,10}"
    r"|[<>][Mm]8(\[(\d{1,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)(/\d{1,9})?\])?"
)
_MAX_ITEMSIZE = 1 << 24
MAX_DIMS = 64


@functools.lru_cache(maxsize=1024)
def numpy_dtype(descr: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a description: a str; or a tuple of fields, each a name (or a title and a name), a description,
    and perhaps a shape. numpy checks the fields, as those of the header of a .npy file.

    It is a dtype of numbers, bool, str, bytes, void, dates or time differences, or of records of these; never of objects.

    Raises:
        ValueError, TypeError: it is not the description of such a dtype.
    """
    try:
        dtype = descr_to_dtype(_in_lists(descr))
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError, SyntaxError) as error:
        raise ValueError(f"{descr!r:.80} is not a dtype: {error}") from None
    if dtype.hasobject or dtype.itemsize > _MAX_ITEMSIZE:
        raise ValueError(f"{descr!r:.80} is a dtype of objects, or of more than {_MAX_ITEMSIZE} bytes")
    return dtype


def _in_lists(descr: Any) -> Any:
    """Return a description with its fields in lists, as numpy wants it. Raises ValueError if it is not one."""
    if type(descr) is str and _PLAIN_DTYPE.fullmatch(descr):
        return descr
    if type(descr) is not tuple:
        raise ValueError(f"{descr!r:.80} is not a dtype that can be read")
    return [(name, _in_lists(inner), *shape) for name, inner, *shape in descr]


def check_size(size: Any, limit: int = 2**63) -> int:
    """Return a size.

    Raises:
        ValueError: it is not an int from 0 to below the limit.
    """
    if type(size) is not int or not 0 <= size < limit:
        raise ValueError(f"{size!r:.80} is not a size")
    return size


def class_text(cls: Any) -> str:
    """Return the name of a class; with its module unless it is one of Python's own types."""
    module, name = getattr(cls, "__module__", None), getattr(cls, "__qualname__", repr(cls))
    return name if module == "builtins" else f"{'__main__' if module == '__mp_main__' else module}:{name}"
