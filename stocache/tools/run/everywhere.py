"""Put stocache's loader where a program looks for torch's: `use_everywhere`, and the command ``stocache run``.

NOTE [ In place of torch's loader ]
    ``DataLoader`` in `torch.utils.data` and in `torch.utils.data.dataloader` becomes a property of these modules, which returns
    `ProgramLoader`. So our loader is imported when the program first asks for the name, and torch's own code, which finds the
    name among the module's globals, keeps its class. If torch is not imported yet, that happens when it has been. A program
    that sets the name itself has it as an ordinary attribute from then on.
"""

import contextlib
import gc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stocache.tools.run.use import ProgramOptions, Use, set_current

if TYPE_CHECKING:
    from stocache.tools.run.report import LoaderLines

logger = logging.getLogger("stocache")

OFF = "STOCACHE_RUN"  # "off" in this variable of the environment switches `use_everywhere` and ``stocache run`` off

_PLACES = {
    "torch": ("torch.utils.data", "torch.utils.data.dataloader"),
    "torchdata.stateful_dataloader": ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.stateful_dataloader"),
}
"""The modules that hold a loader's name, by the import after which they exist."""

_NAMES = {"torch": "DataLoader", "torchdata.stateful_dataloader": "StatefulDataLoader"}


class Everywhere:
    """The loader of stocache in place of torch's, from `use_everywhere` on until `undo`, or the end of a ``with`` block."""

    def __init__(self, options: ProgramOptions) -> None:
        self.use = Use(options)

    def report(self) -> str:
        """Return where the time of all loaders went so far, in a few lines for each; "" if there were none."""
        lines = self.lines()
        if not lines:  # the import below would change the exit status of an interrupted program: it runs code from text
            return ""
        from stocache.tools.run.report import report_of

        return report_of(lines)

    def lines(self) -> "list[LoaderLines]":
        """Return what the report says of each loader."""
        return [] if self.use.loaders is None else self.use.loaders.lines()

    def undo(self) -> None:
        """Give torch's names back. Loaders that exist stay as they are."""
        global _everywhere
        if _everywhere is self:
            _everywhere = None
            set_current(None)
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
            for name in {name for names in _PLACES.values() for name in names}:
                module = sys.modules.get(name)
                if isinstance(module, _Swapped):
                    module.__class__ = types.ModuleType  # type: ignore[assignment]

    def __enter__(self) -> "Everywhere":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


_everywhere: Everywhere | None = None


def use_everywhere(
    cache: float | str | None = None,
    *,
    num_workers: str | None = None,
    worker_method: str | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_limit: float | str | None = None,
    stateful: bool = False,
    share: bool = False,
) -> Everywhere:
    """Let all code of this process find `DataLoader` where it looks for torch's. Call it before other imports.

        import stocache
        stocache.use_everywhere()

    Frameworks that make their loaders themselves get stocache's. Batches, order and random numbers stay those of torch's.
    A subclass of the program that overrides ``__iter__`` keeps torch's own way to iterate.

    Args:
        cache: GiB for caching the datasets of all loaders, together; "auto" for the memory that the machine can spare; None
            caches nothing. Datasets for training come first; a dataset that is read in order is cached when it is iterated the
            second time. Whatever depends on more than the index of a sample is not cached (see ``on_change`` of
            `CachedDataset`), nor are samples that take less time than a cached one.
        num_workers: "auto" chooses the number of workers of each loader; None leaves it to the program.
        worker_method: "multiprocessing", "thread" or "auto" for all loaders, as for `DataLoader`.
        disk, disk_limit: a folder on a local disk for the samples that do not fit in memory, and its bytes; see `CacheOptions`.
        stateful: True stands in for torchdata's ``StatefulDataLoader``, too.
        share: True gives worker processes one copy of the lists, dicts and arrays of 1 MiB and more that datasets have as
            attributes; see `share`. The program's own objects stay as they are.

    Returns:
        An object whose `undo` gives torch's name back, and whose `report` says where the time of the loaders went. It is a
        context manager, too. A second call returns the same object: the first one counts.

    Raises:
        LimitError: ``cache`` is not a size.
        ValueError: another argument is unknown, or ``disk`` is given without ``disk_limit`` or ``cache``.

    With ``STOCACHE_RUN=off`` in the environment, nothing is changed. Modules that have torch's class under a name of their own
    keep it; they are named in a warning on the logger "stocache".

    Examples:
        >>> with use_everywhere("1MB") as everywhere:
        ...     loader = torch.utils.data.DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
        ...     for epoch in range(2):
        ...         batches = list(loader)
        >>> isinstance(loader, DataLoader), len(everywhere.lines()[0].epochs)
        (True, 2)
    """
    global _everywhere
    options = ProgramOptions(cache, num_workers, worker_method, disk, disk_limit, stateful, share)
    if os.environ.get(OFF) == "off":
        return Everywhere(options)
    if _everywhere is not None:
        if options not in (_everywhere.use.options, ProgramOptions()):
            logger.warning("use_everywhere: the program runs with %s already, which stays.", _everywhere.use.options)
        return _everywhere
    _everywhere = Everywhere(options)
    set_current(_everywhere.use)
    for package in ("torch", "torchdata.stateful_dataloader") if stateful else ("torch",):
        if package in sys.modules:
            _warn_of_holders(_NAMES[package], _PLACES[package])
        after_import(package, _swap)
    return _everywhere


class _Swapped(types.ModuleType):
    """A module in which the names of loaders stand for `ProgramLoader`; see NOTE [ In place of torch's loader ]."""


def _property_of(name: str) -> property:
    def get(module: types.ModuleType) -> Any:
        with _uncollected():
            from stocache.tools.run.loaders import ProgramLoader
        return ProgramLoader

    def set_(module: types.ModuleType, value: object) -> None:
        module.__class__ = types.ModuleType
        setattr(module, name, value)

    return property(get, set_)


_SWAPPED: dict[str, Any] = {
    package: type("Swapped", (_Swapped,), {name: _property_of(name)}) for package, name in _NAMES.items()
}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: while torch is imported it takes 0.1 s, and afterwards 50 ms each time, and finds little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _swap(package: str) -> None:
    for name in _PLACES[package]:
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(name)
            if type(module) is types.ModuleType:
                module.__class__ = _SWAPPED[package]


def _warn_of_holders(name: str, places: tuple[str, ...]) -> None:
    """Warn of modules that have imported torch's class by its name before."""
    home = sys.modules.get(places[-1])
    loader = None if home is None else vars(home).get(name)
    holders = sorted(_holders(loader, places[0].partition(".")[0])) if loader is not None else []
    if holders:
        logger.warning(
            "use_everywhere: torch's %s stays in %s, imported before. Call use_everywhere first, or import them again.",
            name,
            ", ".join(holders[:5]) + (f" and {len(holders) - 5} more" if len(holders) > 5 else ""),
        )  # fmt: skip


def _holders(loader: type, own: str) -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in (own, "stocache") and isinstance(module, types.ModuleType):
            yield from {name for value in list(vars(module).values()) if value is loader}


def after_import(name: str, then: Callable[[str], None]) -> None:
    """Call a function with the name of a module when that has been imported: now, or later."""
    if name in sys.modules:
        then(name)
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport:
    """Calls a function with the name of a module when that has been imported."""

    def __init__(self, name: str, then: Callable[[str], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with _uncollected():
                execute(module)
            self._then(self._name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
