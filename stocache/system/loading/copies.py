"""Give each worker thread a dataset of its own, as each worker process has one.

NOTE [ A dataset for each thread ]
    A dataset that opens its file when it is first read keeps the file in an attribute. Threads that shared the dataset would
    share the file, and its position. So each thread gets a copy: of the dataset, of the datasets, plain objects and modules
    inside it, of their short lists, sets and dicts, of lists of datasets, of files in memory, and of functions and methods
    that refer to any of these. All else is shared: long lists, locks, caches, and sentinels: globals of a module that say how
    they are pickled or copied. No code of the user runs for that. A dataset with ``thread_safe = True`` is shared itself.

    Arrays, tensors, images and table frames are copied, too (arrays.py), and so are long lists and dicts of these or of lists
    and dicts: ``__getitem__`` may change one in place, and worker processes would each have their own.

    A *handle* cannot be copied: an open file; an object of a class that is written in C and refuses to be pickled, which so
    says that it holds more than values; an object with ``__del__``, because a copy that dies would release the resources of the
    object. Then one sample is made at a time. An environment of LMDB is for all threads, and can be opened only once in a
    process: the thread that comes second gets a copy of the dataset of the first.

    A running iterator or generator cannot be shared either: it has one position, and each thread would take items that belong
    to the others. A database of sqlite3 may belong to the thread that opened it. Datasets with these are refused.
"""

import builtins
import contextlib
import copy
import copyreg
import enum
import functools
import io
import itertools
import operator
import socket
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    SimpleNamespace,
)
from typing import Any, Generic

import numpy as np
import torch
from torch.utils.data import Dataset

from stocache.system.generators import GENERATOR_TYPES
from stocache.system.loading.arrays import ArrayCopier, Arrays
from stocache.system.objects import base_of, is_in_python, mro, slots_of, static_attribute, vars_of
from stocache.system.walking import part_text, parts_of

HOLDS_DATASET = "_holds_dataset"
"""A class attribute of ours, True for objects without ``__dict__`` that hold a dataset."""

_SPECIAL = {"__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__"}
_MOST_ITEMS = 1000  # of a list or dict that is copied
_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})
_DEEPEST = 12
_SUBCLASSED = defaultdict, OrderedDict, dict, list, deque, tuple
_CONTAINERS = (*_SUBCLASSED, set, frozenset)
_FILES_IN_MEMORY = io.BytesIO, io.StringIO
_BOUND = BuiltinMethodType, MethodWrapperType
_SHARED_MODULES = frozenset(
    {"torch", "numpy", "PIL", "pandas", "datasets", "polars", "scipy", "jax"}
    | {"threading", "queue", "multiprocessing", "concurrent", "asyncio", "logging", "weakref"}  # made to be shared
)
_SHARED_IN_C = _SHARED_MODULES | {"_thread", "_queue", "_contextvars", "_abc", "_asyncio", "_struct"}
_OF_PYTHON = {kind for module in (builtins, types) for kind in vars(module).values() if isinstance(kind, type)} | {
    *map(type, ({}.keys(), {}.values(), {}.items(), functools.lru_cache(len)))
}
_ITERATOR_MODULES = "builtins", "itertools", "_csv", "posix"  # the modules of iterators


def copy_dataset(dataset: object, arrays: "Arrays | None" = None) -> Any:
    """Return a dataset for one more thread; see NOTE [ A dataset for each thread ].

    ``arrays``: takes note of the arrays in it.
    """
    return _copy(dataset, {"arrays": ArrayCopier(arrays or Arrays())}, 0)


def _copy(value: object, memo: dict[Any, Any], depth: int) -> Any:
    if type(value) in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    copied = _copied(value, memo, depth) if depth < _DEEPEST else value
    memo[id(value)] = value, copied  # keeps the value, so that its id stays its own
    return copied


def _copied(value: Any, memo: dict[Any, Any], depth: int) -> Any:
    kind = type(value)
    if kind is FunctionType:
        return _copied_function(value, memo, depth)
    if kind in _REFERENCES:  # from a part to its owner
        target = _target_of(value)
        return _REFERENCES[kind](memo[id(target)][1]) if id(target) in memo and target is not None else value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, torch.Tensor | np.ndarray):
        return memo["arrays"].copy(value, lambda item: _copy(item, memo, depth + 1))
    if kind.__module__ == "PIL.Image" or hasattr(kind, "iloc"):  # of pandas
        return memo["arrays"].copy_table(value)
    if isinstance(value, GENERATOR_TYPES) or (isinstance(value, _FILES_IN_MEMORY) and not value.closed):
        return copy.deepcopy(value)
    if (held := _held(value)) is not None:
        parts, make = held
        return make([_copy(part, memo, depth + 1) for part in parts])
    follows = issubclass(kind, _CONTAINERS) and (_is_followed(value) or _is_copied_long(value, memo))
    is_opened = follows if kind in _CONTAINERS else _is_opened(value)
    if not is_opened or (_releases_resources(kind) and kind not in _CONTAINERS):
        return value
    base = _container_of(kind)
    if base is tuple:
        items = list(tuple.__iter__(value))
        own = [_copy(item, memo, depth + 1) for item in items] if follows else items
        if all(map(operator.is_, own, items)) and not getattr(value, "__dict__", None):
            return value
        copied = tuple.__new__(kind, own)
    else:
        copied = (base or object).__new__(kind)
    memo[id(value)] = value, copied  # it may hold itself
    if base not in (None, tuple):
        _fill(copied, value, base, memo, depth, follows)
    for descriptor, item in slots_of(value):
        descriptor.__set__(copied, _copy(item, memo, depth + 1))
    if not kind.__dictoffset__:
        return copied
    attributes = vars(value)
    if id(attributes) not in memo:  # patched datasets share their attributes
        mine: dict[str, Any] = {}
        memo[id(attributes)] = attributes, mine
        mine.update((name, _copy(item, memo, depth + 1)) for name, item in attributes.items())
    object.__setattr__(copied, "__dict__", memo[id(attributes)][1])  # even if the class is frozen
    return copied


def _is_copied_long(value: Any, memo: dict[Any, Any]) -> bool:
    """Whether the items of a long list, tuple or dict are copied: they can be changed in place, and are not too many."""
    kind = _container_of(type(value)) or type(value)
    first: Any = next(iter(dict.values(value) if isinstance(value, dict) else kind.__iter__(value)))
    if isinstance(first, list | dict | tuple):
        count = kind.__len__(value) * (1 + len(first))
    else:
        count = kind.__len__(value) if isinstance(first, torch.Tensor | np.ndarray) else sys.maxsize
    takes: bool = memo["arrays"].takes_items(count)
    return takes


def _held(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the parts of a value that is made of them, and a function that makes it; None for values of other kinds."""
    kind = type(value)
    if kind is MethodType:
        return [value.__self__], lambda parts: MethodType(value.__func__, *parts)
    if kind in _BOUND:
        return [value.__self__], lambda parts: value if parts[0] is value.__self__ else getattr(parts[0], value.__name__)
    if kind is functools._lru_cache_wrapper:  # its cached results may be open files
        return [value.__wrapped__], lambda parts: functools.lru_cache(**value.cache_parameters())(*parts)
    if kind is partial:
        return [value.func, value.args, value.keywords], lambda parts: partial(parts[0], *parts[1], **parts[2])
    if kind is SimpleNamespace:
        return list(vars(value).values()), lambda parts: SimpleNamespace(**dict(zip(vars(value), parts, strict=True)))
    if kind in (set, frozenset) and _is_followed(value):
        return list(value), kind
    if getattr(kind, HOLDS_DATASET, False):  # it pickles as a call, with the dataset as an argument
        make, arguments = value.__reduce__()
        return list(arguments), lambda parts: make(*parts)
    return None


def _is_opened(value: object) -> bool:
    """Whether the items and attributes of a value are copied."""
    return _is_followed(value) if type(value) in _CONTAINERS else _is_plain(value) and _safety(value) is not True


_REFERENCES: dict[Any, Callable[[Any], Any]] = {
    weakref.ReferenceType: weakref.ref,
    **dict.fromkeys((weakref.ProxyType, weakref.CallableProxyType), weakref.proxy),
}


def _target_of(reference: Any) -> Any:
    """Return the object of a weak reference or proxy; None if it is gone."""
    if type(reference) is weakref.ReferenceType:
        return reference()
    try:
        return reference.__reduce_ex__.__self__
    except ReferenceError:
        return None


def _container_of(kind: type) -> Any:
    """Return the container of which a class is a subclass; None if it is not."""
    return next((base for base in _SUBCLASSED if issubclass(kind, base)), None)


def _fill(copied: Any, value: Any, base: Any, memo: dict[Any, Any], depth: int, followed: bool) -> None:
    """Put the items of a subclass of a container into its copy, without the methods of the subclass."""
    if base in (list, deque):
        if base is deque:
            deque.__init__(copied, (), value.maxlen)
        base.extend(copied, (_copy(item, memo, depth + 1) if followed else item for item in base.__iter__(value)))
        return
    if base is defaultdict:
        copied.default_factory = _copy(value.default_factory, memo, depth + 1)
    for key, item in base.items(value):
        base.__setitem__(copied, key, _copy(item, memo, depth + 1) if followed else item)


def _copied_function(function: FunctionType, memo: dict[Any, Any], depth: int) -> FunctionType:
    """Return a function with copies of its defaults, and of variables from around it, if these have copies."""
    given, cells = function.__kwdefaults__ or {}, function.__closure__ or ()
    defaults = _copy(function.__defaults__, memo, depth + 1)
    keywords = {name: _copy(value, memo, depth + 1) for name, value in given.items()}
    if not cells and defaults is function.__defaults__ and all(map(operator.is_, keywords.values(), given.values())):
        return function
    fresh = [cell for cell in cells if id(cell) not in memo]
    closure = tuple(memo.setdefault(id(cell), (cell, CellType()))[1] for cell in cells)
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    memo[id(function)] = function, copied  # it may refer to itself
    copied.__kwdefaults__, copied.__qualname__ = keywords or None, function.__qualname__
    vars(copied).update(vars(function))
    for cell in fresh:
        with contextlib.suppress(ValueError):  # the variable is not set
            memo[id(cell)][1].cell_contents = _copy(cell.cell_contents, memo, depth + 1)
    return copied


def _is_followed(value: Any) -> bool:
    """Whether the items of a container are copied: it is short, or holds datasets."""
    kind = _container_of(type(value)) or type(value)
    if kind.__len__(value) <= _MOST_ITEMS:
        return True
    return isinstance(next(iter(kind.values(value) if isinstance(value, dict) else kind.__iter__(value))), Dataset)


def _is_plain(value: object) -> bool:
    """Whether a value is an object of attributes only, which may be copied without its class."""
    kind = type(value)
    container = _container_of(kind)
    if isinstance(value, type) or kind.__module__ == "builtins":
        return False
    if container is not tuple and not _is_made_plainly(kind, container):
        return False
    if container is None and not kind.__dictoffset__ and not any("__slots__" in vars(base) for base in kind.__mro__):
        return False
    if isinstance(value, Dataset):
        return True
    shared = kind.__module__.split(".")[0] in _SHARED_MODULES and not isinstance(value, torch.nn.Module)
    return not shared and not (_names(kind) & _SPECIAL and _is_global(value))


def _is_made_plainly(kind: Any, container: Any) -> bool:
    """Whether the constructor of its container, or of object, can make the objects of a class, without its own ``__new__``."""
    own = type(kind.__new__) is types.FunctionType and base_of(kind) is object and not issubclass(kind, enum.Enum)
    return own or kind.__new__ is (container or object).__new__


def _is_global(value: object) -> bool:
    """Whether an object is a global of the module of its class, and so may be known by its identity."""
    module = sys.modules.get(type(value).__module__)
    return any(item is value for item in vars(module).values()) if module is not None else False


def _names(kind: type) -> set[str]:
    """Return the names that a class and its bases define, besides object and Generic."""
    return {name for base in kind.__mro__ if base not in (object, Generic) for name in vars(base)}


def _releases_resources(kind: type) -> bool:
    """Whether objects of a class release resources when they die, as a copy would, too. DataPipes of torch have none."""
    owners = (base for base in kind.__mro__ if "__del__" in vars(base))
    return any(base.__module__.split(".")[0] not in _SHARED_MODULES for base in owners)


def _safety(value: Any) -> Any:
    """Return the ``thread_safe`` that an object or its class defines. Its ``__getattr__`` is not asked."""
    kind = type(value)
    defined = hasattr(kind, "thread_safe") or "thread_safe" in vars_of(value)
    return value.thread_safe if defined else None


def holds_environment(dataset: object) -> bool:
    """Whether a dataset holds an open environment of LMDB, which a process may open only once."""
    return _find(dataset, is_environment) is not None


def is_environment(value: object) -> bool:
    """Whether a value is an environment of LMDB, which is for all threads."""
    lmdb = sys.modules.get("lmdb")
    return lmdb is not None and isinstance(value, lmdb.Environment)


def find_open_handle(dataset: object) -> str | None:
    """Return where a dataset holds a handle; None if it holds none. See NOTE [ A dataset for each thread ]."""
    return _find(dataset, _is_handle)


def holds_generator(dataset: object) -> bool:
    """Whether a dataset holds a random number generator: its numbers depend on the order of the samples."""
    return _find(dataset, lambda value: isinstance(value, GENERATOR_TYPES)) is not None


def holds_dataset(collate_fn: object) -> bool:
    """Whether a collate function refers to a dataset: then it may depend on the attributes of that dataset."""
    return _find(collate_fn, lambda value: isinstance(value, Dataset)) is not None


def _find(dataset: object, wanted: Callable[[Any], bool]) -> str | None:
    """Return where a dataset holds a part of some kind, and its class; None if it holds none."""
    parts = parts_of(dataset, type(dataset).__name__, inner=_parts, most=sys.maxsize, levels=_DEEPEST)
    return next((part_text(where, part) for where, part in parts if wanted(part)), None)


def _parts(where: str, value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a value that copying would follow, each with its place as text."""
    kind = type(value)
    if kind is SimpleNamespace:
        return _items(vars(value), dict, where)
    if (held := _held(value)) is not None:
        return [(where, item) for item in held[0]]
    if kind is FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [(where, item) for item in (*cells, value.__defaults__, value.__kwdefaults__)]
    if not _is_opened(value):
        return []
    attributes = [*_class_attributes(kind), *vars_of(value).items()]
    parts = [(f"{where}.{name}", item) for name, item in attributes + [(slot.__name__, item) for slot, item in slots_of(value)]]
    base = _container_of(kind)
    return parts if base is None or not _is_followed(value) else parts + _items(value, base, where)


def _class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class of the user, besides functions, types and descriptors."""
    for base in mro(kind):
        if is_in_python(base) and base.__module__.split(".")[0] not in _SHARED_MODULES:
            for name, item in list(vars(base).items()):
                if not (name.startswith("__") or isinstance(item, type | FunctionType) or hasattr(type(item), "__get__")):
                    yield name, item


def _items(value: Any, kind: Any, where: str) -> list[tuple[str, Any]]:
    """Return the items of a container, each with its place as text."""
    items = list(kind.items(value)) if issubclass(kind, dict) else list(enumerate(kind.__iter__(value)))
    return [(f"{where}[{key!r:.30}]", item) for key, item in items]


def _is_handle(value: object) -> bool:
    """Whether a value is an open handle, or an object with ``thread_safe = False`` or ``__del__``."""
    if _is_plain(value) and (_safety(value) is False or (_safety(value) is not True and _releases_resources(type(value)))):
        return True
    if isinstance(value, io.IOBase):
        return not isinstance(value, _FILES_IN_MEMORY) and not value.closed
    if isinstance(value, socket.socket):
        return value.fileno() != -1
    return _refuses(value)


def _refuses(value: object) -> bool:
    """Whether an object's class is written in C, and the object cannot be pickled: it holds more than values."""
    kind = type(value)
    base = base_of(kind)
    modules = {cls.__module__.split(".")[0] for cls in mro(kind)}
    if base in _OF_PYTHON or kind in copyreg.dispatch_table or modules & _SHARED_IN_C or is_environment(value):
        return False
    if any(type(static_attribute(kind, name)) is FunctionType for name in ("__reduce_ex__", "__reduce__", "__getstate__")):
        return False  # which would run
    try:
        value.__reduce_ex__(4)
    except Exception:  # whatever the class raises
        return True
    return False


def find_running(dataset: object) -> str | None:
    """Return where a dataset holds an iterator, or an object of the thread that made it; None if it holds none."""
    return _find(dataset, lambda value: _is_running(value) or _is_of_this_thread(value))


def _is_running(value: object) -> bool:
    """Whether a value is a generator, coroutine or iterator; not one that has ended, nor a counter, which all may use."""
    kind = type(value)
    if kind is GeneratorType or kind is AsyncGeneratorType or kind is CoroutineType:
        return any(getattr(value, name, None) is not None for name in ("gi_frame", "ag_frame", "cr_frame"))
    return kind.__module__ in _ITERATOR_MODULES and isinstance(value, Iterator) and kind is not itertools.count


def _is_of_this_thread(value: object) -> bool:
    """Whether a value is a database or cursor of sqlite3 that no other thread may use."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is not None and isinstance(value, sqlite3.Cursor):
        value = value.connection
    if sqlite3 is None or not isinstance(value, sqlite3.Connection):
        return False
    try:
        sqlite3.Connection.cursor(value)
    except sqlite3.Error:  # it is closed
        return False
    refused: list[Exception] = []
    thread = threading.Thread(target=_use, args=(value, refused))
    thread.start()
    thread.join()
    return bool(refused)


def _use(database: Any, refused: list[Exception]) -> None:
    try:
        sys.modules["sqlite3"].Connection.cursor(database)
    except Exception as error:
        refused.append(error)
