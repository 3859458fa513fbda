"""Make a state of a `DataLoader` from one that torchdata's StatefulDataLoader (0.11) saved."""

from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from stocache.errors import StateError
from stocache.system import generators as rng


def is_from_torchdata(state: object) -> bool:
    """Whether torchdata's StatefulDataLoader made this state."""
    return isinstance(state, dict) and "_iterator_finished" in state


def from_torchdata(state: dict[str, Any], engine: object) -> dict[str, Any]:
    """Return a state from which a loader goes on where torchdata's would.

    torchdata's loader shuffles with a generator of its own. So the sampler of this loader gets such a generator, if it does not
    have one. The epochs after the resumed one are shuffled as torch's sampler does, which draws more numbers for each.

    Args:
        state: of torchdata.
        engine: of the `DataLoader` that loads it, made with the same arguments.

    Raises:
        StateError: the state is damaged, or the position of a worker in an iterable dataset without a state is unknown.
    """
    try:
        return _converted(state, engine)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"the state of torchdata's StatefulDataLoader is damaged: {error!r:.100}.") from error


def _converted(state: dict[str, Any], engine: Any) -> dict[str, Any]:
    loader = engine.loader
    snapshot = state.get("_snapshot")
    main = state if snapshot is None else snapshot["_main_snapshot"]
    batches = state["_num_yielded"] if snapshot is None else snapshot["_snapshot_step"]
    finished = state["_iterator_finished"]
    sampling = main["_sampler_iter_state"] or {}
    generator = (sampling.get("sampler_iter_state") or {}).get("generator")
    if isinstance(loader.sampler, RandomSampler) and generator is not None and loader.sampler.generator is None:
        loader.sampler.generator = torch.Generator()
    own: dict[str, Any] = engine.state_dict()  # of a loader that has not begun
    position, parts = own["position"], own["parts"]
    if isinstance(loader.sampler, RandomSampler) and generator is not None:
        with rng.Kept():
            loader.sampler.generator.set_state(generator)
            parts["made"] = parts["begun"] = parts["asked"] = engine.state_dict()["parts"]["made"]
    position |= {"batches": batches, "replay": state.get("_steps_since_snapshot", 0), "finished": finished}
    position["epochs"] = [None for _ in position["epochs"]]  # torchdata leaves them to the user
    samplers = [saved for saved in (main["_index_sampler_state"], sampling.get("sampler_state")) if saved is not None]
    if samplers and not finished:
        parts["samplers"] = parts["now"] = samplers
    if snapshot is None:
        parts["dataset"] = main["dataset_state"]
        workers = [{"dataset_state": None, "fetcher_state": main["fetcher_state"]}]
    else:
        position["turn"] = (snapshot["_last_yielded_worker_id"] + 1) % len(snapshot["_worker_snapshots"])
        workers = [snapshot["_worker_snapshots"][f"worker_{number}"] for number in range(len(snapshot["_worker_snapshots"]))]
    if not finished:
        samples = batches * (loader.batch_size or 1) if len(workers) == 1 else None
        parts["workers"] = [_worker(saved, samples, parts["dataset"], loader) for saved in workers]
    return own


def _worker(saved: dict[str, Any], samples: int | None, dataset: Any, loader: Any) -> dict[str, Any] | None:
    fetcher = saved["fetcher_state"] or {"dataset_iter_state": None, "fetcher_ended": False}
    iterator, own = fetcher["dataset_iter_state"], saved["dataset_state"]
    if isinstance(loader.dataset, IterableDataset) and samples is None and iterator is None and own is None and dataset is None:
        raise StateError("the state does not say how many samples each worker has taken from the iterable dataset.")
    if not isinstance(loader.dataset, IterableDataset) and own is None:
        return None
    ended = fetcher["fetcher_ended"]
    return {"dataset": own, "iterator": iterator, "samples": samples or int(ended), "ended": ended}
