"""What the loaders of a program do since `use_everywhere`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stocache.loader.threads import METHODS
from stocache.system.loading.watch import Watch

LoaderName: TypeAlias = tuple[str, str, int | None]
"""The place of a loader in the program, the class of its dataset, and the number of samples."""


@dataclass(frozen=True)
class ProgramOptions:
    """What `use_everywhere` does with the loaders of a program. Its arguments are the attributes."""

    cache: float | str | None = None
    num_workers: str | None = None
    worker_method: str | None = None
    disk: str | os.PathLike[str] | None = None
    disk_limit: float | str | None = None
    stateful: bool = False
    share: bool = False

    def __post_init__(self) -> None:
        if self.cache not in (None, "auto"):
            from stocache.system.limits import parse_size  # here: a program starts faster without psutil

            parse_size(self.cache, "cache")
        if self.num_workers not in (None, "auto"):
            raise ValueError(f"num_workers={self.num_workers!r:.100} is neither None nor 'auto'.")
        if self.worker_method not in (None, *METHODS):
            raise ValueError(f"worker_method={self.worker_method!r:.100} is unknown. It is one of {METHODS}.")
        if (self.disk is None) != (self.disk_limit is None):
            raise ValueError("disk and disk_limit go together: a folder, and the bytes that it may have. Give both.")
        if self.disk is not None and self.cache is None:
            raise ValueError("disk is for the samples that do not fit into the cache. Give cache, too.")


class Use(Watch):
    """The state of this process between `use_everywhere` and `Everywhere.undo`.

    Attributes:
        on_epoch: called at the end of each epoch with the name of its loader, and with the epoch's figures.
        write: writes the files of the report so far, for a program that ends without another word.
        compared: called with the number of a loader and each iterator over its batches; returns the one to use.
        without: whether to leave all to torch, to compare it.
        loaders: the `ProgramLoaders`, made for the first loader.
        at_end: prints the report at the end of a process; None if nobody asked for it.
        reports_in: the number of the process that is to call it.
        process: the name of this process, if the program has started it; "" for the first one.
        tried: the settings that were tried, with what was measured, and the warnings.
        rank: of this process, as of the newest iterator: at its end a program may have left its group.
        current: the present use; None without one.
    """

    current: ClassVar["Use | None"] = None
    loaders: Any

    def __init__(self, options: ProgramOptions) -> None:
        self.options = options
        self.write: Callable[[], None] | None = None
        self.on_epoch: Callable[[LoaderName, Any], None] | None = None
        self.compared: Callable[[int, Iterator[Any]], Iterator[Any]] | None = None
        self.without = False
        self.at_end: Callable[[], None] | None = None
        self.reports_in = self.rank = 0
        self.process = ""
        self.tried: list[str] = []
