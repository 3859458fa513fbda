"""Options of `StreamLoader` that belong together: the name of its cache, the share of a rank, and how files are read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stocache.errors import StreamError
from stocache.system.ranks import torch_ranks
from stocache.text.engines import engines


@dataclass(frozen=True)
class CacheName:
    """The name under which jobs on one machine share a cache of parsed rows.

    Attributes:
        name: of the cache. Jobs with this name must read the same files in the same way; this is checked.
        persist: True keeps the cache when the last job ends, for the next one.
        fingerprint: any text that changes when the cached rows become invalid. Put there what a `CustomFormat` depends on.

    Raises:
        StreamError: an argument has a wrong type.
    """

    name: str
    persist: bool = False
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_choice("persist", self.persist, (False, True))
        check_type("fingerprint", self.fingerprint, str, optional=True)


@dataclass(frozen=True)
class ShardOptions:
    """The share of the rows that one rank reads: number ``rank`` of ``world_size`` shares.

    Raises:
        StreamError: ``rank`` is not in ``[0, world_size)``.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 0)
        check_integer("world_size", self.world_size, 1)
        if self.rank >= self.world_size:
            raise StreamError(f"rank={self.rank} is out of range for world_size={self.world_size}.")

    @classmethod
    def from_env(cls) -> "ShardOptions":
        """Return the share of this process, as torch.distributed or torchrun's variables say; else all rows."""
        return cls(*(torch_ranks() or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))))


@dataclass(frozen=True)
class ReadOptions:
    """How files are read. The batches do not depend on it.

    Attributes:
        engine: the library that parses: "pyarrow", "numpy", or "auto" for the fastest that is installed.
        multiprocessing_context: start method of the worker processes, or a context of `multiprocessing`.
        storage_options: passed to fsspec for files at a URL.
        progress: True shows a progress bar on the first rank.

    Raises:
        StreamError: an option is unknown, or the engine is not installed.
    """

    engine: Literal["auto", "pyarrow", "numpy"] = "auto"
    multiprocessing_context: Any = None
    storage_options: dict[str, Any] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("auto", "pyarrow", "numpy"))
        engines(self.engine)
        check_type("storage_options", self.storage_options, dict, optional=True)
        check_choice("progress", self.progress, (False, True))


def check_type(name: str, value: Any, kind: type, optional: bool = False) -> None:
    """Raise StreamError if an argument is not of a type; None passes if it is optional."""
    if not isinstance(value, kind) and not (optional and value is None):
        raise StreamError(f"{name}={value!r} is not a {kind.__name__}.")


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise StreamError if an argument is not an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise StreamError(f"{name}={value!r} is not an integer of at least {least}.")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise StreamError if an argument is not one of the choices."""
    if not any(value is choice or (type(value) is str and value == choice) for choice in choices):
        raise StreamError(f"{name}={value!r} is unknown. Use {' or '.join(map(repr, choices))}.")
