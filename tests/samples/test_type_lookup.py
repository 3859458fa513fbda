"""Names in stored data: what is found, and that looking runs nothing; see NOTE [ Names in data ]."""

import collections
import dataclasses
import enum
import sys
import types
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from stocache import SampleError
from stocache.samples.leaves import type_lookup
from stocache.samples.leaves.texts import TEXTS
from stocache.samples.leaves.type_lookup import TORCH_DTYPES, Unresolved, find_class, member_of, numpy_dtype, torch_dtype
from stocache.samples.pytree import Container, check_class, check_image
from stocache.samples.record_encoder import EncodedSample, write_treedef

ran = []


@pytest.fixture(autouse=True)
def _runs_nothing(monkeypatch):
    """None of the hooks below runs."""
    module = Lazy("lazy_package")
    module.__dict__["Real"] = Outer
    monkeypatch.setitem(sys.modules, "lazy_package", module)
    ran.clear()
    yield
    assert ran == []


class Meta(type):
    def __getattr__(cls, name):
        ran.append(name)
        return dict


class Outer(metaclass=Meta):
    Inner = type("Inner", (), {})
    value = property(lambda self: ran.append("value"))
    function = staticmethod(ran.append)


class Lazy(types.ModuleType):
    """As transformers has them: asking for an attribute imports a module."""

    def __getattribute__(self, name):
        ran.append(name)
        return super().__getattribute__(name)

    def __getattr__(self, name):
        ran.append(name)
        return dict


def test_looking_up_runs_no_hooks_and_imports_nothing():
    assert find_class(f"{__name__}:Outer.Inner") is Outer.__dict__["Inner"]
    assert find_class("lazy_package:Real") is Outer
    own = ("Outer.gone", "Outer.value", "Outer.function", "Outer.Inner.gone", "gone", "", "Outer.__class__", "ran.append")
    lazy = [f"lazy_package:{path}" for path in ("gone", "Real.gone", "__class__", "__dict__")]
    others = ["os:system", "builtins:exec", "sys:modules", "os:environ", "os:getcwd", "numpy.random:seed", "os:path.join"]
    for name in [*(f"{__name__}:{path}" for path in own), *lazy, *others]:
        assert find_class(name) is None
    with pytest.raises(Unresolved, match="Import antigravity first") as caught:
        find_class("antigravity:fly")
    assert caught.value.module == "antigravity"
    assert "antigravity" not in sys.modules


class Virtual:
    """Is a Mapping and a tuple to those who ask for it only."""

    __class__ = tuple
    _fields = ()


Mapping.register(Virtual)


class Sly(Meta):
    def __instancecheck__(cls, instance):
        ran.append("instancecheck")
        return True

    def __subclasscheck__(cls, other):
        ran.append("subclasscheck")
        return True

    __mro__ = (tuple, dict, torch.Tensor, enum.Enum)


class Disguised(metaclass=Sly):
    __dataclass_fields__ = ()


def test_a_nature_is_real():
    for kind in ("tuple", "namedtuple", "tensor", "image", "dataclass", "dict", "list", "x"):
        for cls in (Virtual, Disguised, int, type, object, types.ModuleType, print, None, 3):
            with pytest.raises(Unresolved, match="which is not of kind "):
                check_class(kind, cls, "name", ())
    with pytest.raises(Unresolved, match="which is not an enum"):
        type_lookup.enum_class(f"{__name__}:Disguised")


class Point(collections.namedtuple("Point", "x y")):
    def __new__(cls, *parts):
        ran.append("new")
        return super().__new__(cls, *parts)

    @classmethod
    def _make(cls, parts):
        ran.append("make")


class Colour(enum.Flag):
    RED, BLUE = 1, 2

    @classmethod
    def _missing_(cls, value):
        ran.append("missing")
        return cls.RED


def test_dataclasses_namedtuples_and_members_are_made_without_their_own_code():
    cls = dataclasses.make_dataclass("Guarded", ["x"], namespace={"y": property(None, lambda self, value: ran.append("set"))})
    check_class("dataclass", cls, "name", ("x", "another"))
    for key in ("y", "__class__", "__dict__", 1):
        with pytest.raises(Unresolved, match=rf"the parts \('x', '?{key}'?\), which it cannot have here"):
            check_class("dataclass", cls, "name", ("x", key))
    check_class("namedtuple", Point, "Point", ("x", "y"))
    make = Container("namedtuple", Point, ("x", "y")).unflatten_fn()
    assert (type(make([1, 2])), *make([1, 2])) == (Point, 1, 2)
    with pytest.raises(Unresolved, match=r"Point with the parts \('x',\), which it cannot have here"):
        check_class("namedtuple", Point, "Point", ("x",))
    assert member_of(Colour, "RED") is Colour.RED
    with pytest.raises(ValueError, match=r"Colour has no member 'RED\|BLUE'"):
        member_of(Colour, "RED|BLUE")
    plain = enum.IntFlag("Plain", "RED BLUE")
    assert member_of(plain, "RED|BLUE|8") == plain(11)


def test_a_class_that_only_a_hook_finds_is_not_written(monkeypatch):
    module, Hidden = types.ModuleType("hooked"), type("Hidden", (), {"__module__": "hooked"})
    module.__dict__["__getattr__"] = {"Hidden": Hidden}.__getitem__
    monkeypatch.setitem(sys.modules, "hooked", module)
    with pytest.raises(ValueError, match="other processes do not find as hooked:Hidden"):
        type_lookup.name_of(Hidden)


NO_DTYPES = [
    *("|O8", "O", "object", "<O8", "f4,O", "(2,)f4", "float", "<V-1", "<U1e3", "<M8[x]", "|T16", "<f3", "p", "P", "", "<f4 "),
    (("a", "|O"),), (("a", "<f4"), ("b", (("c", "|O8"),))), (("a", "|O8", (2,)),), (("a", (("b", "O", (1,)),), (3,)),),
    (("a", "<f4", (2**31, 2**31)),), (("a", "<f4", -1),), (("a", "<f4", (True,)),), (("a", "<f4", "12"),), (("a", "<f4", "O"),),
    (("a",),), ("a", "<f4"), ("<f4", (2,)), ((1, "<f4"),), ((("t", "a", "b"), "<f4"),), (("a", "<f4"), ("a", "<f4")),
    (("a", "<i8", (2**30,)),), *(None, 1, {}, True, object, np.dtype("f4"), "|V2147483647", [("a", "<f4")]),
]  # fmt: skip


def deep(levels):
    return (("a", deep(levels - 1)),) if levels else "<f4"


def test_only_dtypes_of_plain_values_are_found():
    for descr in NO_DTYPES:
        with pytest.raises((ValueError, TypeError), match=r"is not a dtype|is a dtype of objects, or of more than|unhashable"):
            numpy_dtype(descr)
    for descr in ("<f4", "|b1", ">i8", "<c16", "<U7", "|S3", "|V8", "<M8[25ns]", "<m8", deep(16)):
        assert numpy_dtype(descr).itemsize > 0
    assert numpy_dtype((("a", "<f4", (2, 3)), ("", "|V3"), (("t", "b"), "<i2"))).itemsize == 24 + 3 + 2
    with pytest.raises(SampleError, match="cannot be written down"):  # Python parses fewer levels
        write_treedef(EncodedSample(np.zeros(1, numpy_dtype(deep(150)))).treedef)


def test_only_dtypes_of_torch_with_bytes_of_their_own_are_found():
    for name in ("qint8", "quint8", "quint4x2", "save", "nn", "Tensor", "float", "dtype", "", None, 1, ["uint8"]):
        with pytest.raises(ValueError, match="is not a dtype of torch that can be stored"):
            torch_dtype(name)
    with pytest.raises(ValueError, match=r"is not a dtype"):
        TEXTS["torch.dtype"].from_bytes(b"qint8")
    assert all(torch_dtype(str(dtype)[6:]) is dtype for dtype in TORCH_DTYPES.values())
    assert {torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e5m2} <= set(TORCH_DTYPES.values())


def test_images_are_of_sizes_that_can_be_and_time_zones_are_here():
    for mode, size, data in (
        ("RGB", (2**30, 2**30), b"x"), ("L", (0, 2**31), b""), ("XYZ", (1, 1), b"x"), ("L", (-1, -1), b"x"),
        ("L", (True, 1), b"x"), ("L", (2, 2), b"xxx"), ("L", (1.0, 1), b"x"), (None, (1, 1), b"x"), ("L", (1,), b"x"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"an image|is not a size"):
            check_image([{}, mode, size, None, data])
    before = set(sys.modules)
    for key in ("../../etc/passwd", "/etc/passwd", "Europe/../../x", "", "no/such/zone", "tzdata", "a.b/c"):
        with pytest.raises(ValueError, match="is not a datetime"):
            TEXTS["datetime"].from_bytes(f'["2026-01-01T00:00:00", 0, "{key}"]'.encode())
    assert set(sys.modules) == before
