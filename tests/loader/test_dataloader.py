"""The DataLoader is torch's: the same batches, order, random numbers and errors, however they travel."""

import gc
import inspect
import itertools
import pickle
import random
import re
import runpy
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, RandomSampler, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import stocache
from stocache import CachedDataset, WorkerError
from stocache.shm.ring.ring import NO_MEMORY
from tests.support.containers import Point
from tests.support.endings import said_at_the_end
from tests.support.equality import same
from tests.support.faults import no_shared_memory
from tests.support.images import Images, N, image
from tests.support.loading import THREADS, agree, both, labels_of
from tests.support.processes import in_child
from tests.support.ways import WAYS

pytestmark = pytest.mark.filterwarnings("ignore:.*no accelerator is found")


class Named(Images):
    """Samples of many parts; with ``draws``, of all three generators."""

    draws = False

    def __getitem__(self, idx):
        point = Point(np.full(3, idx, np.int16), float(idx))
        sample = {"image": image(int(idx)), "name": f"{idx}.jpg", "point": point, "n": f"{idx}".encode()}
        return sample | {"drawn": [torch.rand(()), random.random(), float(np.random.rand())]} if self.draws else sample


class Augmented(Named):
    draws = True


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for idx in range(start, N, step):
            yield image(idx), idx


class Drawn:
    """Batches in a random order, which is drawn when they are asked for. It has no length before that."""

    def __iter__(self):
        order = [*torch.randperm(10).tolist(), *random.sample(range(10, 20), 10)]
        self.batches = [order[at : at + 4] for at in range(0, 20, 4)]
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


OPTIONS = [
    {"batch_size": 8, "shuffle": True}, {"batch_size": 7, "drop_last": True, "shuffle": True}, {"batch_size": None},
    {"batch_size": None, "shuffle": True}, {"sampler": range(0, N, 3), "batch_size": 4}, {"batch_sampler": Drawn()},
    {"batch_sampler": np.arange(48).reshape(-1, 4)}, {"batch_sampler": [[3, 1], [4], [1, 5, 9]]},
    {"batch_size": 100}, {"sampler": RandomSampler(range(N), True, 70), "batch_size": 6}, {"batch_size": 8, "collate_fn": list},
    {},
]  # fmt: skip
WORKERS = [
    {}, {"num_workers": 2, "prefetch_factor": 4}, {"num_workers": 2, "persistent_workers": True}, THREADS,
    {**THREADS, "num_workers": 3, "persistent_workers": True, "prefetch_factor": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "workers"),
    [*zip(OPTIONS, itertools.cycle(WORKERS), strict=False)],
    ids=lambda options: re.sub(r" object at \w+", "", str(options)),
)
def test_batches_order_and_random_numbers_are_those_of_torch(options, workers):
    agree(*both(Named() if "worker_method" in workers else Augmented(), **options, **workers))


HALF = f"{N + 20 * 200}B"


def shuffled():
    return {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3)}


@pytest.mark.parametrize(("limit", "options"), [
    (HALF, {}), (0, {"num_workers": 2}), (HALF, {"num_workers": 2}), (HALF, WORKERS[-1]), (1, THREADS),
    (1, {"num_workers": 2, "multiprocessing_context": "forkserver"}), (0, {**THREADS, "prefetch_factor": 9}),
])  # fmt: skip
def test_a_cached_dataset_gives_the_same_batches(limit, options):
    torchs = {"num_workers": 1, "persistent_workers": True} if "persistent_workers" in options else {}
    with CachedDataset(Images(), limit) as dataset:
        ours = stocache.DataLoader(dataset, **shuffled(), **options)
        agree(ours, DataLoader(Images(), **shuffled(), **torchs))
        stats = ours.stats()
        assert stats.hit_rate > 0 or limit == 0
        assert stats.ring == (14 if options.get("num_workers") and "worker_method" not in options else 0)
        part = Subset(dataset, list(range(40, 10, -1)))
        loader = stocache.DataLoader(part, 8, **options)
        agree(loader, DataLoader(Subset(Images(), part.indices), 8, **torchs))
        assert loader.stats().hit_rate == 1 or limit != 1  # of a subset, too


@pytest.mark.parametrize(("limit", "options"), [(1, {}), (HALF, {"num_workers": 2}), (HALF, THREADS)])
def test_batches_of_concatenated_caches(limit, options):
    concatenated = lambda one, other: ConcatDataset([one, Subset(other, range(30, 2, -1)), ConcatDataset([other])])
    with CachedDataset(Images(), limit) as one, CachedDataset(Images(), limit) as other:
        dataset, plain = concatenated(one, other), concatenated(Images(), Images())
        ours = stocache.DataLoader(dataset, **shuffled(), **options)
        agree(ours, DataLoader(plain, **shuffled()), epochs=3)
        assert min(ours.stats().hit_rate, one.stats().total.hits, other.stats().total.hits) > 0


@pytest.mark.parametrize(("workers", "batch_size"), [({}, None), (WORKERS[2], 4), ({**THREADS, "num_workers": 3}, 4)], ids=str)
def test_iterable_datasets(workers, batch_size):
    agree(*both(Stream(), batch_size=batch_size, drop_last=bool(batch_size), **workers))


def clean(batch, *, collate_fn_map=None):
    return torch.from_numpy(np.nan_to_num(np.stack(batch)))


@pytest.mark.parametrize("workers", WAYS)
def test_a_default_collate_that_was_extended_is_used(workers, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, np.ndarray, clean)
    data = [(np.array([idx, np.nan], np.float32), idx) for idx in range(8)]
    with CachedDataset(data, "1MB") as cached:
        for _ in range(2):
            assert same(list(stocache.DataLoader(cached, 4, **WAYS[workers])), list(DataLoader(data, 4)))


@pytest.mark.parametrize("options", [
    {"num_workers": -1}, {"timeout": -1}, {"persistent_workers": True}, {"shuffle": True, "sampler": range(3)},
    {"batch_sampler": [[1]], "batch_size": 3}, {"batch_size": None, "drop_last": True}, {"batch_size": 0},
    {"num_workers": 1, "prefetch_factor": -1}, {"prefetch_factor": 2}, {"multiprocessing_context": "fork"},
], ids=str)  # fmt: skip
def test_arguments_are_refused_as_by_torch(options):
    with pytest.raises(ValueError, match=r".") as theirs:
        torch.utils.data.DataLoader(Images(), **options)
    with pytest.raises(ValueError, match=f"^{re.escape(str(theirs.value))}$"):
        stocache.DataLoader(Images(), **options)


def test_it_is_a_dataloader_with_the_arguments_it_was_given():
    loader = stocache.DataLoader(Images(), 4, drop_last=True)
    assert (loader.collate_fn, type(loader.dataset), len(loader)) == (default_collate, Images, N // 4)
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 3
    ours, theirs = (list(inspect.signature(kind).parameters.values()) for kind in (stocache.DataLoader, DataLoader))
    assert ours[: len(theirs)] == theirs


class Odd(Images):
    def __getitem__(self, idx):
        return {"idx": idx, "data": bytes(1000 * idx), "lock": threading.Lock() if idx in (1, 60) else None}


def test_what_does_not_pickle_is_an_error_of_its_worker_and_the_loader_goes_on():
    """torch's loader prints what does not pickle in the worker, and waits for ever."""
    batches = iter(stocache.DataLoader(Odd(), None, sampler=[0, 1, 20, 60, 40], num_workers=1))
    for idx in (0, 20):
        assert next(batches)["idx"] == idx
        with pytest.raises(TypeError, match=r"(?s)^Caught TypeError in .* worker process 0\..*cannot pickle '_thread.lock'"):
            next(batches)
    assert [batch["idx"] for batch in batches] == [40]


AT_WORK = "at work on batch 2 of the epoch"
ENDS = [
    ("os.kill(os.getpid(), signal.SIGKILL)", rf"was killed by signal 9 \(SIGKILL\) {AT_WORK}. Often", {}),
    ("os._exit(7)", f"exited with code 7 {AT_WORK}", {"kind": "in a step"}),
    ("sys.exit(0)", r"exited with code 0\. Code in the dataset", {"kind": "no ring"}),
    ("os._exit(0)", "exited with code 0 before its first batch", {"place": "init"}),
    ("sys.exit('words')", f"exited with code 1 {AT_WORK}. Code in the dataset", {"place": "collate"}),
    ("sys.exit(0)", "exited with code 0 at work on batch 1[01] of", {"place": "iter", "persistent_workers": True, "idx": 45}),
]


@pytest.mark.parametrize(("ending", "words", "options"), ENDS)
def test_a_worker_that_ends_is_an_error_however_and_wherever_it_ends(tmp_path, ending, words, options):
    said = said_at_the_end(tmp_path / "said", ending, **options)
    assert re.match(rf"WorkerError DataLoader worker \(pid \d+\) {words}", said), said


def test_an_interrupt_of_the_main_process_stays_what_it_is(tmp_path):
    assert said_at_the_end(tmp_path / "said", "os.kill(os.getppid(), signal.SIGINT); time.sleep(1)") == "KeyboardInterrupt "


UNGUARDED = """
import stocache
samples = [bytes([number]) * 5_000_000 for number in range(9)]
list(stocache.DataLoader(samples, 2, num_workers=1, multiprocessing_context='spawn'))
"""


def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    words = "the worker processes of the DataLoader cannot start: one exited with code 1. "
    words += f".* import {script}, and so run it once more. Put the code that starts it under if __name__ =="

    def run():
        with pytest.raises(WorkerError, match=words):
            runpy.run_path(str(script), run_name="__main__")

    assert in_child(run) == 0


def test_processes_that_cannot_start_are_an_error_that_names_the_way_out(monkeypatch):
    def refuse(*_, **__):
        raise OSError(38, "refused")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    with pytest.raises(WorkerError, match=r"its worker processes \(\w+: \[Errno 38\].*\)\. With num_workers=0 .* /dev/shm"):
        iter(stocache.DataLoader(Images(), 8, num_workers=1, multiprocessing_context="fork"))


class Slow(Images):
    def __getitem__(self, idx):
        time.sleep(0.5)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_timeout_is_torchs_and_counts_no_batch(method):
    loader = stocache.DataLoader(Slow(), 4, num_workers=1, worker_method=method, timeout=0.05)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.05 seconds"):
        next(iter(loader))
    assert loader.state_dict()["position"]["batches"] == 0


@pytest.mark.parametrize("options", [
    {}, {"num_workers": 1, "multiprocessing_context": "fork"}, {**THREADS, "persistent_workers": True},
], ids=str)  # fmt: skip
def test_a_loader_that_was_used_works_in_a_forked_child_and_its_iterator_goes_on_without_workers(options):
    with CachedDataset(Images(), 0.1) as dataset:
        used = stocache.DataLoader(dataset, 10, **options)
        assert labels_of(used) == list(range(N))

        def use(batches):
            assert labels_of(used) == list(range(N))
            if not options:
                assert labels_of(batches) == list(range(10, N))
            elif "worker_method" in options:
                with pytest.raises(WorkerError, match=r"do not exist in a forked process"):
                    next(batches)

        for loader in (used, pickle.loads(pickle.dumps(used))):
            batches = iter(loader)
            next(batches)
            assert in_child(use, batches) == 0
            assert labels_of(batches) == list(range(10, N))


@pytest.mark.parametrize("collate_fn", [None, list])
def test_where_torch_gets_no_shared_memory_either_batches_go_through_the_pipe(collate_fn, monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("unable to allocate shared memory(shm)")

    no_shared_memory(monkeypatch)
    monkeypatch.setattr(stocache.shm.ring.ring, "_said_no_memory", False)
    for name in ("_new_using_fd_cpu", "_share_fd_cpu_"):
        monkeypatch.setattr(torch.UntypedStorage, name, refuse)
    ours = stocache.DataLoader(Images(), 8, num_workers=2, collate_fn=collate_fn)
    agree(ours, DataLoader(Images(), 8, collate_fn=collate_fn))
    assert ours.stats().fallbacks == {NO_MEMORY: ours.stats().batches}
    assert caplog.text.count("they go through a pipe") == 1


class Keys(Images):
    def __getitem__(self, idx):
        return [type(idx).__name__, idx]


def test_indices_travel_to_workers_as_what_they_are():
    batches = [[0, 1, 65535], [65536, 3], [1 << 33, 2], [-1, 4], [np.int64(3)], ["a", "b"], [], (1, 2), range(3), [True], [2.5]]
    loader = stocache.DataLoader(Keys(), batch_sampler=batches, num_workers=1, collate_fn=list)
    assert list(loader) == [[[type(idx).__name__, idx] for idx in batch] for batch in batches]


class Epochal(Images):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, idx):
        return idx, self.epoch


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_set_epoch_reaches_the_dataset_in_persistent_workers(workers):
    loader = stocache.DataLoader(Subset(Epochal(), range(N)), batch_size=8, **workers)
    for epoch in (4, 5, 9):
        loader.set_epoch(epoch)
        assert {seen for _, epochs in loader for seen in epochs.tolist()} == {epoch}


# ---------------------------------------------------------------------------------------------------- without workers

BIG = 3, 160, 160  # 16 of them take more than a megabyte, also as bytes


SAMPLES = {
    "floats": lambda: torch.randn(BIG), "arrays": lambda: np.random.default_rng().normal(size=BIG),
    "permuted": lambda: torch.randn(160, 160, 3).permute(2, 0, 1),
    "gradients": lambda: torch.randn(BIG, requires_grad=True) * 2,
    "two dtypes": lambda: torch.randn(BIG) if torch.rand(()) < 0.5 else torch.ones(BIG, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_large_batches_without_workers_are_those_of_torch(make):
    torch.manual_seed(0)
    samples = [make() for _ in range(40)]
    ours, theirs = (list(kind(samples, 16)) for kind in (stocache.DataLoader, DataLoader))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.stride(), mine.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("is_cached", "options"), [(False, {}), (True, {}), (True, THREADS)])
def test_large_batches_are_private_and_their_memory_is_used_again(is_cached, options):
    samples = torch.arange(32.0).view(32, 1, 1).expand(32, 320, 320).contiguous()
    with CachedDataset(samples, 0.1) as dataset:
        dataset.warm(progress=False)
        loader = stocache.DataLoader(dataset if is_cached else samples, 4, **options)
        held = [next(iter(loader))]
        assert in_child(held[0].numpy().fill, -1) == 0  # not by torch, whose threads a forked child lacks
        places = [batch.data_ptr() for _ in range(5) for batch in loader]
        assert len(set(places)) <= (10 if options else 3)
        assert held[0].data_ptr() not in places
        held += list(loader)
        assert [kept[0, 0, 0].item() for kept in held] == [0, *range(0, 32, 4)]
        assert len({kept.data_ptr() for kept in held}) == len(held)
        assert loader._stocache._pool.leased == (9 if is_cached else 4)
        del held
        gc.collect()
        assert loader._stocache._pool.leased == 0


@pytest.mark.parametrize(("device", "message"), [
    ("nonsense", "Use 'cuda'"), (3.5, "Use 'cuda'"), ("meta", "Leave the option out"), ("cuda:2", r"cuda:2.*2 GPU"),
    ("cuda", "built without CUDA|sees no GPU"),
])  # fmt: skip
def test_a_device_that_is_none_of_cuda_or_missing_is_refused(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        stocache.DataLoader([1], device=device)
    assert stocache.DataLoader([1], device="cpu").device is None
