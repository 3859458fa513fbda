"""Worker threads: the same batches, order and errors as worker processes, no thread stays behind, or can be started."""

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, RandomSampler, Subset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import stocache
from stocache import CachedDataset, WorkerError
from stocache.shm.claims import Claims
from tests.support import images
from tests.support.equality import same
from tests.support.images import Images, N
from tests.support.loading import THREADS, agree, both, labels_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*no accelerator is found")


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stocache worker")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    """No worker thread of a test may be there after it."""
    before = {*workers()}
    yield
    wait_until(lambda: gc.collect() >= 0 and before >= {*workers()})  # it does nothing while a thread collects


def thread_loader(dataset, **options):
    return stocache.DataLoader(dataset, **THREADS | options)


def agree_with_torch(dataset, **options):
    agree(*both(dataset, **THREADS | options))


class Made(images.Made):
    def __init__(self, make, n=20):
        super().__init__(lambda self, idx: make(idx), n)


class MadeTogether(Made):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


def numbers(idx):
    return {"tensors": [torch.full((2,), idx, dtype=torch.bfloat16), torch.ones(3, 90, 91) * idx], "one": np.int16(idx)}


def test_datasets_that_make_samples_together_or_do_not():
    for dataset in (Subset(Made(numbers), range(3, 17)), ConcatDataset([Made(numbers), MadeTogether(numbers)])):
        agree_with_torch(dataset, batch_size=4)
        assert not any(tensor.is_shared() for tensor in next(iter(thread_loader(dataset)))["tensors"])


def test_a_graph_of_datapipes_gets_worker_processes(caplog):
    graph = IterableWrapper(range(40)).shuffle().sharding_filter().map(abs)
    agree_with_torch(graph, num_workers=3, batch_size=3, shuffle=True, persistent_workers=True)
    assert "a graph of DataPipes needs worker processes" in caplog.text


class Gated(Images):
    """Holds back sample 5, or a different one, until a gate opens, and counts."""

    thread_safe = True

    def __init__(self, at=5):
        super().__init__()
        self.gate, self.at, self.reads = threading.Event(), at, []

    def __getitem__(self, idx):
        self.reads.append(idx)
        assert idx != self.at or self.gate.wait(60)
        return super().__getitem__(idx)


def test_a_batch_has_a_storage_of_its_own():
    source = Made(lambda idx: torch.full((300,), idx, dtype=torch.bfloat16), 64)
    with CachedDataset(source, 0.1, probe=4) as dataset:
        loader = thread_loader(dataset, batch_size=8)
        for batch in [*loader, *loader]:
            assert (batch.dtype, batch.untyped_storage().nbytes()) == (torch.bfloat16, batch.nbytes)


def look(idx):
    info = get_worker_info()
    generator = torch.random.thread_safe_generator()
    return info.id, info.num_workers, info.seed, info.worker_method, generator is info.rng.torch_generator, len(info.dataset)


began = []


@pytest.mark.linux
def test_worker_info_is_that_of_the_thread_and_is_none_elsewhere():
    began.clear()
    init = lambda number: began.append(look(0))  # began is global: a closure would be copied
    elsewhere = lambda: (get_worker_info(), torch.random.thread_safe_generator())
    with ThreadPoolExecutor(1) as other:
        for batch in thread_loader(Made(look, 40), collate_fn=list, worker_init_fn=init):
            assert set(batch) <= set(began)
            assert other.submit(elsewhere).result() == elsewhere() == (None, None)
    seed = min(each[2] for each in began)
    assert sorted(began) == [(number, 2, seed + number, "thread", True, 40) for number in range(2)]


def failing(error, at=13):
    def make(idx):
        if idx == at:
            raise error
        return idx

    return make


def came(loader):
    """Return the batches of a loader, with errors in their places."""
    found, iterator = [], iter(loader)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration as end:
            return [*found, str(end)[:20]]
        except Exception as error:
            found.append((type(error), str(error).splitlines()[-1] if str(error) else ""))


class Breaks(RandomSampler):
    def __iter__(self):
        yield from range(20)
        raise ValueError("the sampler is broken")


def draws(idx):
    if idx == 2:
        raise ValueError("wrong")
    return idx + 0 * torch.rand((), generator=torch.random.thread_safe_generator())


def refuse_one(samples):
    return failing(ValueError("wrong"), 8)(samples[0][1])


@pytest.mark.parametrize(("dataset", "options"), [
    (Images(), {"collate_fn": refuse_one}), (MadeTogether(failing(StopIteration("end")), 30), {}),
    (Made(draws, 40), {"batch_size": 10}),  # other samples of the batch wait for their turn to draw
    (Images(), {"batch_size": 2, "sampler": Breaks(Images())}),
])  # fmt: skip
def test_errors_come_in_the_place_of_their_batch(dataset, options):
    make = lambda method: stocache.DataLoader(dataset, num_workers=2, worker_method=method, **{"batch_size": 4, **options})
    assert same(came(make("thread")), came(make("multiprocessing")))


def fail(*arguments):
    raise ValueError("wrong")


def test_errors_of_collate_fn_and_the_first_of_a_batch_are_raised():
    two = lambda idx: failing(KeyError("later"), 7)(failing(ValueError("first"), 4)(idx))
    with pytest.raises(ValueError, match="first"):
        list(thread_loader(Made(two), batch_size=20, num_workers=4))
    for dataset, function, message in ((Images(), fail, "wrong"), (Made(torch.zeros), None, "equal size")):
        with pytest.raises((ValueError, RuntimeError), match=rf"(?s)in DataLoader worker thread .*{message}"):
            list(thread_loader(dataset, batch_size=2, collate_fn=function))


@pytest.mark.parametrize("persistent", [True, False])
def test_errors_of_worker_init_fn_are_raised_also_if_all_is_cached(persistent):
    with CachedDataset(Made(float, 500), "1MB", audit=0) as dataset:
        dataset.warm(progress=False)
        for source in (Images(), dataset):
            loader = thread_loader(source, batch_size=5, worker_init_fn=fail, persistent_workers=persistent)
            iterator = iter(loader)
            for batches in (iterator, iterator, iter(loader)):
                with pytest.raises(ValueError, match="wrong"):
                    next(batches)


def test_sys_exit_in_a_worker_is_an_error_of_the_loop():
    with pytest.raises(WorkerError, match=r"sys\.exit\(3\)"):
        list(thread_loader(Made(failing(SystemExit(3)))))


def test_a_wrong_index_is_an_error_in_the_place_of_its_batch_also_if_all_is_cached():
    with CachedDataset(Images(), 0.1, audit=0) as dataset:
        dataset.warm(progress=False)
        first, (error, _), end = came(thread_loader(dataset, batch_sampler=[[1, 2], [N, 1]]))
        assert (first[1].tolist(), error, end) == ([1, 2], IndexError, "")


def test_a_slow_sample_delays_only_its_own_batch():
    dataset = Gated()
    iterator = iter(thread_loader(dataset, batch_size=5, prefetch_factor=3))
    assert next(iterator)[1].tolist() == [0, 1, 2, 3, 4]
    wait_until(lambda: set(range(35)) <= set(dataset.reads))  # six batches after it, and more than one thread could
    dataset.gate.set()
    assert labels_of(iterator) == list(range(5, N))
    assert sorted(dataset.reads) == list(range(N))


@pytest.mark.unaudited
def test_hits_do_not_wait_for_misses():
    source = Gated(at=N - 1)
    with CachedDataset(source, 0.1, example=Images()[0]) as dataset:
        for idx in range(N - 10):
            dataset[idx]
        order = [[N - 1, N - 2], [N - 3, N - 4]] + [[idx, idx + 1] for idx in range(0, 30, 2)]
        source.reads.clear()
        iterator = iter(thread_loader(dataset, batch_sampler=order, prefetch_factor=9, num_workers=1))
        wait_until(lambda: N - 1 in source.reads)
        gathered = iterator._batches._batches.items()  # although the only thread waits for sample N - 1
        assert [number for number, batch in gathered if batch.group is None] == [0, 1]
        source.gate.set()
        assert labels_of(iterator) == list(itertools.chain(*order))


@pytest.mark.unaudited
def test_each_sample_of_a_half_cached_dataset_is_read_once():
    source = Gated(at=None)
    with CachedDataset(source, 0.1, example=Images()[0]) as dataset:
        loaders = [thread_loader(dataset, batch_size=7, shuffle=True, num_workers=3) for _ in range(2)]
        for batches in zip(*loaders, strict=True):  # two iterators at once
            assert all(torch.equal(batch[0], torch.stack([Images()[idx][0] for idx in batch[1].tolist()])) for batch in batches)
        assert sorted(source.reads) == list(range(N))
        stats = dataset.stats().total
        assert (stats.misses, stats.filled) == (N, N)


def test_an_iterator_that_is_dropped_gives_up_its_claims(monkeypatch):
    source = Gated()
    with CachedDataset(source, 0.1, example=Images()[0]) as dataset:
        iterator = iter(thread_loader(dataset, batch_size=5, prefetch_factor=5))
        next(iterator)
        wait_until(lambda: 5 in source.reads)
        source.at = None  # for others
        del iterator
        wait_until(lambda: len(workers()) == 1)  # that of sample 5
        monkeypatch.setattr(Claims, "wait_to_load", fail)  # nothing is left to wait for
        assert labels_of(thread_loader(dataset, batch_size=5)) == list(range(N))
        source.gate.set()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_dropped_or_broken_off_leaves_no_thread(persistent):
    loader = thread_loader(Images(), persistent_workers=persistent)
    next(iter(loader))
    iterator = iter(loader)
    next(iterator)
    assert len(workers()) >= 2
    del iterator, loader
    wait_until(lambda: not workers())  # without the garbage collector
    iterator = iter(thread_loader(Images()))
    list(iterator)
    assert not workers()
    with pytest.raises(StopIteration):
        next(iterator)


def test_more_threads_than_samples():
    agree_with_torch(Images(3), num_workers=9, batch_size=2)
    agree_with_torch(Images(0), num_workers=3)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"worker_method must be one of .*'thread', 'auto', got 'fibre'"):
        stocache.DataLoader(Images(), num_workers=2, worker_method="fibre")


def test_threads_that_cannot_start_are_an_error(monkeypatch):
    left, start = [None] * 3, threading.Thread.start

    def start_if_few(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_few)
    with pytest.raises(WorkerError, match=r"cannot start worker thread 3 of 20: can't start new thread"):
        iter(thread_loader(Images(), num_workers=20))


def drawn(idx):
    return torch.rand(1000, generator=torch.random.thread_safe_generator())


def test_epochs_that_are_left_early_do_not_wait_for_batches_that_were_dropped():
    with CachedDataset(Made(drawn, 64), "128KB", on_change="keep") as dataset:  # not all of them fit
        loader = thread_loader(dataset, batch_size=1, num_workers=1, prefetch_factor=4, persistent_workers=True)
        for _ in range(10):
            assert next(iter(loader)).shape == (1, 1000)
