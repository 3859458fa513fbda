"""What a program finds in place of torch's ``DataLoader``: stocache's loader, which notes what it does.

A subclass of the program that makes iterators in its own way keeps torch's. Their batches are timed.
"""

import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from stocache.loader.dataloader import DataLoader, with_arguments_of_torch
from stocache.loader.engine import SIGNATURE, engine_of, makes_iterators, torch_loader_of
from stocache.loader.epochs import EpochLog, RunningEpoch
from stocache.loader.iteration import Iteration
from stocache.shm.tables.sharing import tables_shared
from stocache.system.objects import TorchLoader
from stocache.tools.run.use import ProgramOptions, Use
from stocache.tools.run.watching import ProgramLoaders

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
        engine = engine_of(self)
        if options.share:
            engine.while_starting = tables_shared
        if used is not None:
            _loaders_of(used).note(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__iter__ is not ProgramLoader.__iter__ and not hasattr(cls.__iter__, "times"):
            cls.__iter__ = _timed(cls, vars(cls).get("__iter__"))  # type: ignore[method-assign]

    def __iter__(self) -> Any:
        used = Use.current
        if "_stocache" not in vars(self):  # a subclass has not called our constructor
            return TorchLoader.__iter__(self)
        engine = engine_of(self)
        if used is not None:
            engine.served = _loaders_of(used).served(self)
        if not iterates_as_torch(self):
            batches = engine.iterate()
        elif hasattr(type(self).__iter__, "times"):
            batches = _iterate_as_torch(self)
        else:  # ``_get_iterator`` is overridden, or ``__iter__`` was set later
            batches = _iterate_timed(self, partial(_iterate_as_torch, self))
        if used is None or used.compared is None:
            return batches
        return used.compared(_loaders_of(used).number_of(self), batches)

    def _get_iterator(self) -> Any:
        """Return an iterator of torch. A subclass may ask for it itself, and keep it."""
        used = Use.current
        if "_stocache" not in vars(self):
            return super()._get_iterator()
        engine = engine_of(self)
        if used is not None and not engine.in_iter:
            engine.served = _loaders_of(used).served(self, keeps_iterator=True)
        loader = self if engine.served is None else torch_loader_of(self, {"dataset": engine.served})
        with engine.while_starting(engine.source):
            return TorchLoader._get_iterator(loader)


def iterates_as_torch(loader: ProgramLoader[Any]) -> bool:
    """Whether a subclass of the program overrides what stocache's loader overrides of torch's."""
    used = Use.current
    overrides = makes_iterators(loader, ProgramLoader) or type(loader).__iter__ is not ProgramLoader.__iter__
    return overrides or (used is not None and used.without)


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
        begin = partial(iterate, self) if iterate is not None else super(cls, self).__iter__
        outermost = type(self).__iter__ is __iter__
        return _iterate_timed(self, begin) if outermost else begin()

    __iter__.times = True  # type: ignore[attr-defined]
    return __iter__


def _iterate_timed(loader: Any, iterate: Callable[[], Any]) -> Any:
    """Return the iterator that a subclass of the program makes in its own way, as one that notes how long each batch took."""
    used = Use.current
    if used is None or "_stocache" not in vars(loader):  # a class of a library has made a loader without our ``__init__``
        return iterate()
    _loaders_of(used).enter(loader)
    engine = engine_of(loader)
    workers = min(loader.num_workers, engine.record.workers)
    epoch = engine.log.begin(engine.record, None, workers, loader.persistent_workers, None)
    batches = iterate()
    return batches if batches is loader else _TimedIteration(batches, epoch, engine.log)


class _TimedIteration(Iteration):
    """An iterator of the program, timed. Making it starts the workers."""

    def __init__(self, batches: Any, epoch: RunningEpoch, log: EpochLog) -> None:
        self._batches, self._epoch, self._log = batches, epoch, log
        epoch.last_ns = time.perf_counter_ns()

    def __iter__(self) -> Any:
        again = iter(self._batches)
        return self if again is self._batches else again

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __next__(self) -> Any:
        began = time.perf_counter_ns()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._epoch.note_request(began)
            self._log.end(self._epoch)
            raise
        ended = time.perf_counter_ns()
        self._epoch.note_batch(ended, ended - began, None)
        return batch


def _loaders_of(use: Use) -> ProgramLoaders:
    if use.loaders is None:
        use.loaders = ProgramLoaders(use, iterates_as_torch)
    return use.loaders  # type: ignore[no-any-return]
