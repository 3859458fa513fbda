"""CachedDataset: any dataset in one line, with the same samples, order and random numbers."""

import logging
import re
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, StackDataset, Subset, TensorDataset

import stocache
from stocache import CachedDataset, CacheOptions, DatasetError, LimitError, SampleError
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache
from tests.support.containers import Point
from tests.support.equality import identical, same
from tests.support.images import Counted, Made, image, many_sizes, one_size

pytestmark = pytest.mark.unaudited

N = 48
ONCE = [2] + [1] * (N - 1)  # reads of a cached dataset: the probe looks at the first sample twice
SIZES = pytest.mark.parametrize("size", [one_size, many_sizes], ids=["fixed", "ragged"])


def everything(dataset, batch_size=5, **options):
    return [sample for batch in DataLoader(dataset, batch_size, collate_fn=list, **options) for sample in batch]


@SIZES
@pytest.mark.parametrize("limit", [1, "3KB", 0])
def test_samples_are_those_of_the_dataset_and_read_once_if_they_fit(size, limit):
    source = Counted(N, size)
    with CachedDataset(source, limit) as cached:
        assert isinstance(cached.cache, SharedCache if size is one_size and limit else RaggedCache)
        for epoch in range(3):
            before = source.reads.sum()
            for idx in torch.randperm(N).tolist():
                assert same(cached[idx], source.sample(idx))
            resident = cached.stats().total.filled
            assert not epoch or source.reads.sum() - before == N - resident
        assert resident in {0: [0], 1: [N]}.get(limit, range(1, N))
        assert resident < N or source.reads.tolist() == ONCE
        assert len(list(cached)) == N  # ends with an IndexError
    with pytest.raises(stocache.errors.ClosedError, match="the cache is closed"):
        cached[0]


@SIZES
def test_batches_are_those_of_the_dataset_which_loads_them_with_one_call(size):
    source, calls = Counted(N, size), []
    source.__getitems__ = lambda indices: calls.append(list(indices)) or [source[idx] for idx in indices]
    with CachedDataset(source, 0.1) as cached:
        assert source.reads.count_nonzero() == 8  # probed
        first = cached.__getitems__([0, 1, 2, 1, 47])
        assert same(first, [*map(source.sample, [0, 1, 2, 1, 47])])
        assert calls == [[1, 2]]
        for sample in (first[1], first[3]):
            sample[0].zero_()
        assert same(cached.__getitems__(range(N)), [*map(source.sample, range(N))])
        assert sorted(source.reads.tolist())[-4:] == [1, 3, 5, 8]  # three are also asked of __getitems__, in batches of 1 to 3


def raised(function, argument):
    try:
        function(argument)
    except Exception as error:
        return repr(error)
    return ""


def test_indices_are_those_of_a_sequence():
    source = Counted(N)
    with CachedDataset(source, 0.1) as cached:
        for idx in (-1, -N, np.int64(3), torch.tensor(-3)):
            assert same(cached[idx], source.sample(int(idx) % N))
            assert same(cached.__getitems__([idx, 0]), [source.sample(int(idx) % N), source.sample(0)])
        assert cached.__getitems__([]) == []
        for idx in (N, -N - 1, None, {}):
            for ask in (cached.__getitem__, lambda idx: cached.__getitems__([0, idx])):
                assert raised(ask, idx) == raised(source.__getitem__, idx) != ""


@pytest.mark.parametrize("order", [np.arange(8, dtype=np.int32), torch.arange(8), range(8)], ids=lambda its: type(its).__name__)
@pytest.mark.parametrize("make", [lambda its, idx: idx / 4, lambda its, idx: image(int(idx))], ids=["class", "number"])
def test_samples_that_depend_on_the_class_of_their_index_are_those_of_torch(make, order, caplog):
    batches = lambda dataset: list(DataLoader(dataset, 4, sampler=order))
    with CachedDataset(Made(make, 8), 0.1) as cached:
        for _ in range(2):
            assert identical(batches(cached), batches(cached.dataset))
    is_due = type(order) is not range and type(make(None, 1)) is float
    assert ("Have the sampler yield int." in caplog.text) == is_due


def test_samples_outside_the_length_are_made_by_the_dataset():
    class Part(Counted):
        __len__ = lambda self: 5

    source = Part(N)
    with CachedDataset(source, 0.1, transform=list) as cached:
        for idx in (5, N - 1):
            assert same([cached[idx], *cached.__getitems__([0, idx])], [*map(list, map(source.sample, (idx, 0, idx)))])


@SIZES
@pytest.mark.parametrize("copies", [True, False])
def test_writing_into_a_sample_reaches_the_cache_only_with_copy_false_and_no_transform(size, copies):
    source = Counted(N, size)

    def spoil(sample):
        sample[0].mul_(0)
        return sample

    with CachedDataset(source, 0.1, transform=spoil, copy=copies) as cached:
        for _ in range(2):
            assert not any(image.any() for image, _ in everything(cached))
            assert not any(cached[idx][0].any() for idx in range(N))
        cached.transform = None
        assert same(list(cached), [*map(source.sample, range(N))])
        cached[3][0].fill_(9)
        cached.__getitems__([4])[0][0].fill_(9)
        assert [bool((cached[idx][0] == 9).all()) for idx in (3, 4)] == [not copies] * 2


LZ4 = "lz4" if find_spec("lz4") else None
TENSORS = TensorDataset(torch.arange(40).view(10, 4), torch.arange(10))


@pytest.mark.parametrize(("source", "options", "kind"), [
    (ConcatDataset([TENSORS, Subset(TENSORS, [7, 3, 5])]), {}, SharedCache),
    (StackDataset(a=TENSORS, b=["text"] * 10), {}, RaggedCache),
    ([Point(torch.ones(2), 3), Point(torch.zeros(2), 4)], {}, SharedCache),
    ([1, 2.5, None, "x", b"y", 2**70], {}, RaggedCache), (np.arange(6.0), {}, SharedCache), ([((), {})] * 5, {}, SharedCache),
    ("text", {}, RaggedCache), ({0: "a", 1: "b"}, {}, RaggedCache), ([1, 2], {"size_limit_gib": "auto"}, SharedCache),
    ([1, 2], {"variable": True}, RaggedCache), ([1, 2], {"admission": "cost"}, RaggedCache),
    ([{1, 2}, {3}, frozenset({4})], {"allow_pickle": True}, RaggedCache), ([], {}, RaggedCache),
    (["a", "b"], {"size_limit_gib": CacheOptions("1MB", codec=LZ4, fingerprint="f")}, RaggedCache),
])  # fmt: skip
def test_datasets_of_torch_and_sequences_work_unchanged(source, options, kind):
    with CachedDataset(source, **{"size_limit_gib": 0.1} | options) as cached:
        assert isinstance(cached.cache, kind)
        assert len(cached) == len(source)
        for _ in range(2):
            assert all(same(cached[idx], source[idx]) for idx in range(len(source)))
            assert all(same(source[idx], sample) for idx, sample in enumerate(cached.__getitems__(range(len(source)))))
        assert cached.stats().total.filled == len(source)
        if isinstance(limits := options.get("size_limit_gib"), CacheOptions):
            assert (cached.cache.codec, cached.stats().total.capacity_bytes <= 10**6) == (limits.codec, True)


@pytest.mark.parametrize("batched", [False, True])
def test_a_misfit_is_served_uncached_and_counted_with_one_warning(caplog, batched):
    source = Counted(N, lambda idx: (3, 2 if idx == 21 else 6, 5))  # the probe does not see sample 21
    with CachedDataset(source, 0.1) as cached:
        for _ in range(3):
            got = cached.__getitems__(range(N)) if batched else [cached[idx] for idx in range(N)]
            assert all(map(same, got, map(source.sample, range(N))))
        total = cached.stats().total
        assert (total.rejected, total.filled) == (1, N - 1)
        assert source.reads.tolist() == [2 if idx == 0 else 3 if idx == 21 else 1 for idx in range(N)]
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "sample 21 does not fit" in warning
        assert "sample[0] has shape (3, 2, 5), the cache holds (3, 6, 5)" in warning


class Failing(Counted):
    def __init__(self, size, failing):
        super().__init__(N, size)
        self.failing, self.error = failing, FileNotFoundError("the file is gone")

    def sample(self, idx):
        if idx in self.failing:
            raise self.error
        return super().sample(idx)


@pytest.mark.linux
@SIZES
def test_errors_of_the_dataset_pass_through_and_are_not_cached(size):
    source = Failing(size, {5, 20})
    with CachedDataset(source, 0.1) as cached:
        for ask in (lambda: cached[5], lambda: cached.__getitems__([3, 5, 6])):
            with pytest.raises(FileNotFoundError, match="the file is gone") as caught:
                ask()
            assert caught.value is source.error
            del caught
            source.error.__traceback__ = None
        with pytest.raises(FileNotFoundError, match="the file is gone") as caught:
            cached.warm(progress=False)
        assert "in sample" in str(caught.value.__cause__)  # the traceback in the child
        del caught
        source.failing.clear()
        assert cached[5][1] == 5
    with pytest.raises(FileNotFoundError, match=r"probing sample 0 of Failing.*example=sample.*probe=0.*the file is gone"):
        CachedDataset(Failing(size, set(range(N))), 0.1)
    with CachedDataset(Failing(size, {0}), 0.1) as cached:  # one of the probed samples: that is not a reason not to begin
        assert cached[5][1] == 5


class Endless(IterableDataset):
    __iter__ = None


class Unending:
    __getitem__ = len


@pytest.mark.parametrize(("dataset", "options", "error", "message"), [
    (Endless(), {}, DatasetError, r"Endless has no samples by number.*Give a map-style dataset.*list\(endless\)"),
    (Unending(), {}, DatasetError, "Unending has no length, which a cache needs: .*Define __len__"),
    ({"train": [1], "test": [2]}, {}, DatasetError, r"is a mapping with the keys \['train', 'test'\].*dict\['train'\]"),
    ({1: "a", 2: "b"}, {}, DatasetError, r"keys \[1, 2\], not with the indices 0 to 1.*list\(dict.values\(\)\)"),
    ([1], {"probe": -1}, LimitError, "probe=-1 is not a number of samples"),
    ([1], {"probe": 0, "variable": False}, LimitError, "variable=False needs to know.* Give example=sample"),
    (["a", "b"], {"placement": "prefix"}, LimitError, "placement='prefix' is for samples of one shape"),
    (["a", "b"], {"variable": False}, SampleError, "value is a str, which has no fixed size"),
    ([[1], [1, 2]], {"variable": False}, SampleError, r"sample 1: value has the entries \[0, 1\], the cache holds"),
    ([1], {"variable": False, "admission": "cost"}, LimitError, "Leave variable=False out"),
    ([1], {"disk": "unused"}, LimitError, "disk_limit"), ([1], {"disk_limit": "1MB"}, LimitError, "go together"),
    ([1], {"cut": "middle"}, LimitError, "cut='middle'"), ([1], {"store": "jpeg"}, LimitError, "store='jpeg'"),
    ([threading.Lock()], {"variable": False}, SampleError, "sample 0: value is a lock, which cannot be pickled"),
])  # fmt: skip
def test_wrong_arguments_say_what_to_do(dataset, options, error, message):
    with pytest.raises(error, match=message):
        CachedDataset(dataset, **{"size_limit_gib": 0.1} | options)


ADVICE = r"sample 0 does not fit and stays uncached.*(\. Turn .* before the cache, or pass|\. Leave |\. Give |holds NoneType)"
UNFIT = {"pickles": lambda: print, "does not pickle": threading.Lock, "gradient": lambda: torch.zeros(2, requires_grad=True)}


@pytest.mark.linux
@pytest.mark.parametrize("name", UNFIT)
def test_samples_that_cannot_be_kept_stay_uncached_and_one_message_says_what_to_do(name, caplog):
    names = lambda samples: [(sample["n"], type(sample["x"]).__name__) for sample in samples]
    source = Made(lambda its, idx: {"n": idx, "x": UNFIT[name]()}, 12)
    with CachedDataset(source, "1MB") as cached:
        for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}):
            loader = stocache.DataLoader(cached, 4, collate_fn=names, **options)
            assert [each for batch in loader for each in batch] == names(map(source.__getitem__, range(12)))
        assert cached.stats().total.filled == 0
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert re.search(ADVICE, message)


def test_the_probe_says_what_it_saw_and_an_example_takes_its_place(caplog):
    caplog.set_level(logging.INFO, "stocache")
    for size in (one_size, many_sizes):
        CachedDataset(Counted(N, size), 0.1, probe=3).close()
    assert "probed samples [0, 24, 47]: all are tuple(0: uint8[3, 9, 7], 1: int)" in caplog.text
    assert "samples [0, 24, 47]: kept as samples of varying size (sample 24: sample[0] has shape (3, 13, 7)" in caplog.text
    source = Counted(N)
    with CachedDataset(source, 0.1, example=source.sample(3)) as cached:
        assert source.reads.sum() == 0
        assert "the example: all are tuple(0: uint8[3, 9, 7], 1: int)" in caplog.text
        assert same(cached[5], source.sample(5))
        assert cached.stats().total.filled == 1
    with CachedDataset(source, 0.1, probe=0) as cached:
        assert isinstance(cached.cache, RaggedCache)
        assert same(cached[5], source.sample(5))
    assert source.reads.sum() == 2


@pytest.mark.parametrize(("size", "workers"), [(one_size, 2), (many_sizes, 0)])
def test_warm_fills_everything_once(size, workers, capsys, monkeypatch):
    source = Counted(N, size)
    with CachedDataset(source, 0.1) as cached:
        cached[5]
        assert cached.warm(num_workers=workers).total.filled == N
        assert source.reads.tolist() == ONCE
        assert "warming the cache: 100%" in capsys.readouterr().err
        monkeypatch.setenv("RANK", "1")
        cached.warm(num_workers=workers)  # only the first rank speaks
        assert source.reads.tolist() == ONCE
        assert capsys.readouterr().err == ""
        with pytest.raises(LimitError, match="num_workers=-1 is not a number of processes"):
            cached.warm(-1)
    with CachedDataset(source, "3KB") as cached:
        total = cached.warm(progress=False).total
        assert (cached.cache.aux_array == 0).sum() == 0
        assert 0 < total.filled < N


@pytest.mark.linux
def test_stats_and_the_log_have_an_entry_for_each_epoch_that_was_set(caplog):
    caplog.set_level(logging.INFO, "stocache")
    source, seen = Counted(N), []
    source.set_epoch = seen.append
    with CachedDataset(source, f"{N + N // 2 * (3 * 9 * 7 + 8)}B") as cached:
        kept = cached.stats().total.filled  # of the probed samples
        for epoch in range(3):
            cached.set_epoch(epoch)
            everything(cached, shuffle=True, num_workers=2, multiprocessing_context="fork")
        cached.set_epoch(3)
        epochs = cached.stats().epochs
        assert [(epoch.hits, epoch.misses, epoch.fills) for epoch in epochs] == [
            (kept, N - kept, N // 2 - kept), (N // 2, N // 2, 0), (N // 2, N // 2, 0),
        ]  # fmt: skip
        assert epochs[1].hit_rate == 0.5
        assert all(epoch.seconds > 0 for epoch in epochs)
    assert (cached.stats().total.fills, "of Counted in a SharedCache" in repr(cached)) == (N // 2, True)  # closed
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert (len(lines), seen) == (3, [0, 1, 2, 3])
    assert lines[1].startswith("epoch 2: 48 samples requested, 50.0 % from the cache, 24 read from the dataset, 0 newly cached")
