"""Put stocache's loader where a program looks for torch's: `use_everywhere`, and the command ``stocache run``.

NOTE [ In place of torch's loader ]
    ``DataLoader`` in `torch.utils.data` and in `torch.utils.data.dataloader` becomes a property of these modules, which returns
    `ProgramLoader`. So our loader is imported when the program first asks for the name. torch's own code keeps torch's class. A
    program that sets the name itself has it as an ordinary attribute from then on.

    A module that is imported later has the property from its creation on. `PathFinder.find_spec` is replaced for that, because
    programs replace `sys.meta_path`. The spec that it returns has a loader that differs only in how it creates the module. So a
    question (`importlib.util.find_spec`) changes nothing, and may be asked any number of times. If a module was created in a
    different way (by a finder of the program, a loader with ``load_module`` alone, or a ``LazyLoader``, which resets the
    class of its modules), it gets the property when the program looks for any other module.
"""

import functools
import gc
import logging
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from stocache.system.loading import watch
from stocache.tools.run.use import ProgramOptions, Use

if TYPE_CHECKING:
    from stocache.tools.run.report import LoaderLines

logger = logging.getLogger("stocache")

OFF = "STOCACHE_RUN"  # "off" in this variable of the environment switches `use_everywhere` and ``stocache run`` off

_PLACES = {
    "DataLoader": ("torch.utils.data", "torch.utils.data.dataloader"),
    "StatefulDataLoader": ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.stateful_dataloader"),
}
"""The modules that hold a loader, by its name. The last one defines it."""

_LARGE = "torch", "stocache.tools.run.loaders"  # modules that import hundreds of others


class Everywhere(Use):
    """The loader of stocache in place of torch's, from `use_everywhere` on until `undo`, or the end of a ``with`` block."""

    @functools.cached_property
    def loaders(self) -> Any:
        """The loaders of the program, as `ProgramLoaders`."""
        from stocache.tools.run.watching import ProgramLoaders  # with torch, which a loader has imported

        return ProgramLoaders(self)

    def note(self, loader: Any) -> None:
        """Note a loader that was made; see `Watch`."""
        self.loaders.note(loader)

    def iterate(self, loader: Any, begin: Callable[[], Any]) -> Any:
        """Return the iterator that ``begin`` makes, timed, and of the cache if there is one."""
        return self.loaders.iterate(loader, begin)

    def report(self) -> str:
        """Return where the time of all loaders went so far, in a few lines for each; "" if there were none."""
        lines = self.lines()
        if not lines:  # the import below would change the exit status of an interrupted program: it runs code from text
            return ""
        from stocache.tools.run.report import report_of

        return report_of(lines)

    def lines(self, waits: bool = True) -> "list[LoaderLines]":
        """Return what the report says of each loader. It waits for what is being tried, or leaves that out."""
        return self.loaders.lines(waits) if "loaders" in vars(self) else []

    def why_nothing(self) -> str:
        """Return one line for a program that imported torch but iterated over none of our loaders; "" if it did not."""
        if "torch.utils.data.dataloader" not in sys.modules or self.lines():
            return ""
        if "loaders" in vars(self) and self.loaders:
            return "stocache: the main process made loaders, and iterated over none of them."
        own = _holders("DataLoader")
        if not self.options.stateful and "torchdata.stateful_dataloader" in sys.modules:
            own.append("torchdata (--stateful stands in for its loader)")
        where = f" of stocache's; those of torch are in {_listed(own)}" if own else ""
        return f"stocache: the main process imported torch, and made no DataLoader{where}."

    def undo(self) -> None:
        """Give torch's names back. Loaders that exist stay unchanged."""
        if Use.current is self:
            Use.current, watch.current = None, watch.Watch()
            for places in _PLACES.values():
                for place in places:
                    give_back_name(place)

    def __enter__(self) -> "Everywhere":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


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

    Frameworks that make their loaders themselves get stocache's. Batches, order and random numbers stay the same as with
    torch's. A subclass of the program that overrides ``__iter__`` keeps torch's own way to iterate.

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
            attributes; see `share`. The program's own objects stay unchanged.

    Returns:
        An object whose `undo` restores torch's name, and whose `report` says where the time of the loaders went. It is a
        context manager, too. A second call returns the same object: the first one counts.

    Raises:
        LimitError: ``cache`` is not a size.
        ValueError: an argument is unknown, or ``disk`` is given without ``disk_limit`` or ``cache``.

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
    options = ProgramOptions(cache, num_workers, worker_method, disk, disk_limit, stateful, share)
    if os.environ.get(OFF) == "off":
        return Everywhere(options)
    if isinstance(Use.current, Everywhere):
        if options not in (Use.current.options, ProgramOptions()):
            logger.warning("use_everywhere: the program runs with %s already, which stays.", Use.current.options)
        return Use.current
    Use.current = watch.current = everywhere = Everywhere(options)
    for name in _PLACES if stateful else ["DataLoader"]:
        if holders := _holders(name):
            logger.warning(
                "use_everywhere: torch's %s stays in %s, imported before. Call use_everywhere first, or import them again.",
                name, _listed(holders),
            )  # fmt: skip
        for place in _PLACES[name]:
            replace_name(place, name, partial(_program_loader, place.partition(".")[0]))
    return everywhere


def _program_loader(package: str, own: Any) -> Any:
    """Return the loader that a program finds in place of its package's own, which the package itself finds."""
    frame: Any = sys._getframe(2)  # of the code that asks, maybe through an import statement
    while (asking := str(frame.f_globals.get("__name__")).partition(".")[0]) in ("importlib", "_frozen_importlib"):
        frame = frame.f_back
    if asking == package:
        return own
    from stocache.tools.run.loaders import ProgramLoader

    return ProgramLoader


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _holders(name: str) -> list[str]:
    """Return the modules that have imported torch's loader of this name, or have a subclass of it that is not of ours."""
    home = sys.modules.get(_PLACES[name][-1])
    loader, known = getattr(home, "__dict__", {}).get(name), (_PLACES[name][0].partition(".")[0], "stocache", "__mp_main__")

    def is_torchs(value: Any) -> bool:
        bases = value.__mro__ if issubclass(type(value), type) else ()
        return loader in bases and not any(base.__module__.startswith("stocache.") for base in bases)

    modules = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in known}
    return sorted(
        name for name, module in modules.items()
        if isinstance(module, types.ModuleType) and any(map(is_torchs, list(vars(module).values())))
    )  # fmt: skip


class _Replaced(types.ModuleType):
    """A module with a name that stands for something else; see NOTE [ In place of torch's loader ]."""


_replaced: dict[str, type[_Replaced]] = {}  # the classes of modules, by the modules' names
_found: Any = None  # the method of `PathFinder` that `_find_spec` replaces, once: others may replace it after that


def replace_name(place: str, name: str, stand_in: Callable[[Any], Any]) -> None:
    """Let programs find ``stand_in(own)`` in place of ``own`` under a name of a module, which may be imported later."""

    def get(module: types.ModuleType) -> Any:
        if name not in vars(module):
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        return stand_in(vars(module)[name])

    def set_(module: types.ModuleType, value: object) -> None:
        _replaced.pop(place, None)
        module.__class__ = types.ModuleType
        setattr(module, name, value)

    global _found
    if _found is None:
        _found, PathFinder.find_spec = vars(PathFinder)["find_spec"], classmethod(_find_spec)  # type: ignore[assignment]
    _replaced[place] = type("Replaced", (_Replaced,), {name: property(get, set_)})
    _replace_in_loaded()


def _replace_in_loaded() -> None:
    for place, replaced in list(_replaced.items()):
        if type(module := sys.modules.get(place)) is types.ModuleType:
            module.__class__ = replaced


def give_back_name(place: str) -> None:
    """End a replacement in a module, and in the modules that are imported later."""
    _replaced.pop(place, None)
    if isinstance(module := sys.modules.get(place), _Replaced):
        module.__class__ = types.ModuleType  # type: ignore[assignment]


def _find_spec(cls: type, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    _replace_in_loaded()
    spec: ModuleSpec | None = _found.__func__(cls, fullname, path, target)
    loader: Any = None if spec is None else spec.loader
    if fullname in _replaced and hasattr(type(loader), "create_module"):
        # The method of the class, which is there once: the loader of an archive is there for many modules and questions
        loader.create_module = partial(_create, type(loader).create_module, loader)
    if fullname in _LARGE and _replaced and hasattr(type(loader), "exec_module"):
        loader.exec_module = partial(_uncollected, type(loader).exec_module, loader)
    return spec


def _uncollected(function: Callable[..., Any], *arguments: Any) -> Any:
    """Import while the garbage collector pauses: it would take 0.2 s, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return function(*arguments)
    finally:
        if enabled:
            gc.enable()


def _create(create: Callable[[Any, ModuleSpec], Any], loader: Any, spec: ModuleSpec) -> Any:
    module = create(loader, spec) or types.ModuleType(spec.name)
    if type(module) is types.ModuleType:
        module.__class__ = _replaced.get(spec.name, types.ModuleType)
    return module
