"""Worker threads: the same batches, order and errors as worker processes, and no thread stays behind."""

import dataclasses
import gc
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Subset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

import stocache
from stocache import CachedDataset, WorkerError
from stocache.errors import SampleIndexError
from stocache.loader import thread_iterator
from tests.support.equality import same
from tests.support.images import Images, N
from tests.support.processes import in_child, wait_until
from tests.support.versions import needs_in_order

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker", "ignore:.*no accelerator is found")


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stocache worker")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    """No worker thread of a test may be there after it."""
    before = set(workers())
    yield

    def all_have_ended():
        gc.collect()  # which does nothing while a thread collects
        return not set(workers()) - before

    wait_until(all_have_ended)


def thread_loader(dataset, **options):
    return stocache.DataLoader(dataset, worker_method="thread", **{"num_workers": 2, "timeout": 20, **options})


def agree(dataset, epochs=2, theirs=None, **options):
    """Demand that threads and processes of torch's DataLoader make the same batches, and return those."""
    options = {"num_workers": 2, **options}
    make = lambda: {**options, "generator": torch.Generator().manual_seed(3)}
    ours = stocache.DataLoader(dataset, **make(), worker_method="thread", timeout=20)
    expected = torch.utils.data.DataLoader(theirs or dataset, **make())
    for _ in range(epochs):
        torch.manual_seed(5)
        batches = list(expected)
        after = torch.rand(1)
        torch.manual_seed(5)
        came = list(ours)
        assert len(came) == len(batches)
        assert all(map(same, came, batches))
        assert torch.rand(1) == after
    return came


# ---------------------------------------------------------------------------------------------------- the same batches


@pytest.mark.parametrize("count", [{}, {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 1}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_size": 8, "shuffle": True}, {"batch_size": 7, "drop_last": True}, {"batch_size": None},
        {"sampler": range(0, N, 3), "batch_size": 4}, {"batch_sampler": BatchSampler(range(N), 9, False)},
        {"batch_sampler": [(3, 1), [4], (1, 5, 9)]}, {"batch_size": 8, "collate_fn": list}, {"batch_size": 100},
        {"sampler": RandomSampler(range(N), True, 70), "batch_size": 6},
    ],
    ids=lambda options: re.sub(r" object at \w+", "", str(options)),
)  # fmt: skip
@pytest.mark.sampled(2)
def test_batches_and_order_are_those_of_torch(options, count):
    agree(Images(), **options, **count)


@dataclasses.dataclass
class Point:
    image: object
    idx: int


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.complex128]


def kinds_of_samples(idx):
    return {
        "tensors": [torch.tensor([idx, idx % 2, 1, 0]).to(dtype) for dtype in DTYPES],
        "large": torch.full((3, 90, 91), float(idx)).to(torch.bfloat16),
        "array": np.full((3, 100, 100), idx, np.float32),
        "scalars": (idx, float(idx), np.int16(idx), bool(idx % 2)),
        "text": f"{idx}.jpg",
        "bytes": b"%d" % idx,
    }


class Made(Dataset):
    def __init__(self, make=kinds_of_samples, n=20):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        return self.make(idx)


class MadeTogether(Made):
    def __getitems__(self, indices):
        return [self.make(idx) for idx in indices]


class NotTogether(Made):
    __getitems__ = None


@pytest.mark.parametrize(
    "dataset", [Made(), MadeTogether(), NotTogether(), Subset(Made(), range(3, 17)), ConcatDataset([Made()] * 2)]
)
def test_samples_of_all_kinds(dataset):
    batches = agree(dataset, epochs=1, batch_size=4)
    assert not batches[0]["large"].is_shared()
    assert not batches[0]["tensors"][0].is_shared()


def test_samples_without_batches_are_the_objects_themselves():
    made = [Point(Image.new("RGB", (3, 3), (idx, 0, 0)), idx) for idx in range(9)]
    dataset = Made(made.__getitem__, 9)
    came = list(thread_loader(dataset, batch_size=None))
    assert all(ours is theirs for ours, theirs in zip(came, made, strict=True))
    batches = list(thread_loader(dataset, batch_size=4, collate_fn=tuple))
    assert list(itertools.chain(*batches)) == made


@pytest.mark.parametrize("limit", [1, f"{N + 20 * 200}B", 0])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "num_workers": 3}, {"prefetch_factor": 9}], ids=str)
@pytest.mark.sampled(2)
def test_a_cached_dataset_gives_the_same_batches(limit, options):
    with CachedDataset(Images(), limit) as dataset:
        agree(dataset, theirs=Images(), epochs=3, batch_size=8, shuffle=True, **options)
        agree(Subset(dataset, range(9, 40)), theirs=Subset(Images(), range(9, 40)), batch_size=8, shuffle=True)


def vary(sample):
    return {"part": sample[0][:, : 1 + sample[1] % 5], "idx": sample[1]}


@pytest.mark.parametrize(
    ("make", "collate"),
    [
        (lambda: CachedDataset(Images(), 1, transform=vary), list),
        (lambda: CachedDataset(Made(lambda idx: vary(Images()[idx]), N), 1), list),
        (lambda: CachedDataset(Made(lambda idx: torch.full((4, 5), idx).bfloat16(), N), 1), default_collate),
    ],
    ids=["transform", "varying", "bfloat16"],
)
def test_other_cached_datasets_give_the_same_batches(make, collate):
    with make() as dataset:
        agree(dataset, batch_size=6, shuffle=True, collate_fn=collate, epochs=3)


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, 25 + info.id * 7, info.num_workers)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_iterable_datasets(options, persistent):
    agree(Stream(), num_workers=3, persistent_workers=persistent, **options)


def test_graphs_of_datapipes_are_sharded_and_seeded_in_each_thread():
    make = lambda: IterableWrapper(range(40)).shuffle().sharding_filter().map(abs)
    for _ in range(5):  # the threads prepare their graphs at the same time
        agree(make(), num_workers=6, batch_size=3, shuffle=True, persistent_workers=True)


def test_a_process_that_is_forked_while_threads_prepare_their_graphs_can_walk_through_one():
    class Slow(IterDataPipe):
        def __iter__(self):
            return iter(range(8))

        def __getstate__(self):  # torch calls it on its walk
            time.sleep(0.2)
            return vars(self)

    iterator = iter(thread_loader(Slow().sharding_filter(), num_workers=2))
    for _ in range(5):
        assert in_child(lambda: traverse_dps(IterableWrapper(range(8)).map(abs))) == 0
    assert sorted(torch.cat(list(iterator)).tolist()) == list(range(8))


@needs_in_order
def test_without_order_all_batches_come():
    gate = threading.Event()

    class Slow(Images):
        thread_safe = True

        def __getitem__(self, idx):
            assert idx != 0 or gate.wait(20)
            return idx

    iterator = iter(thread_loader(Slow(), batch_size=5, in_order=False))
    first = [next(iterator) for _ in range(5)]
    assert all(0 not in batch for batch in first)
    gate.set()
    assert sorted(torch.cat([*first, *iterator]).tolist()) == list(range(N))


# ---------------------------------------------------------------------------------------------------- memory


def test_no_batch_changes_while_a_view_of_it_is_held():
    with CachedDataset(Made(lambda idx: torch.full((64, 64), idx), 64), 1) as dataset:
        loader = thread_loader(dataset, batch_size=16, shuffle=True, num_workers=3)
        plain = thread_loader(Made(lambda idx: torch.full((64, 64), idx), 64), batch_size=16, shuffle=True)
        held = []
        for _ in range(4):
            for batch in itertools.chain(loader, plain):
                view = batch.numpy()[3:] if len(held) % 2 else batch.view(-1)[64:]
                held.append((view, view.copy() if len(held) % 2 else view.clone()))
                del batch
                if len(held) > 20:
                    held.pop(random.Random(len(held)).randrange(len(held)))
        assert all((view == before).all() for view, before in held)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.uint16])
def test_a_batch_has_a_storage_of_its_own(dtype):
    with CachedDataset(Made(lambda idx: torch.full((300,), idx).to(dtype), 64), 1, probe=4) as dataset:
        loader = thread_loader(dataset, batch_size=8)
        for _ in range(3):
            batches = list(loader)
        for number, batch in enumerate(batches):
            assert batch.dtype == dtype
            assert batch.untyped_storage().nbytes() == batch.nbytes
            expected = torch.stack([dataset[idx] for idx in range(8 * number, 8 * number + 8)])
            assert torch.equal(batch.view(torch.uint8), expected.view(torch.uint8))


# ---------------------------------------------------------------------------------------------------- in a worker


def look(idx):
    info = get_worker_info()
    generator = torch.random.thread_safe_generator()
    return info.id, info.num_workers, info.seed, info.worker_method, generator is info.rng.torch_generator, len(info.dataset)


began = []


def test_worker_info_is_that_of_the_thread_and_is_none_elsewhere():
    began.clear()
    base = torch.Generator().manual_seed(3)
    loader = thread_loader(
        Made(look, 40),
        batch_size=1,
        collate_fn=list,
        generator=base,
        worker_init_fn=lambda number: began.append(look(0)),  # began is global: a closure would be copied
    )
    seen = {found for batch in loader for found in batch}
    seed = min(found[2] for found in began)
    assert sorted(began) == [(number, 2, seed + number, "thread", True, 40) for number in range(2)]
    assert seen <= set(began)
    assert get_worker_info() is None
    assert torch.random.thread_safe_generator() is None
    found = []
    for _ in loader:
        thread = threading.Thread(target=lambda: found.append((get_worker_info(), torch.random.thread_safe_generator())))
        thread.start()
        thread.join()
    assert set(found) == {(None, None)}


def test_worker_processes_still_have_their_info():
    iterator = iter(thread_loader(Made(look)))
    next(iterator)
    method = lambda idx: get_worker_info().worker_method
    assert set(itertools.chain(*torch.utils.data.DataLoader(Made(method), num_workers=2))) == {"multiprocessing"}


# ---------------------------------------------------------------------------------------------------- errors


class Fails:
    def __init__(self, error, at=13):
        self.error, self.at = error, at

    def __call__(self, idx):
        if idx == self.at:
            raise self.error
        return idx


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


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyError("key"), StopIteration("end"), IndexError(3), Odd("a", "b")])
@pytest.mark.parametrize("kind", [Made, MadeTogether])
def test_errors_come_in_the_place_of_their_batch(error, kind):
    make = lambda method: stocache.DataLoader(kind(Fails(error), 30), 4, num_workers=2, worker_method=method, timeout=20)
    assert same(came(make("thread")), came(make("multiprocessing")))


def test_the_first_error_of_a_batch_is_raised():
    both = lambda idx: Fails(KeyError("later"), 7)(Fails(ValueError("first"), 4)(idx))
    with pytest.raises(ValueError, match="first"):
        list(thread_loader(Made(both), batch_size=20, num_workers=4))


def test_an_error_before_a_sample_that_draws_does_not_hang():
    def draws(idx):
        if idx == 2:
            raise ValueError("wrong")
        return idx + 0 * torch.rand((), generator=torch.random.thread_safe_generator())

    make = lambda method: stocache.DataLoader(Made(draws, 40), 10, num_workers=2, worker_method=method, timeout=20)
    assert same(came(make("thread")), came(make("multiprocessing")))


def fail(*arguments):
    raise ValueError("wrong")


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_worker_init_fn_is_raised_instead_of_batches(persistent):
    loader = thread_loader(Images(), worker_init_fn=fail, persistent_workers=persistent)
    iterator = iter(loader)
    for _ in range(5):
        with pytest.raises(ValueError, match="wrong"):
            next(iterator)


@pytest.mark.parametrize("dataset", [Images(), Stream()])
def test_an_error_of_collate_fn_is_raised(dataset):
    with pytest.raises(ValueError, match=r"(?s)in DataLoader worker thread .*wrong"):
        list(thread_loader(dataset, collate_fn=fail))


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_in_a_worker_is_an_error_of_the_loop(code):
    with pytest.raises(WorkerError, match=rf"sys.exit\({code}\)"):
        list(thread_loader(Made(Fails(SystemExit(code)))))
    with pytest.raises(WorkerError, match=r"sys\.exit"):
        list(thread_loader(Images(), worker_init_fn=sys.exit))


class Breaks(RandomSampler):
    def __iter__(self):
        yield from range(20)
        raise ValueError("the sampler is broken")


def test_an_error_of_the_sampler_comes_when_processes_have_it():
    make = lambda method: stocache.DataLoader(
        Images(), 2, sampler=Breaks(Images()), num_workers=2, worker_method=method, timeout=20
    )
    assert same(came(make("thread")), came(make("multiprocessing")))


@pytest.mark.parametrize("indices", [[1.5, 2], ["3", 1], [N, 1], [0, None], [-N - 1]], ids=str)
def test_wrong_indices_are_refused(indices):
    with CachedDataset(Images(), 1) as dataset:
        make = lambda method: stocache.DataLoader(dataset, batch_sampler=[[1, 2], indices], num_workers=2, worker_method=method)
        (first, error, end), (_, expected, _) = came(make("thread")), came(make("multiprocessing"))
        assert (first[1].tolist(), error[0], end) == ([1, 2], expected[0], "")
        assert issubclass(error[0], SampleIndexError | TypeError)


def test_a_cache_that_is_closed_early_is_told():
    gate = threading.Event()

    class Slow(Images):
        thread_safe = True

        def __getitem__(self, idx):
            assert idx < 4 or gate.wait(20)
            return super().__getitem__(idx)

    dataset = CachedDataset(Slow(), 1, example=Images()[0])
    iterator = iter(thread_loader(dataset, batch_size=2))
    next(iterator)
    dataset.close()
    gate.set()
    with pytest.raises(stocache.ClosedError, match="the cache is closed"):
        list(iterator)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"worker_method must be one of .*'thread', 'auto', got 'fibre'"):
        stocache.DataLoader(Images(), num_workers=2, worker_method="fibre")


def test_a_stuck_sample_ends_in_a_timeout():
    gate = threading.Event()
    loader = thread_loader(Made(lambda idx: gate.wait(20), 4), timeout=0.2)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
        next(iter(loader))
    gate.set()


# ---------------------------------------------------------------------------------------------------- who waits for whom


class Gated(Images):
    """Holds back sample 5 until a gate opens, and counts."""

    thread_safe = True

    def __init__(self, at=5):
        super().__init__()
        self.gate, self.at, self.reads, self.lock = threading.Event(), at, [], threading.Lock()

    def __getitem__(self, idx):
        with self.lock:
            self.reads.append(idx)
        assert idx != self.at or self.gate.wait(20)
        return super().__getitem__(idx)


def test_a_slow_sample_delays_only_its_own_batch():
    dataset = Gated()
    iterator = iter(thread_loader(dataset, batch_size=5, prefetch_factor=3))
    assert next(iterator)[1].tolist() == [0, 1, 2, 3, 4]
    wait_until(lambda: set(range(35)) <= set(dataset.reads))  # six batches after it, and more than one thread could
    dataset.gate.set()
    assert torch.cat([batch[1] for batch in iterator]).tolist() == list(range(5, N))
    assert sorted(dataset.reads) == list(range(N))


def test_hits_do_not_wait_for_misses():
    source = Gated(at=N - 1)
    with CachedDataset(source, 1, example=Images()[0]) as dataset:
        for idx in range(N - 10):
            dataset[idx]
        order = [[N - 1, N - 2], [N - 3, N - 4]] + [[idx, idx + 1] for idx in range(0, 30, 2)]
        loader = thread_loader(dataset, batch_sampler=order, prefetch_factor=9, num_workers=1)
        source.reads.clear()
        iterator = iter(loader)
        wait_until(lambda: N - 1 in source.reads)
        threads = iterator._batches
        gathered = threads._batches
        missing = [number for number, batch in gathered.items() if batch.group is None]
        assert missing == [0, 1]
        threads._batches = {number: batch for number, batch in gathered.items() if number > 1}
        assert threads._done() == 2  # although the only thread waits for sample N - 1
        threads._batches = gathered
        source.gate.set()
        assert torch.cat([batch[1] for batch in iterator]).tolist() == list(itertools.chain(*order))
        del iterator, loader, gathered, threads


def test_each_sample_of_a_half_cached_dataset_is_read_once():
    source = Gated(at=None)
    with CachedDataset(source, 1, example=Images()[0]) as dataset:
        loaders = [thread_loader(dataset, batch_size=7, shuffle=True, num_workers=3) for _ in range(2)]
        for batches in zip(*loaders, strict=True):  # two iterators at once
            assert all(torch.equal(batch[0], torch.stack([Images()[idx][0] for idx in batch[1].tolist()])) for batch in batches)
        assert sorted(source.reads) == list(range(N))
        stats = dataset.stats().total
        assert (stats.misses, stats.filled) == (N, N)


def test_an_iterator_that_is_dropped_gives_up_its_claims():
    source = Gated()
    with CachedDataset(source, 1, example=Images()[0]) as dataset:
        iterator = iter(thread_loader(dataset, batch_size=5, prefetch_factor=5))
        next(iterator)
        wait_until(lambda: 5 in source.reads)
        source.at = None  # for others
        del iterator
        began = time.monotonic()
        later = stocache.DataLoader(dataset, batch_size=5, num_workers=2, worker_method="thread")
        assert torch.cat([batch[1] for batch in later]).tolist() == list(range(N))
        waited = time.monotonic() - began
        source.gate.set()
        assert waited < 9  # a claim that is held is waited for 10 s


class RejectsOne(Images):
    def __getitem__(self, idx):
        found, _ = image = super().__getitem__(idx)
        assert get_worker_info() is None or get_worker_info().dataset is not None
        return image if idx != 3 else (found[:, :4], idx)


def test_samples_that_cannot_be_cached_are_loaded_by_the_thread_that_needs_them():
    class Own(Images):
        """Belongs to one thread."""

        owner = None

        def __getitem__(self, idx):
            self.owner = self.owner or threading.get_ident()
            assert self.owner == threading.get_ident()
            time.sleep(0.001)
            return super().__getitem__(idx)

    order = [[idx, (idx * 7) % N, (idx * 3) % N] for idx in range(N)]  # samples come several times
    for limit in (1, f"{N + 20 * 200}B"):
        with CachedDataset(Own(), limit, example=Images()[0]) as dataset:
            loader = thread_loader(dataset, batch_sampler=order, num_workers=4, prefetch_factor=4)
            assert [batch[1].tolist() for batch in loader] == order
            del loader


def test_a_sample_of_another_shape_is_an_error_as_with_processes():
    with CachedDataset(RejectsOne(), 1, example=Images()[0]) as dataset:
        make = lambda method: stocache.DataLoader(dataset, 4, num_workers=2, worker_method=method)
        assert [type(found) for found in came(make("thread"))] == [type(found) for found in came(make("multiprocessing"))]


# ---------------------------------------------------------------------------------------------------- life


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Images(), Stream()])
def test_an_iterator_that_is_dropped_or_broken_off_leaves_no_thread(dataset, persistent):
    loader = thread_loader(dataset, persistent_workers=persistent)
    for _ in loader:
        break
    iterator = iter(loader)
    next(iterator)
    assert len(workers()) >= 2
    del iterator, loader
    wait_until(lambda: not workers())  # without the garbage collector


def test_an_iterator_that_ends_leaves_no_thread():
    iterator = iter(thread_loader(Images()))
    list(iterator)
    assert not workers()
    with pytest.raises(StopIteration):
        next(iterator)


def test_persistent_threads_serve_all_epochs():
    names = lambda idx: threading.get_ident()
    loader = thread_loader(Made(names, 50), persistent_workers=True)
    seen = {name for _ in range(3) for batch in loader for name in batch.tolist()}
    assert len(seen) <= 2 == len(workers())


def test_what_threads_hold_goes_with_the_iterator():
    alive = []

    class Heavy:
        pass

    class Holds(Images):
        def __getitem__(self, idx):
            if not hasattr(self, "heavy"):
                self.heavy = Heavy()
                alive.append(__import__("weakref").ref(self.heavy))
            return idx

    gc.disable()
    try:
        assert len(list(thread_loader(Holds()))) == N
        wait_until(lambda: alive and not any(ref() for ref in alive))
    finally:
        gc.enable()


def test_two_iterators_at_once_and_an_early_second_epoch():
    loader = thread_loader(Images(), batch_size=6)
    pairs = list(zip(loader, loader, strict=True))
    assert all(same(one, other) for one, other in pairs)
    loader = thread_loader(Images(), batch_size=6, persistent_workers=True)
    next(iter(loader))
    assert torch.cat([batch[1] for batch in loader]).tolist() == list(range(N))


def test_more_threads_than_samples():
    agree(Images(3), num_workers=9, batch_size=2)
    agree(Images(0), num_workers=3)


def test_a_loader_works_in_a_thread_of_the_user():
    found = []
    thread = threading.Thread(target=lambda: found.extend(thread_loader(Images(), batch_size=9)))
    thread.start()
    thread.join(30)
    assert torch.cat([batch[1] for batch in found]).tolist() == list(range(N))


def test_an_interrupt_of_the_loop_loses_no_batch():
    with CachedDataset(Images(), 1) as dataset:
        list(dataset)
        iterator = iter(thread_loader(dataset, batch_size=5))
        maker, interrupted = iterator._maker, []
        gather = stocache.loader.collate.ThreadCollate.gather

        def interrupt(self, batches):
            if threading.current_thread() is threading.main_thread() and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return gather(self, batches)

        group = thread_iterator.Group()
        group.batches = [batch for batch in iterator._batches._batches.values() if batch.group is not None and not batch.done]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stocache.loader.collate.ThreadCollate, "gather", interrupt)
            with pytest.raises(KeyboardInterrupt):
                maker.gather(group, 0)
            maker.gather(group, 0)
        assert all(batch.done for batch in group.batches)
        assert torch.cat([batch[1] for batch in iterator]).tolist() == list(range(N))
        del iterator, maker, group


def test_a_forked_child_cannot_use_the_iterator():
    source = Gated(at=None)
    with CachedDataset(source, 1, example=Images()[0]) as dataset:
        iterator = iter(thread_loader(dataset, batch_size=5))
        next(iterator)

        def use(iterator):
            with pytest.raises(WorkerError, match=r"do not exist in a forked process"):
                next(iterator)
            assert torch.cat([batch[1] for batch in thread_loader(dataset, batch_size=5)]).tolist() == list(range(N))

        assert in_child(use, iterator) == 0
        assert torch.cat([batch[1] for batch in iterator]).tolist() == list(range(5, N))
        del iterator


def test_processes_may_be_forked_beside_threads():
    with CachedDataset(Images(), 1) as dataset:
        threads = thread_loader(dataset, batch_size=3, shuffle=True)
        for _ in range(3):
            for ours, theirs in itertools.zip_longest(threads, stocache.DataLoader(dataset, batch_size=5, num_workers=2)):
                for batch in filter(None, (ours, theirs)):
                    assert torch.equal(batch[0], torch.stack([Images()[idx][0] for idx in batch[1].tolist()]))
        assert in_child(lambda: list(thread_loader(dataset))) == 0
        del threads


def run(program, interrupt_after=None):
    """Run a program; return its exit code and what it wrote to stderr."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if interrupt_after is not None:
        assert process.stdout.readline().strip() == interrupt_after
        process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=25)[1], process.returncode
    finally:
        process.kill()


_PROGRAM = """
import time, torch, stocache
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, idx):
        if idx == {slow}:
            print("stuck", flush=True)
            {stuck}
        time.sleep(0.001)
        return torch.zeros(100, 100)
loader = stocache.DataLoader(Slow(), batch_size=2, num_workers=2, worker_method="thread", persistent_workers={persistent})
"""


@pytest.mark.parametrize("stuck", ["time.sleep(30)", "import ctypes; ctypes.CDLL(None).sleep(30)"])
def test_ctrl_c_works_while_a_worker_is_stuck(stuck):
    said, code = run(_PROGRAM.format(slow=7, stuck=stuck, persistent=False) + "list(loader)", interrupt_after="stuck")
    assert code in (1, -signal.SIGINT)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_a_program_ends_while_workers_run(persistent):
    program = _PROGRAM.format(slow=-1, stuck="", persistent=persistent)
    assert run(program + "iterator = iter(loader); next(iterator)") == ("", 0)


_BUSY_PROGRAM = """
import time, torch, stocache
from torch.utils.data.datapipes.iter import IterableWrapper
def busy(idx):
    rows = torch.full((200, 500), float(idx))
    for _ in range(10**6 if idx >= {slow} else 6):
        rows = rows.sin()
    return rows
class Busy(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, idx): return busy(idx)
"""


@pytest.mark.parametrize("slow", [4096, 12])
@pytest.mark.parametrize(
    "use",
    [
        "loader = stocache.DataLoader(Busy(), 4, num_workers=8, worker_method='thread', persistent_workers=True)",
        "from stocache.reading import DataLoader2; loader = DataLoader2(IterableWrapper(range(4096)).map(busy).prefetch(20))",
    ],
)
@pytest.mark.parametrize("last", ["", "del iterator, loader; import gc; gc.collect()"])
def test_a_program_ends_while_threads_are_busy_with_torch(slow, use, last):
    program = _BUSY_PROGRAM.format(slow=slow) + f"{use}; iterator = iter(loader); next(iterator), next(iterator); {last}"
    assert run("import warnings; warnings.simplefilter('ignore')\n" + program) == ("", 0)


def test_threads_that_cannot_start_are_an_error():
    def use():
        used = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in os.listdir("/proc") if pid.isdigit() and _is_mine(pid))
        resource.setrlimit(resource.RLIMIT_NPROC, (used + 3, used + 3))
        loader = thread_loader(Images(), num_workers=200)
        with pytest.raises(WorkerError, match=r"cannot start worker thread \d+ of 200: can't start new thread"):
            iter(loader)
        wait_until(lambda: not workers())
        resource.setrlimit(resource.RLIMIT_NPROC, (used + 3, used + 3))

    assert in_child(use, uid=54321) == 0


def _is_mine(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- what is used of torch


def test_the_private_names_of_torch_that_are_used():
    from torch._utils import ExceptionWrapper
    from torch.utils.data import dataloader
    from torch.utils.data._utils import pin_memory, worker

    assert worker.get_worker_info is torch.utils.data.get_worker_info
    assert worker.get_worker_info.__code__.co_names in (("_worker_info",), ("_stocache_info_here", "_worker_info"))
    assert "_worker_info" in vars(worker)
    assert len(worker._generate_state(3, 1)) == 4
    assert {"Map", "Iterable", "create_fetcher"} <= set(vars(dataloader._DatasetKind))
    for name in ("_reset", "_next_index", "__next__", "_next_data"):
        assert callable(getattr(dataloader._BaseDataLoaderIter, name)), name
    iterator = iter(torch.utils.data.DataLoader(range(3)))
    for name in (
        "_dataset", "_dataset_kind", "_auto_collation", "_drop_last", "_index_sampler", "_num_workers", "_collate_fn",
        "_base_seed", "_shared_seed", "_persistent_workers", "_pin_memory", "_pin_memory_device", "_timeout", "_num_yielded",
        "_sampler_iter", "_world_size", "_rank",
    ):  # fmt: skip
        assert hasattr(iterator, name), name
    wrapped = ExceptionWrapper((ValueError, ValueError("text"), None), where="here")
    with pytest.raises(ValueError, match=r"(?s)here.*text"):
        wrapped.reraise()
    assert pin_memory.pin_memory([1], None) == [1]
    assert callable(dataloader._sharding_worker_init_fn)
    info = worker.WorkerInfo(id=0, num_workers=1, seed=3, dataset=None, rng=None, worker_method="thread")
    assert info.worker_method == "thread"


def test_an_unknown_get_worker_info_is_refused(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils.worker, "get_worker_info", lambda: len([]))
    with pytest.raises(RuntimeError, match="this torch has another get_worker_info"):
        next(iter(thread_loader(Images())))
