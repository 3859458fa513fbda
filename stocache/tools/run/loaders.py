"""What a program finds in place of torch's ``DataLoader``: stocache's loader, with the options of ``stocache run``.

A subclass of the program that makes iterators in its own way keeps torch's.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from stocache.loader.dataloader import DataLoader, with_arguments_of_torch
from stocache.loader.engine import SIGNATURE, engine_of, makes_iterators, torch_loader_of
from stocache.system.loading import watch
from stocache.system.objects import TorchLoader
from stocache.tools.run.use import ProgramOptions, Use

_T = TypeVar("_T")


class ProgramLoader(DataLoader[_T]):
    """What a program finds in place of torch's ``DataLoader``; see `use_everywhere`."""

    @with_arguments_of_torch
    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        used = Use.current
        options = ProgramOptions() if used is None or used.without else used.options
        if options.num_workers is not None:
            _, _, *given = SIGNATURE.bind_partial(self, dataset, *args).arguments.items()
            args, kwargs = (), {**kwargs, **dict(given), "num_workers": options.num_workers}
        if options.worker_method is not None:
            kwargs.setdefault("worker_method", options.worker_method)
        super().__init__(dataset, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__iter__ is not ProgramLoader.__iter__ and not hasattr(cls.__iter__, "times"):
            cls.__iter__ = _timed(cls, vars(cls).get("__iter__"))  # type: ignore[method-assign]

    def __iter__(self) -> Any:
        if "_stocache" not in vars(self):  # a subclass has not called our constructor
            return TorchLoader.__iter__(self)
        begin = partial(_iterate_as_torch, self) if has_own_way(self) else engine_of(self).iterate
        return watch.current.iterate(self, begin)

    def _get_iterator(self) -> Any:
        """Return an iterator of torch. A subclass may ask for it itself, and keep it."""
        used = Use.current
        if "_stocache" not in vars(self):
            return super()._get_iterator()
        engine = engine_of(self)
        if used is not None and not engine.in_iter:
            engine.served = used.loaders.served(self, keeps_iterator=True)
        loader = self if engine.served is None else torch_loader_of(self, {"dataset": engine.served})
        with engine.while_starting(engine.source):
            return TorchLoader._get_iterator(loader)


def has_own_way(loader: Any) -> bool:
    """Whether a loader keeps torch's iterators: a subclass overrides what our loader overrides of torch's."""
    if not isinstance(loader, ProgramLoader):  # the program has taken it from stocache
        return not isinstance(loader, DataLoader) or makes_iterators(loader, DataLoader)
    overrides = makes_iterators(loader, ProgramLoader) or type(loader).__iter__ is not ProgramLoader.__iter__
    return overrides or (Use.current is not None and Use.current.without)


def _iterate_as_torch(loader: ProgramLoader[Any]) -> Any:
    engine = engine_of(loader)
    engine.in_iter = True
    try:
        return TorchLoader.__iter__(loader)
    finally:
        engine.in_iter = False


def _timed(cls: Any, iterate: Any) -> Any:
    """Return the method ``__iter__`` of a program's subclass, whose iterators are timed. None: it inherits its own."""

    @wraps(iterate or ProgramLoader.__iter__)
    def __iter__(self: Any) -> Any:
        begin: Callable[[], Any] = partial(iterate, self) if iterate is not None else super(cls, self).__iter__
        is_outermost = type(self).__iter__ is __iter__
        if not is_outermost or Use.current is None or "_stocache" not in vars(self):  # a library may not call our constructor
            return begin()
        return Use.current.loaders.timed(self, begin)

    __iter__.times = True  # type: ignore[attr-defined]
    return __iter__
