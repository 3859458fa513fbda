"""Retry and Skip: which errors they cover, what they refuse, which substitutes they choose."""

import pytest

from stocache import Retry, Skip, WorkerError
from stocache.errors import LimitError
from stocache.system.on_error import parse_on_error


class Unpicklable(OSError):
    def __reduce__(self):
        raise TypeError


def caused(error, cause):
    error.__cause__ = cause
    return error


def in_a_circle():
    one, other = ValueError(), KeyError()
    one.__context__, other.__context__ = other, one
    return one


COVERED = {
    "the class": (OSError(), True),
    "a subclass": (TimeoutError(), True),
    "no pickle": (Unpicklable(), True),
    "a cause": (caused(ValueError(), ConnectionError()), True),
    "a context": (caused(ValueError(), caused(RuntimeError(), OSError())), True),
    "others": (ValueError(), False),
    "a circle": (in_a_circle(), False),
    "a dead worker": (caused(OSError(), WorkerError()), False),
    "an interrupt": (caused(KeyboardInterrupt(), OSError()), False),
    "an exit": (SystemExit(), False),
}


@pytest.mark.parametrize(("error", "covered"), COVERED.values(), ids=COVERED)
def test_retry_looks_through_the_causes(error, covered):
    assert Retry().covers(error) is covered


def failing(times, error=OSError):
    calls = []

    def load():
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "sample"

    return load, calls


@pytest.mark.parametrize(("times", "fails"), [(1, 1), (3, 3), (3, 0)])
def test_retry_begins_again_before_each_further_attempt(times, fails):
    load, calls = failing(fails)
    begun = []
    assert Retry(times, backoff_s=0).call(load, lambda: begun.append(len(calls))) == "sample"
    assert begun == list(range(1, fails + 1))


@pytest.mark.parametrize(("error", "attempts"), [(OSError, 4), (ValueError, 1), (KeyboardInterrupt, 1)])
def test_retry_ends(error, attempts):
    load, calls = failing(100, error)
    with pytest.raises(error):
        Retry(times=3, backoff_s=0).call(load, lambda: None)
    assert len(calls) == attempts


WRONG = {
    "times=0": lambda: Retry(times=0),
    "times=101": lambda: Retry(times=101),
    "times=True": lambda: Retry(times=True),
    "backoff_s=nan": lambda: Retry(backoff_s=float("nan")),
    "backoff_s=-1": lambda: Retry(backoff_s=-1),
    r"only=\(\)": lambda: Retry(only=()),
    r"only=\(<class 'KeyboardInterrupt'": lambda: Retry(only=(KeyboardInterrupt,)),
    r"only=.OSError": lambda: Retry(only="OSError"),
    "at_most=0": lambda: Skip(at_most=0),
    "at_most=1.5": lambda: Skip(at_most=1.5),
    "at_most=nan": lambda: Skip(at_most=float("nan")),
    "seed=None": lambda: Skip(seed=None),
    "on_error='skip'": lambda: parse_on_error("skip"),
    r"on_error=\[Skip\(": lambda: parse_on_error([Skip(), Skip()]),
    r"on_error=\[None\]": lambda: parse_on_error([None]),
}


@pytest.mark.parametrize(("text", "make"), WRONG.items(), ids=WRONG)
def test_a_wrong_argument_is_named(text, make):
    with pytest.raises(LimitError, match=text):
        make()


def test_one_class_need_not_be_in_a_tuple():
    assert Retry(only=KeyError).only == (KeyError,)


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
