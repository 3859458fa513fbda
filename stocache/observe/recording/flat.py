"""Flatten statistics into one dict of numbers, as W&B, MLflow, TensorBoard and Lightning's ``log_dict`` take them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def flat_numbers(prefix: str, *parts: Any) -> dict[str, float]:
    """Return the numbers in dataclasses and mappings, by name: ``{"cache/hits": 7, "loader/wait_p95_s": 0.1}``.

    A number in a nested part has the names of both, joined by "_". Values that are not numbers are left out. A prefix that ends
    in "_" is joined as it is.
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
