"""Values by key: keys that differ have values of their own, each is loaded once by all processes, and nothing is ever wrong."""

import enum
import multiprocessing
import os
import pickle
import random
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from stocache import ClosedError, DiskCache, KeyedCache, SampleError, SlotError
from stocache.cache.keyed import disk, keys, layout
from stocache.errors import CacheKeyError, DiskError, LimitError, MismatchError
from stocache.tools.cli import listing
from tests.support.equality import same
from tests.support.processes import in_child, kill_in, run_all

N = 200


class Camera(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Fields(enum.Flag):
    A = 1
    B = 2


class Loss(str, enum.Enum):
    L1 = "l1"


KEYS = [
    1, True, 1.0, "1", b"1", None, 0, False, 0.0, -0.0, "", b"", -1, 255, 256, 2**70, -(2**70), float("inf"), "ä€\udc80",
    Camera.LEFT, Camera.RIGHT, Loss.L1, "l1", Path("l1"), Path("a/b"), (), ("a",), ("a", "b"), ("ab",), (("a",), "b"),
    ("a", ("b",)), ((), ()), (Path("v.mp4"), 3), ("v.mp4", 3), ("v.mp4", 3.0), "x" * (1 << 20), ("slide", 1, 2, 3),
    Fields.A, Fields.A | Fields.B, Fields(0), Path("\ud800"),
]  # fmt: skip


@pytest.fixture
def cache():
    with KeyedCache("8MB") as cache:
        yield cache


def value(key):
    number = zlib.crc32(repr(key).encode("utf-8", "replace"))
    return {"of": repr(key)[:50], "data": torch.full((1 + number % 7,), number % 251, dtype=torch.uint8)}


def test_each_key_has_its_own_value_and_comes_back(cache):
    for key in KEYS:
        assert key not in cache
        assert cache.get(key) is None
        assert cache.put(key, value(key))
    assert len(cache) == len(KEYS)
    for key in KEYS:
        assert key in cache
        assert same(cache.get(key), value(key))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.fills, stats.filled) == (len(KEYS),) * 4


@pytest.mark.parametrize("key", [
    float("nan"), (1, float("nan")), [1], {1: 2}, {1}, np.zeros(2), torch.tensor(1), object(), (1, [2]), bytearray(b"x"), 1j,
    np.datetime64("2020-01-01"), np.timedelta64(5, "ns"), np.longdouble(1),
])  # fmt: skip
def test_what_changes_or_equals_nothing_is_no_key(cache, key):
    for use in (
        lambda: cache.get(key), lambda: cache.put(key, 1), lambda: key in cache, lambda: cache.get_or_load(key, str),
        lambda: cache.get_or_load_many([1, key], str),
    ):  # fmt: skip
        with pytest.raises(CacheKeyError, match=r"a key|NaN"):
            use()
    deep = ()
    for _ in range(1000):
        deep = (deep,)
    with pytest.raises(CacheKeyError, match="flatter"):
        cache.get(deep)


def test_numbers_of_numpy_and_subclasses_are_the_keys_that_they_equal(cache):
    class Name(str):
        def __str__(self):
            return "always the same"

    for key, again in ((np.int64(7), 7), (np.float32(0.5), 0.5), (np.str_("a"), "a"), (np.bool_(True), True), (Name("b"), "b"),
                       (PurePosixPath("c"), Path("c"))):  # fmt: skip
        cache.put(key, repr(again))
        assert cache.get(again) == repr(again)
    assert len(cache) == 6


def test_keys_whose_hashes_are_equal_keep_their_values(cache, monkeypatch):
    monkeypatch.setattr(keys, "xxh3_128_intdigest", lambda text: 5)
    for number in range(N):
        assert cache.get_or_load(number, lambda number: number * 2) == number * 2
    assert [cache.get(number) for number in range(N)] == [number * 2 for number in range(N)]
    assert len(cache) == N


def test_the_table_grows_when_later_values_are_smaller_than_the_first(cache):
    cache.put("large", torch.zeros(1 << 20, dtype=torch.uint8))
    numbers = range(20_000)
    for number in numbers:
        cache.put(number, number)
    assert [cache.get(number) for number in numbers] == list(numbers)
    assert len(cache) == cache.stats().fills == len(numbers) + 1
    assert len(cache._store._seen[1]) > 2
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.get(19_999) == 19_999


def test_a_full_cache_loads_further_keys_each_time_and_says_so_once(caplog):
    loads = []

    def load(key):
        loads.append(key)
        return torch.full((50_000,), key, dtype=torch.uint8)

    with KeyedCache("1MB") as cache:
        for _ in range(2):
            for key in range(40):
                assert same(cache.get_or_load(key, load), torch.full((50_000,), key, dtype=torch.uint8))
        kept = len(cache)
        assert 10 < kept < 20
        assert len(loads) == 40 + 40 - kept
        assert not cache.put(39, 1)
        assert cache.put("small", 1) == ("small" in cache)
        stats = cache.stats()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(
        rf"full: {kept} keys of .* KiB each in .*, hit rate \d+ %.*a limit of n times \d+ bytes", record.getMessage()
    )
    assert stats.filled * stats.slot_bytes <= stats.capacity_bytes


def test_nothing_is_cached_where_there_is_no_room():
    with KeyedCache(0) as cache:
        assert cache.get_or_load("a", str.upper) == "A"
        assert (cache.put("a", 1), cache.get("a"), len(cache), cache.clear()) == (False, None, 0, None)


def test_many_are_loaded_in_one_call_in_their_order_and_each_once(cache):
    calls = []

    def load(missing):
        calls.append(missing)
        yield from (value(key) for key in missing)

    cache.put("c", value("c"))
    wanted = ["b", "a", "c", "b", ("a",), "a"]
    assert same(cache.get_or_load_many(wanted, load), list(map(value, wanted)))
    assert calls == [["b", "a", ("a",)]]
    assert same(cache.get_or_load_many(wanted, load), list(map(value, wanted)))
    assert len(calls) == 1
    assert cache.get_or_load_many([], load) == []


def test_a_value_that_cannot_be_stored_is_an_error_or_stays_uncached(cache):
    bad = torch.zeros(1, requires_grad=True)
    with pytest.raises(SampleError, match="gradient"):
        cache.get_or_load("bad", lambda key: bad)
    assert cache.get_or_load("bad", lambda key: bad, strict=False) is bad
    assert cache.stats().rejected == 1


def test_a_load_may_ask_for_itself_and_for_others(cache):
    def fibonacci(number):
        if number < 2:
            return number
        return sum(cache.get_or_load(number - step, fibonacci) for step in (1, 2))

    assert cache.get_or_load(60, fibonacci) == 1548008755920
    assert cache.stats().fills == 61

    def endless(key, depth=0):
        return cache.get_or_load(key, lambda key: endless(key, depth + 1)) if depth < 5 else depth

    assert cache.get_or_load("same", endless) == 5


def test_a_value_does_not_change_and_its_bytes_can_be_looked_at(cache):
    assert cache.get("a") is None
    cache.put("a", torch.zeros(4))
    assert cache.put("a", torch.zeros(4))  # the same
    with pytest.raises(SlotError, match=r"put\('a'\): the key is cached with another value"):
        cache.put("a", torch.ones(4))
    cache.get("a").fill_(7)
    assert same(cache.get("a"), torch.zeros(4))
    cache.get("a", copy=False).fill_(9)
    assert same(cache.get("a"), torch.full((4,), 9.0))
    other = pickle.loads(pickle.dumps(cache))
    assert other.get("b") is None
    assert cache.put("b", 1)
    assert other.put("b", 2)  # the first wins
    assert cache.get("b") == other.get("b") == 1


def test_as_a_mapping_it_serves_programs_that_keep_a_dict(cache):
    kept = cache.as_mapping()
    assert kept.setdefault("a", [1]) == [1]
    kept["b"] = {"x": 2}
    assert (kept["a"], kept["b"], len(kept), "b" in kept, kept.get("c"), kept.pop("c", 5)) == ([1], {"x": 2}, 2, True, None, 5)
    with pytest.raises(TypeError, match="are not listed"):
        dict(kept)
    with pytest.raises(KeyError):
        kept["c"]
    with pytest.raises(SlotError, match="does not change"):
        kept["a"] = 3
    del kept["a"]
    with pytest.raises(KeyError):
        del kept["a"]
    kept["a"] = 3
    assert (kept.pop("a"), kept.pop("a", 4), kept["b"]) == (3, 4, {"x": 2})


def test_a_full_mapping_serves_each_thread_what_it_has_set_last():
    with KeyedCache("256KB") as cache:
        kept = cache.as_mapping()
        for key in range(20):
            if key not in kept:
                kept[key] = torch.full((50_000,), key, dtype=torch.uint8)
            assert kept[key][0] == key
        assert len(kept) < 10
        with pytest.raises(KeyError):
            pickle.loads(pickle.dumps(kept))[19]
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
            pool.submit(kept.__getitem__, 19).result()
        del kept[19]
        with pytest.raises(KeyError):
            del kept[19]
        kept.clear()
        with pytest.raises(KeyError):
            kept[19]


def test_a_key_that_is_removed_is_gone_for_all_and_others_are_found_behind_it(cache, monkeypatch):
    monkeypatch.setattr(keys, "xxh3_128_intdigest", lambda text: 5)  # all lie one behind the other
    for number in range(N):
        cache.put(number, value(number))
    view, other = cache.get(7, copy=False), pickle.loads(pickle.dumps(cache))
    assert all(cache.remove(number) for number in range(0, N, 3))
    assert not any(other.remove(number) for number in range(0, N, 3))
    assert len(cache) == len(other) == N - len(range(0, N, 3)) == other.stats().filled
    for number in range(N):
        assert same(other.get(number), None if number % 3 == 0 else value(number))
    assert cache.remove(7)
    assert same(view, value(7))
    for number in range(N):
        assert same(other.get_or_load(number, value), value(number))
    assert (len(cache), not cache.remove("never")) == (N, True)


@pytest.mark.parametrize("memory", [0, "1MB"])
def test_a_key_that_is_removed_from_the_disk_does_not_come_back(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(keys, "xxh3_128_intdigest", lambda text: 5)
    with on_disk(tmp_path, memory=memory) as cache:
        for key in range(9):
            cache.put(key, value(key))
        assert cache.remove(3)
        assert [key for key in range(9) if key in cache] == [0, 1, 2, 4, 5, 6, 7, 8]
        assert in_child(lambda: cache.remove(8)) == 0
        assert not cache.remove(8)
    with on_disk(tmp_path, memory=memory) as cache:
        assert all(same(cache.get(key), value(key)) for key in range(3))
        assert not any(key in cache for key in (3, 8))  # those behind it may be loaded again
        assert all(same(cache.get_or_load(key, value), value(key)) for key in range(9))
        assert cache.remove(5)
    with on_disk(tmp_path, memory=memory) as cache:
        assert 5 not in cache


@pytest.mark.parametrize("seed", range(4))
def test_processes_that_remove_and_are_killed_disturb_no_reader(cache, seed):
    def churn():
        for key in range(100_000):
            cache.get_or_load(key % 50, value)
            cache.remove(key * 7 % 50)

    for turn in range(4):
        kill_in(churn, random.Random(4 * seed + turn).random() * 0.03)
        assert all(same(cache.get_or_load(key, value), value(key)) for key in range(50))
    assert len(cache) == 50


def test_clear_forgets_all_and_the_memory_is_used_again(cache):
    for turn in range(5):
        for key in range(300):
            found = cache.get_or_load((turn, key), lambda key: torch.full((2_000,), sum(key)))
            assert found.sum() == 2_000 * (key + turn)
        cache.clear()
        assert (len(cache), cache.get(1)) == (0, None)


def test_a_process_that_found_the_cache_full_fills_it_again_after_another_has_cleared_it():
    with KeyedCache("200KB") as cache:
        for key in range(100):
            cache.get_or_load(key, picture)
        assert cache.get(99) is None
        assert in_child(cache.clear) == 0
        assert cache.put(99, 1)


def test_a_closed_cache_says_so(cache):
    cache.put("a", torch.zeros(4))
    view = cache.get("a", copy=False)
    cache.close()
    cache.close()
    for use in (
        lambda: cache.get("a"), lambda: cache.put("b", 1), lambda: "a" in cache, lambda: len(cache),
        lambda: cache.get_or_load("a", str), lambda: cache.get_or_load_many(["a"], str), cache.stats, cache.clear,
        lambda: pickle.dumps(cache),
    ):  # fmt: skip
        with pytest.raises(ClosedError):
            use()
    assert (repr(cache), view.tolist()) == ("<KeyedCache, closed>", [0] * 4)


@pytest.mark.linux
def test_by_a_name_other_processes_and_later_runs_find_it():
    def fill():
        with KeyedCache("2MB", name="keyed", persist=True, fingerprint="v1") as cache:
            for key in KEYS[:20]:
                cache.get_or_load(key, value)

    assert in_child(fill) == 0
    (found,) = listing.find()
    assert (found.name, found.samples, found.stats.filled, found.state) == ("keyed", "values by key", 20, "kept")
    with KeyedCache("2MB", name="keyed", fingerprint="v1") as cache:
        assert all(same(cache.get(key), value(key)) for key in KEYS[:20])
    with KeyedCache("2MB", name="keyed", fingerprint="v2") as cache:  # of other data
        assert len(cache) == 0


def load_and_note(key):
    with open(os.environ["TEST_LOG"], "a") as log:
        log.write(f"{key}\n")
    time.sleep(0.001)
    return value(key)


def take_all(number, cache, many):
    order = random.Random(number).sample(range(N), N)
    for begin in range(0, N, 20):
        part = order[begin : begin + 20]
        if many:
            values = cache.get_or_load_many(part, lambda missing: map(load_and_note, missing), timeout_s=60)
        else:
            values = [cache.get_or_load(key, load_and_note, timeout_s=60) for key in part]
        assert same(values, list(map(value, part)))


@pytest.mark.linux
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_want_the_same_keys_load_each_once(tmp_path, cache, many, method, monkeypatch):
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    run_all(multiprocessing.get_context(method), 4, take_all, cache, many)
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(N))
    stats = cache.stats()
    assert (stats.fills, stats.filled, stats.misses, stats.hits) == (N, N, N, 3 * N)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("on", ["memory", "disk"])
def test_a_kill_at_any_moment_leaves_right_values_only(cache, tmp_path, seed, on):
    rng = random.Random(seed)

    def fill():
        with cache if on == "memory" else on_disk(tmp_path, memory="20KB") as used:
            for key in range(100_000):
                used.get_or_load_many([key, ("pair", key)], lambda missing: [value(each) for each in missing])

    for _ in range(5):
        kill_in(fill, rng.random() * (0.03 if on == "memory" else 0.1))
    with cache if on == "memory" else on_disk(tmp_path, memory="2MB") as used:
        count = next(key for key in range(100_000) if used.get(key) is None)
        assert all(same(used.get_or_load(key, value), value(key)) for key in range(count + 100))


def test_a_damaged_table_is_an_error_and_no_crash(cache):
    cache.put("a", 1)
    other = pickle.loads(pickle.dumps(cache))
    other._store._seen = -1, []
    cache._store.words[layout.OFFSET] = 1 << 40  # where the first level is
    with pytest.raises(Exception, match="damaged: its table of keys"):
        other.get("a")


def on_disk(folder, fingerprint="v1", memory="200KB", **options):
    return KeyedCache(memory, disk=folder, disk_limit="20MB", fingerprint=fingerprint, **options)


def picture(key):
    return torch.full((5000,), key % 251, dtype=torch.uint8)


def test_what_memory_has_no_room_for_is_on_the_disk_and_stays_for_the_next_run(tmp_path, caplog):
    loads = []

    def load(missing):
        loads.extend(missing)
        return list(map(picture, missing))

    with on_disk(tmp_path / "d") as cache:
        for _ in range(2):
            for begin in range(0, 200, 20):
                keys = range(begin, begin + 20)
                assert same(cache.get_or_load_many(keys, load), list(map(picture, keys)))
        assert loads == list(range(200))
        assert 0 < len(cache) < 50  # all are on the disk
        assert same(cache.get(199), picture(199))
        assert 199 in cache
        with pytest.raises(SlotError, match="does not change"):
            cache.put(199, 0)
        copy = pickle.loads(pickle.dumps(cache))
        assert same(copy.get_or_load(150, None), picture(150))
        copy.close()
    with KeyedCache("200KB", disk=tmp_path / "d", disk_limit="200MB", fingerprint="v1") as cache:
        with pytest.raises(MismatchError, match="in use for other data"):
            on_disk(tmp_path / "d", "v2")
        # memory is empty, and takes from the disk what it has room for
        assert same(cache.get_or_load_many(range(100, 200), load), list(map(picture, range(100, 200))))
        assert (len(loads), len(cache) > 0) == (200, True)
    with on_disk(tmp_path / "d", "v2") as cache:
        assert cache.get(199) is None
    assert any("left behind for other data" in record.getMessage() for record in caplog.records)


@pytest.mark.linux
def test_processes_share_the_disk_and_load_each_key_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    with on_disk(tmp_path / "d", memory="8KB") as cache:
        assert cache.get("before the fork") is None
        run_all(multiprocessing.get_context("fork"), 3, take_all, cache, True)
        assert cache.get_or_load(7, load_and_note)["of"] == "7"
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(N))


def test_a_full_disk_and_a_wrong_folder(tmp_path, caplog):
    with KeyedCache("100KB", disk=tmp_path / "small", disk_limit="200KB") as cache:
        for key in range(100):
            assert same(cache.get_or_load(key, picture), picture(key))
        assert cache.get(99) is None
    assert sum("takes no more values" in record.getMessage() for record in caplog.records) == 1
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory"):
        on_disk(tmp_path / "file")
    with pytest.raises(LimitError, match="go together"):
        KeyedCache("1MB", disk=tmp_path)
    with pytest.raises(DiskError, match="disk='' is not the path"):
        on_disk("")
    with DiskCache(tmp_path / "samples", "1MB", 9, fingerprint="v1"), pytest.raises(MismatchError, match="values by key"):
        on_disk(tmp_path / "samples")


def test_a_repeated_key_of_a_full_cache_is_loaded_once_in_a_call():
    calls = []

    def load(missing):
        calls.append(missing)
        return [[key] for key in missing]

    with KeyedCache(0) as cache:
        values = cache.get_or_load_many(["a", "b", "a"], load)
        values[0].append(1)
        assert (values, calls) == ([["a", 1], ["b"], ["a"]], [["a", "b"]])


def test_one_value_that_is_too_large_leaves_room_for_others():
    with KeyedCache("1MB") as cache:
        assert not cache.put("big", torch.zeros(4_000_000, dtype=torch.uint8))
        assert cache.put("small", 1)
        cache.put("half", torch.zeros(500_000, dtype=torch.uint8))
        assert not cache.put("other half", torch.zeros(600_000, dtype=torch.uint8))
        assert cache.put("small too", 1)


def test_a_child_that_is_forked_while_a_thread_writes_uses_and_closes_the_disk(tmp_path):
    def use():
        assert torch.equal(cache.get(0), torch.zeros(500))
        cache.close()

    with on_disk(tmp_path, memory="20KB") as cache, ThreadPoolExecutor(1) as pool:
        for key in range(50):
            cache.put(key, torch.zeros(500))
        writing = pool.submit(lambda: [cache.put(key, torch.full((500,), key)) for key in range(50, 400)])
        assert [in_child(use, timeout_s=20) for _ in range(8)] == [0] * 8
        writing.result()
        assert int(cache.get(399)[0]) == 399


def test_damaged_values_on_a_disk_are_loaded_and_written_again(tmp_path, caplog):
    with on_disk(tmp_path, memory="20KB") as cache:
        for key in range(9):
            cache.put(key, bytes([key]) * 3000)
    data = tmp_path / "samples"
    data.write_bytes(data.read_bytes().replace(bytes([8]) * 3000, bytes([8]) * 2999 + b"x"))
    for _ in range(2):
        with on_disk(tmp_path, memory=0) as cache:
            assert cache.get_or_load(8, lambda key: bytes([key]) * 3000) == bytes([8]) * 3000
            assert cache.get(7) == bytes([7]) * 3000
    assert caplog.text.count("has lost samples") == 1


def test_keys_whose_places_on_a_disk_are_taken_lie_in_the_next_ones_and_few_find_none(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_FEWEST", 64)
    monkeypatch.setattr(disk, "_PLACE_BYTES", 1 << 30)
    with on_disk(tmp_path, memory=0) as cache:
        kept = sum(cache.put(key, value(key)) for key in range(64))
        assert 48 < kept <= 64
    with on_disk(tmp_path, memory=0) as cache:
        found = [key for key in range(64) if key in cache]
        assert len(found) == kept
        assert all(same(cache.get(key), value(key)) for key in found)
