"""The part of a `LoaderEngine` that can be resumed: its state, and the epoch."""

import copy
import weakref
from types import NoneType
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe, RandomSampler, Sampler, Subset

from stocache.datasets.cached import CachedDataset
from stocache.errors import StateError
from stocache.loader.order import Order, Progress, epoch_of, samplers_in
from stocache.loader.sample_seed import SampleSeed
from stocache.loader.samplers.locality import LocalityDistributedSampler
from stocache.loader.torchdata_state import from_torchdata, is_from_torchdata
from stocache.loader.worker_group import WorkerGroup
from stocache.loader.workers.states import (
    StatefulCollate,
    StatefulDataPipe,
    StatefulInit,
    StatefulIterable,
    WorkerState,
    WorkerStates,
    restore,
    state_of,
)
from stocache.samples.indices import length_of
from stocache.system import generators as rng
from stocache.system.objects import TorchLoader, attribute_of, has_state, takes_epoch, vars_of
from stocache.system.state import STATE_TYPES, StateForm
from stocache.system.walking import set_epoch, walk

_FORM = StateForm(
    "DataLoader",
    2,
    position={
        "batches": (int,),  # delivered, when the states of the workers were taken
        "replay": (int,),  # delivered since then
        "ahead": (list,),  # numbers of batches that were delivered before their turn
        "finished": (bool,),
        "turn": (int,),  # the worker that makes the next batch
        "world_size": (int,),
        "persistent": (bool,),  # whether the workers live on
        "epoch": (int, NoneType),  # of `set_epoch`
        "epochs": (list,),  # of the samplers
        "sample_epoch": (int, NoneType),  # from which samples are seeded; between epochs, the iterations that were begun
    },
    parts={
        "made": (dict,),  # the random generators at three moments
        "begun": (dict,),
        "asked": (dict,),
        "samplers": (list, NoneType),  # at the beginning of the epoch
        "now": (list, NoneType),  # the samplers and their iterator, after the delivered batches
        "dataset": STATE_TYPES,
        "workers": (list,),
    },
    optional=("fingerprint", "sample_seed"),
)


class ResumableEngine:
    """A position of a loader that can be saved and restored."""

    snapshot_every_n_steps: int | None
    sample_seed: SampleSeed | None
    prefetch_epochs: bool
    _epoch: int | None
    _loader: "weakref.ref[TorchLoader[Any]] | None"  # the loader holds the engine; a pickled engine has none

    @property
    def loader(self) -> Any:
        """The loader; None if it is gone."""
        return None if self._loader is None else self._loader()

    def _reset_position(self) -> None:
        self._progress = Progress(finished=True)
        self._iterations = 0  # that were begun
        self._loaded: dict[str, Any] | None = None  # the state from which the next iterator continues
        self._promised = False  # whether an iterator that has not begun is to continue from it
        self._restored: list[WorkerState | None] = []  # states for the next workers
        self._worker_states = WorkerStates(1)  # of the newest iterator
        self._iterable: StatefulIterable | None = None  # of the newest iterator without workers
        self._worker_group: WorkerGroup | None = None  # of persistent workers
        self._workers_made: dict[str, Any] | None = None  # states of the generators when these were made

    @property
    def index_source(self) -> Any:
        """The sampler that the loader asks: for batches, or for single indices."""
        return self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler

    def _order(self) -> Order:
        """Return the order of the batches, with the generators that the loader and its samplers own."""
        of_samplers = (value for sampler in samplers_in(self.index_source) for value in vars_of(sampler).values())
        owned = self.loader.generator, *of_samplers
        generators = {id(value): value for value in owned if isinstance(value, torch.Generator)}
        return Order(self.index_source, list(generators.values()), endless=self._is_iterable)

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def _in_order(self) -> bool:
        return getattr(self.loader, "in_order", True) or self.loader.num_workers < 2

    @property
    def _keeps_states(self) -> bool:
        """Whether the states of workers, or the numbers of their batches, have to be known."""
        return self._is_iterable or has_state(self.loader.dataset) or not self._in_order

    @property
    def foresees(self) -> bool:
        """Whether worker processes begin the next epoch; see NOTE [ The next epoch ]."""
        if not (self.prefetch_epochs and self.loader.persistent_workers) or self._keeps_states:
            return False
        return self._order().may_run_ahead

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy. It begins an epoch, or continues from a state that was loaded last."""
        progress = self._progress if self._progress.begun is None else Progress(finished=True)
        own: dict[str, Any] = {"_progress": progress, "_worker_states": WorkerStates(1), "_promised": False}
        return vars(self) | own | dict.fromkeys(("_loader", "_iterable", "_worker_group", "_workers_made"))

    def _next_progress(self) -> Progress:
        """Return the progress of the epoch that begins, or is resumed."""
        sample_epoch = None if self.sample_seed is None else self._next_sample_epoch()
        if self._loaded is None:
            replaces = self._progress.skip_rng_draw and self._worker_group is None
            workers_made = self._progress.workers_made if replaces else None
            return Progress(sample_epoch=sample_epoch, skip_rng_draw=replaces, workers_made=workers_made)
        position, parts = self._loaded["position"], self._loaded["parts"]
        return Progress(
            delivered=position["batches"],
            resumed=position["batches"],
            replay=position["replay"],
            ahead=set(position["ahead"]),
            epochs=position["epochs"],
            sample_epoch=sample_epoch,
            turn=position["turn"] if self._restored and self._in_order else 0,
            workers_made=parts["made"] if self.loader.num_workers and self._worker_group is None else None,
            **{name: parts[name] for name in ("made", "begun", "asked", "samplers", "now")},
        )

    def _next_sample_epoch(self) -> int:
        """Return the epoch from which the samples of the next iterator are seeded."""
        saved = None if self._loaded is None else self._loaded["position"]["sample_epoch"]
        set_by_user = (self._epoch, *(epoch_of(sampler) for sampler in samplers_in(self.index_source)))
        return next((epoch for epoch in (saved, *set_by_user) if epoch is not None), self._iterations)

    def _leave_resumed_epoch(self) -> None:
        """Begin a new epoch instead of resuming, because the user has set another epoch since."""
        if self._loaded is not None:
            with rng.Kept():
                self._order().restore(self._loaded["parts"]["asked"])  # where that epoch left the generators of the loader
            self._loaded = None

    def _with_states(self, source: Any, collate: Any) -> dict[str, Any]:
        """Return arguments of torch's loader with which the states of the dataset are restored, and known after each batch."""
        (states, self._restored), workers = (self._restored, []), self.loader.num_workers
        sends_some = self._in_order and workers and (self._is_iterable or not self.loader.persistent_workers)
        every = max(1, self.snapshot_every_n_steps or 1) if sends_some and self._keeps_states else 1
        self._worker_states = WorkerStates(max(1, workers), every, list(states))
        iterable = None
        if self._is_iterable:
            kind = StatefulDataPipe if isinstance(source, IterDataPipe) else StatefulIterable
            source = iterable = kind(source, states, self.loader.batch_size or 1, self.loader.drop_last)
        self._iterable = None if workers else iterable
        if workers and self._keeps_states:
            init = StatefulInit(self.loader.worker_init_fn, states)
            return {"dataset": source, "collate_fn": StatefulCollate(collate, every, iterable), "worker_init_fn": init}
        if iterable is None and states and states[0] is not None:
            restore(source, states[0].dataset)
        return {"dataset": source, "collate_fn": collate}

    def set_epoch(self, epoch: int) -> None:
        """See `DataLoader.set_epoch`."""
        self._epoch = epoch
        for sampler in samplers_in(self.index_source):
            if takes_epoch(sampler):
                sampler.set_epoch(epoch)
        set_epoch(self.loader.dataset, epoch)
        if self._worker_group is not None and self._worker_group.order.context is not None:
            self._worker_group.order.context.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """See `DataLoader.state_dict`."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        progress, order = self._progress, self._order()
        finished = progress.finished or progress.begun is None
        now = order.rng_state() if finished or progress.asked is None else None
        since, workers, turn = self._states_of_workers(finished)
        position = {
            "batches": since,
            "replay": progress.delivered + progress.replay - since,
            "ahead": sorted(progress.ahead),
            "finished": finished,
            "turn": turn,
            "world_size": self._world_size,
            "persistent": self._worker_group is not None,
            "epoch": self._epoch,
            "epochs": order.epochs() if finished else progress.epochs,
            "sample_epoch": self._iterations if finished else progress.sample_epoch,
        }
        parts = {
            "made": self._workers_made or (now if finished else progress.made),
            "begun": now if finished else progress.begun,
            "asked": now if finished else progress.asked or now,
            "samplers": order.sampler_states() if finished else progress.samplers,
            "now": None if finished or since != progress.delivered else progress.now,
            "dataset": copy.deepcopy(state_of(self.loader.dataset)),
            "workers": workers,
        }
        return _FORM.make(self._identity(), position, parts)

    def _states_of_workers(self, finished: bool) -> tuple[int, list[Any], int]:
        """Return the batches delivered, the states of the workers, and whose turn it is, to resume from."""
        delivered = self._progress.delivered
        if finished:
            states = WorkerStates(1, states=[] if self._iterable is None else [WorkerState(ended=True)])  # without workers
            if self._worker_group is not None:
                states = self._worker_states.next_epoch()
            return delivered, states.at(0)[1], 0
        if self._iterable is not None and self._iterable.state is not None:
            state = vars(self._iterable.state) | {"dataset": None}  # it is the dataset of this process
            return delivered, [copy.deepcopy(state)], 0
        return self._worker_states.at(delivered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `DataLoader.load_state_dict`."""
        if state == {}:
            self.end_workers()
            self._reset_position()
            return
        if is_from_torchdata(state):
            self._progress, self._loaded = Progress(finished=True), None
            state = from_torchdata(state, self)
        position, parts = _FORM.read(state, self._identity())
        order = self._order()
        _check(position, parts, order)
        states, workers = [WorkerState.read(saved) for saved in parts["workers"]], self.loader.num_workers
        if not any(states):
            states = []
        elif len(states) != max(1, workers):
            raise StateError(
                f"the state has the states of {len(states)} workers; this loader has {workers}. Use as many workers."
            )
        elif position["turn"] >= len(states):
            raise StateError(f"the state of a DataLoader is damaged: position has turn={position['turn']}.")
        restore(self.loader.dataset, copy.deepcopy(parts["dataset"]))
        if self._keeps_states:
            self.end_workers()  # new ones begin with their states
        if position["epoch"] is not None:
            self.set_epoch(position["epoch"])
        if position["sample_epoch"] is not None:
            self._iterations = position["sample_epoch"]
        if position["world_size"] != self._world_size:
            parts["now"] = None  # counts the samples of another rank
        with rng.Kept():
            finished = position["finished"]
            order.restore(parts["begun"] if finished else None, parts["samplers"], position["epochs"])
        self._restored = states
        replaces = finished and position["persistent"]
        self._progress = Progress(finished=True, skip_rng_draw=replaces, workers_made=parts["made"] if replaces else None)
        self._loaded = None if finished else copy.deepcopy(state | {"position": position, "parts": parts})
        self._promised = False

    def end_workers(self) -> None:
        """See `DataLoader.end_workers`."""
        # As Lightning does. The garbage collector may find the queues first, and then this takes 5 seconds a worker
        group, self._worker_group, self._workers_made = self._worker_group, None, None
        if group is not None:
            iterator, self.loader._iterator = self.loader._iterator, None
            if iterator is not None:
                iterator._shutdown_workers()

    @property
    def _world_size(self) -> int:
        """The number of ranks that the samplers share the samples among."""
        counts = (getattr(sampler, "num_replicas", None) for sampler in samplers_in(self.index_source))
        return next((count for count in counts if type(count) is int), 1)

    def _identity(self) -> dict[str, Any]:
        """Return the properties that must be equal for a state to be resumed."""
        layers = walk(self.loader.dataset, through=lambda wrapper: isinstance(wrapper, Subset | CachedDataset))
        fingerprints = [
            attribute_of(layer, name) for layer in layers for name in ("fingerprint", "_fingerprint")
        ]  # stocache and Hugging Face use the second name
        batch_size = self.loader.batch_size
        if isinstance(self.loader.sampler, LocalityDistributedSampler):  # other ranks may continue the same batches
            batch_size = self.loader.sampler.global_batch_size
        elif batch_size is not None:
            batch_size *= self._world_size
        return {
            "fingerprint": next((value for value in fingerprints if isinstance(value, str)), None),
            "samples": None if self._is_iterable else length_of(self.loader.dataset),
            "batches": length_of(self.index_source),
            "batch_size": batch_size,
            "drop_last": self.loader.drop_last,
            "sample_seed": None if self.sample_seed is None else self.sample_seed.seed,
            "samplers": [_description(value) for value in samplers_in(self.index_source) if isinstance(value, Sampler)],
        }


def _check(position: dict[str, Any], parts: dict[str, Any], order: Order) -> None:
    """Check the properties of a state that its form does not describe.

    Raises:
        StateError: the state is damaged, or belongs to a loader with other generators.
    """
    taken = [rng.checked(parts[name]) for name in ("made", "begun", "asked")]
    if any(len(states["generators"]) != len(order.generators) for states in taken):
        raise StateError(
            f"the state belongs to a DataLoader that has, with its samplers, {len(taken[0]['generators'])} random number "
            f"generators; this one has {len(order.generators)}. Pass generator= to both loaders, or to neither."
        )
    epochs, samplers = position["epochs"], parts["samplers"] or []
    for name, fits in {
        "ahead": all(type(number) is int and number > position["batches"] for number in position["ahead"]),
        "epochs": len(epochs) == len(order.epochs()) and all(type(epoch) in (int, NoneType) for epoch in epochs),
        "samplers": len(samplers) == len(order.sampler_states() or []),
    }.items():
        if not fits:
            raise StateError(f"the state of a DataLoader is damaged: it has {name}={(position | parts)[name]!r:.100}.")


def _description(sampler: Any) -> dict[str, Any]:
    """Return the properties that distinguish samplers of torch. Others check their own states."""
    names = {DistributedSampler: ("seed", "shuffle"), RandomSampler: ("replacement",)}.get(type(sampler), ())
    return {"class": type(sampler).__name__} | {name: getattr(sampler, name) for name in names}
