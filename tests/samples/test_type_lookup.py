"""Names in stored data: what is found, and that looking runs nothing; see NOTE [ Names in data ]."""

import collections
import dataclasses
import enum
import itertools
import sys
import types

import pytest

from stocache import SampleError, SegmentError
from stocache.samples.leaves.texts import TEXTS
from stocache.samples.leaves.type_lookup import find_class, member_of, numpy_dtype, torch_dtype
from stocache.samples.pytree import Container, check_image
from stocache.samples.record_decoder import reader_of_cache
from stocache.samples.record_encoder import EncodedSample, pack_integers, write_treedef

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


def read(treedef, allow_pickle=False):
    return reader_of_cache(treedef.encode(), allow_pickle)


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

    def __getattr__(self, name):
        ran.append(name)
        return dict


NAMES = [
    *(f"{__name__}:{name}" for name in ("ran", "ran.append", "Outer.gone", "Outer.value", "Outer.function", "")),
    *("lazy_package:gone", "lazy_package:Real.gone", "builtins:type", "builtins:exec", "os:environ", "os:system"),
]  # fmt: skip
KINDS = "tuple", "namedtuple", "tensor", "image", "dataclass", "dict", "list", "x"


def test_a_class_is_of_its_real_kind_and_looking_it_up_runs_no_hooks_and_imports_nothing():
    assert find_class(f"{__name__}:Outer.Inner") is Outer.__dict__["Inner"]
    assert find_class("lazy_package:Real") is Outer
    for kind, name in itertools.product(KINDS, NAMES):
        with pytest.raises(SegmentError, match=f"made of {name}, which is not of kind {kind}"):
            read(f"('in', '{kind}', '{name}', (0, 1), (), (('str',), ('str',)))")
    for name in NAMES:
        with pytest.raises(SegmentError, match=f"have members of {name}, which is not an enum"):
            read(f"('enum', '{name}')")


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


@dataclasses.dataclass
class Guarded:
    x: int
    y = property(None, lambda self, value: ran.append("set"))


def test_a_class_has_no_other_parts_than_its_own_and_its_own_code_does_not_run():
    for kind, cls, keys in (
        ("dataclass", Guarded, ("x", "y")), ("dataclass", Guarded, ("x", "__class__")), ("namedtuple", Point, ("y", "x")),
    ):  # fmt: skip
        with pytest.raises(SegmentError, match=r"with the parts .*, which it cannot have here"):
            read(repr(("in", kind, f"{__name__}:{cls.__name__}", keys, (), (("str",),) * len(keys))))
    point = Container("namedtuple", Point, ("x", "y")).unflatten_fn()([1, 2])
    assert (type(point), *point) == (Point, 1, 2)
    plain = enum.IntFlag("Plain", "RED BLUE")
    assert (member_of(Colour, "RED"), member_of(plain, "RED|BLUE|8")) == (Colour.RED, plain(11))
    with pytest.raises(ValueError, match=r"Colour has no member 'RED\|BLUE'"):
        member_of(Colour, "RED|BLUE")


@pytest.mark.parametrize(("text", "message"), [
    ("", "cannot be read here"),
    ("__import__('os')", "cannot be read here"),
    ("('what',)", "what"),
    (write_treedef(EncodedSample([{1}], allow_pickle=True).treedef).decode(), "partly pickled.*, pass allow_pickle=True"),
    ("('tensor', 'save', 1)", "is not a dtype of torch"), ("('array', 'f4,O', 1)", "cannot be read here"),
    ("('tensor', 'uint8', 2, (0, 0))", "is not an order of dimensions"),
    ("('enum', 'no_such_module:Kind')", "Import no_such_module first"),
    ("('in', 'tuple', 'antigravity:fly', (0,), (), (('str',),))", "Import antigravity first"),
    ("('in', 'dict', 'builtins:dict', (('enum', 'antigravity:A', 'A'),), (), (('str',),), 'coded')", "Import antigravity"),
    ("('in', 'dict', 'builtins:dict', (('enum', 'enum:Enum', 'A'),), (), (('str',),), 'coded')", "has no member 'A'"),
    *((text, "cannot be read here") for depth in (70, 200_000) for text in (
        "('in', 'tuple', 'builtins:tuple', (0,), (), (" * depth + "('str',)" + ",))" * depth, "-" * depth + "1")),
], ids=lambda value: value[:80])  # fmt: skip
def test_a_treedef_that_cannot_be_read_says_why_and_imports_nothing(text, message):
    with pytest.raises(SegmentError, match=message):
        read(text)
    assert "antigravity" not in sys.modules


def test_modules_of_classes_are_imported_only_if_pickles_are_allowed(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("import enum\nColour = enum.Enum('Colour', 'RED BLUE')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SegmentError, match="Import imported_later first, or pass allow_pickle=True"):
        read("('enum', 'imported_later:Colour')")
    assert "imported_later" not in sys.modules
    data = bytearray(b"BLUE\4")
    reader = read("('enum', 'imported_later:Colour')", allow_pickle=True)
    assert reader.read(memoryview(data), 0, 4, pack_integers([4])[1], True) is sys.modules.pop("imported_later").Colour.BLUE
    with pytest.raises(SegmentError, match="classes of no_such_module, which is not here: No module named"):
        read("('enum', 'no_such_module:Kind')", allow_pickle=True)


NO_DTYPES = [
    *("|O8", "f4,O", "float", None, "|V2147483647"), (("a", "<f4"), ("b", (("c", "|O8"),))), (("a", "<f4", (2**31, 2**31)),),
    (("a",),), ((1, "<f4"),), (("a", "<f4"), ("a", "<f4")),
]  # fmt: skip


def test_only_dtypes_of_plain_values_are_found():
    for descr in NO_DTYPES:
        with pytest.raises((ValueError, TypeError), match=r"is not a dtype|is a dtype of objects, or of more than|unhashable"):
            numpy_dtype(descr)
    fields = ("a", "<f4", (2, 3)), ("", "|V3"), (("t", "b"), "<i2"), ("c", (("d", "<f4"),))
    assert numpy_dtype(fields).itemsize == 24 + 3 + 2 + 4
    with pytest.raises(SampleError, match="cannot be written down"):
        write_treedef(("array", object(), 1))
    for name in ("qint8", "save", "Tensor", None):
        with pytest.raises(ValueError, match="is not a dtype of torch that can be stored"):
            torch_dtype(name)


def test_images_are_of_sizes_that_can_be_and_time_zones_are_here():
    for mode, size, data in (
        ("RGB", (2**30, 2**30), b"x"), ("XYZ", (1, 1), b"x"), ("L", (-1, -1), b"x"), ("L", (2, 2), b"xxx"), ("L", (1,), b"x"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"an image|is not a size"):
            check_image([{}, mode, size, None, data])
    before = set(sys.modules)
    for key in ("../../etc/passwd", "", "no/such/zone", "tzdata"):
        with pytest.raises(ValueError, match="is not a datetime"):
            TEXTS["datetime"].from_bytes(f'["2026-01-01T00:00:00", 0, "{key}"]'.encode())
    assert set(sys.modules) == before
