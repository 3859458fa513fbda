"""StreamLoader: its orders, its states, its length and life, its files, its cache and its ranks."""

import contextlib
import gzip
import itertools
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stocache import CacheOptions, CustomFormat, ReadOptions, StreamLoader
from stocache.errors import CacheNameError, ClosedError, DamagedError, StateError, StreamError
from stocache.shm import named
from tests.support.equality import same
from tests.support.processes import run_all, wait_until
from tests.support.shuffling import same_block
from tests.support.texts import N, Watch, epochs, in_workers, numbers, ours, parse, rows, run_ranks

CONTEXT = multiprocessing.get_context("fork")


def firsts(loader):
    """The first numbers of the rows of an epoch, of batches of one tensor."""
    return torch.cat(list(loader)).flatten().tolist()


@pytest.mark.linux
def test_a_loader_is_left_early_copied_and_closed_twice_and_leaves_no_file_open(numbered):
    loader = StreamLoader(numbered, 10, 20, size_limit_gib=0.01)
    for count in (5, 3):
        with contextlib.closing(iter(loader)) as batches:
            assert len(list(itertools.islice(batches, count))) == count
    assert numbers(loader) == list(range(420))
    assert str(numbered) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    with pickle.loads(pickle.dumps(loader)) as copied:
        assert len(copied) == len(loader) == len(DataLoader(loader, batch_size=None)) == 42
        hits = copied.stats().cache.hits
        assert numbers(copied) == list(range(420))
        assert copied.stats().cache.hits == hits + 21
    loader.close()
    loader.close()
    with pytest.raises(ClosedError, match="the StreamLoader is closed"):
        next(iter(loader))


def test_many_files_are_one_text(tmp_path):
    cuts = [0, 5, 6, 100, 300, N]
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        content = b"a\tb\tc\n" + rows(begin, end)
        (tmp_path / f"part{number}.tsv").write_bytes(content if number % 2 else content.rstrip(b"\n"))
        (tmp_path / f"part{number}.tsv.gz").write_bytes(gzip.compress(content))
    options = {"skip_header": 1, "drop_last": False, "columns": ["b", "a"], "label_columns": "c"}
    for pattern in ("part?.tsv", "part*.gz"):
        with StreamLoader(tmp_path / pattern, 10, 20, **options) as loader:
            assert numbers(loader) == numbers(loader) == list(range(N))
    with pytest.raises(StreamError, match=r"any byte, and .*part0\.tsv\.gz is gzip\. Use shuffle=True, with a window"):
        StreamLoader(tmp_path / "part*.gz", 10, 20, shuffle="buffers", **options)


def test_files_at_a_url():
    fsspec = pytest.importorskip("fsspec", reason="URLs need fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({"/texts/a.tsv": rows(0, 100), "/texts/b.tsv.gz": gzip.compress(rows(100, N))})
    try:
        with StreamLoader("memory://texts/*", 10, 20, drop_last=False, size_limit_gib=0.01) as loader:
            assert numbers(loader) == numbers(loader) == list(range(N))
            memory.pipe("/texts/a.tsv", rows(0, 90))
            assert numbers(loader) == [*range(90), *range(100, N)]
    finally:
        memory.rm("/texts", recursive=True)


def keeping_time(path, content):
    facts = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


CHANGES = [
    lambda path: path.write_bytes(rows(0, N + 20)),
    *(lambda path, end=end: keeping_time(path, rows()[:end] + b"2" + rows()[end:][1:]) for end in (0, -2)),  # of the same size
    lambda path: os.utime(path, ns=(0, 0)),
    lambda path: path.with_name("z.tsv").write_bytes(rows(0, 20)),  # one more file of the glob
]


@pytest.mark.linux
def test_a_file_that_changed_is_never_served_stale(numbered):
    paths = numbered.with_name("*.tsv")
    for change in CHANGES:
        numbered.write_bytes(rows())
        with StreamLoader(paths, 20, 20, drop_last=False, size_limit_gib=0.01) as loader:
            assert len(list(loader)) == len(list(loader)) == 22
            change(numbered)
            with StreamLoader(paths, 20, 20, drop_last=False) as fresh:
                assert same(list(loader), list(fresh))
                assert len(loader) == len(fresh)


def test_a_change_in_the_middle_of_an_epoch_is_an_error_also_for_what_is_cached(numbered):
    with StreamLoader(numbered, 10, 20, size_limit_gib=0.01) as loader:
        list(loader)
        batches, delivered = iter(loader), []
        next(batches)
        numbered.write_bytes(rows(1, N + 1))
        os.utime(numbered)
        with pytest.raises(DamagedError, match=r"numbered\.tsv has changed while it was being read\. The next epoch will"):
            delivered.extend(batches)
        assert len(delivered) < 30  # of 42: what was read ahead
        assert numbers(loader)[0] == 1
        batches = iter(loader)
        next(batches)
        numbered.unlink()
        with pytest.raises(DamagedError, match=r"numbered\.tsv is gone"):
            list(batches)


@pytest.mark.parametrize(("shuffle", "window", "drop_last"), [(False, 1, False), (True, 2, "batch"), ("buffers", 2, True)])
def test_epochs_are_those_without_a_cache_and_what_is_cached_is_neither_read_nor_parsed(
    numbered, monkeypatch, shuffle, window, drop_last
):
    options, watch = {"shuffle": shuffle, "window": window, "drop_last": drop_last}, Watch(monkeypatch)
    expected = epochs(numbered, 3, **options)
    assert epochs(numbered, 3, size_limit_gib="6KB", **options) == expected
    form = CustomFormat(watch.parse, audit=False)
    with StreamLoader(numbered, 10, 20, format=form, size_limit_gib=0.01, **options) as loader:
        for epoch in range(3):
            watch.bytes = watch.rows = 0
            assert firsts(loader) == expected[epoch]
            assert (watch.rows >= 420, watch.bytes >= numbered.stat().st_size) == (epoch == 0,) * 2
        assert (watch.rows, watch.bytes) == (0, 0)


@pytest.mark.linux
def test_jobs_share_a_named_cache_and_the_next_run_reads_nothing(numbered, monkeypatch):
    watch, parsed = Watch(monkeypatch), CONTEXT.Value("q", 0)

    def parse(found):
        with parsed.get_lock():
            parsed.value += len(found)
        return np.array([[int(row.split("\t")[0])] for row in found])

    def run(_):
        form, cache = CustomFormat(parse, audit=False), CacheOptions(0.01, name="texts", persist=True)
        with StreamLoader(numbered, 10, 20, format=form, drop_last=False, cache=cache) as loader:
            assert [firsts(loader) for _ in range(2)] == [list(range(N))] * 2

    run_all(CONTEXT, 3, run)
    run(0)
    for path in ours():
        named.remove(path)
    assert parsed.value == N
    assert watch.bytes < len(rows()) / 4  # the first row, to know what the columns are


def test_it_reads_ahead_while_the_trainer_works(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse, audit=False)) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: watch.rows >= 40)
        assert watch.rows < 200
        batches.close()


COUNTED, BUFFERS = {"count_rows": True}, {"shuffle": "buffers", "size_limit_gib": 0.01}
RANKS = [
    (True, gzip.compress, COUNTED), ("batch", bytes, COUNTED), (True, bytes, BUFFERS), ("batch", bytes, BUFFERS),
    (False, bytes, {}), (False, gzip.compress, {"size_limit_gib": 0.01, "shuffle": True}),
]  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize(("drop_last", "compress", "options"), RANKS)
def test_ranks_read_every_row_once_or_equally_many_batches(tmp_path, drop_last, compress, options):
    (path := tmp_path / "rows").write_bytes(compress(rows() + b"".join(b"%d\t%d\t%d\n" % (n, n, n) for n in range(N, N + 300))))
    ranks = run_ranks(path, tmp_path, 3, drop_last=drop_last, **options)
    for epoch in range(2):
        found = sorted(number for rank in ranks for number in rank[epoch])
        assert len(found) == len(set(found))
        if drop_last:  # the last rows are shorter, so there are more of them in as many bytes
            assert {len(rank[epoch]) for rank in ranks} == {10 * length for *_, length in ranks}
            assert len(found) > N
        else:
            assert found == list(range(N + 300))
    assert not ours()


def test_ranks_are_those_of_torchrun_unless_they_are_given(numbered, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, first in (({}, 200), ({"rank": 0, "world_size": 1}, 0)):
        (found,) = epochs(numbered, 1, drop_last=False, **options)
        assert found == list(range(found[0], N))
        assert first <= found[0] <= first + 50


def test_ranks_without_a_batch_and_caches_of_unknown_functions_are_refused_at_once(numbered, tmp_path):
    with pytest.raises(StreamError, match="with buffer_size=300, a rank of 2 has no batch"):
        StreamLoader(numbered, 10, 300, rank=0, world_size=2, count_rows=True)
    form = CustomFormat(parse)
    with pytest.raises(CacheNameError, match="with a name, and with a fingerprint"):
        StreamLoader(numbered, 10, 20, size_limit_gib=0.01, format=form, rank=0, world_size=2)
    with pytest.raises(CacheNameError, match="change the fingerprint with the function"):
        StreamLoader(numbered, 10, 20, format=form, cache=CacheOptions(0, disk=tmp_path / "disk", disk_limit="4MB"))


@pytest.mark.parametrize("buffer_size", [20, 430, 440])
def test_what_is_left_out_and_the_length_after_a_first_pass_or_if_rows_are_counted(numbered, buffer_size, caplog, capsys):
    whole, full = N - N % buffer_size, N - N % 10
    for drop_last, wanted in ((False, N), ("batch", full), (True, whole)):
        with StreamLoader(numbered, 10, buffer_size, drop_last=drop_last) as loader:
            if not wanted:
                with pytest.raises(StreamError, match=r"437 rows, buffer_size=.*drop_last=True leaves no batch"):
                    list(loader)
                continue
            with pytest.raises(TypeError, match="known after its first epoch, or with count_rows=True"):
                len(loader)
            assert bool(loader)
            batches = list(loader)
            assert torch.cat([y for _, y in batches]).tolist() == list(range(wanted))
            assert {len(y) for _, y in batches[:-1]} <= {10}
            assert len(batches) == len(loader)
            assert loader.stats().rows == (wanted if drop_last is True else N)
            list(loader)
        for options in ({"count_rows": True, "read": ReadOptions(progress=True)}, {"shuffle": "buffers"}):
            with StreamLoader(numbered, 10, buffer_size, drop_last=drop_last, **options) as loader:
                assert len(loader) == len(batches) == len(list(loader))
            shown = capsys.readouterr().err
            assert ("counting rows" in shown, "epoch 0: " in shown) == ("read" in options,) * 2
    left_out = f"the last {N % buffer_size} of {N} rows do not fill a buffer of {buffer_size} and are left out of each epoch"
    assert caplog.text.count(left_out) == 3 * bool(whole)  # once for each loader


@pytest.mark.parametrize(("shuffle", "window"), [(True, 1), (True, 3), ("buffers", 3)])
def test_orders_follow_from_seed_and_epoch(numbered, shuffle, window):
    options = {"shuffle": shuffle, "window": window, "drop_last": False}
    before = torch.get_rng_state()
    first = epochs(numbered, 3, **options)
    assert all(sorted(order) == list(range(N)) for order in first)
    assert len(set(map(tuple, first))) == 3
    assert epochs(numbered, 1, seed=1, **options)[0] not in first
    with StreamLoader(numbered, 10, 20, **options) as loader:
        for epoch in (2, 0):
            loader.set_epoch(epoch)
            assert numbers(loader) == first[epoch]
    assert torch.equal(torch.get_rng_state(), before)
    order = [n // 20 for n in epochs(numbered, 1, **options | {"drop_last": True})[0]]  # in windows of that many buffers
    windows = [set(order[start : start + 20 * window]) for start in range(0, len(order), 20 * window)]
    assert {len(buffers) for buffers in windows} == {window}
    assert (sorted(windows, key=min) == windows) == (shuffle is True)
    mixed = [same_block(order, 20, 10) for order in first]
    assert all(share < 1.2 / window for share in mixed)


def test_transforms_run_in_workers_and_get_whole_batches(numbered):
    transform = lambda batch: (batch[0] * 2, len(batch[1]), os.getpid())
    with StreamLoader(numbered, 10, 20, transform=transform) as loader:
        for batches, in_worker in ((loader, False), (in_workers(loader), True)):
            found = sorted(batches, key=lambda batch: batch[0][0, 0])
            for (x, rows, pid), start in zip(found, range(0, 420, 10), strict=True):
                assert (rows, x[:, 0].tolist()) == (10, [2 * n for n in range(start, start + 10)])
                assert (pid != os.getpid()) == in_worker


def test_batches_are_the_users_to_keep_and_to_write_to(numbered):
    for options in ({}, {"shuffle": True}):
        with StreamLoader(numbered, 10, 20, size_limit_gib=0.01, **options) as loader:
            kept = [list(loader) for _ in range(2)]
            for x, y in itertools.chain(*kept, loader):
                assert torch.equal(x[:, 0].long(), y)
                x.zero_()
                y.zero_()


@pytest.mark.linux
def test_in_a_dataloader_of_torch_each_row_comes_once_in_an_order_by_torchs_seed_or_the_epoch(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False, size_limit_gib=0.01) as loader:
        torchs, epochs = in_workers(loader), []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            epochs.append(numbers(torchs))
        assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
        assert epochs[0] == epochs[1] != epochs[2]
        assert loader.stats().cache.fill_fraction > 0
        loader.set_epoch(5)
        set_once = [numbers(torchs) for _ in range(2)]
        assert set_once[0] == set_once[1]
        assert set_once[0] not in epochs
        numbered.write_bytes(rows(3, N))
        assert sorted(numbers(torchs)) == list(range(3, N))


def nth_state(loader, count):
    """The state after that many batches; resuming from each is in tests/system/test_state_contract.py."""
    return [loader.state_dict() for _ in itertools.islice(loader, count)][-1]


def test_resuming_neither_reads_nor_parses_what_was_delivered(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse, audit=False)) as loader:
        state = nth_state(loader, 40)
    watch.rows = 0
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse, audit=False)) as loader:
        loader.load_state_dict(state)
        watch.bytes = 0
        assert firsts(loader) == list(range(400, 420))
        assert len(loader) == 42
    assert watch.rows <= 40
    assert watch.bytes < len(rows()) / 3


def test_states_that_do_not_belong_are_refused(numbered, tmp_path):
    with StreamLoader(numbered, 10, 20) as loader:
        state = nth_state(loader, 1)
    for options in ({"seed": 1}, {"shuffle": True}, {"drop_last": False}, {"columns": [0]}, {"rank": 0, "world_size": 2}):
        with StreamLoader(numbered, 10, 20, **options) as loader:
            with pytest.raises(StateError, match="other files, or other arguments"):
                loader.load_state_dict(state)
    with StreamLoader(numbered, 10, 20) as loader:
        loader.load_state_dict(state)
        numbered.write_bytes(rows(1, N))
        with pytest.raises(StateError, match="have changed since the state was taken"):
            list(loader)
    (copied := tmp_path / "copied.tsv").write_bytes(rows())
    with StreamLoader(copied, 10, 20) as loader:  # elsewhere, at another time
        loader.load_state_dict(state)
        assert numbers(loader) == list(range(10, 420))


def test_a_state_that_would_begin_inside_a_line_is_refused(tmp_path):
    (path := tmp_path / "long.tsv").write_bytes(rows(0, 20_000))
    with StreamLoader(path, 100, 200) as loader:
        state = nth_state(loader, 101)
    content, at = path.read_bytes(), state["position"]["line"][1]
    path.write_bytes(content[: at - 3] + b"0\n1" + content[at:])
    with StreamLoader(path, 100, 200) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="no line begins where"):
            next(iter(loader))


@pytest.mark.linux
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_parse_that_gives_other_rows_than_are_cached_is_found_before_these_are_served(numbered, num_workers, tmp_path):
    factor = tmp_path / "factor"  # which worker processes see
    factor.write_text("1")

    def scaled(lines):
        return {"x": torch.tensor([float(line.split("\t")[0]) for line in lines]) * int(factor.read_text())}

    with StreamLoader(numbered, 10, 20, size_limit_gib=0.01, format=CustomFormat(scaled)) as loader:
        batches = in_workers(loader, num_workers) if num_workers else loader
        first = torch.cat([batch["x"] for batch in batches])
        assert torch.equal(first, torch.cat([batch["x"] for batch in batches]))
        factor.write_text("3")
        assert torch.equal(first * 3, torch.cat([batch["x"] for batch in batches]))
        assert loader.stats().cache.hits
