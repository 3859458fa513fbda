"""Functions and methods whose results are cached give what they gave before, and compute each result once."""

import contextlib
import copy
import inspect
import pickle
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import wraps as functools_wraps
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import stocache
from stocache import DataLoader, DatasetError, LimitError, cache_method, cached
from stocache.cache.keyed import functions
from tests.support import decorated
from tests.support.decorated import Mosaics, Windows, frame
from tests.support.processes import in_child, wait_until


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A function that returns what was computed, sorted."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("TEST_LOG", str(path))
    return lambda: sorted(path.read_text().splitlines())


@pytest.fixture
def calls():
    return []


@pytest.fixture(autouse=True)
def _compared_once(monkeypatch):
    """Have each process and object compare one result, however long that takes."""
    defaults = functions.cached.__kwdefaults__
    monkeypatch.setattr(functions.cached, "__kwdefaults__", defaults | {"audit": 1e-9})


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_each_set_of_arguments_is_computed_once_however_they_are_given(calls):
    @cached("1MB", audit=0)
    def scaled(number, by=2, *more, **names):
        calls.append((number, by, more, names))
        return [number * by, *more, names]

    with scaled:
        for _ in range(3):
            assert scaled(3) == scaled(3, 2) == scaled(number=3) == scaled(3, by=2) == [6, {}]
            assert scaled(3, 2, 7, a=1, b=2) == scaled(3, 2, 7, b=2, a=1) == [6, 7, {"a": 1, "b": 2}]
            assert type(scaled(3.0)[0]) is float
            assert type(scaled(True)[0]) is int
        assert len(calls) == 4
        assert scaled.stats().filled == 4
        assert (scaled.__name__, inspect.signature(scaled).parameters["by"].default) == ("scaled", 2)
        with pytest.raises(TypeError, match="multiple values"):
            scaled(3, number=3)
        scaled(3)[0] = 0  # the caller's own
        assert scaled(3) == [6, {}]
    count = len(calls)
    assert scaled(3) == [6, {}]  # closed: it runs as before
    assert len(calls) == count + 1


def test_none_is_compared_if_that_is_asked_for(calls):
    @cached("1MB", audit=0)
    def once(key):
        calls.append(key)
        return key

    with once:
        assert [once("a"), once("a"), once("b"), once("b")] == ["a", "a", "b", "b"]
        assert in_child(lambda: [once("a"), calls.append("child")]) == 0
        assert calls == ["a", "b"]
    for share in (-1, 2, True, "1"):
        with pytest.raises(LimitError, match="not a share of the time"):
            cached("1MB", audit=share)


def test_without_parentheses_and_with_none_as_a_result(calls):
    @cached
    def nothing(key):
        calls.append(key)

    with nothing:
        assert [nothing("a"), nothing("a"), nothing("a")] == [None] * 3
        assert len(calls) == 2  # once to compare


def test_a_file_that_changes_is_read_again_if_that_is_asked_for(tmp_path):
    path = tmp_path / "text"
    path.write_text("one")

    @cached("1MB", files=True)
    def read(path, upper=False):
        return path.read_text().upper() if upper else path.read_text()

    with read:
        assert [read(path), read(path, True)] == ["one", "ONE"]
        path.write_text("three")
        assert [read(path), read(path, upper=True)] == ["three", "THREE"]
        assert read.stats().filled == 4

    @cached("1MB", files=True)
    def read_all(*paths):
        return [path.read_text() for path in paths]

    with read_all:
        for text in ("a", "bbb"):
            path.write_text(text)
            assert read_all(path) == [text]


class Reader:
    def __init__(self):
        self.root, self.size, self.paths, self.table = "root", (4, 4), ["a", "b"], np.arange(4)
        self.calls, self.lock = 0, None

    def load(self, idx):
        return f"{self.root}/{self.paths[idx]} {self.size} {self.table.sum()}"

    def count(self, idx):
        self.calls += 1
        return idx

    def append(self, idx):
        self.paths.append("more")
        return idx

    def guarded(self, idx):
        return str(self.lock)[:0] + str(idx)

    def draw(self, idx):
        return idx + random.random() + np.random.random() + torch.rand(1).item()


def test_what_a_method_reads_of_its_object_is_part_of_the_key():
    reader, plain = Reader(), Reader()
    with cache_method(reader, "load", "1MB") as method:
        for change in (
            lambda each: None, lambda each: setattr(each, "root", "other"), lambda each: setattr(each, "size", (8, 8)),
            lambda each: setattr(each, "paths", ["c", "d"]), lambda each: each.paths.append("e"),
            lambda each: setattr(each, "table", np.arange(5)), lambda each: setattr(each, "calls", 5),
        ):  # fmt: skip
            change(reader)
            change(plain)
            for idx in (0, 1, 0, 1):
                assert reader.load(idx) == plain.load(idx)
        assert method.stats().filled == 2 * 6  # an attribute that it does not read is not part of it
    assert "load" not in vars(reader)


@pytest.mark.parametrize(("name", "problem"), [
    ("count", "it sets 'calls' of its object"), ("append", "it sets 'paths' of its object"),
    ("guarded", "it reads 'lock', of type object, whose changes nobody would notice. Pass key="),
    ("draw", "it draws random numbers"),
])  # fmt: skip
def test_a_method_that_does_or_needs_more_is_not_cached_and_says_why_once(name, problem, caplog):
    reader, plain = Reader(), Reader()
    reader.lock = plain.lock = object()
    with cache_method(reader, name, "1MB"):
        results = []
        for each in (reader, plain):
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
            results.append([getattr(each, name)(idx) for idx in (0, 1, 0, 1)])
    assert results[0] == results[1]
    assert (reader.calls, reader.paths) == (plain.calls, plain.paths)
    (text,) = warnings_of(caplog)
    assert text.startswith(f"Reader.{name} is not cached: {problem}")


def test_a_key_of_the_users_takes_the_place_of_all_that(calls):
    class Tiles:
        def __init__(self):
            self.handle = object()

        @cached("1MB", key=lambda self, tile: tile["x"])
        def read(self, tile):
            calls.append((self.handle, tile))
            return tile["x"] * 2

    with Tiles.read:
        one, other = Tiles(), Tiles()
        assert [each.read({"x": 4}) for each in (one, other, one)] == [8] * 3
        assert len(calls) == 2


factor = 2


def test_a_result_that_changes_for_the_same_arguments_is_noticed_and_no_process_serves_it(caplog, monkeypatch):
    @cached("1MB")
    def scaled(number):
        return number * factor

    with scaled:
        assert [scaled(3), scaled(4)] == [6, 8]
        monkeypatch.setitem(globals(), "factor", 5)

        def child():
            assert scaled(3) == 15  # it compares the first that it would serve
            assert scaled(4) == 20

        assert in_child(child) == 0
        assert scaled(4) == 20
        assert scaled(3) == 15
    assert len(warnings_of(caplog)) <= 1


def test_a_call_whose_arguments_are_no_keys_is_not_cached_and_others_are(caplog, calls):
    @cached("1MB")
    def total(numbers):
        calls.append(numbers)
        return sum(numbers)

    with total:
        assert [total([1, 2]), total([1, 2]), total((1, 2)), total((1, 2))] == [3] * 4
        assert len(calls) == 4  # of the tuple twice: once to compare
    (text,) = warnings_of(caplog)
    assert "total is not cached: a key of type list" in text


def test_results_that_cannot_be_stored_and_errors_pass_through(caplog):
    @cached("1MB")
    def made(what):
        if what == "error":
            raise KeyError(what)
        return object() if what == "object" else what

    with made:
        assert type(made("object")) is object
        assert made("object") is not made("object")
        for _ in range(2):
            with pytest.raises(KeyError, match="error"):
                made("error")
        assert made("a") == made("a") == "a"
    assert "does not fit and stays uncached" in warnings_of(caplog)[0]


def test_cached_functions_may_call_themselves_and_each_other():
    @cached("1MB")
    def even(number):
        return True if number == 0 else odd(number - 1)

    @cached("1MB")
    def odd(number):
        return False if number == 0 else even(number - 1)

    with even, odd:
        assert [even(30), odd(30), even(31)] == [True, False, False]


def test_a_method_of_one_object_is_undone_by_close_and_travels_with_the_object(log):
    dataset, plain = Mosaics(), Mosaics()
    expected = [plain[idx] for idx in range(len(plain))]
    own = Mosaics.load_image
    with cache_method(dataset, "load_image", "1MB") as method:
        before = len(log())
        dataset.load_image(0)
        others = pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)  # they know which attributes it reads
        for each in (dataset, *others):
            assert all(torch.equal(each[idx], expected[idx]) for idx in range(len(plain)))
        assert len(log()) - before <= len(plain) + 3  # one of each object is compared
        others[0].scale = 3
        assert others[0][1][0, 0] == 3
        with pytest.raises(DatasetError, match="cached already"):
            cache_method(dataset, "load_image")
        assert Mosaics.load_image is own
        assert method.cache.closed is False
        for each in others:
            each.load_image.cache.close()
    method.close()
    assert (vars(dataset).keys(), method.cache.closed) == ({"paths", "scale"}, True)
    assert torch.equal(dataset[0], expected[0])


class Owned(Mosaics):
    """Each copy of it is for one thread, and has a file of its own."""

    def load_image(self, index):
        owners[id(self)].add(threading.get_ident())
        return super().load_image(index)


owners = defaultdict(set)


def test_worker_threads_have_copies_of_the_object_and_share_the_results(log):
    dataset, plain = Owned(), Mosaics()
    expected = torch.stack([plain[idx] for idx in range(len(plain))])
    before = len(log())
    with cache_method(dataset, "load_image", "1MB", key=lambda self, index: index) as method:
        loader = DataLoader(dataset, 4, num_workers=3, worker_method="thread")
        for _ in range(2):
            assert torch.equal(torch.cat(list(loader)), expected)
        assert method.stats().filled == len(plain)
        assert len(log()) - before <= len(plain) + 3 * 2  # each copy compares one
    assert id(dataset) not in owners
    assert all(len(threads) == 1 for threads in owners.values())


@pytest.mark.parametrize(("obj", "name", "message"), [
    (Mosaics(), "nothing", "no method 'nothing'"), (Mosaics(), "paths", "no method 'paths'"),
    ([], "append", "no method 'append'"),
])  # fmt: skip
def test_what_has_no_such_method_is_refused(obj, name, message):
    with pytest.raises(DatasetError, match=message):
        cache_method(obj, name)


LOADERS = [
    (TorchDataLoader, {"num_workers": 4, "multiprocessing_context": "fork"}),
    (DataLoader, {"num_workers": 3, "worker_method": "thread"}),
    pytest.param(TorchDataLoader, {"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
]


@pytest.mark.linux
@pytest.mark.parametrize(("make", "options"), LOADERS)
def test_workers_compute_each_frame_once(make, options, log):
    frame.cache.clear()
    dataset = Windows()
    for _ in range(2):
        batches = torch.cat(list(make(dataset, 4, **options)))
        assert batches.shape == (36, 5, 3, 8)
        assert batches[:, :, 0, 0].tolist() == [list(range(idx, idx + 5)) for idx in range(36)]
    computed = [line for line in log() if line]
    assert set(computed) == {f"v {number}" for number in range(40)}
    compared = len(computed) - 40
    assert compared <= 2 * options["num_workers"] + 1  # each process compares one, and each loop starts processes anew
    assert decorated.frame.stats().filled == 40
    frame.cache.clear()


def test_the_decorated_function_pickles_by_its_name_and_has_the_names_of_the_face():
    assert pickle.loads(pickle.dumps(frame)) is frame
    assert copy.deepcopy(frame) is frame
    assert (stocache.cached, stocache.cache_method) == (cached, cache_method)


class Slotted:
    __slots__ = ("k",)
    scale = 10

    def __init__(self, k):
        self.k = k

    @cached("1MB")
    def load(self, number):
        return self.k * number * self.scale + self.helper()

    def helper(self):
        return 0


class Other(Slotted):
    __slots__ = ()
    scale = 100

    def helper(self):
        return 1


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, number):
        return number * self.by


def test_slots_class_attributes_and_subclasses_are_part_of_the_key():
    for each in (Slotted(2), Slotted(3), Other(2), Slotted(2)):
        for _ in range(2):
            assert each.load(1) == each.k * each.scale + each.helper()
    assert Slotted.load.stats().filled == 3


def test_functions_that_close_over_objects_share_nothing_with_others():
    def make(scale):
        @cached("1MB", audit=0)
        def scaled(number):
            return scale(number)

        return scaled

    first = make(Scale(2))
    assert first(3) == 6

    def child(by):
        with make(Scale(by)) as scaled:
            assert [scaled(number) for number in range(4)] == [number * by for number in range(4)]

    assert [in_child(child, by) for by in (3, 4)] == [0, 0]
    first.close()


def test_signatures_are_those_of_the_function_itself_and_of_builtin_ones():
    def add(a, b=1):
        return a + b

    @functools_wraps(add)
    def one(a, b=2):
        return add(a, b)

    with cached("1MB")(one) as added, cached("1MB")(max) as largest:
        assert [added(3), added(3, 1), added(3)] == [5, 4, 5]
        assert [largest(1, 2), largest(3, 2), largest(1, 2)] == [2, 3, 2]
        assert pickle.loads(pickle.dumps(largest))(1, 5) == 5


def test_arguments_that_equal_one_another_but_differ_have_results_of_their_own():
    @cached("1MB")
    def shown(value):
        return f"{type(value).__name__} {value}"

    with shown:
        for _ in range(2):
            for value in (200, np.uint8(200), np.int64(200), 200.0, (1, 2), Point(1, 2), "1", Path("1")):
                assert shown(value) == f"{type(value).__name__} {value}"


class Point(NamedTuple):
    x: int
    y: int


def test_static_and_class_methods(calls):
    class Reader:
        @cached("1MB")
        @staticmethod
        def read(path):
            calls.append(path)
            return path * 2

        @cached("1MB")
        @classmethod
        def name(cls, number):
            return f"{cls.__name__} {number}"

    assert [Reader.read("a"), Reader().read("a"), Reader.read("a")] == ["aa"] * 3
    assert len(calls) in (2, 3)  # once to compare, and again if a long time has passed
    assert [Reader.name(1), Reader().name(1)] == ["Reader 1"] * 2


def test_first_calls_that_wait_for_each_other_do_not_hang():
    class Pair:
        def outer(self, number):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.inner, number).result(20)

        def inner(self, number):
            return number + 1

    pair = Pair()
    with cache_method(pair, "outer", "1MB", key=None), cache_method(pair, "inner", "1MB"):
        assert [pair.outer(1), pair.outer(1)] == [2, 2]
    assert "__getattribute__" not in vars(Pair)


def test_once_refused_no_process_serves_a_result_even_if_the_cache_is_full_or_nothing_is_compared():
    @cached("1MB", audit=0)
    def drawn(number):
        return random.random()

    with drawn:
        assert in_child(drawn, 1) == 0
        assert drawn(1) != drawn(1)


def test_a_method_that_the_object_itself_has_is_refused():
    dataset = Mosaics()
    dataset.load_image = lambda index: index
    with pytest.raises(DatasetError, match="an attribute of the object itself"):
        cache_method(dataset, "load_image")
    with pytest.raises(DatasetError, match="takes no attribute"):
        cache_method(Slotted(1), "helper")


def test_a_subclass_may_read_other_attributes_in_a_cached_method():
    class Plain:
        @stocache.cached("1MB")
        def load(self, value):
            return self.scale(value)

        def scale(self, value):
            return value

    class Scaled(Plain):
        def __init__(self, factor):
            self.factor = factor

        def scale(self, value):
            return value * self.factor

    with contextlib.closing(Plain.load):
        assert [obj.load(1) for obj in (Plain(), Plain(), Scaled(2), Scaled(3), Scaled(2))] == [1, 1, 2, 3, 2]


def test_a_child_that_is_forked_while_a_method_is_first_called_caches_it(calls):
    class Slow:
        factor, waits = 2, True

        @stocache.cached("1MB", audit=0)
        def load(self, value):
            while Slow.waits:
                time.sleep(0.001)
            calls.append(value)
            return value * self.factor

    def use():
        Slow.waits = False
        assert [Slow().load(5) for _ in range(3)] == [10] * 3
        assert (calls, "__getattribute__" in vars(Slow)) == ([5], False)

    with contextlib.closing(Slow.load), ThreadPoolExecutor(1) as pool:
        first = pool.submit(Slow().load, 1)
        wait_until(lambda: "__getattribute__" in vars(Slow))
        status = in_child(use)
        Slow.waits = False
        assert (status, first.result()) == (0, 2)
