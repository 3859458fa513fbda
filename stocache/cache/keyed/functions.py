"""Cache the results of functions and methods: `cached` and `cache_method`.

NOTE [ What a result depends on ]
    The key of a result is made of the arguments, with their types and with defaults applied. A method reads attributes of its
    object and its class, too. A child process makes the first call, and records which ones. These enter the key: small values
    themselves, plain data (lists, dicts, arrays, tensors) by a digest, which is made again if a different object or length
    takes its place. A method that reads anything else is not cached, because nobody would notice that it has changed. ``key=``
    takes the place of all that.

    A function that draws random numbers, or sets attributes of its object, does more than return a result: it is not cached. As
    samples are (NOTE [ The audit ]), results are compared: the first that a process would serve, and more as long as that takes
    a small share of the time. If one differs, a flag that all processes read stops all of them. Global variables are noticed by
    that alone. So is what a function closes over. If that is more than plain values, processes that are not forked from one
    another share no results, because they may close over something else.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stocache.cache.keyed.cache import KeyedCache
from stocache.cache.keyed.keys import key_of
from stocache.cache.options import AuditOptions, CacheOptions, shows_options, take_options
from stocache.cache.stats import MISSING, CacheStats
from stocache.errors import CacheKeyError, DatasetError
from stocache.shm.job import job_of_process_tree
from stocache.system.describe import describe, difference
from stocache.system.generators import Kept, in_worker_thread
from stocache.system.hashing import callable_text, checksum, code_text
from stocache.system.loading.children import in_children
from stocache.system.objects import recorded_names, static_attribute, vars_of

logger = logging.getLogger("stocache")

_F = TypeVar("_F", bound=Callable[..., Any])

_PASS_KEY = "Pass key=, a function of the same arguments that returns what the result depends on"
_PATIENCE_S = 60.0  # for a call in a child process
_LONGEST = 1000  # characters of a text that is a small value
_MOST_DIGESTS = 16  # of attributes that are kept, with their values
_OPTIONS = "name", "persist", "fingerprint", "codec", "allow_pickle"
_SIZED = (list, tuple, dict, set, frozenset, bytearray)
_DATA = (*_SIZED, np.ndarray, Tensor)


@shows_options(*_OPTIONS, "audit")
def cached(
    size_limit_gib: float | str | Callable[..., Any] = "auto",
    *,
    files: bool = False,
    key: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Cache the results of a function or method in shared memory, once for all processes that this one starts.

        @stocache.cached("8GiB", files=True)
        def decode(path, number): ...

    Each set of arguments is computed once: by one process, while others that want it wait. The arguments must be keys of a
    `KeyedCache`; a call with others is not cached. The attributes that a method reads are part of the key. Results are what a
    `RaggedCache` can store, and come back equal. A function is not cached, with one warning, if it draws random numbers, sets
    attributes of its object, or returns something else for the same arguments.

    Args:
        size_limit_gib, name, persist, fingerprint, codec, allow_pickle: as for `KeyedCache`. Ranks and other jobs share the
            results by a name. Without a name, the processes that this one forks or spawns share them.
        files: True adds the size and the time of change of each file that an argument names to the key.
        key: called with the same arguments; returns the key, and nothing else is part of it.
        audit: the share of the time for computing results that are cached as well, to compare them. The first that each process
            would serve is compared in any case; with 0 none is.

    Returns:
        A decorator; or for ``@cached`` without parentheses, the cached function. It has ``cache`` (the `KeyedCache`),
        ``stats()`` and ``close()``, and ``__wrapped__`` is the function itself.

    Raises:
        LimitError, CodecError, CacheNameError, MismatchError, SegmentError, BusyError: as `KeyedCache`.

    Examples:
        >>> @cached("1MB")
        ... def decode(path, number):
        ...     return torch.full((2,), number)
        >>> [decode("a.mp4", number).tolist() for number in (3, 4, 3)]
        [[3, 3], [4, 4], [3, 3]]
        >>> decode.stats().filled, decode.stats().hits
        (2, 1)
        >>> decode.close()
    """
    if callable(size_limit_gib) or isinstance(size_limit_gib, staticmethod | classmethod):
        return cached()(size_limit_gib)
    names = {CacheOptions: _OPTIONS, AuditOptions: ("audit",)}
    taken, checks = take_options("cached", [size_limit_gib], options, names)

    def decorate(function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        code = getattr(function, "__code__", None)
        identity = f"{taken.fingerprint or ''} {callable_text(function)} {code and checksum(code_text(code).encode())}"
        is_shared = taken.name is not None or _is_described(function)  # else another process may close over something else
        own = dataclasses.replace(taken, fingerprint=identity if is_shared else None, share_ranks=is_shared)
        cache = KeyedCache.from_options(own, job_of_process_tree() if is_shared else None)
        return CachedFunction(function, cache, files, key, checks.audit)

    return decorate


def cache_method(obj: Any, name: str, size_limit_gib: float | str = "auto", **options: Any) -> "CachedFunction":
    """Cache a method of one object, say ``load_image`` of a dataset of a library. The class is not changed.

        method = stocache.cache_method(dataset, "load_image", "8GiB")

    Do it before workers start: they share what is cached then, forked or spawned. A pickled or deep copy of the object has a
    cached method of its own, over the same results; one of `copy.copy` has the cached method of the original, so make it
    before.

    Args:
        obj: the object, which gets an attribute with the method's name.
        name: of the method.
        size_limit_gib, options: as for `cached`.

    Returns:
        The cached method. ``close()`` puts the object's own method back, and releases the memory.

    Raises:
        DatasetError: the object has no such method, or no attribute can be set.
        LimitError, CodecError, CacheNameError, MismatchError, SegmentError, BusyError: as `KeyedCache`.

    Examples:
        >>> class Photos(Dataset):
        ...     def load_image(self, idx):
        ...         return torch.full((2,), idx)
        >>> dataset = Photos()
        >>> method = cache_method(dataset, "load_image", "1MB")
        >>> dataset.load_image(3), dataset.load_image(3), method.stats().filled
        (tensor([3, 3]), tensor([3, 3]), 1)
        >>> method.close()
    """
    function = inspect.getattr_static(type(obj), name, None)
    kind = type(obj).__name__
    if not inspect.isfunction(function):
        raise DatasetError(f"{kind} has no method {name!r} that is written in Python.")
    own = vars_of(obj).get(name)
    if own is not None:
        raise DatasetError(
            f"{kind}.{name} is an attribute of the object itself. If it is cached already, close that first; else decorate it "
            f"with stocache.cached."
        )
    method: CachedFunction = cached(size_limit_gib, **options)(function)
    method.bind(obj, name)
    try:
        setattr(obj, name, method)
    except AttributeError as error:
        method.close()
        raise DatasetError(f"{kind} takes no attribute {name!r}: {error}. Decorate the method with stocache.cached.") from None
    return method


class CachedFunction:
    """A function whose results are cached, or a method: of all objects of its class, or of one."""

    thread_safe = True  # worker threads share it; that of one object is copied with the object
    _object: Any = None  # of a method of one object
    _name = ""  # of the attribute, if it is a method

    def __init__(self, function: Callable[..., Any], cache: KeyedCache[Any, Any], files: bool, key: Any, audit: float) -> None:
        self.cache = cache
        self._function, self._files, self._key, self._audit = function, files, key, audit
        # By class, once it was called: the names that the method reads of its object, and whether they are values. Others are
        # functions of the class, of which an object may have others
        self._reads: dict[str, list[tuple[str, bool]]] = {}
        self._begin()

    def _begin(self) -> None:
        functools.update_wrapper(self, self._function)
        try:
            self._signature = inspect.signature(self._function, follow_wrapped=False)
        except ValueError:  # of a builtin function
            self._signature = inspect.signature(lambda *args, **kwargs: None)
        kinds = {parameter.kind for parameter in self._signature.parameters.values()}
        self._plain = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._digests: dict[tuple[str, int], tuple[Any, int, str]] = {}  # by attribute and object: value, length, digest
        self._next_s: dict[int, float] = {}  # by process: when to compare the next result
        self._shown = getattr(self._function, "__qualname__", repr(self._function))
        self._warned = False

    def bind(self, obj: object, name: str) -> None:
        """Make this a method of one object, until it is closed."""
        self._object, self._name, self.thread_safe = obj, name, False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: object, cls: type | None = None) -> Any:
        return self if obj is None else MethodType(self, obj)

    def __getstate__(self) -> dict[str, Any]:
        names = "cache", "_function", "_files", "_key", "_audit", "_object", "_name", "thread_safe", "_reads"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A function of a module is found there by its name, which this object has taken
        found: Any = sys.modules.get(self._function.__module__)
        for name in self._function.__qualname__.split("."):
            found = getattr(found, name, None)
        return self._function.__qualname__ if found is self else super().__reduce_ex__(protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for the arguments: from the cache, or from the function, which is then cached."""
        if self._object is not None:
            args = self._object, *args
        if self.cache.closed or self.cache.stopped:
            return self._function(*args, **kwargs)
        try:
            key = self._key_of(args, kwargs)
            found = None if key is None else key_of(key)
        except CacheKeyError as error:
            if not self._warned:
                self._warned = True
                logger.warning("a call of %s is not cached: %s", self._shown, error)
            return self._function(*args, **kwargs)
        if found is None:
            return self._first_call(args, kwargs)
        value = self.cache.hit(found, copy=True)
        if value is MISSING:
            return self.cache.get_or_load(key, lambda _: self._computed(args, kwargs), strict=False)
        is_due = self._audit and time.monotonic() >= self._next_s.get(os.getpid(), 0.0)
        return self._compared(value, args, kwargs) if is_due else value

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the key of a call; None if the attributes that the method reads are not known yet."""
        if self._key is not None:
            return (self._key(*args, **kwargs),)
        if kwargs or not self._plain or len(args) != len(self._signature.parameters):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args if self._plain else (*bound.args, tuple(bound.kwargs.items()))
        attributes: tuple[Any, ...] = ()
        if self._name:
            obj, kind, own = args[0], _kind_of(args[0]), vars_of(args[0])
            if kind not in self._reads:
                return None
            names = [name for name, is_value in self._reads[kind] if is_value or name in own]
            attributes, args = (kind, *((name, self._attribute(obj, name)) for name in names)), args[1:]
        return tuple(map(_typed, args)), attributes, tuple(map(_stamp, args)) if self._files else ()

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find out in a child process which attributes the method reads, and call it."""
        obj = args[0]
        try:
            with contextlib.closing(in_children([partial(self._watched, args, kwargs)], obj, _PATIENCE_S)) as found:
                reads, changed = next(found)
        except Exception as error:  # of the method; or no child process can run it
            value = self._function(*args, **kwargs)
            self._refuse(f"no child process can find out which attributes it reads ({error!r:.200}). {_PASS_KEY}")
            return value
        if changed:
            self._refuse(f"it sets {changed[0]!r} of its object")
        names = [(name, _is_value(obj, name)) for name in reads if vars_of(obj).get(name) is not self]
        try:
            for name in (name for name, is_value in names if is_value):
                self._attribute(obj, name)
        except CacheKeyError as error:
            self._refuse(str(error))
        self._reads[_kind_of(obj)] = names
        return self(*args[self._object is not None :], **kwargs)

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[list[str], list[str]]]:
        """Call the method. Yield the names of the attributes that it reads and that it changes. For a child."""
        obj, before = args[0], _marks(args[0])
        with recorded_names(obj) as reads:
            self._function(*args, **kwargs)
        yield sorted(reads), [name for name, mark in _marks(obj).items() if before.get(name) != mark]

    def _attribute(self, obj: Any, name: str) -> Any:
        """Return what stands for an attribute in the key. Raises CacheKeyError."""
        value = getattr(obj, name, None)
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type | BuiltinFunctionType) or (isinstance(value, FunctionType) and not value.__closure__):
            return callable_text(value)
        if not isinstance(value, _DATA) and not (isinstance(value, str | bytes) and len(value) > _LONGEST):
            try:
                key_of(value)
            except CacheKeyError:
                kind = type(value).__name__
                raise CacheKeyError(
                    f"it reads {name!r}, of type {kind}, whose changes nobody would notice. {_PASS_KEY}"
                ) from None
            return value
        length = getattr(value, "nbytes", None) or len(value)
        known = self._digests.get((name, id(obj)))
        if known is None or known[0] is not value or known[1] != length:
            if len(self._digests) >= _MOST_DIGESTS:
                self._digests.clear()
            known = value, length, checksum(repr(describe(value, strides=False)).encode("utf-8", "surrogatepass"))
            self._digests[name, id(obj)] = known
        return known[2]

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, and notice if it draws random numbers."""
        monitor = None if in_worker_thread() else Kept()  # other threads draw from the same generators meanwhile
        value = self._function(*args, **kwargs)
        if monitor is not None and monitor.drawn():
            self._refuse("it draws random numbers")
        return value

    def _compared(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a result that would be served, after comparing it with a new one; the new one if they differ."""
        began = time.monotonic()
        fresh = self._computed(args, kwargs)
        place = difference(describe(value, strides=False), describe(fresh, strides=False))
        now = time.monotonic()
        self._next_s[os.getpid()] = now + (now - began) / self._audit
        if place is None:
            return value
        self._refuse(f"its result for the same arguments is another one now ({place:.300})")
        return fresh

    def _refuse(self, reason: str) -> None:
        """Serve no results from now on, in any process."""
        if not self.cache.closed and not self.cache.stopped:
            self.cache.stop()
            logger.warning("%s is not cached: %s.", self._shown, reason)

    def stats(self) -> CacheStats:
        """Return the counts of its cache, over all processes."""
        return self.cache.stats()

    def close(self) -> None:
        """Release the memory; the function runs uncached from now on. An object gets its own method back. Twice is fine."""
        if self._object is not None and vars_of(self._object).get(self._name) is self:
            delattr(self._object, self._name)
        self.cache.close()

    def __enter__(self) -> "CachedFunction":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _kind_of(value: object) -> str:
    """Return the name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}".replace("__mp_main__", "__main__")


def _is_value(obj: object, name: str) -> bool:
    """Whether an attribute holds a value: of the object, in a slot, or of its class; not a method or property."""
    found = static_attribute(type(obj), name)
    return name in vars_of(obj) or isinstance(found, MemberDescriptorType) or not hasattr(type(found), "__get__")


def _is_described(function: Any) -> bool:
    """Return whether `callable_text` says all that a function has bound: nothing but plain values."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    defaults, named = getattr(function, "__defaults__", None) or (), getattr(function, "__kwdefaults__", None) or {}
    bound = [*cells, *defaults, *named.values()]
    return all(isinstance(value, bool | int | float | str | bytes | type | None) for value in bound)


def _typed(value: Any) -> Any:
    """Return what stands for an argument in the key: with its type, if a function may distinguish it from what it equals."""
    kind = type(value)
    if kind in (str, int, bool, float, bytes, type(None)):
        return value
    if isinstance(value, tuple):
        parts = tuple(map(_typed, value))
        return parts if kind is tuple else (_kind_of(value), parts)
    is_dtype = isinstance(value, np.dtype | torch.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return _kind_of(value), repr(value) if is_dtype else value


def _stamp(value: object) -> Any:
    """Return the size and the time of change of the file that an argument names; None if it names none."""
    if isinstance(value, tuple):
        return tuple(map(_stamp, value))
    if isinstance(value, str | bytes | os.PathLike):
        try:
            status = os.stat(value)
        except (OSError, ValueError):
            return None
        return status.st_size, status.st_mtime_ns
    return None


def _marks(obj: object) -> dict[str, Any]:
    """Return for each attribute of an object which value it is, and how long."""
    items = list(vars_of(obj).items())  # other threads may set some meanwhile
    return {name: (id(value), len(value) if isinstance(value, _SIZED) else 0) for name, value in items}
