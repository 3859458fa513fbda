"""What happens when a sample cannot be loaded: `Retry` loads it again, `Skip` takes a different sample in its place."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

from stocache.errors import DatasetError, LimitError, WorkerError

_T = TypeVar("_T")

_MOST_TIMES = 100
_LONGEST_S = 60.0  # between two attempts


@dataclass(frozen=True)
class Retry:
    """Load a sample again when loading it has failed, such as by a refused request of an object store.

        DataLoader(dataset, batch_size=32, on_error=Retry(times=3, backoff_s=0.5))

    The random generators are set back before each attempt, so the sample is equal to one that loaded at once.

    Args:
        times: attempts after the first one, from 1 to 100.
        backoff_s: seconds to wait before the second attempt. Each wait is twice as long as the one before, up to 60 s.
        only: classes of errors. An error counts if it is of such a class, or an error that caused it is. A `WorkerError`, and
            what is not an Exception (KeyboardInterrupt, SystemExit), never counts.

    Examples:
        >>> attempts = iter([False, True])
        >>> def request():
        ...     if not next(attempts):
        ...         raise ConnectionError("refused")
        ...     return "sample"
        >>> Retry(backoff_s=0).call(request, lambda: None)
        'sample'

    Raises:
        LimitError: ``times`` or ``backoff_s`` is not such a number, or ``only`` does not hold classes of exceptions.
    """

    times: int = 3
    backoff_s: float = 0.1
    only: tuple[type[Exception], ...] = (OSError, TimeoutError)

    def __post_init__(self) -> None:
        if type(self.times) is not int or not 1 <= self.times <= _MOST_TIMES:
            raise LimitError(f"times={self.times!r:.100} is not a number of attempts. Use an int from 1 to {_MOST_TIMES}.")
        if not isinstance(self.backoff_s, int | float) or not 0 <= self.backoff_s <= _LONGEST_S:
            raise LimitError(
                f"backoff_s={self.backoff_s!r:.100} is not a time to wait. Use seconds from 0 to {_LONGEST_S:.0f}."
            )
        only = self.only if isinstance(self.only, tuple) else (self.only,)
        if not only or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in only):
            raise LimitError(f"only={self.only!r:.100} does not hold classes of exceptions. Use only=(OSError,).")
        object.__setattr__(self, "only", only)

    def call(self, load: Callable[[], _T], begin_again: Callable[[], object]) -> _T:
        """Return ``load()``, called again while it fails. ``begin_again`` is called before each further attempt."""
        for attempt in range(self.times):
            try:
                return load()
            except Exception as error:
                if not self.covers(error):
                    raise
            time.sleep(min(self.backoff_s * 2**attempt, _LONGEST_S))
            begin_again()
        return load()

    def covers(self, error: BaseException) -> bool:
        """Return whether a sample that failed with this error is loaded again."""
        return may_go_on(error) and any(isinstance(each, self.only) for each in causes_of(error))


@dataclass(frozen=True)
class Skip:
    """Take a different sample in place of one that cannot be loaded, such as a truncated image.

        DataLoader(dataset, batch_size=32, on_error=[Retry(times=3), Skip(at_most=0.001)])

    The substitute depends on (seed, epoch, index) alone, so all batches keep their size and order on any number of workers and
    ranks, and after a resume. It is not cached as the sample that failed. The epoch is the epoch of the loader's ``set_epoch``.

    Args:
        at_most: the share of the dataset's samples that may fail, rounded up to whole samples. The next sample that fails ends
            the epoch with a `DatasetError` that names the samples.
        seed: chooses the substitutes.

    Examples:
        >>> class Images(TensorDataset):
        ...     def __getitem__(self, idx):
        ...         if idx == 2:
        ...             raise ValueError("truncated")
        ...         return super().__getitem__(idx)
        >>> loader = DataLoader(Images(torch.arange(6)), batch_size=6, on_error=Skip(at_most=0.2))
        >>> [len(batch) for (batch,) in loader], loader.stats().failed
        ([6], (2,))

    Raises:
        LimitError: ``at_most`` is not a share above 0, or ``seed`` is not an int.
    """

    at_most: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.at_most, bool) or not isinstance(self.at_most, int | float) or not 0 < self.at_most <= 1:
            raise LimitError(f"at_most={self.at_most!r:.100} is not a share of the samples. Use a number above 0, up to 1.")
        if type(self.seed) is not int:
            raise LimitError(f"seed={self.seed!r:.100} is not an int.")

    def most(self, length: int) -> int:
        """Return how many samples of ``length`` may fail."""
        return math.ceil(self.at_most * length)

    def substitutes(self, epoch: int, index: int, length: int) -> Iterator[int]:
        """Yield the samples to take in place of sample ``index``, one after the other, if these fail as well."""
        number = 0
        while True:
            chosen = blake2b(f"{self.seed} {epoch} {index} {number}".encode(), digest_size=8)
            yield int.from_bytes(chosen.digest(), "little") % length
            number += 1


OnError: TypeAlias = Retry | Skip | list[Retry | Skip] | tuple[Retry | Skip, ...]


def parse_on_error(value: Any) -> tuple[Retry | None, Skip | None]:
    """Return the ``on_error`` argument of a user as the two objects that it may have.

    Raises:
        LimitError: it is not a `Retry`, a `Skip`, or one of each.
    """
    given = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    retries = [each for each in given if isinstance(each, Retry)]
    skips = [each for each in given if isinstance(each, Skip)]
    if len(retries) > 1 or len(skips) > 1 or len(retries) + len(skips) < len(given):
        raise LimitError(f"on_error={value!r:.200} is not a Retry, a Skip, or one of each: on_error=[Retry(times=3), Skip()].")
    return retries[0] if retries else None, skips[0] if skips else None


def of_word(on_error: Any) -> Any:
    """Return what a word of a user stands for: "skip" leaves out whatever fails, any other word nothing. Objects stay."""
    return (Skip(at_most=1.0) if on_error == "skip" else None) if isinstance(on_error, str) else on_error


class TooManyFailed(DatasetError):
    """More samples cannot be loaded than `Skip` allows."""


def may_go_on(error: BaseException) -> bool:
    """Return whether an error is one of a sample: not an interrupt, an exit, or the death of a worker."""
    ends = WorkerError, TooManyFailed
    return isinstance(error, Exception) and not any(isinstance(each, ends) for each in causes_of(error))


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error, and the errors that caused it."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is other for other in found):
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found
