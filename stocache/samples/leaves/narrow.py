"""Numbers that are made of small integers: find how, store the integers, and make the numbers again, to the last bit.

NOTE [ Narrow values ]
    Images as floats are bytes that were divided by 255, and often normalised by channel: `(x / 255 - mean) / std`. Medical and
    satellite images are 16-bit integers as floats, masks are bytes as int64, and grey images have one channel three times. A
    `Narrowing` says how values are made. Nothing is assumed: a value is narrow only if these steps, in the arithmetic of its
    own dtype, make the same bits again. So NaN, infinity and -0.0 are not.

    ``mean`` and ``std`` are not known beforehand. They follow from the distance of neighbouring values, up to a rounding error,
    and people write them with a few decimals. A wrong guess makes other bits, and is dropped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[Any]

_NORMALISED = (  # those that are too long to be guessed: of CLIP
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
)
_SCALES = (255, 1), (1, 1 / 255), (1, 1), (127.5, 1)  # divisor and factor before a normalisation
_DECIMALS = 1, 2, 3, 4, 5  # of a standard deviation; a mean may have one more
_NEAR = 1e-5  # how far a guess may be from a number of few decimals
_MOST_CHANNELS = 16
_LEAST, _LEAST_INTS = 256, 4096  # numbers of a value that may be narrow
_LOOKED_AT = 1 << 20  # numbers, to guess a normalisation


@dataclass(frozen=True)
class Narrowing:
    """The steps from stored integers to values: `((x / divisor) * factor - mean) / std`. See NOTE [ Narrow values ].

    Attributes:
        wide: numpy's text for the dtype of the values.
        stored: numpy's text for the dtype of the integers.
        divisor, factor: 1 for no such step.
        mean, std: by channel; empty for no such step.
        channels, inner: the values as they lie in memory are rows of ``channels`` times ``inner`` numbers.
        repeats: all channels have the same integers, which are stored once.
    """

    wide: str
    stored: str
    divisor: float = 1
    factor: float = 1
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels: int = 1
    inner: int = 1
    repeats: bool = False

    @property
    def share(self) -> int:
        """How many values are made of one integer."""
        return self.channels if self.repeats else 1

    def narrow(self, values: _Array) -> _Array | None:
        """Return the integers of which values (1-D) are made; None if they are made of others, or otherwise."""
        numbers = values
        with np.errstate(invalid="ignore", over="ignore"):
            if values.dtype.kind == "f":
                rows = values.astype(np.float64).reshape(-1, self.channels, self.inner)
                if self.mean:
                    rows = rows * _by_channel(self.std, np.float64) + _by_channel(self.mean, np.float64)
                numbers = np.rint(rows * (self.divisor / self.factor))
            if self.repeats:
                numbers = numbers.reshape(-1, self.channels, self.inner)[:, 0]
            narrow = numbers.astype(self.stored).reshape(-1)
        again = np.empty_like(values)
        self.widen(narrow, again)
        bits = np.dtype(f"u{values.itemsize}")
        return narrow if np.array_equal(again.view(bits), values.view(bits)) else None

    def widen(self, narrow: _Array, out: _Array) -> None:
        """Write the values that are made of integers into a contiguous array of any shape."""
        rows = out.reshape(-1, self.channels, self.inner)
        rows[...] = narrow.reshape(-1, 1 if self.repeats else self.channels, self.inner)
        number = out.dtype.type
        if self.divisor != 1:  # in two steps: both use vector instructions, a division that also converts does not
            np.divide(rows, number(self.divisor), out=rows)
        if self.factor != 1:
            np.multiply(rows, number(self.factor), out=rows)
        if self.mean:
            np.subtract(rows, _by_channel(self.mean, number), out=rows)
            np.divide(rows, _by_channel(self.std, number), out=rows)

    def __str__(self) -> str:
        text = str(np.dtype(self.stored))
        text += f" / {self.divisor:g}" * (self.divisor != 1) + f" * {self.factor:.9g}" * (self.factor != 1)
        if self.mean:
            text = f"({text} - {list(self.mean)}) / {list(self.std)}"
        return text + f" x {self.channels}" * self.repeats


def _by_channel(numbers: tuple[float, ...], dtype: Any) -> _Array:
    return np.array(numbers, np.float64).astype(dtype)[:, None]


def find(values: Sequence[_Array], shape: tuple[int, ...], for_all: bool = True) -> Narrowing | None:
    """Return the narrowest way to store arrays of one dtype and size; None without one.

    Args:
        shape: of an array as it lies in memory.
        for_all: others will have to be stored so. Then small arrays have no way: too few numbers say what others are.
            Without, channels that repeat are stored as often.
    """
    dtype, size = values[0].dtype, values[0].size
    least = _LEAST_INTS if for_all and dtype.kind != "f" else _LEAST
    if dtype.kind not in "fiu" or not dtype.isnative or size < least or dtype == np.float16:  # whose arithmetic is slow
        return None
    values = [array.reshape(-1) for array in values]

    def fits(way: Narrowing) -> bool:
        return all(way.narrow(array) is not None for array in values)

    plain = Narrowing(dtype.str, dtype.str)
    best = next(filter(fits, _ways(values, dtype.str, shape)), plain)
    for channels, inner in _layouts(shape) if for_all else ():
        repeating = replace(best, channels=channels, inner=inner, repeats=True)
        if channels > 1 and (not best.mean or (best.channels, best.inner) == (channels, inner)) and fits(repeating):
            return repeating
    return None if best is plain else best


def _layouts(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield how the channels of an image may lie in memory: before its pixels, or in each of them."""
    if len(shape) >= 2:
        for channels, inner in ((shape[0], math.prod(shape[1:])), (shape[-1], 1)):
            if channels <= _MOST_CHANNELS:
                yield channels, inner


def _ways(values: Sequence[_Array], wide: str, shape: tuple[int, ...]) -> Iterator[Narrowing]:
    """Yield ways in which values may be made, those of one byte first."""
    itemsize, is_float = values[0].itemsize, values[0].dtype.kind == "f"
    if itemsize > 1:
        yield Narrowing(wide, "|u1")
        if is_float:
            yield Narrowing(wide, "|u1", divisor=255)
            yield Narrowing(wide, "|u1", factor=1 / 255)
            some = np.concatenate(values[: -(-_LOOKED_AT // values[0].size)])
            for channels, inner in (*_layouts(shape), (1, values[0].size)):
                yield from _normalised(some.reshape(-1, channels, inner), wide)
    if itemsize > 2:
        yield Narrowing(wide, "<i2")
        yield Narrowing(wide, "<u2")
        if is_float:
            yield Narrowing(wide, "<u2", divisor=65535)


def _normalised(rows: _Array, wide: str) -> Iterator[Narrowing]:
    """Yield the normalisations by channel of which values may come; ``rows`` has the channels in its second dimension."""
    channels, inner = rows.shape[1:]
    for divisor, factor in _SCALES:
        way = Narrowing(wide, "|u1", divisor, factor, channels=channels, inner=inner)
        for mean, std in _NORMALISED:
            if channels == len(mean):
                yield replace(way, mean=mean, std=std)
        fitted = [_fit(np.unique(rows[:, channel]), way) for channel in range(channels)]
        if all(fitted):
            mean, std = zip(*fitted, strict=True)
            yield replace(way, mean=mean, std=std)


def _fit(found: _Array, way: Narrowing) -> tuple[float, float] | None:
    """Return the mean and standard deviation, of few decimals, by which the values of a channel are made; None without them."""
    if not 2 <= len(found) <= 256 or not np.isfinite(found).all():
        return None
    least, most = float(found[0]), float(found[-1])
    span = round((most - least) / float(np.diff(found.astype(np.float64)).min()))
    if span > 255:
        return None
    unit = way.factor / way.divisor  # of a value before the normalisation, for 1 more of the integer
    std = unit * span / (most - least)
    for decimals in _DECIMALS:
        rounded = round(std, decimals)
        if not rounded or abs(rounded / std - 1) > _NEAR:
            continue
        means = [number * unit - least * rounded for number in range(256 - span)]  # if the least value is made of that number
        for mean in sorted(means, key=lambda mean: abs(mean - 120 * unit)):  # black images fit several: not that of a black one
            near = round(mean, decimals + 1)
            is_shift = rounded == 1 and unit == 1 and near.is_integer()  # of integers, which may have any other range
            if abs(near - mean) < _NEAR * max(1, abs(mean)) and not is_shift:
                trial = replace(way, mean=(near,), std=(rounded,), channels=1, inner=len(found))
                if trial.narrow(found) is not None:
                    return near, rounded
    return None
