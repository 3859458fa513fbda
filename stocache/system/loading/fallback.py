"""Load samples in child processes; or in this one, if these cannot.

NOTE [ Loading in this process ]
    A child may be unable to load: it cannot use the GPU of its parent, or it is stalled (NOTE [ Stalled processes ]). Then this
    process runs the job, as plain torch would, but with copies of the dataset and the objects in it, as a fork would have
    (NOTE [ A dataset for each thread ]). Files that these open, and attributes that they set, end with the copies. The states
    of the random generators are put back.
"""

import contextlib
import logging
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from stocache.errors import WorkerError
from stocache.system.generators import Kept
from stocache.system.loading.children import ChildError, SlowError, StalledError, has_stalled, in_children
from stocache.system.loading.code import own_generators
from stocache.system.loading.copies import copy_dataset
from stocache.system.platform import here

logger = logging.getLogger("stocache")

Job = Callable[[], Iterator[Any]]

_PATIENCE_S = 30.0  # for the sample of `would_stall`
_DATASET_ERRORS = (TypeError, AttributeError, LookupError, NameError, NotImplementedError, FileNotFoundError)
"""Errors of a dataset that is wrong or not ready. It would raise them in any process."""


def in_children_or_here(
    dataset: object, jobs: Sequence[Job], proven: bool = False, patience_s: float | None = None
) -> Generator[Any, None, None]:
    """Yield the items of ``jobs``, which load samples in child processes; or in this one if children cannot load them.

    Args:
        dataset, jobs, patience_s: as for `in_children`.
        proven: whether children have loaded samples before. Then every error is an error of the dataset.

    Raises:
        SlowError: nothing came for ``patience_s``.
        WorkerError: a child died.
        Exception: the error of a job.
    """
    counts = [0] * len(jobs)  # items of each job
    try:
        numbered = [partial(_numbered, number, job) for number, job in enumerate(jobs)]
        with contextlib.closing(in_children(numbered, dataset, patience_s)) as items:
            for number, item in items:
                counts[number] += 1
                yield item
        return
    except SlowError:
        raise
    except ChildError as error:
        reason: Exception = error
    except Exception as error:
        if proven or any(counts) or not loads_only_here(lambda: [next(job(), None) for job in jobs], error):
            raise
        reason = error
    warn_of_this_process(reason)
    for job, count in zip(jobs, counts, strict=True):
        yield from islice(run_here(job), count, None)


def _numbered(number: int, job: Job) -> Iterator[tuple[int, Any]]:
    return ((number, item) for item in job())


def run_here(job: Job) -> Generator[Any, None, None]:
    """Yield the items of a job that runs in this process; see NOTE [ Loading in this process ]."""
    with Kept(own_generators(job)):
        for item in copy_dataset(job)():
            yield pickle.loads(pickle.dumps(item, 5))


def loads_only_here(load: Callable[[], object], error: Exception) -> bool:
    """Whether ``load``, which raised ``error`` in a child, works here: with a GPU, or a dataset that forbids forks."""
    if isinstance(error, (*_DATASET_ERRORS, WorkerError)):
        return False
    try:
        list(run_here(partial(_call, load)))
    except Exception:
        return False
    return True


def would_stall(dataset: object) -> bool:
    """Whether a forked process that loads a sample would stall."""
    with contextlib.suppress(Exception):  # of the sample: it is raised again when the sample is requested
        list(in_children([partial(_call, partial(_load_first, dataset))], dataset, _PATIENCE_S))
    return has_stalled(dataset)


def _load_first(dataset: Any) -> None:
    next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]


def _call(load: Callable[[], object]) -> Iterator[None]:
    load()
    yield None


def warn_of_this_process(reason: Exception) -> None:
    """Warn that samples are loaded in this process. Of a stall, `in_children` has warned; some systems have no other way."""
    if here.OPEN_FILES and not isinstance(reason, StalledError):
        logger.warning(
            "samples cannot be loaded in a child process (%s: %s), so this process loads them, before your loop, with a copy "
            "of the dataset. Files that it keeps elsewhere stay open here, and forked workers share them. If it reads files, "
            "give CachedDataset example=sample, or probe=0, which load nothing.",
            type(reason).__name__, str(reason),
        )  # fmt: skip
