"""Values by key: keys that differ have values of their own, each is loaded once by all processes, and nothing is ever wrong."""

import enum
import functools
import multiprocessing
import os
import pickle
import random
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from stocache import DiskCache, KeyedCache, SlotError
from stocache.cache.keyed import keys, layout
from stocache.errors import CacheKeyError, MismatchError
from stocache.tools.cli import listing
from tests.support.equality import same
from tests.support.processes import in_child, kill_in, run_all

N = 200


class Camera(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Loss(str, enum.Enum):
    L1 = "l1"


KEYS = [
    1, True, 1.0, "1", b"1", None, 0, False, 0.0, -0.0, "", b"", -1, 255, 256, 2**70, -(2**70), float("inf"), "ä€\udc80",
    Camera.LEFT, Camera.RIGHT, Loss.L1, "l1", Path("l1"), Path("a/b"), (), ("a",), ("a", "b"), ("ab",), (("a",), "b"),
    ("a", ("b",)), (Path("v.mp4"), 3), ("v.mp4", 3), ("v.mp4", 3.0), "x" * (1 << 20), Path("\ud800"),
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
    (1, float("nan")), [1], np.zeros(2), torch.tensor(1), object(), (1, [2]), 1j, np.datetime64("2020-01-01"),
    functools.reduce(lambda key, _: (key,), range(999)),
])  # fmt: skip
def test_what_changes_or_equals_nothing_or_is_nested_deeply_is_no_key(cache, key):
    for use in (
        lambda: cache.get(key), lambda: cache.put(key, 1), lambda: key in cache, lambda: cache.get_or_load(key, str),
        lambda: cache.get_or_load_many([1, key], str),
    ):  # fmt: skip
        with pytest.raises(CacheKeyError, match=r"a key|NaN|flatter"):
            use()


def test_numbers_of_numpy_and_subclasses_are_the_keys_that_they_equal(cache):
    for key, equal in ((np.int64(7), 7), (np.float32(0.5), 0.5), (np.str_("a"), "a"), (PurePosixPath("c"), Path("c"))):
        cache.put(key, 1)
        assert cache.get(equal) == 1


def test_the_table_grows_when_later_values_are_smaller_than_the_first(cache):
    cache.put("large", torch.zeros(1 << 20, dtype=torch.uint8))
    for number in range(6_000):
        cache.put(number, number)
    assert [cache.get(number) for number in range(6_000)] == list(range(6_000))
    assert len(cache) == cache.stats().fills == 6_001
    assert len(cache._store._seen[1]) > 2
    assert pickle.loads(pickle.dumps(cache)).get(5_999) == 5_999


def test_a_full_cache_loads_further_keys_each_time_and_says_so_once(caplog):
    loads = []
    with KeyedCache("100KB") as cache:
        for key in [*range(40)] * 2:
            assert same(cache.get_or_load(key, lambda key: loads.append(key) or picture(key)), picture(key))
        stats = cache.stats()
        assert 10 < len(cache) < 20
        assert len(loads) == 40 + 40 - len(cache)
        assert not cache.put(39, 1)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    text = rf"full: {stats.filled} keys of .* KiB each in .*, hit rate \d+ %.*a limit of n times \d+ bytes"
    assert re.search(text, record.getMessage())
    assert stats.filled * stats.slot_bytes <= stats.capacity_bytes


@pytest.mark.parametrize("size", ["8MB", 0])
def test_many_are_loaded_in_one_call_in_their_order_and_each_once(size):
    calls, wanted = [], ["b", "a", "c", "b", ("a",), "a"]

    def load(missing):
        calls.append(missing)
        yield from ([key] for key in missing)

    with KeyedCache(size) as cache:
        assert cache.put("c", ["c"]) == (cache.get("c") == ["c"]) == bool(size)
        for _ in range(2):
            values = cache.get_or_load_many(wanted, load)
            values[0].append("the caller's own")
            assert values == [["b", "the caller's own"], ["a"], ["c"], ["b"], [("a",)], ["a"]]
        assert calls == ([["b", "a", ("a",)]] if size else [["b", "a", "c", ("a",)]] * 2)
        assert cache.get_or_load_many([], load) == []


def test_a_value_does_not_change_and_its_bytes_can_be_looked_at(cache):
    for _ in range(2):
        assert cache.put("a", torch.zeros(4))  # the same
    with pytest.raises(SlotError, match=r"put\('a'\): the key is cached with another value"):
        cache.put("a", torch.ones(4))
    cache.get("a").fill_(7)
    assert same(cache.get("a"), torch.zeros(4))
    cache.get("a", copy=False).fill_(9)
    assert same(cache.get("a"), torch.full((4,), 9.0))
    other = pickle.loads(pickle.dumps(cache))
    assert cache.get("b") is other.get("b") is None  # both are to put it
    assert (cache.put("b", 1), other.put("b", 2)) == (True, True)  # the first wins
    assert cache.get("b") == other.get("b") == 1


def test_as_a_mapping_it_serves_programs_that_keep_a_dict(cache):
    kept = cache.as_mapping()
    assert kept.setdefault("a", [1]) == [1]
    kept["b"] = {"x": 2}
    assert (kept["a"], kept["b"], len(kept), "b" in kept, kept.get("c")) == ([1], {"x": 2}, 2, True, None)
    with pytest.raises(TypeError, match="are not listed"):
        dict(kept)
    with pytest.raises(SlotError, match="does not change"):
        kept["a"] = 3
    assert (kept.pop("a"), kept.pop("a", 4)) == ([1], 4)
    with pytest.raises(KeyError, match="a"):
        del kept["a"]
    kept["a"] = 3
    assert kept["a"] == pickle.loads(pickle.dumps(kept))["a"] == 3


def test_a_full_mapping_serves_each_thread_what_it_has_set_last():
    with KeyedCache("256KB") as cache, ThreadPoolExecutor(1) as pool:
        kept = cache.as_mapping()
        for key in range(20):
            kept[key] = torch.full((50_000,), key, dtype=torch.uint8)
            assert kept[key][0] == key
        assert len(kept) < 10
        for uncached in (lambda: kept[18], pool.submit(kept.__getitem__, 19).result):
            with pytest.raises(KeyError, match=r"18|19"):
                uncached()
        del kept[19]
        with pytest.raises(KeyError, match="19"):
            kept[19]
        kept.clear()
        assert len(kept) == 0


def test_keys_of_one_hash_keep_their_values_and_one_that_is_removed_is_gone_for_all(cache, monkeypatch):
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
    assert all(same(other.get_or_load(number, value), value(number)) for number in range(N))
    assert (len(cache), not cache.remove("never")) == (N, True)


@pytest.mark.parametrize("memory", [0, "1MB"])
def test_a_key_that_is_removed_from_the_disk_does_not_come_back(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(keys, "xxh3_128_intdigest", lambda text: 5)
    with on_disk(tmp_path, memory=memory) as cache:
        for key in range(9):
            cache.put(key, value(key))
        assert (cache.remove(3), in_child(lambda: cache.remove(8)), cache.remove(8)) == (True, 0, False)
        assert [key for key in range(9) if key in cache] == [0, 1, 2, 4, 5, 6, 7]
    with on_disk(tmp_path, memory=memory) as cache:
        assert all(same(cache.get(key), value(key)) for key in range(3))
        assert not any(key in cache for key in (3, 8))  # those behind it may be loaded again
        assert all(same(cache.get_or_load(key, value), value(key)) for key in range(9))
        assert cache.remove(5)
    with on_disk(tmp_path, memory=memory) as cache:
        assert 5 not in cache


def test_what_any_process_clears_is_forgotten_and_its_memory_used_again(cache):
    for turn, clear in enumerate((cache.clear, lambda: in_child(cache.clear), cache.clear)):
        for key in range(600):
            found = cache.get_or_load(key, lambda key, turn=turn: torch.full((2_000,), key + turn))
            assert found.sum() == 2_000 * (key + turn)
        assert 300 < len(cache) < 600  # it is full
        clear()
        assert (len(cache), cache.get(1)) == (0, None)


@pytest.mark.linux
def test_by_a_name_other_processes_and_later_runs_find_it():
    def fill():
        with KeyedCache("2MB", name="keyed", persist=True, fingerprint="v1") as cache:
            for key in KEYS[:20]:
                cache.get_or_load(key, value)

    assert in_child(fill) == 0
    (found,) = listing.find()
    assert (found.name, found.samples, found.stats.filled, found.state) == ("keyed", "values by key", 20, "kept")
    for fingerprint, kept in (("v1", 20), ("v2", 0)):
        with KeyedCache("2MB", name="keyed", fingerprint=fingerprint) as cache:
            assert all(same(cache.get(key), value(key)) for key in KEYS[:kept])
            assert len(cache) == kept


def load_and_note(key):
    with open(os.environ["TEST_LOG"], "a") as log:
        log.write(f"{key}\n")
    return value(key)


def take_all(number, cache, many):
    order = random.Random(number // 2).sample(range(N), N)  # two processes have the same order
    for begin in range(0, N, 20):
        part = order[begin : begin + 20]
        if many:
            values = cache.get_or_load_many(part, lambda missing: map(load_and_note, missing), timeout_s=60)
        else:
            values = [cache.get_or_load(key, load_and_note, timeout_s=60) for key in part]
        assert same(values, list(map(value, part)))


@pytest.mark.linux
@pytest.mark.parametrize(("method", "on", "many"), [
    ("fork", "memory", False), ("fork", "memory", True), ("fork", "disk", True),
    pytest.param("spawn", "disk", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_processes_that_want_the_same_keys_load_each_once(tmp_path, cache, method, on, many, monkeypatch):
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    with cache if on == "memory" else on_disk(tmp_path / "d", memory="8KB") as used:
        assert used.get("before the fork") is None
        run_all(multiprocessing.get_context(method), 3, take_all, used, many)
        assert same(used.get_or_load(7, load_and_note), value(7))
        stats = used.stats()
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(N))
    assert on == "disk" or (stats.fills, stats.filled, stats.misses, stats.hits) == (N, N, N + 1, 2 * N + 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("does", ["fill memory", "fill a disk", "remove"])
def test_a_kill_at_any_moment_leaves_right_values_only(cache, tmp_path, does, seed):
    rng, is_on_disk, span = random.Random(seed), does == "fill a disk", 50 if does == "remove" else 100_000

    def work():
        with on_disk(tmp_path, memory="20KB") if is_on_disk else cache as used:
            for number in range(100_000):
                key = number % span
                used.get_or_load_many([key, ("pair", key)], lambda missing: list(map(value, missing)))
                if does == "remove":
                    used.remove(number * 7 % span)

    for _ in range(5):
        kill_in(work, rng.random() * (0.1 if is_on_disk else 0.03))
    with on_disk(tmp_path, memory="2MB") if is_on_disk else cache as used:
        count = 100 + next(key for key in range(100_000) if used.get(key) is None)
        for key in (*range(count), *(("pair", number) for number in range(count))):
            assert same(used.get_or_load(key, value), value(key))
        assert is_on_disk or len(used) == 2 * count


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


@pytest.mark.linux
def test_what_memory_has_no_room_for_is_on_the_disk_and_stays_for_the_next_run(tmp_path, caplog):
    with on_disk(tmp_path / "d") as cache:
        for begin in range(0, 200, 20):
            keys = range(begin, begin + 20)
            assert same(cache.get_or_load_many(keys, lambda missing: map(picture, missing)), list(map(picture, keys)))
        assert 0 < len(cache) < 50  # all are on the disk
        assert (199 in cache, same(cache.get(199), picture(199))) == (True, True)
        with pytest.raises(SlotError, match="does not change"):
            cache.put(199, 0)
        with pickle.loads(pickle.dumps(cache)) as copy:
            assert same(copy.get_or_load(150, None), picture(150))
    with KeyedCache("200KB", disk=tmp_path / "d", disk_limit="200MB", fingerprint="v1") as cache:
        with pytest.raises(MismatchError, match="in use for other data"):
            on_disk(tmp_path / "d", "v2")
        # memory is empty, and takes from the disk what it has room for
        assert same(cache.get_or_load_many(range(200), None), list(map(picture, range(200))))
        assert len(cache) > 0
    with on_disk(tmp_path / "d", "v2") as cache:
        assert cache.get(199) is None
    assert any("left behind for other data" in record.getMessage() for record in caplog.records)


def test_a_full_disk_and_a_folder_of_samples(tmp_path, caplog):
    with KeyedCache("100KB", disk=tmp_path / "small", disk_limit="200KB") as cache:
        for key in range(100):
            assert same(cache.get_or_load(key, picture), picture(key))
        assert cache.get(99) is None
    assert sum("takes no more values" in record.getMessage() for record in caplog.records) == 1
    with DiskCache(tmp_path / "samples", "1MB", 9, fingerprint="v1"), pytest.raises(MismatchError, match="values by key"):
        on_disk(tmp_path / "samples")


def test_one_value_that_is_too_large_leaves_room_for_others():
    with KeyedCache("1MB") as cache:
        for key, nbytes in (("big", 4_000_000), ("small", 1), ("half", 500_000), ("other half", 600_000), ("small too", 1)):
            assert cache.put(key, bytes(nbytes)) == (key not in ("big", "other half"))


def test_damaged_values_on_a_disk_are_loaded_and_written_again(tmp_path, caplog):
    with on_disk(tmp_path, memory=0) as cache:
        assert all(cache.put(key, picture(key)) for key in (7, 8))
    data = tmp_path / "samples"
    data.write_bytes(data.read_bytes().replace(bytes([8]) * 5000, bytes([8]) * 4999 + b"x"))
    for _ in range(2):
        with on_disk(tmp_path, memory=0) as cache:
            assert same([cache.get_or_load(8, picture), cache.get(7)], [picture(8), picture(7)])
    assert caplog.text.count("has lost samples") == 1
