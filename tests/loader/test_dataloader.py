"""The DataLoader is torch's: the same batches, order, random numbers and errors, however they travel."""

import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import stocache
from stocache import CachedDataset, WorkerError, reading
from stocache.ring.ring import FULL, NOTHING
from stocache.system import limits
from stocache.timing import record
from tests.support.equality import same
from tests.support.faults import no_shared_memory
from tests.support.images import Images, N, image
from tests.support.processes import in_child
from tests.support.versions import needs_in_order

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker", "ignore:.*no accelerator is found")

Pair = namedtuple("Pair", "image label")


class Named(Images):
    def __getitem__(self, idx):
        return {"image": image(idx), "name": f"{idx}.jpg", "pair": Pair(np.full(3, idx, np.int16), float(idx))}


class Augmented(Images):
    """Draws from all three generators."""

    def __getitem__(self, idx):
        return image(idx).float() + torch.rand(()) + random.random() + float(np.random.rand())


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for idx in range(start, N, step):
            yield image(idx), idx


def both(dataset, seed=3, theirs=None, **options):
    """Our loader and torch's, with generators of the same seed."""
    make = lambda: {"generator": torch.Generator().manual_seed(seed), **options}
    return stocache.DataLoader(dataset, **make()), torch.utils.data.DataLoader(theirs or dataset, **make())


def agree(ours, theirs, epochs=2):
    torch.manual_seed(0)
    random.seed(0)
    expected = [list(theirs) for _ in range(epochs)]
    after = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    for batches in expected:
        came = list(ours)
        assert len(came) == len(batches)
        assert same(came, batches)
    assert (torch.rand(1), random.random()) == after
    return True


# ---------------------------------------------------------------------------------------------------- the same batches


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_size": 8}, {"batch_size": 8, "shuffle": True}, {"batch_size": 7, "drop_last": True, "shuffle": True},
        {"batch_size": None}, {"batch_size": None, "shuffle": True}, {"sampler": range(0, N, 3), "batch_size": 4},
        {"batch_sampler": BatchSampler(range(N), 9, False)}, {"batch_sampler": [[3, 1], [4], [1, 5, 9]]},
        {"sampler": WeightedRandomSampler(torch.ones(N), 20), "batch_size": 6}, {"batch_size": 8, "collate_fn": list},
    ],
    ids=lambda options: re.sub(r" object at \w+", "", str(options)),
)  # fmt: skip
@pytest.mark.parametrize("dataset", [Images(), Named()], ids=["pairs", "dicts"])
@pytest.mark.sampled(3)
def test_batches_order_and_random_numbers_are_those_of_torch(dataset, options, workers):
    assert agree(*both(dataset, **options, **workers))


@pytest.mark.parametrize("workers", [{"num_workers": 1, "prefetch_factor": 4}, {"num_workers": 3}], ids=str)
def test_workers_draw_the_random_numbers_of_torchs(workers):
    assert agree(*both(Augmented(), batch_size=8, shuffle=True, **workers))


@pytest.mark.parametrize("limit", [1, f"{N + 20 * 200}B", 0])
@pytest.mark.parametrize("workers", [{}, {"prefetch_factor": 3}, {"num_workers": 2}], ids=str)
def test_a_cached_dataset_gives_the_same_batches(limit, workers):
    with CachedDataset(Images(), limit) as dataset:
        ours, theirs = both(dataset, theirs=Images(), batch_size=8, shuffle=True, **workers if "num_workers" in workers else {})
        if "num_workers" not in workers:
            ours = stocache.DataLoader(
                dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3), **workers
            )
        assert agree(ours, theirs, epochs=3)
        assert ours.stats().hit_rate > 0 or limit == 0
        del ours, theirs
        gc.collect()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_start_methods(start_method):
    with CachedDataset(Images(), 1) as dataset:
        ours, theirs = both(
            dataset, theirs=Images(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=start_method
        )
        assert agree(ours, theirs)
        assert ours.stats().ring >= 12
        del ours, theirs
        gc.collect()


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets(workers):
    assert agree(*both(Stream(), batch_size=4, num_workers=workers))
    assert agree(*both(Stream(), batch_size=None, num_workers=workers))


@needs_in_order
def test_in_order_false_delivers_each_batch_once():
    loader = stocache.DataLoader(Images(), batch_size=4, num_workers=2, in_order=False)
    labels = sorted(label for _, labels in loader for label in labels.tolist())
    assert labels == list(range(N))


@pytest.mark.parametrize("epochs", [1, 3])
def test_threads_leave_a_generator_as_torch_does_when_a_loop_is_left_early(epochs):
    def left_early(make, dataset, **options):
        generator = torch.Generator().manual_seed(0)
        sampler = RandomSampler(dataset, num_samples=epochs * len(dataset), generator=generator)
        next(iter(make(dataset, batch_size=2, num_workers=2, sampler=sampler, **options)))
        return generator.get_state()

    with CachedDataset(Images(), 1) as dataset:
        dataset.warm(progress=False)
        theirs = left_early(torch.utils.data.DataLoader, Images())
        assert left_early(stocache.DataLoader, dataset, worker_method="thread").equal(theirs)


def test_subsets_of_a_cached_dataset_are_gathered_too():
    with CachedDataset(Images(), 1) as dataset:
        part = Subset(dataset, list(range(40, 10, -1)))
        ours, theirs = both(part, theirs=Subset(Images(), part.indices), batch_size=8, num_workers=2)
        assert agree(ours, theirs, epochs=2)
        assert ours.stats().hit_rate >= 0.5
        del ours, theirs, part
        gc.collect()


def worker_number(samples):
    return torch.utils.data.get_worker_info().id, default_collate(samples)


def seen_by_workers(worker_id):
    assert isinstance(torch.utils.data.get_worker_info().dataset, Images)


def test_collate_fn_and_worker_init_fn_run_in_workers():
    loader = stocache.DataLoader(Images(), 5, num_workers=2, collate_fn=worker_number, worker_init_fn=seen_by_workers)
    assert loader.collate_fn is worker_number  # as given
    assert [number for number, _ in loader] == [0, 1] * 5


def test_a_default_collate_that_was_extended_is_used(monkeypatch):
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: len(batch))
    assert next(iter(stocache.DataLoader(Images(), 5, num_workers=1, multiprocessing_context="fork")))[0] == 5
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 5)
        assert [batch[0] for batch in loader] == [5] * 10
        del loader
        gc.collect()


# ---------------------------------------------------------------------------------------------------- arguments and errors


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": -1}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"persistent_workers": True}, ValueError),
        ({"shuffle": True, "sampler": range(3)}, ValueError),
        ({"batch_sampler": [[1]], "batch_size": 3}, ValueError),
        ({"batch_size": None, "drop_last": True}, ValueError),
        ({"num_workers": 1, "prefetch_factor": -1}, ValueError),
        ({"multiprocessing_context": "fork"}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"nonsense": 1}, TypeError),
    ],
    ids=str,
)
def test_arguments_are_refused_as_by_torch(options, error):
    with pytest.raises(error) as theirs:
        torch.utils.data.DataLoader(Images(), **options)
    with pytest.raises(error) as ours:
        stocache.DataLoader(Images(), **options)
    if error is ValueError:
        assert str(ours.value) == str(theirs.value)


def test_prefetch_factor_without_workers_must_be_a_count():
    with pytest.raises(ValueError, match="non-negative"):
        stocache.DataLoader(Images(), prefetch_factor=-1)


def test_it_is_a_dataloader_with_the_arguments_it_was_given():
    import inspect

    sampler = WeightedRandomSampler(torch.ones(N), N)
    loader = stocache.DataLoader(Images(), 4, sampler=sampler, num_workers=1, drop_last=True, prefetch_factor=3)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.sampler, loader.batch_size, loader.drop_last, loader.prefetch_factor) == (sampler, 4, True, 3)
    assert loader.collate_fn is default_collate
    assert isinstance(loader.dataset, Images)
    assert len(loader) == N // 4
    signature = inspect.signature(stocache.DataLoader)
    *parameters, steps, sample_seed, worker_method = signature.parameters.values()
    assert signature.replace(parameters=parameters) == inspect.signature(torch.utils.data.DataLoader)
    assert [own.name for own in (steps, sample_seed, worker_method)] == [
        "snapshot_every_n_steps", "sample_seed", "worker_method",
    ]  # fmt: skip
    next(iter(loader))
    assert loader.collate_fn is default_collate  # and they stay
    assert loader.sampler is sampler
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 3


class Failing(Images):
    def __getitem__(self, idx):
        if idx == 20:
            raise KeyError("sample 20 is broken")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_dataset_pass_through_and_the_loader_goes_on(workers):
    loader = stocache.DataLoader(Failing(), 8, num_workers=workers)
    batches = iter(loader)
    came = [next(batches), next(batches)]
    with pytest.raises(KeyError, match="sample 20 is broken"):
        next(batches)
    if workers:  # as torch's
        came += list(batches)
        assert len(came) == 6
    assert same(came[0], default_collate([Images()[idx] for idx in range(8)]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Deadly", "was killed by signal 9 (SIGKILL)"),
        ("Crashing", "was killed by signal 6 (SIGABRT)"),
        ("Exiting", "exited with code 3"),
    ],
)
@pytest.mark.sampled(3)
def test_the_death_of_a_worker_names_process_signal_and_batch(name, words):
    program = f"from tests.support import endings; endings.until_death({name!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=True)
    assert result.stdout.startswith("WorkerError DataLoader worker (pid "), result.stdout + result.stderr
    assert f"{words} at work on batch 2 of the epoch" in result.stdout


ENDINGS = {
    "os._exit(0)": "exited with code 0",
    "os._exit(7)": "exited with code 7",
    "sys.exit()": "exited with code 0",
    "sys.exit('words')": "exited with code 1",
    "raise KeyboardInterrupt": "exited with code 0",
    "signal.raise_signal(signal.SIGINT)": "exited with code 0",
    "signal.raise_signal(signal.SIGTERM)": "was killed by signal 15 (SIGTERM)",
    "signal.raise_signal(signal.SIGSEGV)": "was killed by signal 11 (SIGSEGV)",
}


def said_at_the_end(*arguments, **options):
    program = f"from tests.support import endings; endings.until_the_end(*{arguments!r}, **{options!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=False)
    assert done.stdout.startswith("DataLoader worker (pid "), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ending", [pytest.param(its, marks=[pytest.mark.slow] * (its != "os._exit(0)")) for its in ENDINGS])
def test_a_worker_that_ends_is_an_error_however_it_ends(ending):
    assert f"{ENDINGS[ending]} at work on batch 2 of the epoch. " in said_at_the_end("getitem", ending)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["os._exit(0)", "raise KeyboardInterrupt"])
@pytest.mark.parametrize(
    ("place", "where"),
    [("collate", "at work on batch 2 of"), ("init", "before its first batch"), ("iter", r"at work on batch [456] of")],
)
def test_a_worker_that_ends_is_an_error_wherever_it_ends(place, where, ending):
    assert re.search(f"{re.escape(ENDINGS[ending])} {where}", said_at_the_end(place, ending))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"idx": 0},
        {"num_workers": 1, "idx": 47},
        {"kind": "cached"},
        {"persistent_workers": True},
        {"place": "iter", "persistent_workers": True, "idx": 45},
        {"timeout": 6},
        pytest.param({"in_order": False}, marks=needs_in_order),
        {"multiprocessing_context": "spawn"},
        {"multiprocessing_context": "forkserver", "num_workers": 1},
    ],
    ids=str,
)
def test_a_worker_that_ends_well_is_an_error_in_any_loader(options):
    options = {"place": "getitem", "ending": "sys.exit(0)"} | options
    said = said_at_the_end(**options)
    number = rf"{options.get('idx', 20) // 8}" if options["place"] == "getitem" else "1[01]"
    assert re.search(f"exited with code 0 at work on batch {number} of the epoch", said)
    assert ("again" in said) == ("persistent_workers" in options)


@pytest.mark.slow
def test_a_death_in_the_midst_of_a_step_is_told_like_any():
    program = "from tests.support import endings; endings.until_a_death_in_a_step()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=True)
    assert re.match(r"DataLoader worker \(pid \d+\) exited with code 7 at work on batch 2 of the epoch\.", done.stdout), (
        done.stderr
    )


@pytest.mark.slow
def test_without_a_ring_the_batch_of_a_worker_that_ended_is_not_known():
    assert re.match(
        r"DataLoader worker \(pid \d+\) exited with code 0\. Code in the dataset",
        said_at_the_end("getitem", "sys.exit(0)", "no ring"),
    )


class Interrupting(Images):
    def __getitem__(self, idx):
        if idx == 20:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(2)
        return super().__getitem__(idx)


@pytest.mark.slow
def test_an_interrupt_of_the_main_process_stays_what_it_is():
    batches = iter(stocache.DataLoader(Interrupting(), 8, num_workers=1))
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        list(batches)
    del batches


UNGUARDED = {
    "a loader": "[b for b in stocache.DataLoader(list(range(9)), 2, num_workers=2, multiprocessing_context=START)]",
    "much data": "[b for b in stocache.DataLoader(Large(), 2, num_workers=1, multiprocessing_context=START)]",
    "the default": "multiprocessing.set_start_method(START); list(stocache.DataLoader(list(range(9)), num_workers=1))",
    "text": "list(stocache.StreamLoader(sys.argv[2], 1, 1, delimiter=',', num_workers=1, "
    "read=stocache.ReadOptions(multiprocessing_context=START)))",
    "DataPipes": "from stocache import reading; from torch.utils.data.datapipes.iter import IterableWrapper as W; "
    "list(reading.DataLoader2(W(range(9)).sharding_filter(), "
    "reading_service=reading.MultiProcessingReadingService(1, multiprocessing_context=START)))",
}


@pytest.mark.parametrize(
    ("what", "start_method"),
    [
        pytest.param(what, method, marks=[pytest.mark.slow] * ((what, method) != ("much data", "spawn")))
        for what in UNGUARDED
        for method in ("spawn", "forkserver")
    ],
)
def test_a_script_without_a_guard_is_told_of_it(tmp_path, what, start_method):
    (tmp_path / "rows.csv").write_text("1,2,0\n" * 9)
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\nimport stocache\nSTART = sys.argv[1]\n"
        "class Large(list):\n    def __init__(self): super().__init__([bytes(5_000_000)] * 9)\n" + UNGUARDED[what]
    )
    command = [sys.executable, str(script), start_method, str(tmp_path / "rows.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 1
    assert "WorkerError: the worker processes of the DataLoader cannot start: one exited with code 1. " in done.stderr
    assert f"import {script}, and so run it once more. Put the code that starts it under if __name__ ==" in done.stderr


def refused_semaphore(error):
    class SemLock:
        SEM_VALUE_MAX = 1

        def __init__(self, *_):
            raise type(error)(*error.args)  # another: each holds the frames it came through

    return SemLock


@pytest.mark.parametrize(
    "error", [OSError(38, "Function not implemented"), FileNotFoundError(2, "No such file"), PermissionError(13, "denied")]
)
@pytest.mark.parametrize("kind", ["loader", "text", "DataPipes"])
def test_without_semaphores_no_workers_is_the_way_out(monkeypatch, tmp_path, start_method, error, kind):
    monkeypatch.setattr("_multiprocessing.SemLock", refused_semaphore(error))
    (tmp_path / "rows.csv").write_text("1,2,0\n" * 9)
    options = {"num_workers": 1, "multiprocessing_context": start_method}
    wanted = (
        rf"cannot start its worker processes \(\w+: \[Errno {error.errno}\].*\)\. With num_workers=0 this process .* /dev/shm"
    )
    if kind == "loader":
        for dataset in (Images(), stocache.CachedDataset(Images(), 0.01)):
            with pytest.raises(WorkerError, match=wanted):
                iter(stocache.DataLoader(dataset, 8, **options))
            assert len(list(stocache.DataLoader(dataset, 8))) == 7
    elif kind == "text":
        read = stocache.ReadOptions(multiprocessing_context=start_method)
        with (
            stocache.StreamLoader(tmp_path / "rows.csv", 1, 1, delimiter=",", num_workers=1, read=read) as loader,
            pytest.raises(WorkerError, match=wanted),
        ):
            list(loader)
    else:
        service = reading.MultiProcessingReadingService(**options)
        loader = reading.DataLoader2(IterableWrapper(range(9)).sharding_filter(), reading_service=service)
        with pytest.raises(WorkerError, match=wanted):
            list(loader)
        loader.shutdown()


def test_errors_of_a_sampler_are_not_taken_for_those_of_processes():
    def indices():
        raise FileNotFoundError("order.txt")
        yield

    class Sampler:
        def __iter__(self):
            return indices()

    with pytest.raises(FileNotFoundError, match=r"^order\.txt$"):
        list(stocache.DataLoader(Images(), 8, sampler=Sampler(), num_workers=1))


def test_a_timeout_is_torchs_and_counts_no_batch():
    loader = stocache.DataLoader(Slow(), 4, num_workers=1, timeout=0.05)
    with pytest.raises(RuntimeError, match="timed out"):
        next(iter(loader))
    assert loader.state_dict()["position"]["batches"] == 0


class Slow(Images):
    def __getitem__(self, idx):
        time.sleep(0.2)
        return super().__getitem__(idx)


# ---------------------------------------------------------------------------------------------------- never overwritten


@pytest.mark.parametrize("workers", [{}, {"prefetch_factor": 2}, {"num_workers": 2}], ids=str)
@pytest.mark.leaves_descriptors
def test_all_batches_may_be_kept(workers):
    with CachedDataset(Images(600), 1) as dataset:
        loader = stocache.DataLoader(dataset, 8, **workers)
        for _ in range(2):
            kept = list(loader)
            for number, (images, labels) in enumerate(kept):
                wanted = range(number * 8, min(600, number * 8 + 8))
                assert labels.tolist() == list(wanted)
                assert torch.equal(images, torch.stack([image(idx) for idx in wanted]))
        stats = loader.stats()
        if "num_workers" in workers:
            assert set(stats.fallbacks) == {FULL}
            assert stats.ring + stats.fallbacks[FULL] == stats.batches == 150
        del loader, kept, images, labels
        gc.collect()


def test_views_and_random_holding():
    generator = random.Random(0)
    loader = stocache.DataLoader(Images(400), 4, num_workers=2)
    held = []
    for _ in range(2):
        for images, labels in loader:
            pick = generator.randrange(4)
            held.append(
                (generator.choice([images[pick], images.numpy()[pick], images.view(4, -1)[pick]]), labels[pick : pick + 1])
            )
            if len(held) > generator.randrange(6):
                held.pop(generator.randrange(len(held)))
            for view, label in held:
                assert torch.equal(torch.as_tensor(view).view(3, 8, 8), image(int(label)))
    assert loader.stats().ring > 50


def test_batches_survive_the_end_of_their_loader():
    loader = stocache.DataLoader(Images(), 8, num_workers=2)
    first = next(iter(loader))
    batches = iter(loader)
    second = [next(batches), next(batches)]
    del loader, batches
    gc.collect()
    for _ in range(3):
        list(stocache.DataLoader(Images(), 8, num_workers=2))
    assert same(first, default_collate([Images()[idx] for idx in range(8)]))
    assert same(second[1], default_collate([Images()[idx] for idx in range(8, 16)]))


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_early_again_and_again_leaves_the_ring_usable(persistent):
    loader = stocache.DataLoader(Images(200), 4, num_workers=2, persistent_workers=persistent)
    for _ in range(12):
        for number, (_, labels) in enumerate(loader):
            assert labels.tolist() == list(range(number * 4, number * 4 + 4))
            if number == 3:
                break
    assert loader.stats().fallbacks == {}
    assert loader.stats().ring_bytes <= 2 * 12 * limits.MIB * 2


def test_two_iterators_over_one_loader():
    loader = stocache.DataLoader(Images(), 8, num_workers=2)
    expected = [default_collate([Images()[idx] for idx in range(start, min(N, start + 8))]) for start in range(0, N, 8)]
    pairs = list(zip(loader, loader, strict=True))
    assert same([pair[0] for pair in pairs], expected)
    assert same([pair[1] for pair in pairs], expected)


@pytest.mark.leaves_descriptors
def test_more_iterators_than_lanes():
    loader = stocache.DataLoader(Images(), 8, num_workers=1)
    expected = [default_collate([Images()[idx] for idx in range(start, min(N, start + 8))]) for start in range(0, N, 8)]
    for batches in zip(*[loader] * 4, strict=True):
        assert same(list(batches), [expected[0]] * 4)
        expected.pop(0)
    assert sum(loader.stats().fallbacks.values()) > 0


def test_a_loader_that_was_used_works_in_a_forked_child():
    loader = stocache.DataLoader(Images(), 8, num_workers=1, multiprocessing_context="fork")  # a child has no forkserver
    list(loader)

    def iterate():
        assert [label for _, labels in loader for label in labels.tolist()] == list(range(N))

    assert in_child(iterate) == 0
    assert len(list(loader)) == 7


def test_a_loader_pickles_without_its_ring():
    import pickle

    loader = stocache.DataLoader(Images(), 8, num_workers=1, persistent_workers=True)
    list(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert same(list(again), list(loader))


def test_torch_keeps_and_ends_persistent_workers_under_the_names_that_are_used():
    loader = stocache.DataLoader(Images(), 8, num_workers=1, persistent_workers=True)
    next(iter(loader))
    (process,) = loader._iterator._workers
    assert process.is_alive()
    loader._iterator._shutdown_workers()
    assert process.exitcode == 0


FORKING = """
import sys, threading, time
import stocache

forking, at_once = set(), []

def watch(event, _):
    if event == "os.fork":
        forking.add(threading.get_ident())
        time.sleep(0.2)
        at_once.append(len(forking))
        forking.discard(threading.get_ident())

sys.addaudithook(watch)  # as filelock does, which raises where two threads fork at once
loaders = [stocache.DataLoader(range(8), 4, num_workers=1, multiprocessing_context="fork") for _ in range(2)]
threads = [threading.Thread(target=list, args=[loader]) for loader in loaders]
threads += [threading.Thread(target=stocache.CachedDataset, args=[list(range(8)), "1MB"])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert at_once == [1] * len(at_once) and len(at_once) >= 3, at_once
"""


def test_threads_that_start_workers_or_probe_fork_one_after_the_other():
    program = "import warnings; warnings.simplefilter('ignore')" + FORKING
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------- how they travel


def test_through_the_ring_and_outside_of_it():
    loader = stocache.DataLoader(Images(), 8, num_workers=2)
    before = loader.stats()
    assert (before.batches, before.ring, before.fallbacks, before.ring_bytes, before.hit_rate) == (0, 0, {}, 0, None)
    for _ in loader:
        pass
    stats = loader.stats()
    assert (stats.batches, stats.ring, stats.fallbacks) == (7, 7, {})
    assert stats.waited_s > 0
    strings = stocache.DataLoader([f"{n}" for n in range(10)], 5, num_workers=1)
    assert list(strings) == [["0", "1", "2", "3", "4"], ["5", "6", "7", "8", "9"]]
    assert strings.stats().fallbacks == {NOTHING: 2}


@pytest.mark.leaves_descriptors
def test_without_shared_memory_it_is_torchs(monkeypatch):
    no_shared_memory(monkeypatch)
    ours, theirs = both(Images(), batch_size=8, shuffle=True, num_workers=2)
    assert agree(ours, theirs)
    assert ours.stats().ring == 0
    assert sum(ours.stats().fallbacks.values()) == 14


def test_a_thread_gathers_ahead_only_what_is_cached():
    import threading

    loads = []

    class Recording(Images):
        def __getitem__(self, idx):
            loads.append(threading.current_thread())
            return super().__getitem__(idx)

    with CachedDataset(Recording(), 1, probe=1) as dataset:
        loader = stocache.DataLoader(dataset, batch_size=8, prefetch_factor=2)
        for _ in range(2):
            for images, labels in loader:
                assert torch.equal(images, torch.stack([image(idx) for idx in labels.tolist()]))
        assert set(loads) == {threading.main_thread()}
        assert len(loads) == N - 1  # one was loaded by the probe, in a child process
        assert any(thread.name.startswith("stocache-gather") for thread in threading.enumerate())
        del loader, images, labels
        gc.collect()


def test_a_loader_without_a_cache_and_without_workers_uses_no_ring():
    loader = stocache.DataLoader(Images(), 8, prefetch_factor=2)
    assert len(list(loader)) == 7
    assert loader.stats().ring_bytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be pinned")
def test_pin_memory_without_a_gpu_is_torchs():
    ours, theirs = both(Images(), batch_size=8, num_workers=2, pin_memory=True)
    assert agree(ours, theirs)


def test_batches_without_workers_are_private_and_their_memory_is_used_again():
    with CachedDataset([torch.full((200, 200), float(idx)) for idx in range(16)], 1) as dataset:
        loader = stocache.DataLoader(dataset, 4)
        batch = next(iter(loader))
        pid = os.fork()
        if pid == 0:
            batch.numpy()[:] = -1  # not by torch, whose threads a forked child lacks
            os._exit(0)
        os.waitpid(pid, 0)
        assert batch[:, 0, 0].tolist() == [0, 1, 2, 3]
        del batch
        addresses = set()
        for _ in range(3):
            for batch in loader:
                addresses.add(batch.data_ptr())
        assert len(addresses) <= 3
        held = list(loader)
        assert [batch[0, 0, 0].item() for batch in held] == [0, 4, 8, 12]
        del loader, batch, held
        gc.collect()


@pytest.mark.slow
def test_cold_first_batches_gathered_by_two_threads_are_right():
    for _ in range(200):
        with CachedDataset(Images(16), 1, probe=1) as dataset:
            dataset.__getitems__(list(range(4, 16)))
            loader = stocache.DataLoader(dataset, 4, prefetch_factor=3)
            assert [labels.tolist() for _, labels in loader] == [list(range(n, n + 4)) for n in (0, 4, 8, 12)]
            del loader


def test_an_error_ahead_comes_in_its_turn():
    with CachedDataset(Images(), 1) as dataset:
        dataset.warm(progress=False)
        wanted = [[4 * n, 4 * n + 1] for n in range(8)]
        wanted[5] = [-100, 1]
        batches = iter(stocache.DataLoader(dataset, batch_sampler=wanted, prefetch_factor=3))
        came = []
        for _ in range(8):
            try:
                came.append(next(batches)[1].tolist())
            except IndexError:
                came.append("error")
        assert came == [*wanted[:5], "error", *wanted[6:]]
        del batches
        gc.collect()


def test_a_forked_child_goes_on_with_an_iterator_that_gathers_ahead():
    with CachedDataset(Images(), 1) as dataset:
        dataset.warm(progress=False)
        batches = iter(stocache.DataLoader(dataset, 8, prefetch_factor=3))
        next(batches)
        pid = os.fork()
        if pid == 0:
            os._exit([labels.tolist()[0] for _, labels in batches] != [8, 16, 24, 32, 40, 48])
        assert os.waitpid(pid, 0)[1] == 0
        assert len(list(batches)) == 6
        del batches
        gc.collect()


def test_another_thread_goes_on_with_an_iterator(monkeypatch):
    monkeypatch.setattr(record, "_LOOK_NS", 0)  # note processor times, which each thread has of its own, at each batch
    batches = iter(stocache.DataLoader(Images(), 8))
    next(batches)
    with ThreadPoolExecutor(1) as other:
        assert len(list(other.submit(list, batches).result())) == 6


def set_a_transform(worker_id):
    torch.utils.data.get_worker_info().dataset.transform = lambda sample: sample[1] + 100


def test_a_transform_that_workers_set_is_applied():
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 4, num_workers=1, worker_init_fn=set_a_transform)
        assert next(iter(loader)).tolist() == [100, 101, 102, 103]
        del loader
        gc.collect()


class Sub(torch.Tensor):
    pass


def as_subclass(samples):
    return torch.stack([image for image, _ in samples]).as_subclass(Sub)


@pytest.mark.leaves_descriptors
def test_tensor_subclasses_go_the_way_of_torch_without_leaving_descriptors():
    loader = stocache.DataLoader(Images(300), 1, num_workers=1, collate_fn=as_subclass, persistent_workers=True)
    counts = []
    for _ in range(2):
        for batch in loader:
            assert type(batch) is Sub
            (worker,) = multiprocessing.active_children()
            counts.append(len(os.listdir(f"/proc/{worker.pid}/fd")))
    assert max(counts) < 60


class Odd(Images):
    """Answers everything, as mocks and lazy wrappers do."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Odd()

    def __setstate__(self, state):
        vars(self).update(state)


def test_datasets_that_have_every_attribute():
    loader = stocache.DataLoader(Odd(), 8, num_workers=1)
    assert len(list(loader)) == 7
    assert loader.stats().hit_rate is None


def test_getitems_of_odd_types_are_collated_as_by_torch():
    class Keys(Images):
        def __getitems__(self, indices):
            return {idx: self[idx] for idx in indices}

    batches = iter(stocache.DataLoader(Keys(), batch_sampler=[[3, 4]], num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(KeyError, match="Caught KeyError in DataLoader worker"):
        next(batches)
    batches._shutdown_workers()  # the traceback holds it, so it would wait for the garbage collector, and then 5 seconds


def test_statistics_after_the_dataset_was_closed():
    with CachedDataset(Images(), 1) as dataset:
        loader = stocache.DataLoader(dataset, 8)
        list(loader)
    assert loader.stats().hit_rate is None
    assert loader.stats().batches == 7
    del loader
    gc.collect()


class EagerBatches:
    """Draws when it is asked for an iterator, not later; and counts how often that is."""

    def __init__(self, draw):
        self.draw, self.asked = draw, 0

    def __len__(self):
        return 5

    def __iter__(self):
        self.asked += 1
        order = list(range(20))
        if self.draw == "torch":
            order = torch.randperm(20).tolist()
        else:
            random.shuffle(order)
        return iter([order[start : start + 4] for start in range(0, 20, 4)])


@pytest.mark.parametrize("draw", ["torch", "random"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_samplers_that_begin_at_once_are_asked_as_by_torch(draw, workers):
    ours, theirs = EagerBatches(draw), EagerBatches(draw)
    assert agree(
        stocache.DataLoader(Images(), batch_sampler=ours, **workers),
        torch.utils.data.DataLoader(Images(), batch_sampler=theirs, **workers),
    )
    assert ours.asked == theirs.asked


# ---------------------------------------------------------------------------------------------------- epochs


class Epochal(Images):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, idx):
        return idx, self.epoch


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(N))], ids=["itself", "subset"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_set_epoch_reaches_the_dataset_in_persistent_workers(workers, wrap):
    loader = stocache.DataLoader(wrap(Epochal()), batch_size=8, **workers)
    for epoch in (4, 5, 9):
        loader.set_epoch(epoch)
        for _, epochs in loader:
            assert set(epochs.tolist()) == {epoch}


@pytest.mark.parametrize("inside", [False, True])
def test_set_epoch_reaches_the_sampler(inside):
    sampler = torch.utils.data.DistributedSampler(Images(), 2, 0, seed=1)
    options = {"batch_sampler": BatchSampler(sampler, 8, False)} if inside else {"sampler": sampler, "batch_size": 8}
    loader = stocache.DataLoader(Images(), **options)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([label for _, labels in loader for label in labels.tolist()])
        assert sampler.epoch == epoch
    assert len({tuple(order) for order in orders}) == 3


def test_indices_travel_as_what_they_are():
    class Echo(Dataset):
        def __len__(self):
            return 1 << 40

        def __getitem__(self, idx):
            return [type(idx).__name__, idx]

    batches = [
        [0, 1, 65535], [65536, 3], [1 << 24, 7], [(1 << 32) - 1], [1 << 33, 2], [-1, 4], [np.int64(3)], ["a", "b"], [], (1, 2),
        range(3), [True, False], [2.5],
    ]  # fmt: skip
    loader = stocache.DataLoader(Echo(), batch_sampler=batches, num_workers=1, collate_fn=list, multiprocessing_context="fork")
    came = list(loader)
    assert came == [[[type(idx).__name__, idx] for idx in batch] for batch in batches]
