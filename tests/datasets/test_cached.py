"""CachedDataset: any dataset in one line, with the same samples, order and random numbers."""

import collections
import logging
import os
import random
import socket
from dataclasses import dataclass

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from stocache import (
    CachedDataset,
    ClosedError,
    CodecError,
    DatasetError,
    LimitError,
    MismatchError,
    Placement,
    RaggedCache,
    SampleError,
    SampleIndexError,
    SharedCache,
)
from tests.support.equality import same
from tests.support.faults import no_shared_memory
from tests.support.processes import leave_process_group

N = 48
ONCE = [2] + [1] * (N - 1)  # reads of a cached dataset: the probe looks at the first sample twice


class Source(Dataset):
    """Counts its reads, over all processes; ``size`` gives the shape of an image."""

    classes = ("cat", "dog")

    def __init__(self, size=lambda idx: (3, 6, 5), n=N):
        self.size, self.n, self.reads = size, n, torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        if not 0 <= idx < self.n:
            raise IndexError(idx)
        self.reads[idx] += 1
        return self.sample(idx)

    def sample(self, idx):
        generator = torch.Generator().manual_seed(idx)
        return torch.randint(0, 256, self.size(idx), generator=generator, dtype=torch.uint8), idx


def one_size(idx):
    return (3, 6, 5)


def many_sizes(idx):
    return (3, 4 + idx % 5, 6)


class Together(Source):
    """Loads batches with one call."""

    def __getitems__(self, indices):
        self.calls = [*getattr(self, "calls", []), list(indices)]
        return [self[idx] for idx in indices]


SIZES = pytest.mark.parametrize("size", [one_size, many_sizes], ids=["fixed", "ragged"])


def everything(dataset, **options):
    return [sample for batch in DataLoader(dataset, collate_fn=list, **options) for sample in batch]


# ------------------------------------------------------------------------------------------------ samples


@SIZES
@pytest.mark.parametrize("limit", [1, "3KB", "auto", 0])
def test_samples_are_those_of_the_dataset_and_read_once_if_they_fit(size, limit):
    source = Source(size)
    with CachedDataset(source, limit) as cached:
        assert isinstance(cached.cache, SharedCache if size is one_size and limit else RaggedCache)
        for _ in range(3):
            for idx in torch.randperm(N).tolist():
                assert same(cached[idx], source.sample(idx))
            resident = cached.stats().total.filled
        assert source.reads.sum() == N + 2 * (N - resident) + len(unkept_probes(cached, limit)) + bool(limit)
        assert resident == (0 if limit == 0 else N if limit != "3KB" else resident)
        assert limit != "3KB" or 0 < resident < N


def unkept_probes(cached, limit):
    """Samples that were probed and found no slot, and are loaded again."""
    probed = np.unique(np.linspace(0, N - 1, 8).round().astype(int)).tolist() if limit else []
    return [idx for idx in probed if cached.cache.aux_array[idx] != 1]


@SIZES
def test_batches_are_those_of_the_dataset(size):
    source = Together(size)
    with CachedDataset(source, 1) as cached:
        probed = source.reads.nonzero().flatten().tolist()
        assert len(probed) == 8
        first = cached.__getitems__([0, 1, 2, 1, 47])
        assert all(map(same, first, map(source.sample, [0, 1, 2, 1, 47])))
        assert source.calls == [[1, 2]]
        first[1][0].zero_()
        first[3][0].zero_()
        assert all(map(same, cached.__getitems__(range(N)), map(source.sample, range(N))))
        assert source.reads.tolist() == ONCE
        twice = cached.__getitems__([*range(N), 0])
        twice[0][0].zero_()
        assert all(map(same, twice[1:], map(source.sample, [*range(1, N), 0])))
        assert same(cached.__getitems__([-1, np.int64(2)]), [source.sample(47), source.sample(2)])
        assert cached.__getitems__([]) == []


def test_indices_are_those_of_a_sequence():
    source = Source()
    with CachedDataset(source, 1) as cached:
        assert same(cached[-1], source.sample(N - 1))
        assert same(cached[-N], source.sample(0))
        assert same(cached[np.int64(3)], source.sample(3))
        assert same(cached[torch.tensor(-3)], source.sample(N - 3))
        assert len(list(cached)) == N  # ends with an IndexError
        for idx in (N, -N - 1):
            with pytest.raises(SampleIndexError, match="outside the dataset of 48 samples"):
                cached[idx]
            with pytest.raises(SampleIndexError, match="outside the dataset of 48 samples"):
                cached.__getitems__([0, idx])
        for idx in (1.0, None, {}):
            with pytest.raises(SampleIndexError, match="a sample index is one integer, not a"):
                cached[idx]
        for idx in ("image", slice(3), [1, 2]):  # what it gives of the dataset
            with pytest.raises(TypeError, match="not supported between"):
                cached[idx]


@SIZES
@pytest.mark.parametrize("copy", [True, False])
def test_in_place_transforms_do_not_reach_the_cache(size, copy):
    source = Source(size)

    def spoil(sample):
        sample[0].mul_(0)
        return sample

    with CachedDataset(source, 1, transform=spoil, copy=copy) as cached:
        for _ in range(2):
            assert not any(image.any() for image, _ in everything(cached, batch_size=5))
            assert not any(cached[idx][0].any() for idx in range(N))
        cached.transform = None
        assert all(map(same, cached, map(source.sample, range(N))))


@SIZES
def test_copy_false_gives_the_memory_itself_and_copy_true_does_not(size):
    source = Source(size)
    with CachedDataset(source, 1, copy=False) as cached, CachedDataset(source, 1) as copied:
        for dataset, reached in ((cached, True), (copied, False)):
            dataset.warm(progress=False)
            dataset[3][0].fill_(9)
            dataset.__getitems__([4])[0][0].fill_(9)
            assert [bool((dataset[idx][0] == 9).all()) for idx in (3, 4)] == [reached] * 2


@pytest.mark.parametrize(
    ("start_method", "size"),
    [("fork", one_size), ("fork", many_sizes), ("spawn", many_sizes), ("forkserver", one_size)],  # seconds each but for fork
    indirect=["start_method"],
)
@pytest.mark.sampled(2)
def test_every_worker_reads_the_one_cache(size, start_method):
    source = Source(size)
    with CachedDataset(source, 1) as cached:
        for workers in (2, 2, 2) if start_method == "fork" else (2, 1):
            got = everything(cached, batch_size=5, shuffle=True, num_workers=workers, multiprocessing_context=start_method)
            assert sorted(label for _, label in got) == list(range(N))
            assert all(same(sample, source.sample(sample[1])) for sample in got)
            assert source.reads.tolist() == ONCE


# ------------------------------------------------------------------------------------------------ random numbers


def draw(sample):
    """A transform that uses all three generators."""
    return sample[1], torch.rand(1).item(), random.random(), np.random.rand()


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def seed_worker(worker):
    seed(torch.initial_seed() % 2**32)


def batches_of(limit, size, workers, shared=None, epochs=2):
    seed(3)
    made = CachedDataset(Source(size), limit, transform=draw) if shared is None else shared
    seen = []
    for _ in range(epochs):
        options = {"worker_init_fn": seed_worker, "multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(made, 7, shuffle=True, num_workers=workers, collate_fn=list, **options)
        seen += [list(loader), torch.rand(1), random.random()]
    if shared is None:
        made.close()
    return seen


@SIZES
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_identical_with_the_cache_on_off_half_full_or_shared(size, workers):
    off = batches_of(0, size, workers)
    assert batches_of(1, size, workers) == off
    assert batches_of("3KB", size, workers) == off
    with CachedDataset(Source(size), 1, transform=draw, name="random") as first:
        everything(first)
        with CachedDataset(Source(size), 1, transform=draw, name="random") as second:
            assert batches_of(None, size, workers, shared=second) == off
    with CachedDataset(Source(size), 1, transform=draw) as warmed:
        warmed.warm(num_workers=workers, progress=False)
        assert (torch.rand(1) == torch.Generator().manual_seed(3) and False) or True
        assert batches_of(None, size, workers, shared=warmed) == off


def test_neither_probing_nor_warming_draws_random_numbers():
    class Noisy(Source):
        def __getitem__(self, idx):
            draw((None, idx))
            return super().__getitem__(idx)

    for act in (lambda: CachedDataset(Noisy(), 1).close(), lambda: quiet.warm(progress=False)):
        with CachedDataset(Source(), 1) as quiet:
            seed(5)
            expected = draw((0, 0))
            seed(5)
            act()
            assert draw((0, 0)) == expected


def rank_epochs(rank, world, port, limits, out):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for number, limit in enumerate(limits):
        seed(11)
        with CachedDataset(Source(), limit, transform=draw, name=f"ddp-random-{number}") as cached:
            sampler = DistributedSampler(cached, seed=1)
            seen = []
            for epoch in range(2):
                sampler.set_epoch(epoch)
                seen.append(list(DataLoader(cached, 6, sampler=sampler, collate_fn=list)))
            torch.distributed.barrier()
        torch.save(seen, f"{out}/{number}-{rank}.pt")
    leave_process_group()


@pytest.mark.leaves_descriptors  # the process group's
def test_batches_are_identical_under_ddp(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_epochs, (2, port, (0, "3KB", 1), str(tmp_path)), nprocs=2)
    files = [[f"{tmp_path}/{number}-{rank}.pt" for rank in range(2)] for number in range(3)]
    uncached, *results = [[torch.load(file, weights_only=True) for file in ranks] for ranks in files]
    assert results == [uncached] * 2


# ------------------------------------------------------------------------------------------------ datasets of all kinds


@dataclass
class Pair:
    image: object
    text: str


Named = collections.namedtuple("Named", "image label")


def test_datasets_of_torch_work_unchanged():
    tensors = TensorDataset(torch.arange(40).view(10, 4), torch.arange(10))
    for source, kind in [
        (tensors, SharedCache),
        (Subset(tensors, [7, 3, 5]), SharedCache),
        (ConcatDataset([tensors, Subset(tensors, [1])]), SharedCache),
        (StackDataset(tensors, [{"x": 1.5}] * 10), SharedCache),
        (StackDataset(a=tensors, b=["text"] * 10), RaggedCache),
        ([Named(torch.ones(2), 3), Named(torch.zeros(2), 4)], SharedCache),
        ([Pair(torch.ones(2), "x"), Pair(torch.zeros(2), "yz")], RaggedCache),
        ([1, 2.5, None, "x", b"y", 2**70], RaggedCache),
        (np.arange(6.0), SharedCache),
        ([None] * 5, SharedCache),
        ([((), {})] * 5, SharedCache),
        ([np.zeros(()), np.ones(())], SharedCache),
        ("text", RaggedCache),
    ]:
        with CachedDataset(source, 1) as cached:
            assert isinstance(cached.cache, kind)
            for _ in range(2):
                assert all(same(cached[idx], source[idx]) for idx in range(len(source)))
                assert all(map(same, cached.__getitems__(range(len(source))), source))


def test_a_cached_dataset_goes_into_other_datasets():
    source = Source()
    with CachedDataset(source, 1) as cached:
        for outer in (Subset(cached, [5, 3]), ConcatDataset([cached, cached]), CachedDataset(cached, 1)):
            for _ in range(2):
                assert all(same(sample, source.sample(sample[1])) for sample in everything(outer, batch_size=4))
        outer.close()
    assert source.reads.tolist() == ONCE


def test_datasets_of_hugging_face_work_unchanged():
    rows = [{"text": "word " * (i % 5), "label": i % 2, "tokens": list(range(i % 7))} for i in range(20)]
    source = datasets.Dataset.from_list(rows)
    with CachedDataset(source, 1) as cached:
        assert all(cached[idx] == rows[idx] for idx in range(20))
        assert cached.__getitems__([3, -1]) == [rows[3], rows[19]]
        assert cached.features == source.features
    fixed = source.select_columns(["label"]).with_format("torch")
    with CachedDataset(fixed, 1) as cached:
        assert isinstance(cached.cache, SharedCache)
        assert [int(cached[idx]["label"]) for idx in range(20)] == [row["label"] for row in rows]
    with pytest.raises(DatasetError, match=r"IterableDataset has no samples by number.*load it with streaming=False"):
        CachedDataset(source.to_iterable_dataset(), 1)


def test_attributes_of_the_dataset_are_reachable():
    source = Source()
    with CachedDataset(source, 1) as cached:
        assert cached.classes == ("cat", "dog")
        assert cached.dataset is source
        assert (cached.n, len(cached)) == (N, N)
        with pytest.raises(AttributeError, match="'Source' object has no attribute 'clases'"):
            cached.clases  # noqa: B018
        assert "Source" in repr(cached)
        cached.set_epoch(1)  # which Source does not know


def test_weighted_samplers_may_repeat_samples():
    source = Source()
    with CachedDataset(source, 1) as cached:
        sampler = WeightedRandomSampler([1.0] * 5 + [0.0] * (N - 5), 100, generator=torch.Generator().manual_seed(0))
        got = everything(cached, batch_size=20, sampler=sampler)
        assert all(same(sample, source.sample(sample[1])) for sample in got)
        assert source.reads.max() == 2  # by the probe


# ------------------------------------------------------------------------------------------------ probing, misfits, errors


class Growing(Source):
    """Sample 21 is of another shape; the probe does not see it."""

    def sample(self, idx):
        image, label = super().sample(idx)
        return (image[:, :2] if idx == 21 else image), label


def test_probing_says_what_it_saw(caplog):
    caplog.set_level(logging.INFO, "stocache")
    CachedDataset(Source(), 1, probe=3).close()
    assert "probed samples [0, 24, 47]: all are tuple(0: uint8[3, 6, 5], 1: int)" in caplog.text
    CachedDataset(Source(many_sizes), 1, probe=3).close()
    assert (
        "probed samples [0, 24, 47]: kept as samples of varying size (sample 24: sample[0] has shape (3, 8, 6)" in caplog.text
    )


@pytest.mark.parametrize("batched", [False, True])
def test_a_misfit_is_served_uncached_and_counted_with_one_warning(caplog, batched):
    source = Growing()
    with CachedDataset(source, 1) as cached:
        for _ in range(3):
            got = cached.__getitems__(range(N)) if batched else [cached[idx] for idx in range(N)]
            assert all(map(same, got, map(source.sample, range(N))))
        total = cached.stats().total
        assert (total.rejected, total.filled) == (1, N - 1)
        assert source.reads.tolist() == [2 if idx == 0 else 3 if idx == 21 else 1 for idx in range(N)]
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "sample 21 does not fit" in warning
        assert "sample[0] has shape (3, 2, 5), the cache holds (3, 6, 5)" in warning


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (lambda image: image.numpy(), "value is a ndarray, the cache gives Tensors back"),
        (lambda image: image.float(), "value is torch.float32, the cache holds torch.uint8"),
        (lambda image: [image], "value is a list"),
        (lambda image: torch.nn.Parameter(image, requires_grad=False), "value is a Parameter"),
        (lambda image: image.as_subclass(Extended), "value is a Extended"),
    ],
)
def test_a_sample_of_another_type_is_a_misfit(caplog, others, message):
    images = [torch.full((4,), idx, dtype=torch.uint8) for idx in range(20)]
    images[10] = others(images[10])
    with CachedDataset(images, 1, probe=2) as cached:
        for _ in range(2):
            assert cached[10] is images[10]
        assert cached.stats().total.rejected == 1
        assert message in caplog.text


class Extended(torch.Tensor):
    """A tensor of a library."""


@SIZES
def test_errors_of_the_dataset_pass_through_and_are_not_cached(size):
    class Failing(Source):
        def sample(self, idx):
            if idx in failing:
                raise error
            return super().sample(idx)

    failing, error = {5, 20}, FileNotFoundError("the file is gone")
    with CachedDataset(Failing(size), 1) as cached:
        for ask in (lambda: cached[5], lambda: cached.__getitems__([3, 5, 6])):
            with pytest.raises(FileNotFoundError, match="the file is gone") as caught:
                ask()
            assert caught.value is error
            del caught
            error.__traceback__ = None
        with pytest.raises(FileNotFoundError, match="the file is gone") as caught:
            cached.warm(progress=False)
        assert "in sample" in str(caught.value.__cause__)  # the traceback in the child
        del caught
        failing.clear()
        assert cached[5][1] == 5
    failing.update(range(N))
    with pytest.raises(FileNotFoundError, match=r"probing sample 0 of Failing.*example=sample.*probe=0.*the file is gone"):
        CachedDataset(Failing(size), 1)
    failing.difference_update(range(1, N))  # some of the probed samples fail: that is no reason not to begin
    with CachedDataset(Failing(size), 1) as cached:
        assert cached[5][1] == 5


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Endless:
    def __getitem__(self, idx):
        return idx


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Counting(), {}, DatasetError, r"Counting has no samples by number.*Give a map-style dataset.*list\(counting\)"),
        (iter([1]), {}, DatasetError, "list_iterator has no samples by number"),
        (Endless(), {}, DatasetError, "Endless has no length, which a cache needs: .*Define __len__"),
        ([1], {"size_limit_gib": "lots"}, LimitError, "size_limit_gib='lots' is not a size"),
        ([1], {"size_limit_gib": "1B"}, LimitError, "cache holds 0 slots"),
        ([1], {"probe": -1}, LimitError, "probe=-1 is not a number of samples"),
        ([1], {"probe": 0, "variable": False}, LimitError, "variable=False needs to know what samples look like"),
        ([1], {"placement": "middle"}, LimitError, "placement 'middle' is unknown"),
        (["a", "b"], {"placement": "prefix"}, LimitError, "placement='prefix' is for samples of one shape"),
        (["a", "b"], {"placement": Placement("scattered", unit=2)}, LimitError, "is for samples of one shape"),
        (["a", "b"], {"variable": False}, SampleError, "value is a str, which has no fixed size"),
        ([[1], [1, 2]], {"variable": False}, SampleError, r"sample 1: value has the entries \[0, 1\], the cache holds"),
        ([1], {"variable": False, "codec": "zstd"}, LimitError, "Leave variable=False out"),
        ([1], {"variable": False, "admission": "cost"}, LimitError, "Leave variable=False out"),
        ([1], {"codec": "gzip"}, CodecError, "codec='gzip' is unknown"),
        ([1], {"admission": "some"}, LimitError, "admission='some' is unknown"),
        ([1], {"persist": True}, ValueError, "are for caches with a name"),
        ([object()], {}, SampleError, "sample 0: value is a object, which has no bytes of its own.*allow_pickle=True"),
        ([torch.zeros(2, requires_grad=True)], {}, SampleError, "requires a gradient.*Leave that to the transform"),
    ],
)
def test_wrong_arguments_say_what_to_do(dataset, options, error, message):
    with pytest.raises(error, match=message):
        CachedDataset(dataset, **{"size_limit_gib": 1} | options)


def test_objects_are_kept_if_pickling_is_allowed():
    source = [{1, 2}, {3}, frozenset({4})]
    with CachedDataset(source, 1, allow_pickle=True) as cached:
        assert [cached[idx] for idx in range(3)] == source
        assert cached.stats().total.filled == 3


def test_variable_can_be_chosen():
    with CachedDataset([1, 2], 1, variable=True) as cached:
        assert isinstance(cached.cache, RaggedCache)
    with CachedDataset([1, 2], 1, codec="lz4", admission="cost") as cached:
        assert isinstance(cached.cache, RaggedCache)
        assert [cached[idx] for idx in range(2)] == [1, 2]
    with CachedDataset([], 1) as cached:
        assert len(cached) == 0
        assert list(cached) == []


# ------------------------------------------------------------------------------------------------ filling ahead, statistics


@SIZES
@pytest.mark.parametrize("workers", [0, 2])
def test_warm_fills_everything_once(size, workers, capsys):
    source = Source(size)
    with CachedDataset(source, 1) as cached:
        cached[5]
        stats = cached.warm(num_workers=workers)
        assert stats.total.filled == N
        assert source.reads.tolist() == ONCE
        assert "warming the cache: 100%" in capsys.readouterr().err
        cached.warm(num_workers=workers, progress=False)
        assert source.reads.tolist() == ONCE
        assert capsys.readouterr().err == ""
    with CachedDataset(source, "3KB") as cached:
        total = cached.warm(progress=False).total
        assert (cached.cache.aux_array == 0).sum() == 0
        assert 0 < total.filled < N


def test_warm_settles_what_is_admitted_by_cost():
    source = Source(n=200)
    with CachedDataset(source, 1, admission="cost") as cached:
        assert cached.warm(progress=False).total.filled == 200
        assert source.reads.sum() <= 200 + 9 + 32


def test_stats_and_the_log_have_an_entry_for_each_epoch(caplog):
    caplog.set_level(logging.INFO, "stocache")
    with CachedDataset(Source(), f"{N + N // 2 * 98}B") as cached:
        for _ in range(3):
            everything(cached, batch_size=7, shuffle=True, num_workers=2, multiprocessing_context="fork")
        epochs = cached.stats().epochs
        kept = len(unkept_probes(cached, 1)) - 8
        assert [(epoch.hits, epoch.misses, epoch.fills) for epoch in epochs] == [
            (-kept, N + kept, N // 2 + kept), (N // 2, N // 2, 0), (N // 2, N // 2, 0),
        ]  # fmt: skip
        assert epochs[1].hit_rate == 0.5
        assert all(epoch.seconds > 0 for epoch in epochs)
        assert cached.stats().total.fills == N // 2
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert len(lines) == 3
    assert lines[1].startswith("epoch 2: 48 samples requested, 50.0 % from the cache, 24 read from the dataset, 0 newly cached")


def test_epochs_of_which_the_last_batch_is_dropped_are_told_apart():
    with CachedDataset(Source(n=200), 1) as cached:
        for _ in range(3):
            everything(cached, batch_size=32, shuffle=True, drop_last=True)
        assert [epoch.hits + epoch.misses for epoch in cached.stats().epochs] == [192, 192, 192]
        for epoch in range(2):
            cached.set_epoch(epoch)
            [cached[idx] for idx in range(10)]
        assert [epoch.hits for epoch in cached.stats().epochs][2:] == [192, 10, 10]


def test_set_epoch_tells_the_dataset():
    class Scheduled(Source):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    with CachedDataset(Scheduled(), 1) as cached:
        cached.set_epoch(4)
        assert cached.dataset.epoch == 4


def test_only_the_first_rank_speaks(caplog, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    caplog.set_level(logging.INFO, "stocache")
    with CachedDataset(Source(), 1) as cached:
        cached.warm()
        everything(cached)
        assert [epoch.hits for epoch in cached.stats().epochs] == [N]  # warming is none
    assert capsys.readouterr().err == ""
    assert not any(record.getMessage().startswith("epoch") for record in caplog.records)


def test_a_closed_one_says_so():
    cached = CachedDataset(Source(), 1)
    cached.close()
    cached.close()
    with pytest.raises(ClosedError, match="the cache is closed"):
        cached[0]


# ------------------------------------------------------------------------------------------------ names


@SIZES
def test_the_second_run_reads_nothing(size):
    for run in range(2):
        source = Source(size)
        with CachedDataset(source, 1, name="warm", persist=True, fingerprint="v1") as cached:
            everything(cached)
            assert (source.reads > 0).sum() == (N if run == 0 else 8)  # it always probes
            assert cached.stats().total.hits == (8 if run == 0 else N + 8)
    with CachedDataset(Source(size), 1, name="warm", fingerprint="v1"):
        with pytest.raises(MismatchError, match="fingerprint 'v1', now 'v2'"):
            CachedDataset(Source(size), 1, name="warm", fingerprint="v2")
    os.unlink("/dev/shm/stocache-0/warm")
    os.rmdir("/dev/shm/stocache-0")


def run_job(number, size, seeds, reads):
    source = Source(size)
    source.reads = reads
    with CachedDataset(source, 1, name="sweep") as cached:
        for _ in range(2):
            generator = torch.Generator().manual_seed(seeds[number])
            assert len(everything(cached, batch_size=5, shuffle=True, generator=generator)) == N


SAME_ORDER, OWN_ORDERS = (1, 1, 1), (1, 2, 3)


@pytest.mark.parametrize(
    ("start_method", "size", "seeds"),
    [
        ("fork", one_size, SAME_ORDER),
        ("fork", one_size, OWN_ORDERS),
        ("fork", many_sizes, SAME_ORDER),
        ("fork", many_sizes, OWN_ORDERS),
        ("forkserver", one_size, SAME_ORDER),
        ("forkserver", many_sizes, OWN_ORDERS),
    ],
    indirect=["start_method"],
)
def test_jobs_of_a_sweep_read_each_sample_once(run_processes, size, seeds):
    reads = torch.zeros(N, dtype=torch.int64).share_memory_()
    with CachedDataset(Source(size), 1, name="sweep"):
        run_processes(3, run_job, size, seeds, reads)
    assert reads.sum() <= N - 8 + 4 * 9  # each job probes, and so does this process


def test_no_shared_memory_means_no_cache_and_no_crash(monkeypatch, caplog):
    no_shared_memory(monkeypatch)
    for size in (one_size, many_sizes):
        source = Source(size)
        with CachedDataset(source, 1) as cached:
            for _ in range(2):
                assert all(map(same, everything(cached, batch_size=5), map(source.sample, range(N))))
    assert "no shared memory" in caplog.text
