"""Describe the samples of a dataset, so that ranks share a cache only if their samples are the same.

NOTE [ Values that ranks compare ]
    A few samples that are equal prove little: masks may be empty, and labels may be 0, in all of them. So the proof also has
    a text for each value in the dataset, however deep: numbers and texts themselves, a checksum for a list, array or table.
    Of a large one, entries evenly spread are compared. Attributes of the user's classes count, and so do the numbers and texts
    that functions of these classes read from modules.

    Some values differ between ranks though samples do not depend on them: random generators, devices, locks, queues, loggers,
    files that are written. They are left out. A value that cannot be compared (a handle of a library, a function that asks for
    the number of its rank, too many values) is different in each process.
"""

import io
import os
import pickle
import re
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from stocache.cache.allocate import NOT_COMPARABLE, Proof
from stocache.datasets.cut.split import Split
from stocache.datasets.probing import Probe
from stocache.datasets.tables import table_text
from stocache.datasets.values import HeldValues
from stocache.samples.indices import spread
from stocache.system.describe import describe
from stocache.system.generators import GENERATOR_TYPES
from stocache.system.hashing import code_text, digest
from stocache.system.limits import MIB
from stocache.system.loading.copies import is_environment
from stocache.system.objects import attributes_of_class, base_of, is_module_of_library, is_of_library, slots_of, vars_of
from stocache.system.walking import inner_parts, parts_of

_MOST = 20_000  # values that are compared
_MOST_ITEMS = 1000  # of a list of objects
_NAMED = 64  # entries of a dict that are compared one by one, so that the one that differs has a name
_WHOLE = 16 * MIB  # of a list or array

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, torch.dtype)
_PARTS = (list, tuple, deque, dict, type, SimpleNamespace, MethodType, BuiltinMethodType, partial, type(lru_cache(len)))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LEFT_OUT = {"threading", "queue", "concurrent", "asyncio", "logging", "weakref", "tqdm"}
_LEFT_OUT |= {"_thread", "_queue", "_contextvars", "_abc", "_asyncio", "_multiprocessing", "_weakref"}
_OF_PROCESSES = {f"multiprocessing.{name}" for name in ("synchronize", "queues", "connection", "pool", "managers", "context")}
_ASKS_FOR_RANK = {"get_rank", "get_node_local_rank", "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"}


def proof_of(dataset: object, probe: Probe, split: Split | None) -> Proof | None:
    """Return the description of a dataset's samples; None if no sample is known."""
    samples = probe.samples if probe.example is None else {-1: probe.example}
    if not samples:
        return None
    facts = {"dataset": describe(type(dataset))[1], "steps before the cache": "" if split is None else split.before_text()}
    digests = {idx: digest(describe(sample, strides=False)) for idx, sample in samples.items()}
    return Proof(facts, digests, _values(dataset))


def _values(dataset: object) -> list[tuple[str, str]]:
    """Return the name and the text of each value in a dataset; see NOTE [ Values that ranks compare ]."""
    texts: list[tuple[str, str]] = []
    parts = parts_of(dataset, follow=lambda _: texts[-1][1].startswith("a "), inner=_inner, most=_MOST, levels=sys.maxsize)
    held = HeldValues(dataset, is_off=False).held
    read = ((prefix + name, value) for _, its, prefix in held for name, value in its.items() if type(value) in _PLAIN)
    for name, value in chain(parts, read):
        try:
            text = _text(value)
        except Exception:  # whatever the class of the user or of a library raises
            text = f"{NOT_COMPARABLE} in process {os.getpid()}"
        texts.append((name, text))
    return texts if len(texts) < _MOST else [("dataset, of too many values,", f"{NOT_COMPARABLE} in process {os.getpid()}")]


def _text(value: Any) -> str:
    """Return a text that is equal in two ranks if a value is. "a" and a class: the value is made of its parts.

    Raises:
        Exception: the value cannot be compared.
    """
    cls = type(value)
    name, module = f"a {cls.__module__}.{cls.__qualname__}".replace("__mp_main__", "__main__"), cls.__module__.split(".")[0]
    if cls in _PLAIN or isinstance(value, PurePath | np.generic):
        return ascii(_ADDRESS.sub("", value)) if cls is str else ascii(value)
    if isinstance(value, Enum):
        return f"{name} {value.name}"[2:]
    if isinstance(value, (*GENERATOR_TYPES, torch.device)) or module in _LEFT_OUT or cls.__module__ in _OF_PROCESSES:
        return "left out"
    if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
        return ascii(value.name) if not value.closed and value.readable() else "left out"  # type: ignore[attr-defined]
    named = issubclass(cls, dict) and len(dict.items(value)) <= _NAMED
    table = None if named else table_text(value, _WHOLE)
    if table is not None:
        return table
    if is_environment(value):
        return ascii(value.path())
    if module in _TEXTS:
        return digest(_TEXTS[module](value))
    if isinstance(value, FunctionType):
        if not _ASKS_FOR_RANK.isdisjoint(_names_in(value)):
            raise ValueError("its result may depend on the rank")
        return f"{name} {value.__qualname__} {digest(code_text(value.__code__))}"
    is_python = base_of(cls) is object and (cls.__dictoffset__ or any(True for _ in slots_of(value)))
    if is_python or cls is object or issubclass(cls, (*_PARTS, ModuleType)):
        return f"{name} {getattr(value, '__qualname__', '')}" if isinstance(value, type) else name
    try:
        return digest(pickle.dumps(value, 4))
    except (TypeError, ValueError):  # memory of ctypes
        return digest(memoryview(value).tobytes()[:_WHOLE])


def _arrow_text(value: Any) -> str:
    """Return some rows of a table or array of Arrow; the text of a type or schema."""
    if not hasattr(value, "slice"):
        return str(value)
    return repr((len(value), value.nbytes, [value.slice(row, 1).to_pylist() for row in spread(len(value), 64)]))


_TEXTS: dict[str, Any] = {"PIL": describe, "h5py": repr, "pandas": pickle.dumps, "pyarrow": _arrow_text}
"""What to compare of objects of libraries."""


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that is made of them."""
    if isinstance(value, ModuleType):
        return
    if isinstance(value, type):
        if not is_module_of_library(value.__module__):
            yield from ((f"{name}.{key}", item) for key, item in list(attributes_of_class(value).items()) if _counts(key, item))
            yield from ((name, base) for base in value.__bases__)
        return
    if isinstance(value, list | tuple | deque | dict):
        entries = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        for row in range(0, len(entries), -(-len(entries) // _MOST_ITEMS) or 1):
            key, item = entries[row]
            named = type(key) in (int, str) and len(str(key)) <= _NAMED
            yield f"{name}[{key!r}]" if named else f"{name}[{row}]", item
            if not named:
                yield f"{name}: key {row}", key
    if isinstance(value, FunctionType | MethodType | partial):
        yield from inner_parts(name, value)
    if isinstance(value, MethodType | BuiltinMethodType):
        yield f"{name}: function", getattr(value, "__func__", value.__self__)
        return
    if isinstance(value, FunctionType):
        return
    yield f"{name}.__class__", type(value)
    yield from ((f"{name}.{slot.__name__}", item) for slot, item in slots_of(value))
    yield from ((f"{name}.{key}", item) for key, item in list(vars_of(value).items()))


def _counts(key: str, item: object) -> bool:
    """Whether samples may depend on an attribute of a class: on a value, or on a function that runs after the class is made."""
    if isinstance(item, FunctionType):
        return key not in ("__init__", "__new__")
    return not (key.startswith("__") or hasattr(type(item), "__get__") or key == "_abc_impl")


def _names_in(function: FunctionType) -> set[str]:
    """Return the names and texts in the code of a function of the user."""
    code = function.__code__
    if is_of_library(code.co_filename):
        return set()
    return {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
