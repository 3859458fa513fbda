"""Find what could be cached below samples that are random: a call that takes most of the time, and gives the same each time."""

import contextlib
import inspect
import sys
import time
from collections import defaultdict
from types import FrameType
from typing import Any, NamedTuple

from stocache.cache.keyed.keys import key_of
from stocache.errors import CacheKeyError
from stocache.system.describe import describe
from stocache.system.generators import is_of_library

_LEAST = 0.3  # the share of the time of a sample that a call must take to be worth a hint
_MOST = 64  # sets of arguments of a call
_LEAST_S = 1e-4  # below which a call costs less than its cache


class _Name(NamedTuple):
    """How a call is written: of a method of the dataset, or of a function of the user's modules."""

    name: str
    is_method: bool


class CallRecorder:
    """Records, in ``with`` blocks that load one sample each, the calls of methods of a dataset and of the user's functions."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._open: list[tuple[FrameType, _Name, Any, float]] = []
        self._whole_s = 0.0  # of the first block
        self._seconds: defaultdict[_Name, float] = defaultdict(float)
        self._results: defaultdict[_Name, defaultdict[Any, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def __enter__(self) -> "CallRecorder":
        self._began, self._before = time.perf_counter(), sys.getprofile()
        if self._before is None:  # else another profiler is at work, which may not be a function of Python
            sys.setprofile(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is None:
            sys.setprofile(None)
        self._open.clear()
        self._whole_s = self._whole_s or time.perf_counter() - self._began

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call or its return: the profile function of Python."""
        if event == "call" and (name := self._name_of(frame)) is not None:
            code = frame.f_code
            names = code.co_varnames[name.is_method : code.co_argcount + code.co_kwonlyargcount]
            with contextlib.suppress(CacheKeyError):
                key = key_of(tuple(frame.f_locals[each] for each in names))
                self._open.append((frame, name, key, time.perf_counter()))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, name, key, began = self._open.pop()
            if not self._whole_s and all(each[1] != name for each in self._open):  # it does not call itself
                self._seconds[name] += time.perf_counter() - began
            if len(self._results[name]) < _MOST:
                self._results[name][key].append(argument)

    def _name_of(self, frame: FrameType) -> _Name | None:
        code = frame.f_code
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR) or code.co_name[0] == "_":
            return None
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if first is self._dataset:
            method = inspect.getattr_static(type(first), code.co_name, None)
            return _Name(code.co_name, True) if getattr(method, "__code__", None) is code else None
        function = frame.f_globals.get(code.co_name)
        is_own = getattr(function, "__code__", None) is code and not is_of_library(code.co_filename)
        return _Name(code.co_name, False) if is_own else None

    def hint(self) -> str:
        """Return which call could be cached, and how, as a sentence without its end; "" if none took long and was steady."""
        steady = [name for name, results in self._results.items() if _is_steady(results)]
        name = max(steady, key=self._seconds.__getitem__, default=None)
        seconds = 0.0 if name is None else self._seconds[name]
        if name is None or seconds < max(_LEAST * self._whole_s, _LEAST_S):
            return ""
        remedy = f"stocache.cache_method(dataset, {name.name!r})" if name.is_method else "decorate it with @stocache.cached()"
        took = f"{1e3 * seconds:.3g} of {1e3 * self._whole_s:.3g} ms"
        return f"But {name.name}() takes {took} and is the same each time, so it can be cached: {remedy}"


def _is_steady(results: dict[Any, list[Any]]) -> bool:
    """Return whether a call gave the same for the same arguments, and was made with some of them more than once."""
    repeated = [found for found in results.values() if len(found) > 1]
    described = [[describe(each, strides=False) for each in found] for found in repeated]
    return bool(repeated) and all(each == found[0] for found in described for each in found[1:])
