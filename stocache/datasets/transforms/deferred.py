"""Stand in for an output that does not exist yet, and pass each operation on it to a recorder."""

import copy
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from stocache.datasets.transforms.part_transform import find_parts
from stocache.system.platform import here


def call(function: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


def call_ufunc(ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a function of numpy."""
    return getattr(ufunc, method)(*args, **kwargs)


class Deferred:
    """Takes the place of the result of a step that runs after the cache; see NOTE [ Deferred outputs ] in recording.py.

    Args:
        recorder: its ``record`` is called with a function and its arguments, and returns the result of that step; its ``need``
            is called where the value is needed.
        step: the number of the step.
    """

    __slots__ = ("_recorder_", "_step_")

    def __init__(self, recorder: object, step: int) -> None:
        object.__setattr__(self, "_recorder_", recorder)
        object.__setattr__(self, "_step_", step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("keys", "values", "items") and issubclass(self.__class__, dict):
            return functools.partial(_list_dict, self, name)
        return self._recorder_.record(getattr, (self, name))

    def __setattr__(self, name: str, value: object) -> None:
        self._recorder_.record(setattr, (self, name, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call."""
        return self._recorder_.record(call, (self, *args), kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._recorder_.record(type, (self,), answered=True)

    def __iter__(self) -> Iterator[Any]:
        cls = self.__class__
        if issubclass(cls, dict):
            return iter(_list_dict(self, "keys"))
        if not hasattr(cls, "__getitem__"):
            self._recorder_.need("the items")
        return iter([_item(self, number) for number in range(self._recorder_.record(len, (self,), answered=True))])

    def __contains__(self, key: object) -> bool:
        if not issubclass(self.__class__, dict):
            self._recorder_.need("the items")
        return key in _list_dict(self, "keys")

    @classmethod
    def __torch_function__(cls, function: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _recorder_of((args, kwargs)).record(function, args, kwargs or {})

    def __array_function__(self, function: object, types: Any, args: Any, kwargs: Any) -> Any:
        return self._recorder_.record(function, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._recorder_.record(call_ufunc, (ufunc, method, *inputs), kwargs)

    def __copy__(self) -> Any:
        return self._recorder_.record(copy.copy, (self,))

    def __deepcopy__(self, memo: object) -> Any:
        return self._recorder_.record(copy.deepcopy, (self,))


def _list_dict(output: Deferred, name: str) -> Any:
    """Return the keys, values or items of an output that is a dict."""
    keys = output._recorder_.record(tuple, (output,), answered=True)
    items = [] if name == "keys" else [(key, _item(output, key)) for key in keys]
    return {"keys": keys, "values": [value for _, value in items], "items": items}[name]


def _item(output: Deferred, key: object) -> Any:
    return output._recorder_.record(operator.getitem, (output, key))


def _is_deferred(part: object) -> bool:
    return type(part) is Deferred


def holds_deferred(value: object) -> bool:
    """Whether a value is, or contains, the output of a step."""
    return next(find_parts(value, _is_deferred), None) is not None


def _recorder_of(value: object) -> Any:
    """Return the recorder of an output somewhere in a value."""
    _, output = next(find_parts(value, _is_deferred))
    return output._recorder_


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem", "setitem", "delitem")
_ANSWERED = {"bool": bool, "int": int, "index": operator.index, "len": len}
_NEEDED = {
    "float": "a number", "complex": "a number", "hash": "a key", "str": "the text", "repr": "the text", "format": "the text",
    "array": "the array", "reduce_ex": "the value",
}  # fmt: skip


def _add_operators() -> None:
    """Define the operators of `Deferred`: those that are recorded, and those that need the value."""

    def recorded(function: object, swapped: bool = False) -> Any:
        def method(self: Deferred, *args: Any) -> Any:
            return self._recorder_.record(function, (*args, self) if swapped else (self, *args))

        return method

    def answered(function: object) -> Any:
        return lambda self: self._recorder_.record(function, (self,), answered=True)

    def needed(what: str) -> Any:
        def method(self: Deferred, *args: Any) -> Any:
            self._recorder_.need(what)

        return method

    for name in _ARITHMETIC:
        function = getattr(operator, f"__{name}__")
        setattr(Deferred, f"__{name}__", recorded(function))
        setattr(Deferred, f"__r{name}__", recorded(function, swapped=True))
        setattr(Deferred, f"__i{name}__", recorded(getattr(operator, f"__i{name}__")))
    for name in _OTHERS:
        setattr(Deferred, f"__{name}__", recorded(getattr(operator, f"__{name}__")))
    for name, function in _ANSWERED.items():
        setattr(Deferred, f"__{name}__", answered(function))
    for name, what in _NEEDED.items():
        setattr(Deferred, f"__{name}__", needed(what))


_add_operators()


def _conversions() -> Iterator[tuple[Any, str]]:
    """Yield the functions without a protocol such as ``__torch_function__``: by the module, and the name in it."""
    yield from ((torch, name) for name in ("as_tensor", "asarray", "from_numpy", "tensor"))
    yield from ((np, name) for name in ("array", "asarray", "ascontiguousarray"))
    if (images := sys.modules.get("PIL.Image")) is not None:
        yield images, "fromarray"


class RecordedConversions:
    """A ``with`` block in which conversions of `Deferred` to tensors, arrays and images are recorded, in any thread."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._originals: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._originals = [(module, name, *_recorded(module, name)) for module, name in _conversions()]

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def _put_back(self) -> None:
        for module, name, original, recorded in self._originals:
            if getattr(module, name) is recorded:
                setattr(module, name, original)

    def enter_child(self) -> None:
        """Reset the block in a forked child, which does not have the threads that may have been in it."""
        self._put_back()
        self.__init__()  # type: ignore[misc]


def _recorded(module: Any, name: str) -> tuple[Any, Any]:
    original = getattr(module, name)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if args and holds_deferred(args[0]):
            return _recorder_of(args[0]).record(original, args, kwargs)
        return original(*args, **kwargs)

    setattr(module, name, recorded)
    return original, recorded


recorded_conversions = RecordedConversions()
here.at_fork(after_in_child=recorded_conversions.enter_child)
