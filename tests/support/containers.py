"""A named tuple and a dataclass, as samples have them."""

import dataclasses
from collections import namedtuple

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Box:
    corner: object
    label: int
