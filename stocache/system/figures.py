"""Write figures for people, and flatten statistics for loggers."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any


def plural(count: int, noun: str) -> str:
    """Return a count and its noun: "1 sample", "2 samples", "3 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith("tch") else "s"
    return f"{count} {noun}{ending}"


def format_seconds(seconds: float) -> str:
    """Return a duration with up to three digits: "9.12 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def round_digits(value: float, digits: int, up: bool) -> float:
    """Return a positive value, or 0, rounded up or down to a number of significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value > 0 else 1.0
    steps = math.ceil(value / unit - 1e-9) if up else math.floor(value / unit + 1e-9)
    return float(f"{steps * unit:.{digits}g}")


def flat_numbers(prefix: str, *parts: Any) -> dict[str, float]:
    """Return the numbers in dataclasses and mappings, by name: ``{"cache/hits": 7, "loader/wait_p95_s": 0.1}``.

    A number in a nested part has the names of both, joined by "_". Values that are not numbers are left out. A prefix that ends
    in "_" is joined unchanged. W&B, MLflow, TensorBoard and Lightning's ``log_dict`` take such a dict.
    """
    joint = "" if prefix.endswith("_") else "/"
    return {f"{prefix}{joint}{name}": number for part in parts for name, number in _numbers(part)}


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    for name, part in value.items():
        if isinstance(part, int | float) and not isinstance(part, bool):
            yield name, part
        elif dataclasses.is_dataclass(part) or isinstance(part, Mapping):
            yield from ((f"{name}_{inner}", number) for inner, number in _numbers(part))
