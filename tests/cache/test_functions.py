"""Functions and methods whose results are cached give what they gave before, and compute each result once."""

import copy
import functools
import inspect
import operator
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from stocache import DatasetError, cache_method, cached
from stocache.cache.keyed import functions
from tests.support.containers import Point
from tests.support.decorated import Mosaics, Windows, frame
from tests.support.processes import in_child


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
            assert (type(scaled(3.0)[0]), type(scaled(True)[0])) == (float, int)
        assert len(calls) == scaled.stats().filled == 5  # the order of `names` counts
        assert (scaled.__name__, inspect.signature(scaled).parameters["by"].default) == ("scaled", 2)
        with pytest.raises(TypeError, match="multiple values"):
            scaled(3, number=3)
        scaled(3)[0] = 0  # the caller's own
        assert scaled(3) == [6, {}]
    assert (scaled(3), len(calls)) == ([6, {}], 6)  # closed: it runs as before


def test_a_file_that_changes_is_read_again_if_that_is_asked_for(tmp_path):
    path = tmp_path / "text"

    @cached("1MB", files=True)
    def read(*paths, more=()):
        return [each.read_text() for each in (*paths, *more)]

    with read:
        for text in ("one", "three"):
            path.write_text(text)
            for _ in range(2):
                assert read(path) == read(more=(path,)) == [text]
        assert read.stats().filled == 4


class Reader:
    def __init__(self):
        self.root, self.size, self.paths, self.table = "root", (4, 4), ["a", "b"], np.arange(4)
        self.calls, self.lock = 0, object()

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


@pytest.mark.linux
def test_what_a_method_reads_of_its_object_is_part_of_the_key():
    reader, plain = Reader(), Reader()
    with cache_method(reader, "load", "1MB") as method:
        for name, value in (
            ("root", "other"), ("size", (8, 8)), ("paths", ["c", "d"]), ("table", np.arange(5)), ("calls", 5),
        ):  # fmt: skip
            for each in (reader, plain):
                setattr(each, name, copy.copy(value))
            for idx in (0, 1, 0, 1):
                assert reader.load(idx) == plain.load(idx)
        reader.paths[0] = plain.paths[0] = "new"
        reader.paths.append("e")
        assert reader.load(0) == plain.load(0)
        assert method.stats().filled == 2 * 4 + 1  # an attribute that it does not read is not part of it
    assert "load" not in vars(reader)


@pytest.mark.linux
@pytest.mark.parametrize(("name", "problem"), [
    ("count", "it sets 'calls' of its object"), ("append", "it sets 'paths' of its object"),
    ("guarded", "it reads 'lock', of type object, whose changes nobody would notice. Pass key="),
    ("draw", "it draws random numbers"),
])  # fmt: skip
def test_a_method_that_does_or_needs_more_is_not_cached_and_says_why_once(name, problem, caplog):
    reader, plain = Reader(), Reader()
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


def test_what_is_no_key_or_cannot_be_stored_and_errors_pass_through(caplog, calls):
    @cached("1MB")
    def made(what):
        calls.append(what)
        if what == "error":
            raise KeyError(what)
        return object() if what == "object" else what

    with made:
        assert [made([1]), made([1]), made((1,)), made((1,))] == [[1], [1], (1,), (1,)]
        assert len(calls) == 4  # of the tuple twice: once to compare
        assert made("object") is not made("object")
        for _ in range(2):
            with pytest.raises(KeyError, match="error"):
                made("error")
    no_key, not_stored = warnings_of(caplog)
    assert "made is not cached: a key of type list" in no_key
    assert "does not fit and stays uncached" in not_stored


@pytest.mark.linux
def test_a_method_of_one_object_is_undone_by_close_and_travels_with_the_object(log):
    dataset, plain = Mosaics(), Mosaics()
    expected, own = [plain[idx] for idx in range(len(plain))], Mosaics.load_image
    with cache_method(dataset, "load_image", "1MB") as method:
        before = len(log())
        dataset.load_image(0)
        others = pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)  # they know which attributes it reads
        for each in (dataset, *others):
            assert all(torch.equal(each[idx], expected[idx]) for idx in range(len(plain)))
        assert len(log()) - before <= len(plain) + 4  # one of each object is compared; a child makes the first
        others[0].scale = 3
        assert others[0][1][0, 0] == 3
        with pytest.raises(DatasetError, match="cached already"):
            cache_method(dataset, "load_image")
        for each in others:
            each.load_image.cache.close()
        assert (Mosaics.load_image is own, method.cache.closed) == (True, False)
    assert (vars(dataset).keys(), method.cache.closed) == ({"paths", "scale"}, True)
    assert torch.equal(dataset[0], expected[0])


def test_what_has_no_such_method_or_takes_no_attribute_is_refused():
    for obj, name, message in ((Mosaics(), "paths", "no method 'paths'"), (Slotted(), "helper", "takes no attribute")):
        with pytest.raises(DatasetError, match=message):
            cache_method(obj, name)


@pytest.mark.linux
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_compute_each_frame_once(method, log):
    frame.cache.clear()
    for _ in range(2):
        batches = torch.cat(list(TorchDataLoader(Windows(), 4, num_workers=2, multiprocessing_context=method)))
        assert batches.shape == (36, 5, 3, 8)
        assert batches[:, :, 0, 0].tolist() == [list(range(idx, idx + 5)) for idx in range(36)]
    computed = [line for line in log() if line]
    assert set(computed) == {f"v {number}" for number in range(40)}
    assert len(computed) - 40 <= 2 * 2 + 1  # each process compares one, and each loop starts processes anew
    assert frame.stats().filled == 40
    frame.cache.clear()


def test_the_decorated_function_pickles_by_its_name():
    assert pickle.loads(pickle.dumps(frame)) is copy.deepcopy(frame) is frame


class Slotted:
    __slots__ = ("k",)
    scale = 10

    @cached("1MB")
    def load(self, number):
        return self.k * number * self.scale + self.helper()

    def helper(self):
        return 0


class Other(Slotted):  # reads a different attribute in the cached method
    scale, shift = 100, 1

    def helper(self):
        return self.shift


@pytest.mark.linux
def test_slots_class_attributes_and_what_subclasses_read_are_part_of_the_key():
    objects = Slotted(), Slotted(), Other(), Other()
    for each, k in zip(objects, (2, 3, 2, 2), strict=True):
        each.k = k
    objects[3].shift = 5
    for each in objects * 2:
        assert each.load(1) == each.k * each.scale + each.helper()
    assert Slotted.load.stats().filled == 4


def test_functions_that_close_over_objects_share_nothing_with_others():
    def make(scale):
        return cached("1MB", audit=0)(lambda number: scale(number))

    def child(by):
        with make(functools.partial(operator.mul, by)) as scaled:
            assert [scaled(number) for number in range(4)] == [number * by for number in range(4)]

    with make(functools.partial(operator.mul, 2)) as first:
        assert first(3) == 6
        assert [in_child(child, by) for by in (3, 4)] == [0, 0]


def test_static_and_class_methods_are_decorated_also_without_parentheses():
    class Reader:
        @cached
        @staticmethod
        def read(path):
            return None

        @cached("1MB", audit=0)
        @classmethod
        def name(cls, number):
            return f"{cls.__name__} {number}"

    for _ in range(2):
        assert [Reader.read("a"), Reader().read("a"), Reader.name(1), Reader().name(1)] == [None, None, "Reader 1", "Reader 1"]
    assert Reader.read.stats().fills == 1


DTYPES = np.uint8, np.int64, np.dtype("uint8"), np.dtype([("a", "u1")]), torch.uint8, torch.float32


def test_arguments_that_equal_one_another_but_differ_have_results_of_their_own():
    with cached("1MB")(lambda value: f"{type(value).__name__} {value}") as shown:
        for value in (200, np.uint8(200), np.int64(200), 200.0, (1, 2), Point(1, 2), "1", Path("1"), *DTYPES) * 2:
            assert shown(value) == f"{type(value).__name__} {value}"
        assert shown.stats().fills == 8 + len(DTYPES)
    with cached("1MB")(lambda **options: [*options]) as names:
        for _ in range(9):
            assert (names(a=1, b=2), names(b=2, a=1)) == (["a", "b"], ["b", "a"])
