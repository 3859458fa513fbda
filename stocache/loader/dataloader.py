"""DataLoader: torch's DataLoader, with batches in shared memory that is reused."""

import functools
import gc
import inspect
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from stocache.loader.engine import SIGNATURE, LoaderEngine, engine_of, makes_iterators
from stocache.loader.epochs import LoaderStats
from stocache.loader.sample_seed import SampleSeed
from stocache.system.loading import watch
from stocache.system.objects import TorchLoader
from stocache.system.on_error import OnError

logger = logging.getLogger("stocache")

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., None])


def with_arguments_of_torch(function: _F) -> _F:
    """Give ``function`` the signature of torch's loader and its own arguments. Lightning recreates a loader from it."""
    parameters = inspect.signature(function).parameters.values()
    own = [value for value in parameters if value.kind is value.KEYWORD_ONLY and value.name not in SIGNATURE.parameters]
    function.__signature__ = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *own])  # type: ignore[attr-defined]
    return function


class DataLoader(TorchLoader[_T]):
    """torch's DataLoader with the same arguments and the same batches, and less copying.

        loader = DataLoader(CachedDataset(dataset, 32), batch_size=256, shuffle=True, num_workers=8)

    Worker processes write batches into a ring of buffers in shared memory, and send a few hundred bytes that say where a batch
    is. Samples of a `CachedDataset` without a transform are gathered straight into a buffer. A buffer is used again when the
    last view of its batch is gone: a batch is never overwritten while you hold it, and you may hold many. Values, order and
    random numbers are the same as with torch's DataLoader. A batch that does not go through the ring (no free buffer, no
    memory, small and without tensors) is sent as torch sends it.

    Args:
        dataset, batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last, generator, in_order: as for torch's
            DataLoader, which has ``in_order`` from torch 2.6 on.
        timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers, pin_memory, pin_memory_device:
            likewise.
        num_workers: as for torch's DataLoader; or "auto": a child process runs short epochs with 0, 1, 2, 4, ... workers for up
            to 10 s, and the fewest workers are chosen with which these are as fast as with any other number. The choice is
            logged, and becomes the attribute ``num_workers``. An iterable dataset gets 0; one that cannot be measured, one for
            each CPU, at most 8. If it is 0, ``prefetch_factor``, ``persistent_workers`` and ``multiprocessing_context`` have no
            effect.
        snapshot_every_n_steps: with which batches workers send the state of a dataset that has one: with the batches of every
            n-th step. A loader that resumes between two of them loads up to n - 1 batches, and drops them. None and 0 are 1.
            Persistent workers of a map-style dataset send each state that has changed, whatever n is.
        worker_method: "multiprocessing" for worker processes; "thread" for threads of this process, which need no start, no
            pickling and no shared memory, and are as fast if making a sample leaves the GIL free (decoding, reading, numpy,
            torch); "auto" tries both, and logs what it chooses. Each thread has its own copy of the dataset object, and
            shares its data; see NOTE [ A dataset for each thread ]. (The name is that of torch's ``WorkerInfo``.) None stands
            for processes; for threads if the dataset is cached, the system shares no memory between processes, and there is no
            ``sample_seed``.
        device: a GPU, such as "cuda", on which batches are delivered. They are copied, two ahead, on a stream of its own, from
            pinned memory, whatever ``pin_memory`` is. Samples of a `CachedDataset` that are in memory are read by the GPU
            itself. "cuda" is the current device when the first iterator is made. Parts that are no tensors stay on the host.
            None and "cpu" are as without it.
        sample_seed: a number, or a `SampleSeed`, from which each sample gets random numbers of its own: the same samples with
            any number of workers and ranks, any batch size, cached or not, resumed or not. Read the limits of `SampleSeed`.

        on_error: what happens when a sample cannot be made: a `Retry`, a `Skip`, or a list of one of each. Without it the error
            is raised.
        prefetch_epochs: True has persistent worker processes make the first batches of the next epoch as soon as they have
            made the last ones of this epoch. Batches, random numbers and states are as without it.

    A subclass may use any name for its attributes and methods, besides the names of torch's DataLoader and ``_stocache``. If it
    overrides ``_get_iterator``, it iterates as it does with torch.

    Raises:
        ValueError, TypeError: as torch's DataLoader; also for ``worker_method``, ``snapshot_every_n_steps`` and ``device``.
        LimitError: the `LocalityDistributedSampler` was made for a different batch size; ``sample_seed`` is not a seed.
        DatasetError: ``sample_seed`` was given for an iterable dataset; while iterating: worker threads cannot use the dataset.
        WorkerError: while iterating: a worker died, or none can start. The message names its process, signal and batch.

    Examples:
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> next(iter(loader))
        [tensor([0, 1])]
        >>> resumed = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> resumed.load_state_dict(loader.state_dict())
        >>> list(resumed)
        [[tensor([2, 3])], [tensor([4, 5])]]
    """

    @functools.wraps(TorchLoader.__init__)  # type: ignore[misc]  # for its types
    @with_arguments_of_torch
    def __init__(
        self,
        dataset: Any,
        *args: Any,
        snapshot_every_n_steps: int | None = 1,
        sample_seed: int | SampleSeed | None = None,
        worker_method: str | None = None,
        device: Any = None,
        on_error: OnError | None = None,
        prefetch_epochs: bool = False,
        **kwargs: Any,
    ) -> None:
        arguments: dict[str, Any] = SIGNATURE.bind(self, dataset, *args, **kwargs).arguments
        if arguments.get("num_workers") == "auto":
            # here, as imports are half of the time of `stocache run`
            from stocache.loader.choice.choice import with_chosen_workers

            arguments = with_chosen_workers(dataset, arguments, DataLoader, worker_method)
            args, kwargs = (), arguments
        super().__init__(dataset, *args, **kwargs)
        own: dict[str, Any] = {"snapshot_every_n_steps": snapshot_every_n_steps, "sample_seed": sample_seed}
        own |= {"worker_method": worker_method, "device": device, "on_error": on_error}
        own |= {"prefetch_epochs": prefetch_epochs}
        engine = vars(self)["_stocache"] = LoaderEngine(self, DataLoader, **own)
        named = inspect.signature(type(self).__init__).parameters
        for name in own.keys() & named.keys():  # as attributes, from which trainers make a loader again
            if (own[name] is not _DEFAULTS[name] or type(self) is DataLoader) and not hasattr(type(self), name):
                vars(self).setdefault(name, getattr(engine, name))
        effects = {"sample_seed": sample_seed is not None, "on_error": on_error is not None}
        effects |= {"worker_method": worker_method not in (None, "multiprocessing")}
        if lost := [name for name, effect in (effects | {"device": engine.device is not None}).items() if effect]:
            engine.unused = weakref.finalize(self, _warn_of_lost, lost, id(dataset), os.getpid())
        watch.current.note(self)

    _stocache: LoaderEngine

    def __iter__(self) -> Any:
        """Return an iterator over the batches. After `load_state_dict` the first one continues where the state was taken."""
        if "_stocache" not in vars(self):
            return super().__iter__()
        begin = super().__iter__ if makes_iterators(self, DataLoader) else engine_of(self).iterate
        return watch.current.iterate(self, begin)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset, if they have a ``set_epoch``; also in persistent workers.

        A worker learns the epoch with its first batch. An iterable dataset has made its iterator by then: if that already
        chose the samples, they are the samples of the previous epoch.
        """
        engine_of(self).set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, after the batches it has delivered, for a checkpoint.

        It has the contract of torchdata's StatefulDataLoader. It holds the generators of the loader and its samplers, and the
        epochs of the samplers. It also holds the states of samplers, of the dataset, and of each worker's copy of it, if
        these have ``state_dict`` and ``load_state_dict``. JSON can save it if it can save those states. It does not hold random
        numbers that the model draws, nor the numbers that transforms draw in workers: ``sample_seed`` is for them.
        """
        return engine_of(self).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. The next iterator delivers the batches that followed, and loads no others.

        A state also loads with a different number of workers, if neither the dataset nor an iterator has a state; and with a
        different number of ranks, if the global batch has the same size. An empty dict starts over. A state of torchdata's
        StatefulDataLoader loads, too.

        Raises:
            StateError: ``state`` is damaged, of a different version, or of a different dataset, sampler or batch size.
        """
        engine_of(self).load_state_dict(state)

    def end_workers(self) -> None:
        """End the persistent workers. The next iteration starts new ones."""
        engine_of(self).end_workers()

    def stats(self) -> LoaderStats:
        """Return the counts and times of the loader so far."""
        return engine_of(self).stats()


_DEFAULTS: dict[str, Any] = DataLoader.__init__.__kwdefaults__
_said_lost = False  # the warning below


def _warn_of_lost(options: list[str], dataset: int, pid: int) -> None:
    """Warn, once, if a loader that was never iterated is gone, and a loader of torch's has its dataset in its place.

    Libraries make such a loader from the arguments of torch that ours has. The options that torch's does not have are lost.
    """
    global _said_lost
    if _said_lost or os.getpid() != pid:
        return
    loaders = (each for each in gc.get_objects() if issubclass(type(each), TorchLoader) and not isinstance(each, DataLoader))
    if any(id(vars(each).get("dataset")) == dataset for each in loaders):
        _said_lost = True
        logger.warning(
            "a library has made torch's own loader of a stocache.DataLoader, where %s has no effect. Iterate over the loader "
            "that you made, or leave the option out.",
            " and ".join(options),
        )
