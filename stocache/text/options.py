"""Arguments of `StreamLoader`, checked; the options for reading files are one object."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stocache.cache.stats import CacheStats
from stocache.errors import StreamError
from stocache.system.ranks import torch_ranks


@dataclass(frozen=True)
class ReadOptions:
    """How files are read. The batches do not depend on it.

    Attributes:
        storage_options: passed to fsspec for files at a URL.
        progress: True shows a progress bar on the first rank.

    Raises:
        StreamError: an option is of a different type.

    Examples:
        >>> np.savetxt("rows.csv", [[0.5, 1], [1.5, 0]], "%g", delimiter=",")
        >>> read = ReadOptions(progress=False)
        >>> with StreamLoader("rows.csv", batch_size=2, buffer_size=2, delimiter=",", read=read) as loader:
        ...     x, y = next(iter(loader))
        >>> x.tolist(), y.tolist()
        ([[0.5], [1.5]], [1, 0])
    """

    storage_options: dict[str, Any] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        check_type("storage_options", self.storage_options, dict, optional=True)
        check_choice("progress", self.progress, (False, True))


def share_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks; if both are None, as torch.distributed or torchrun's variables say.

    Raises:
        StreamError: ``rank`` is not in ``[0, world_size)``.
    """
    if rank is None and world_size is None:
        return torch_ranks() or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    check_integer("rank", rank, 0)
    check_integer("world_size", world_size, 1)
    assert rank is not None
    assert world_size is not None
    if rank >= world_size:
        raise StreamError(f"rank={rank} is out of range for world_size={world_size}.")
    return rank, world_size


def check_type(name: str, value: object, kind: type, optional: bool = False) -> None:
    """Raise StreamError if an argument is not of a type; None passes if it is optional."""
    if not isinstance(value, kind) and not (optional and value is None):
        raise StreamError(f"{name}={value!r} is not a {kind.__name__}.")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise StreamError if an argument is not an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise StreamError(f"{name}={value!r} is not an integer of at least {least}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise StreamError if an argument is not one of the choices."""
    if not any(value is choice or (type(value) is str and value == choice) for choice in choices):
        raise StreamError(f"{name}={value!r} is unknown. Use {' or '.join(map(repr, choices))}.")


@dataclass(frozen=True)
class StreamStats:
    """Counts of a `StreamLoader` in this process.

    Attributes:
        epochs: number of finished epochs.
        batches: number of delivered batches.
        rows: number of rows in the buffers that were used, in all epochs.
        skipped: number of bad lines among them that were left out (``on_error="skip"``).
        dropped: number of good rows among them that were left out because they do not fill a batch (``drop_last``).
        cache: counts of all processes that share the cache, in which a sample is a buffer. None without a cache.
        disk: the counts of the disk behind the memory, if there is one. Its misses are buffers that were read and parsed.
    """

    epochs: int
    batches: int
    rows: int
    skipped: int
    dropped: int
    cache: CacheStats | None
    disk: CacheStats | None = None


def are_counts(values: list[Any] | None, least: int, most: int) -> bool:
    """Return whether ``values`` is None, or a list of ``least`` to ``most`` integers from 0 to 2^64 - 1."""
    if values is None:
        return True
    return least <= len(values) <= most and all(type(value) is int and 0 <= value < 1 << 64 for value in values)
