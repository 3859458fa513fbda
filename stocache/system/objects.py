"""Read attributes of the user's objects and classes, even if their own code would raise or answer to any name."""

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Subset, dataloader

_T = TypeVar("_T")

attributes_of_class: Callable[[Any], Any] = vars(type)["__dict__"].__get__  # past the hooks of its metaclass
mro: Callable[[Any], Any] = vars(type)["__mro__"].__get__
_flags: Callable[[Any], int] = vars(type)["__flags__"].__get__

_ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_OF_C = _ON_HEAP | 1 << 8 | 1 << 7  # and the flags of types that are immutable, or not made by calling them
_BUILTIN = type(len)
_ABSENT = object()


def attribute_of(value: object, name: str, default: object = None) -> Any:
    """Return an attribute of a user's object; the default if it is missing, or the object answers to any name."""
    try:
        found = getattr(value, name, default)
    except Exception:  # of a __getattr__ that raises a different error than AttributeError, or of a property
        return default
    if inspect.getattr_static(value, name, default) is default:
        with contextlib.suppress(Exception):
            return default if getattr(value, "_any_name", None) is not None else found
    return found


def has_state(value: object) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(attribute_of(value, "state_dict")) and callable(attribute_of(value, "load_state_dict"))


def takes_epoch(value: object) -> bool:
    """Whether a sampler or dataset has a method ``set_epoch``. Some classes answer any name with None."""
    return callable(attribute_of(value, "set_epoch"))


def rest_of(iterator: Iterator[_T]) -> Iterator[_T]:
    """Yield what an iterator has left. It is not asked for an iterator again: a sampler that is its own would begin anew."""
    with contextlib.suppress(StopIteration):
        while True:
            yield next(iterator)


def vars_of(value: object) -> dict[str, Any]:
    """Return the attributes that an object holds, besides slots, without asking its ``__getattr__``."""
    try:
        return vars(value) if type(value).__dictoffset__ else {}
    except TypeError:  # a class in C hides them, as SWIG's do
        return {}


def slots_of(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield the descriptor and the content of each of an object's slots that is set."""
    for base in mro(type(value)):
        attributes = attributes_of_class(base)
        if "__slots__" in attributes:
            for slot in list(attributes.values()):
                if isinstance(slot, MemberDescriptorType):
                    try:
                        yield slot, slot.__get__(value)
                    except AttributeError:  # it is not set
                        continue


def get_many_of(dataset: Any) -> Any:
    """Return the ``__getitems__`` that torch's loader asks for a batch; None if it asks for one sample at a time.

    It is asked even if a subclass has a ``__getitem__`` of its own. The method of a Subset asks the dataset in it.
    """
    if type(dataset) is Subset and "__getitems__" not in vars_of(dataset) and get_many_of(dataset.dataset) is None:
        return None
    return attribute_of(dataset, "__getitems__") or None


def newer_of(value: Any, name: str = "__getitems__", other: str = "__getitem__") -> Any:
    """Return the method ``name`` of an object; None if it has none, or a subclass has its own ``other``."""
    for names in (vars_of(value), *map(vars, type(value).__mro__)):
        if name in names:
            return getattr(value, name)
        if other in names:
            return None
    return None


def has_methods(value: object, cls: type, *names: str) -> bool:
    """Return whether methods of an object are the methods of ``cls``, and not of a subclass or its own."""
    return all(getattr(getattr(value, name, None), "__func__", None) is getattr(cls, name) for name in names)


def static_attribute(cls: type, name: str) -> Any:
    """Return an attribute of a class or of its bases, without running descriptors; None if it is missing."""
    for base in mro(cls):
        found = attributes_of_class(base).get(name, _ABSENT)
        if found is not _ABSENT:
            return found
    return None


def is_in_python(cls: type) -> bool:
    """Whether a class, without its bases, is written in Python."""
    return _flags(cls) & _OF_C == _ON_HEAP and type(attributes_of_class(cls).get("__new__")) is not _BUILTIN


def base_of(cls: type) -> Any:
    """Return the first base of a class, or itself, that is not written in Python."""
    return next(base for base in mro(cls) if not is_in_python(base))


def is_decoder(cls: type) -> bool:
    """Whether the objects of a class decode audio or video on demand: their state is behind a pointer."""
    return any(base.__name__ in _DECODERS or base.__module__.split(".")[0] == "torchcodec" for base in mro(cls))


_DECODERS = {"AudioDecoder", "VideoDecoder"}


if TYPE_CHECKING:
    from torch.utils.data.dataloader import DataLoader

    TorchLoader = DataLoader
else:
    TorchLoader = vars(dataloader)["DataLoader"]  # torch's, even if `use_everywhere` has put ours in its place


_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_of_library(path: str) -> bool:
    """Whether a file of code belongs to a library, to Python or to this package, not to the user."""
    return path.startswith((*_LIBRARIES, "<frozen ")) or "site-packages" in path


@functools.cache
def is_module_of_library(name: str) -> bool:
    """Whether the file of a module belongs to a library; False for a module without a file."""
    return is_of_library(str(getattr(sys.modules.get(name), "__file__", None)))


def is_of_python(path: str) -> bool:
    """Whether a file of code belongs to Python or to this package."""
    return path.startswith(_LIBRARIES) and "site-packages" not in path


@contextlib.contextmanager
def recorded_names(dataset: object) -> Iterator[set[str]]:
    """Yield a set that collects the attributes of the dataset that are read in the block.

    Use it in a child process: its class has a method of ours meanwhile.
    """
    cls, names, method = type(dataset), set[str](), "__getattribute__"
    original: Any = cls.__getattribute__

    def record(self: Any, name: str) -> Any:
        if self is dataset and not name.startswith("__"):
            names.add(name)
        return original(self, name)

    undo = partial(setattr, cls, method, original) if method in vars(cls) else partial(delattr, cls, method)
    with contextlib.suppress(TypeError):  # of a built-in class, whose objects have no attributes
        setattr(cls, method, record)
    try:
        yield names
    finally:
        with contextlib.suppress(TypeError):
            undo()
