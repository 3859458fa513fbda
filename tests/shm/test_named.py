"""Named caches: who shares one, when it goes, what is left behind and taken over, and what is refused."""

import dataclasses
import errno
import gc
import multiprocessing
import os
import pickle
import re
import signal
from pathlib import Path

import pytest
import torch

from stocache import CacheNameError, LimitError, MismatchError, SegmentError, SharedCache, SharedCacheDDP
from stocache.shm import layout, registry
from stocache.shm.locks import ROW_LOCKS
from stocache.tools.cli import listing
from tests.support.processes import in_child, run_all, run_python, stopped

N, DIMS = 40, (3, 8, 8)
HALF = f"{N + N // 2 * 192}B"
NAME = "test-named"


def make(size_limit_gib=1, dataset_len=N, dims=DIMS, **options):
    return SharedCacheDDP(size_limit_gib, dataset_len, dims, **{"name": NAME, **options})


def sample(idx):
    return torch.full(DIMS, idx, dtype=torch.uint8)


def fill(cache, indices=range(N)):
    for idx in indices:
        if cache.get_slot(idx) is None:
            cache.set_slot(idx, sample(idx))


def path():
    return Path(registry.path_of(NAME))


def leave_behind(**options):
    """Have a process fill the cache and end without any clean-up."""
    assert in_child(lambda: (cache := make(**options), fill(cache), os._exit(0))) == 0
    assert path().exists()


def test_processes_that_come_at_once_with_the_name_only_get_the_same_cache():
    fork, count = multiprocessing.get_context("fork"), 16
    barrier = fork.Barrier(count, timeout=60)

    def come(number):
        barrier.wait()
        with make() as cache:
            fill(cache, [number])
            barrier.wait()
            if number == 0:
                (found,) = listing.find()
                assert len({holder["pid"] for holder in found.holders}) == count
                assert cache.stats().filled == cache.stats().fills == count
            barrier.wait()

    run_all(fork, count, come)
    assert not path().exists()


def test_auto_takes_the_cache_that_is_there_and_one_of_auto_knows_its_size(caplog):
    with make(HALF) as first, make("auto") as second:
        assert len(second) == len(first) == N // 2
    assert not caplog.records
    with make("auto"), make(1) as second:
        assert len(second) == N
        with pytest.raises(MismatchError, match=f"slots {N}, now {N // 2}"):
            make(HALF)


def test_it_goes_when_the_script_ends_by_an_error_and_leaves_a_worker():
    script = f"""
from pathlib import Path
from torch.utils.data import DataLoader
from stocache import SharedCacheDDP
cache = SharedCacheDDP(1, {N}, {DIMS}, name={NAME!r})
cache.array.zero_()
cycle = [cache]
cycle.append(cycle)
batches = iter(DataLoader(cache, num_workers=1, persistent_workers=True))
next(batches)
print(Path({str(path())!r}).exists())
raise KeyError
"""
    result = run_python("-c", script, ok=False)
    assert result.stdout == "True\n", result.stderr
    assert not path().exists()


def has_lock():
    status = path().stat()
    return os.getpid() in registry.lock_owners(ROW_LOCKS, layout.COUNTER_ROWS)[status.st_dev, status.st_ino]


def test_views_hold_neither_the_name_nor_the_locks():
    """Until 3.13 a view holds a descriptor in Python's mmap, whose closing would drop the locks of this process."""
    cache = make()
    fill(cache)
    views = cache.get_slot(7, copy=False), cache.array
    cache.close()
    assert not path().exists()
    assert torch.equal(views[0], sample(7))
    with make(persist=True) as cache:
        views = cache.array
    cache = make()
    del views
    gc.collect()
    assert has_lock()
    with registry.attaching:
        cache.close()  # this process leaves it later
    with make():
        assert has_lock()


@pytest.mark.parametrize("fingerprint", ["v1", None])
def test_the_next_run_takes_over_what_a_killed_one_left(fingerprint, caplog):
    leave_behind(fingerprint=fingerprint)
    with make(fingerprint=fingerprint) as cache:
        stats = cache.stats()
        assert (stats.filled, stats.fills) == (N, 0)
        assert all(torch.equal(cache.get_slot(idx), sample(idx)) for idx in range(N))
    assert not path().exists()
    warnings = ["Without a fingerprint it is unknown whether its data has changed" in each.message for each in caplog.records]
    assert warnings == [True] * (fingerprint is None)


@pytest.mark.parametrize(("options", "difference"), [
    ({"dataset_len": N + 1}, f"dataset_len {N}, now {N + 1}; slots {N}, now {N + 1}"),
    ({"dtype": torch.int8}, "samples 'uint8[3, 8, 8]', now 'int8[3, 8, 8]'"), ({"placement": "scattered"}, "order='prefix'"),
    ({"fingerprint": "v2"}, "fingerprint 'v1', now 'v2'"), ({"size_limit_gib": HALF}, f"slots {N}, now {N // 2}"),
])  # fmt: skip
def test_another_cache_is_replaced_when_dead_and_refused_when_alive(options, difference, caplog):
    options = {"fingerprint": "v1", **options}
    leave_behind(fingerprint="v1")
    with stopped(lambda: make(fingerprint="v1")) as pid:
        for users in (pid, ", ".join(map(str, sorted([os.getpid(), pid])))):  # then by this process, too
            with pytest.raises(MismatchError, match=f"is in use by processes {users} for .*{re.escape(difference)}"):
                make(**options)
            cache = make(fingerprint="v1")
        assert cache.stats().filled == N
        cache.close()
    with make(**options) as cache:
        assert cache.stats().filled == 0
    assert re.search(f"was left behind for other data: .*{re.escape(difference)}", caplog.text)


def test_a_child_forked_in_the_middle_does_not_keep_the_lock_of_a_parent_that_is_killed():
    read, write = os.pipe()

    def fork_and_die(at):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.write(write, str(pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    make().close()  # the first segment sets up what a child does
    assert in_child(lambda: registry.run_locked(registry.directory_of(), fork_and_die, create=True)) == signal.SIGKILL
    try:
        assert in_child(lambda: make(on_busy="raise")) == 0
    finally:
        os.kill(int(os.read(read, 20)), signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_file_deleted_in_use_is_told_to_the_next_maker(caplog):
    with make() as cache:
        fill(cache)
        path().unlink()
        path().parent.rmdir()  # as systemd does with RemoveIPC
        assert torch.equal(cache.get_slot(3), sample(3))
        with pickle.loads(pickle.dumps(cache)) as copy, make() as second:
            assert (copy.stats().filled, second.stats().filled) == (N, 0)
            cache.close()
            copy.close()
            assert path().exists()  # the old one's leaving does not touch the new one
        assert f"was deleted while processes {os.getpid()} use it" in caplog.text
        assert "RemoveIPC=no" in caplog.text


def test_names_that_are_no_names_and_options_without_one():
    for name in ("", ".", "..", "a/b", "../x", "/etc/passwd", ".hidden", "-rf", "a b", "ä", "x" * 101, "a\0b", 7):
        with pytest.raises(CacheNameError, match=r"cannot name a cache\. Use up to 100 letters"):
            make(name=name)
    with pytest.raises(CacheNameError, match="persist is for caches with a name"):
        SharedCache(1, N, DIMS, persist=True)
    with pytest.raises(CacheNameError, match="fingerprint=b'x' is a bytes"):
        make(fingerprint=b"x")
    with pytest.raises(LimitError, match="cache holds 0 slots"):
        make("60B")


def patch(offset, data):
    return lambda target: target.write_bytes(target.read_bytes()[:offset] + data + target.read_bytes()[offset + len(data) :])


def forge(change):
    """Give the file a header that checks out, with a different descriptor."""

    def write(target):
        with target.open("r+b") as file:
            given = layout.Layout.read(file.fileno())
            dataclasses.replace(given, descriptor=change(given.descriptor)).allocate(file.fileno())

    return write


@pytest.mark.parametrize(("damage", "message"), [
    (lambda target: os.truncate(target, 2104831), "is damaged: it has 2104831 bytes, its header says 2104832"),
    (lambda target: [os.truncate(target, size) for size in (2100736, 2104832)], "is damaged: it has .* of memory, expected"),
    (lambda target: os.truncate(target, 0), "is not a segment of stocache: it begins with b''"),
    (patch(8, b"\2"), "has format version 2, this stocache reads version 4"), (patch(16, b"\xff"), "has a damaged header"),
    (forge(lambda _: b"\xff"), "has a header without a descriptor"),
    (forge(lambda old: old.replace(b'"capacity": 40', b'"capacity": 39')), "sizes do not belong to a capacity of 39"),
    (lambda target: target.chmod(0o644), r"is open to others \(mode 644\). If it is yours: chmod 600"),
    (lambda target: (target.unlink(), target.symlink_to("/etc/hostname")), "is a symbolic link, so it is not used"),
])  # fmt: skip
def test_a_damaged_file_or_none_is_refused(damage, message):
    leave_behind(fingerprint="v1")
    damage(path())
    with pytest.raises(SegmentError, match=f"{path()} .*{message}"):
        make(fingerprint="v1")


def test_a_directory_that_others_may_enter_is_refused():
    path().parent.mkdir(0o755)
    with pytest.raises(SegmentError, match=r"is open to others \(mode 755\). If it is yours: chmod 700"):
        make()
    path().parent.rmdir()
    path().parent.write_text("")
    with pytest.raises(SegmentError, match="is not a directory"):
        make()
    path().parent.unlink()


def test_a_cell_that_runs_again_with_other_data_is_refused_until_nothing_refers_to_the_earlier_cache():
    cache = make(fingerprint="v" * 5000)
    with pytest.raises(MismatchError, match=r"by this process for other data: .*sha256.* or close\(\) the earlier one\."):
        make(fingerprint="v" * 4999 + "w")  # long ones differ by their end
    circle = [cache]
    circle.append(circle)
    del cache, circle
    make(fingerprint="v2").close()


@pytest.mark.parametrize("call", ["mkdir", "posix_fallocate"])
def test_a_cache_that_the_file_system_does_not_take_is_not_shared(monkeypatch, caplog, call):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        cache = make()
    assert cache.get_slot(3) is None
    assert "is not shared: this process has its own part of the limit. [Errno 28] No space left on device" in caplog.text
    cache.close()
