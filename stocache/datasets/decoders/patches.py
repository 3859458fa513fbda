"""Put functions in the place of decoders, by all names that modules have for them, and take them back."""

import atexit
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from stocache.datasets.decoders.table import DECODERS
from stocache.system.loading.children import hold_to_fork

_lock = threading.RLock()
_placed: list[tuple[Any, ...]] = []  # an owner, a name; what was there, what is there now, whether it was its own
_known: set[int] = set()  # numbers of the decoders that are in place
_modules = 0  # how many were imported at the last look
_serve: Callable[..., Any] | None = None

hold_to_fork(_lock)


def install(serve: Callable[..., Any]) -> None:
    """Have ``serve`` called in place of the decoders whose libraries are imported."""
    global _serve
    with _lock:
        _serve = serve
        install_imported()


def install_imported() -> None:
    """If decoders are replaced, replace those too whose libraries were imported since."""
    global _modules
    if _serve is None or len(sys.modules) == _modules:
        return
    with _lock:
        if "PIL.Image" in sys.modules:  # which imports them with the first image
            importlib.import_module("PIL.TiffImagePlugin")
        _modules = len(sys.modules)
        functions: dict[int, tuple[Any, Any]] = {}  # by the id of what was there
        for number, row in enumerate(DECODERS):
            holder, _, name = row.name.rpartition(".")
            module = sys.modules.get(row.module)
            owner = getattr(module, holder, None) if holder else module
            true = getattr(owner, name, None)
            if number not in _known and true is not None:
                _known.add(number)
                decode = _replacement(number, true)
                _place(owner, name, true, decode)
                if not holder:
                    functions[id(true)] = true, decode
        for module in list(sys.modules.values()) if functions else ():
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in functions:
                    _place(module, name, *functions[id(value)])


def _replacement(number: int, true: Any) -> Any:
    @functools.wraps(true)
    def decode(*args: Any, **kwargs: Any) -> Any:
        serve = _serve
        return true(*args, **kwargs) if serve is None else serve(number, true, args, kwargs)

    return decode


def _place(owner: Any, name: str, true: Any, decode: Any) -> None:
    is_own = name in vars(owner)
    setattr(owner, name, decode)
    _placed.append((owner, name, true, decode, is_own))


def uninstall() -> None:
    """Take the functions back, unless others have replaced them since: these may call ours, which then only decode."""
    global _serve, _modules
    with _lock:
        for owner, name, true, decode, is_own in reversed(_placed):
            if vars(owner).get(name) is decode:
                if is_own:
                    setattr(owner, name, true)
                else:
                    delattr(owner, name)
        _placed.clear()
        _known.clear()
        _serve, _modules = None, 0


atexit.register(uninstall)
