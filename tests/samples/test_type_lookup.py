"""Names in stored data: what is found, and that looking runs nothing; see NOTE [ Names in data ]."""

import collections
import enum
import sys
import types
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from stocache.samples.pytree import Container, check_class, check_image
from stocache.samples.texts import TEXTS
from stocache.samples.type_lookup import (
    TORCH_DTYPES,
    Unresolved,
    check_shape,
    enum_class,
    factory_of,
    find_class,
    member_of,
    name_of,
    numpy_dtype,
    resolve,
    torch_dtype,
)

pytestmark = pytest.mark.quick
ran = []


@pytest.fixture(autouse=True)
def _runs_nothing():
    """None of the hooks below runs."""
    ran.clear()
    yield
    assert ran == []


class Meta(type):
    def __getattr__(cls, name):
        ran.append(name)
        return dict


class Outer(metaclass=Meta):
    class Inner:
        pass

    @property
    def value(self):
        ran.append("value")

    function = staticmethod(ran.append)


class Lazy(types.ModuleType):
    """As transformers has them: asking for an attribute imports a module."""

    def __getattribute__(self, name):
        ran.append(name)
        return super().__getattribute__(name)

    def __getattr__(self, name):
        ran.append(name)
        return dict


@pytest.fixture
def lazy(monkeypatch):
    module = Lazy("lazy_package")
    module.__dict__["Real"] = Outer
    monkeypatch.setitem(sys.modules, "lazy_package", module)
    ran.clear()


@pytest.mark.usefixtures("lazy")
def test_looking_up_runs_no_hooks():
    assert find_class(f"{__name__}:Outer.Inner") is Outer.__dict__["Inner"]
    assert find_class("lazy_package:Real") is Outer
    own = ("Outer.gone", "Outer.value", "Outer.function", "Outer.Inner.gone", "gone", "", "Outer.__class__", "ran.append")
    assert [find_class(f"{__name__}:{path}") for path in own] == [None] * len(own)
    assert [find_class(f"lazy_package:{path}") for path in ("gone", "Real.gone", "__class__", "__dict__")] == [None] * 4
    for name in ("os:system", "builtins:exec", "sys:modules", "os:environ", "numpy.random:seed", "os:path.join"):
        assert find_class(name) is None


def test_a_module_that_is_not_imported_is_named():
    with pytest.raises(Unresolved, match="Import antigravity first") as caught:
        resolve("antigravity:fly", False)
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


@pytest.mark.parametrize(
    "kind", ["mapping", "tuple", "namedtuple", "tensordict", "tensor", "image", "dataclass", "dict", "list", "x"]
)
def test_a_nature_is_real(kind):
    for cls in (Virtual, Disguised, int, type, object, types.ModuleType, print, None, 3):
        with pytest.raises(Unresolved, match="which is not of kind "):
            check_class(kind, cls, "name", (), ())


class Point(collections.namedtuple("Point", "x y")):
    def __new__(cls, *parts):
        ran.append("new")
        return super().__new__(cls, *parts)

    @classmethod
    def _make(cls, parts):
        ran.append("make")


def test_a_namedtuple_is_made_without_its_own_code():
    check_class("namedtuple", Point, "Point", ("x", "y"), ())
    made = Container("namedtuple", Point, ("x", "y")).unflatten_fn()([1, 2])
    assert (type(made), made.x, made.y) == (Point, 1, 2)
    with pytest.raises(ValueError, match="1 parts has 2 fields"):
        Container("namedtuple", Point, ("x", "y")).unflatten_fn()([1])


class Colour(enum.Flag):
    RED = 1
    BLUE = 2

    @classmethod
    def _missing_(cls, value):
        ran.append("missing")
        return cls.RED


class Plain(enum.IntFlag):
    RED = 1
    BLUE = 2


def test_members_are_looked_up_without_code_of_their_class():
    assert member_of(Colour, "RED") is Colour.RED
    with pytest.raises(ValueError, match=r"Colour has no member 'RED\|BLUE'"):
        member_of(Colour, "RED|BLUE")
    assert member_of(Plain, "RED|BLUE|8") == Plain(11)
    with pytest.raises(Unresolved, match="which is not an enum"):
        enum_class(f"{__name__}:Disguised", False)


def test_only_pythons_own_factories_are_called():
    for name in ("os:system", "builtins:exec", f"{__name__}:Outer", "builtins:type", "subprocess:Popen"):
        with pytest.raises(Unresolved, match=f"have the default_factory {name}. To call it, pass allow_pickle=True"):
            factory_of(name, False)
    assert factory_of("builtins:list", False) is list


def test_a_class_that_only_a_hook_of_its_module_finds_is_refused_when_it_is_written(monkeypatch):
    module = types.ModuleType("hooked")
    Hidden = type("Hidden", (), {"__module__": "hooked"})
    module.__dict__["__getattr__"] = {"Hidden": Hidden}.__getitem__
    monkeypatch.setitem(sys.modules, "hooked", module)
    with pytest.raises(ValueError, match="other processes do not find as hooked:Hidden"):
        name_of(Hidden)


# ---------------------------------------------------------------------------------------------------- dtypes


def deep(levels):
    descr = "<f4"
    for _ in range(levels):
        descr = [["a", descr]]
    return descr


NO_DTYPES = [
    *("|O8", "O", "object", "<O8", "f4,O", "(2,)f4", "float", "<V-1", "<U1e3", "<M8[x]", "|T16", "<f3", "p", "P", "", "<f4 "),
    [["a", "|O"]], (("a", "<f4"), ("b", (("c", "|O8"),))), [["a", "|O8", [2]]], [["a", [["b", "O", [1]]], [3]]],
    [["a", "<f4", [2**31, 2**31]]], [["a", "<f4", -1]], [["a", "<f4", [True]]], [["a", "<f4", "12"]],
    [["a"]], ["a", "<f4"], ("<f4", (2,)), [[1, "<f4"]], [[["t", "a", "b"], "<f4"]], [["a", "<f4"], ["a", "<f4"]],
    *(None, 1, {}, True, object, np.dtype("f4"), "|V2147483647"),
]  # fmt: skip


def test_a_dtype_that_is_not_of_plain_values_is_refused():
    for descr in NO_DTYPES:
        with pytest.raises(ValueError, match=r"dtype|field|shape|size|itemsize|dimension|name"):
            numpy_dtype(descr)
    for descr in (deep(200), deep(17), [[f"f{n}", "<f4"] for n in range(20_000)]):
        with pytest.raises(ValueError, match="more than 16 levels or 10000 fields"):
            numpy_dtype(descr)


def test_plain_dtypes_and_records_of_them_are_found():
    for descr in ("<f4", "|b1", ">i8", "<c16", "<U7", "|S3", "|V8", "<M8[25ns]", "<m8", deep(16)):
        assert numpy_dtype(descr).itemsize > 0
    assert numpy_dtype([["a", "<f4", [2, 3]], ["", "|V3"], [["t", "b"], "<i2"]]).itemsize == 24 + 3 + 2


def test_only_dtypes_of_torch_with_bytes_of_their_own_are_found():
    for name in ("qint8", "quint8", "quint4x2", "save", "nn", "Tensor", "float", "dtype", "", None, 1, ["uint8"]):
        with pytest.raises(ValueError, match="is not a dtype of torch that can be stored"):
            torch_dtype(name)
        if isinstance(name, str):
            with pytest.raises(ValueError, match=r"is not a dtype"):
                TEXTS["torch.dtype"].from_bytes(name.encode())
    assert all(torch_dtype(str(dtype)[6:]) is dtype for dtype in TORCH_DTYPES.values())
    assert {torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e5m2} <= set(TORCH_DTYPES.values())


# ---------------------------------------------------------------------------------------------------- other values


def test_what_is_not_a_shape_is_refused():
    for shape in ([-1], [1.0], [True], [2**63], [1] * 65, "ab", None, 3, [[1]], {1: 2}):
        with pytest.raises(ValueError, match=r"is not a (shape|size)"):
            check_shape(shape)
    assert check_shape([2**63 - 1, 0] + [1] * 62) == (2**63 - 1, 0, *[1] * 62)


@pytest.mark.parametrize(("mode", "size", "data"), [
    ("RGB", (2**30, 2**30), b"x"), ("L", (0, 2**31), b""), ("XYZ", (1, 1), b"x"), ("L", (-1, -1), b"x"), ("L", (True, 1), b"x"),
    ("L", (2, 2), b"xxx"), ("L", (1.0, 1), b"x"), (None, (1, 1), b"x"), ("L", 3, b"x"), ("L", (1, 1, 1), b"x"),
])  # fmt: skip
def test_an_image_has_the_pixels_that_it_claims(mode, size, data):
    with pytest.raises(ValueError, match=r"an image|is not a size"):
        check_image([{}, mode, size, None, data])


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "Europe/../../x", "", "no/such/zone", "tzdata", "a.b/c"])
def test_a_time_zone_is_one_that_is_here(key):
    before = set(sys.modules)
    with pytest.raises(ValueError, match="is not a datetime"):
        TEXTS["datetime"].from_bytes(f'["2026-01-01T00:00:00", 0, "{key}"]'.encode())
    assert set(sys.modules) == before
