"""Samples of every kind, drawn by hypothesis or made by hand, and their comparisons."""

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import resource

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.containers import Box, Point
from tests.support.equality import everywhere, identical, same

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.frombuffer(bytearray(draw(st.binary(min_size=count + 1, max_size=count + 1))), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        data = data % 2
    value = data.clone().view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return value.permute(draw(st.permutations(range(value.dim()))))


dtypes = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"), hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(), hnp.byte_string_dtypes(), hnp.unicode_string_dtypes(), hnp.array_dtypes(),
)  # fmt: skip
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))

Kind = enum.Enum("Kind", {"BOX": "box", "MASK": "mask", "SQUARE": "box"})
Access = enum.IntFlag("Access", "READ WRITE EXECUTE")
Colour = enum.Flag("Colour", {"RED": 1, "BLUE": 2, "PURPLE": 3})
Level = enum.IntEnum("Level", "LOW HIGH")


class Space(str, enum.Enum):
    RAS, LPS = "ras", "lps"

    def __repr__(self):
        return self.value


members = st.one_of(
    st.sampled_from([*Kind, *Space, *Level]), st.integers(0, 15).map(Access), st.integers(0, 3).map(Colour)
)  # fmt: skip
zones = st.one_of(
    st.none(), st.timezones(), st.just(datetime.timezone(datetime.timedelta(hours=1), "CET")),
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone),
)  # fmt: skip
paths = st.text(max_size=9).filter(lambda text: "\0" not in text)
values = st.one_of(
    members, st.dates(), st.datetimes(timezones=zones), st.times(timezones=zones), st.timedeltas(), st.fractions(),
    st.decimals(allow_nan=False), st.binary(max_size=5).map(bytearray),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    *(paths.map(cls) for cls in (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])]),
)  # fmt: skip
numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.complex_numbers())
texts = st.text(st.characters(), max_size=9)  # with lone surrogates
leaves = st.one_of(
    tensors(), arrays, arrays.map(np.asfortranarray), numbers, texts, values, st.binary(max_size=9), st.none(),
    st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats()).map(tuple), st.lists(st.booleans()), st.lists(texts),
    st.sampled_from([np.float32(0.5), np.int64(-3), np.datetime64("2026-11-21"), np.str_("å"), np.bool_(True)]),
)  # fmt: skip
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False), members,
    st.tuples(st.one_of(st.integers(), st.booleans(), members), st.text(max_size=2)),
    st.complex_numbers(allow_nan=False), st.binary(max_size=2),
)  # fmt: skip


def containers(inner):
    dicts = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple), dicts, dicts.map(collections.OrderedDict),
        st.builds(Point, inner, inner), st.builds(Box, inner, st.integers(0, 9)),
    )  # fmt: skip


samples = st.recursive(leaves, containers, max_leaves=10)


class Note:
    """A plain object."""

    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        return type(other) is Note and self.text == other.text

    __hash__ = None


class Tagged(str):
    """As iTXt of PIL."""


class Odd:
    """Not of any kind that has bytes of its own."""

    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


Extra = collections.namedtuple("Extra", "image info")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("image",)
    image: object


class Annotated(torch.Tensor):
    """A tensor with attributes, as MONAI's."""


class Boxes(Annotated):
    """As torchvision's: operations on it give plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def boxes(cls=Boxes):
    value = torch.arange(8.0).view(2, 4).as_subclass(cls)
    value.format, value.canvas_size, value.clamping_mode = Kind.BOX, (3, 5), "soft"
    return value


def picture(mode="L", width=5):
    library = pytest.importorskip("PIL.Image", reason="comes with the extra bench")
    image = library.frombytes(mode, (width, 3), bytes(range(width * 3 * len(mode))))
    image.info["dpi"] = (72, 72)
    return image


def alike(a, b):
    """`identical`, also of what is to be compared in a way of its own."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Annotated):
        return torch.equal(a, b) and vars(a) == vars(b)
    if isinstance(a, Slotted):
        return alike(a.image, b.image)
    if isinstance(a, decimal.Decimal | fractions.Fraction):  # sNaN cannot be compared; a fraction may be too long for repr
        return repr(a) == repr(b) if isinstance(a, decimal.Decimal) else a == b
    if hasattr(a, "getpixel"):
        return (a.mode, a.size, a.info, a.tobytes()) == (b.mode, b.size, b.info, b.tobytes())
    return identical(a, b) and everywhere(identical, a, b)


def nested(depth, value=1):
    for _ in range(depth):
        value = {"a": value}
    return value


@contextlib.contextmanager
def takes_little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def equal(of):
    return lambda a, b: type(a) is type(b) and same(of(a), of(b))


equal_dense, equal_repr = equal(lambda value: (value.layout, value.to_dense())), equal(repr)


PICKLED = [
    *((torch.eye(3).to_sparse(), equal_dense), (torch.nn.Parameter(torch.ones(2), requires_grad=False), equal_dense)),
    *(({frozenset({1}): 1, np.str_("a"): 2, 3: [4]}, equal_repr), (Exception("x"), equal_repr)),
    *((value, same) for value in (Odd(), nested(100))),
    (collections.defaultdict(list, a=[1]), lambda a, b: a == b and a.default_factory is list),
    *((value, same) for value in (collections.Counter("abba"), collections.UserDict(a=[1]))),
    *((value, equal(lambda value: value)) for value in ({1, 2}, frozenset("a"), slice(1, None), Note("a"), Tagged("a"))),
    *(
        (value, equal(list))
        for value in (collections.deque([1, "a"], 3), np.array([None, "x"]), np.ma.array([1, 2], mask=[0, 1]))
    ),
]
"""What has no bytes of its own, but pickles; and how it is compared."""
