"""Choose the number of workers of a loader, and whether they are threads, by short epochs of the real loader.

NOTE [ Threads or processes ]
    Two threads make samples as fast as two processes, and start much faster, if making a sample leaves the GIL free. So threads
    are chosen if short epochs with them take no longer than with processes. A child process runs these, so that the user's
    dataset stays unchanged.

    Threads are chosen in any case if forked processes would stall (NOTE [ Stalled processes ]), and processes if samples
    draw from the global random number generators, of which processes have their own.
"""

import logging
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from stocache.cache.ragged import RaggedCache
from stocache.datasets.cached import CachedDataset
from stocache.loader.choice.measure import SAME, Epoch, MakeLoader, Samples, Study, measure
from stocache.system.figures import format_seconds
from stocache.system.loading.copies import find_open_handle, find_running, holds_generator
from stocache.system.loading.fallback import would_stall
from stocache.system.objects import attribute_of, has_state
from stocache.system.platform import here
from stocache.system.walking import makers, passes_on, walk

logger = logging.getLogger("stocache")

_MOST_WORKERS = 128
_FALLBACK = 8

_CACHED = 0.9  # the share of samples in the cache, from which batches are mostly gathered, which leaves the GIL free


def worker_counts(cores: int) -> list[int]:
    """Return the numbers of workers that are worth a try. torch warns of more than there are CPUs."""
    most = min(cores, _MOST_WORKERS)
    return sorted({0, most, *(2**power for power in range(most.bit_length()) if 2**power < most)})


def rank(epochs: Sequence[Epoch], step_s: float, count: int) -> list[Epoch]:
    """Return the best settings, the best first. Of equally fast ones the cheaper is the better.

    Cheaper means: without a codec, then with fewer workers, then with less memory.

    Args:
        step_s: seconds of the training step for each sample. Settings that keep up with it are equally fast.
    """
    left, best = sorted(epochs, key=lambda epoch: epoch.with_step(step_s)), list[Epoch]()
    while left and len(best) < count:
        as_fast = [epoch for epoch in left if epoch.with_step(step_s) <= left[0].with_step(step_s) * SAME]
        best.append(min(as_fast, key=_price))
        left.remove(best[-1])
    return best


def _price(epoch: Epoch) -> tuple[bool, int, int, float]:
    setting = epoch.setting
    return setting.codec is not None, setting.workers, setting.limit_bytes, epoch.sample_s


def with_chosen_workers(
    dataset: object, arguments: Mapping[str, Any], make_loader: MakeLoader, method: str | None = None
) -> dict[str, Any]:
    """Return arguments of torch's DataLoader with a number in place of ``num_workers="auto"``, and log why.

    It is the smallest number with which short epochs were as fast as with any other; never more than there are CPUs. They are
    run for up to 10 s. An iterable dataset gets 0 workers, because each would yield all samples. A dataset that cannot be
    measured gets one for each CPU, at most 8. If it is 0, arguments that torch refuses without workers are left out.

    Args:
        arguments: of the constructor, without default values; "self" and "dataset" are left out of the result.
        method: the ``worker_method`` of the loader.
    """
    chosen = {name: value for name, value in arguments.items() if name not in ("self", "dataset")}
    size = chosen.get("batch_size", getattr(chosen.get("batch_sampler"), "batch_size", 1))
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)  # ranks of torchrun share the CPUs
    counts = worker_counts(max(1, here.usable_cpus() // share))
    methods = ("thread",) if method == "thread" else ("multiprocessing",)
    study = Study(make_loader, counts, (size,), methods, collate_fn=chosen.get("collate_fn"))
    chosen["num_workers"], reason = _choose_number(dataset, study)
    logger.info("num_workers='auto' chooses %d: %s", chosen["num_workers"], reason)
    if not chosen["num_workers"]:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            chosen.pop(name, None)
    return chosen


def _choose_number(dataset: Any, study: Study) -> tuple[int, str]:
    if isinstance(dataset, IterableDataset):
        return 0, "the dataset is iterable, and each worker would yield all of its samples"
    if multiprocessing.current_process().daemon:
        return 0, "this process is daemonic, and may not start workers"
    fallback = min(here.usable_cpus(), _FALLBACK)
    source = dataset.dataset if isinstance(dataset, CachedDataset) else dataset
    if holds_cache(source):
        return fallback, "the dataset wraps a CachedDataset, which is not measured"
    try:
        if not len(source):
            return 0, "the dataset has no samples"
        _, epochs = _measure(dataset, study)
    except Exception as error:  # of a sample: it is raised again when the sample is requested
        return fallback, f"samples cannot be measured ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if not epochs:
        return fallback, "samples are too slow to be measured"
    return rank(epochs, 0.0, 1)[0].setting.workers, "epochs take " + ", ".join(
        f"{format_seconds(each.sample_s * len(source))} with {each.setting.workers} workers" for each in epochs
    )


def _measure(dataset: Any, study: Study) -> tuple[Samples, list[Epoch]]:
    """Measure settings of a loader; for a `CachedDataset` with a cache like its own, which is left as it is."""
    sizes = [size if isinstance(size, int) and size > 0 else 1 for size in study.batch_sizes]
    study = replace(study, batch_sizes=sizes)
    if not isinstance(dataset, CachedDataset):
        return measure(dataset, study)
    room, length = dataset.cache.stats().capacity_bytes, len(dataset)
    codec = dataset.cache.codec if isinstance(dataset.cache, RaggedCache) else None

    def choose_caches(samples: Samples) -> list[tuple[int, str | None]]:
        if codec not in samples.cached_bytes:
            return [(0, None)]
        holds_all = room >= length * samples.cached_bytes[codec]
        return [(samples.limit_for(codec, length) if holds_all else room, codec)]

    options = {"transform": dataset.after_cache, "allow_pickle": True}
    return measure(dataset.dataset, replace(study, codecs=(codec,), options=options, choose_caches=choose_caches))


def holds_cache(dataset: object) -> bool:
    """Return whether a dataset gets samples from a `CachedDataset`."""
    return any(isinstance(found, CachedDataset) for found in walk(dataset))


def choose_method(dataset: object, hooks: bool, study: Study, forks: bool) -> str:
    """Return "thread" or "multiprocessing" for the workers of a loader, and log why.

    Args:
        hooks: whether its ``sample_seed`` has hooks.
        study: the settings of the loader, with both methods.
        forks: whether its worker processes are forked.
    """
    method, reason = method_by_rule(dataset, hooks) or try_methods(dataset, study)
    *_, innermost = walk(dataset, through=lambda wrapper: passes_on(wrapper) or isinstance(wrapper, CachedDataset))
    if method == "multiprocessing" and forks and would_stall(innermost):
        method, reason = "thread", "forked processes would stall"
    logger.info("worker_method='auto' chooses %r: %s", method, reason)
    return method


def try_methods(dataset: object, study: Study) -> tuple[str, str]:
    """Return the method with which short epochs are faster, and why."""
    try:
        samples, epochs = _measure(dataset, study)
    except Exception as error:  # of a sample: it is raised again when the sample is requested
        logger.debug("threads could not be tried: %s", str(error))
        return "multiprocessing", "threads could not be tried"
    if samples.draws:
        return "multiprocessing", "samples draw from the global random number generators, which threads share"
    sample_s = {each.setting.method: each.sample_s for each in epochs if each.setting.workers}
    if len(sample_s) < 2:
        return "multiprocessing", "threads could not be tried"
    faster = sample_s["multiprocessing"] / sample_s["thread"]
    method = "thread" if faster * SAME >= 1 else "multiprocessing"
    return method, f"threads make {faster:.2f} times as many samples as processes"


def method_by_rule(dataset: object, hooks: bool) -> tuple[str, str] | None:
    """Return the method, and why; None if a measurement decides."""
    if attribute_of(dataset, "thread_safe") is False:
        return "multiprocessing", "the dataset has thread_safe = False"
    if isinstance(dataset, IterableDataset) or has_state(dataset) or holds_generator(dataset):
        return "multiprocessing", "the dataset is iterable, or has a state or a generator of its own"
    if hooks:
        return "multiprocessing", "sample_seed has hooks, which may set objects that threads share"
    handle = find_open_handle(dataset) or find_running(dataset)
    if handle is not None:
        return "multiprocessing", f"threads would share {handle}"
    share = min(map(_gathered_share, makers(dataset)))
    if share >= _CACHED:
        return "thread", f"{share:.0%} of the samples are cached"
    if (os.cpu_count() or 1) < 2:
        return "thread", "there is one CPU"
    if holds_cache(dataset):
        if not here.SHARES_MEMORY:
            return "thread", "on this system processes share no cache"
        if not isinstance(dataset, CachedDataset):
            return "multiprocessing", "the dataset wraps a CachedDataset, which is not measured"
    return None


def _gathered_share(dataset: Any) -> float:
    """Return the share of the samples that need only be gathered."""
    plain = isinstance(dataset, CachedDataset) and not dataset.is_transformed
    return dataset.cache.stats().fill_fraction if plain else 0.0
