"""Retry and Skip: which errors they cover, what they refuse, which substitutes they choose."""

import contextlib
import re

import pytest

from stocache import Retry, Skip, WorkerError
from stocache.errors import LimitError
from stocache.system.on_error import parse_on_error


def caused(error, cause):
    error.__cause__ = cause
    return error


def test_retry_looks_through_the_causes():
    for error in (TimeoutError(), caused(ValueError(), OSError()), caused(ValueError(), caused(RuntimeError(), OSError()))):
        assert Retry().covers(error)
    for error in (ValueError(), caused(OSError(), WorkerError()), caused(KeyboardInterrupt(), OSError()), SystemExit()):
        assert not Retry().covers(error)


@pytest.mark.parametrize(("error", "fails", "attempts"), [
    (OSError, 0, 1), (OSError, 3, 4), (OSError, 4, 4), (ValueError, 1, 1), (KeyboardInterrupt, 1, 1),
])  # fmt: skip
def test_retry_begins_again_before_each_further_attempt_and_ends(error, fails, attempts):
    calls, begun = [], []

    def load():
        calls.append(1)
        if len(calls) <= fails:
            raise error
        return "sample"

    with pytest.raises(error) if fails >= attempts else contextlib.nullcontext():
        assert Retry(times=3, backoff_s=0).call(load, lambda: begun.append(len(calls))) == "sample"
    assert (len(calls), begun) == (attempts, list(range(1, attempts)))


WRONG = {
    Retry: {"times": (0, 101, True), "backoff_s": (float("nan"), -1), "only": ((), (KeyboardInterrupt,), "OSError")},
    Skip: {"at_most": (0, 1.5, float("nan")), "seed": (None,)},
}


def test_a_wrong_argument_is_named():
    for cls, name in ((cls, name) for cls, arguments in WRONG.items() for name in arguments):
        for value in WRONG[cls][name]:
            with pytest.raises(LimitError, match=re.escape(f"{name}={value!r}")):
                cls(**{name: value})
    for value in ("skip", [Skip(), Skip()], [None]):
        with pytest.raises(LimitError, match=re.escape(f"on_error={value!r}")):
            parse_on_error(value)


def test_substitutes_depend_on_seed_epoch_and_index():
    def first(skip, epoch, index):
        found = skip.substitutes(epoch, index, 1000)
        return [next(found) for _ in range(4)]

    assert first(Skip(), 3, 17) == first(Skip(at_most=0.5), 3, 17)
    others = first(Skip(seed=1), 3, 17), first(Skip(), 4, 17), first(Skip(), 3, 18)
    assert len({tuple(each) for each in (*others, first(Skip(), 3, 17))}) == 4


@pytest.mark.parametrize(("at_most", "length", "most"), [(0.001, 10_000, 10), (0.001, 500, 1), (1.0, 7, 7), (0.5, 3, 2)])
def test_a_share_is_rounded_up(at_most, length, most):
    assert Skip(at_most).most(length) == most
