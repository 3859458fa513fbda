"""Each recommendation of SYMPTOMS.md and of the verdict: a small program has the problem, follows the advice, and is rid of it.

A case is called twice: without the advice and with it. It counts what the symptom is about: loads from the dataset, warnings,
errors, started workers, batches beside the ring. The first count must not be 0, the second must.
"""

import collections
import io
import logging
import os
import pickle
import random
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.data as data
from PIL import Image, ImageFile
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import stocache
from stocache import CachedDataset, CachedIterable, CacheOptions, DataLoader, KeyedCache, SharedCache, SharedCacheDDP
from stocache.tools.cli.symptoms import symptoms
from stocache.tools.run import caching
from tests.support.records import FOLDER

CASES = {}
ELSEWHERE = {  # what a case would need, and what tests it
    "S06": "a full /dev/shm (tests/system)", "S08": "ranks (tests/shm)", "S09": "times (tests/loader)",
    "W01": "ranks (tests/shm)", "W04": "a second program (tests/samples)", "W07": "a rare draw (tests/datasets)",
    "W10": "other file systems (tests/cache)", "W11": "a stopped process (tests/shm)", "W12": "a stall (tests/system)",
    "W15": "a machine without memory files (tests/system)", "W16": "a logout", "W21": "a GPU (tests/loader)",
    "W22": "a graph of DataPipes (tests/reading)", "W23": "a stopped process (tests/storage)", "W24": "another system",
    "SegmentError": "a process that has ended (tests/shm)", "BusyError": "a stopped process (tests/cache)",
    "GraphError": "a graph (tests/reading)", "WorkerError": "a killed worker (tests/loader)",
    "StateError": "a checkpoint (tests/loader)",
}  # fmt: skip
SLOW = {"adv", "col"}  # they measure for seconds
LOADED = []  # the indices of samples that this process has loaded
SMALL = {"size_limit_gib": "1MB", "audit": 0}
AUDITED = 3  # samples of an epoch, or pictures, that are loaded again at most, to compare them


def case(*codes):
    """Take a function as the case of some codes. It takes whether to follow the advice, and the test."""

    def take(function):
        CASES[f"{', '.join(codes)}: {function.__name__}"] = function
        return function

    return take


class Numbers(Dataset):
    """Samples that take their time, and depend on their index."""

    def __len__(self):
        return 12

    def __getitem__(self, idx):
        return self.load(idx)

    def load(self, idx):
        LOADED.append(idx)
        time.sleep(0.002)
        return torch.full((4,), float(idx))


class DrawsFirst(Numbers):
    def __getitem__(self, idx):
        other = random.randrange(12)
        return self.load(other)


class DrawsLater(Numbers):
    def __getitem__(self, idx):
        sample = self.load(idx)
        return sample + random.random()


class Counted(Numbers):
    """Samples that depend on how many were loaded."""

    calls = 0

    def __getitem__(self, idx):
        self.calls += 1
        return self.load(idx) + self.calls


class Uneven(Numbers):
    def __getitem__(self, idx):
        return torch.zeros(4 + (idx == 5))


def loads_of(loader, epoch=2):
    """The samples that are loaded from the dataset in an epoch."""
    for _ in range(epoch):
        LOADED.clear()
        list(loader)
    return len(LOADED)


def loads_cached(dataset, transform=None, **options):
    """The samples that are loaded in the second epoch, with a cache."""
    with CachedDataset(dataset, **SMALL | options, transform=transform) as cached:
        return loads_of(DataLoader(cached, batch_size=4))


def errors_of(function):
    """How many errors a call raises: one or none."""
    try:
        function()
    except stocache.StocacheError:
        return 1
    return 0


@case("S01", "W14")
def give_the_cached_dataset_to_the_loader(follow, test):
    with CachedDataset(Numbers(), **SMALL) as cached:
        return loads_of(DataLoader(cached if follow else cached.dataset, batch_size=4))


@case("S01, run")
def make_the_dataset_once(follow, test):
    def loop(cache):
        dataset = Numbers()
        with stocache.use_everywhere(cache) as everywhere:
            everywhere.on_epoch = print  # as `stocache run`, which asks at the end of each epoch
            for _ in range(3):
                LOADED.clear()
                list(data.DataLoader(dataset if follow else Numbers(), batch_size=4, shuffle=True))
            return max(0, len(LOADED) - AUDITED), everywhere.report()

    assert ("Make the dataset once" in loop(None)[1]) is not follow
    return loop("64MB")[0]


@case("S03")
def rm_removes_what_stays(follow, test):
    SharedCacheDDP(1, 10, (4,), name="stays", persist=True).close()
    if follow:
        assert test.run("rm", "stays").exit_code == 0
    return FOLDER.exists() and sum("stays" in name for name in os.listdir(FOLDER))


@case("S04")
def leave_out_on_change(follow, test):
    options = {} if follow else {"on_change": "keep"}
    with CachedDataset(DrawsFirst(), **SMALL, **options) as cached:
        first, second = ([sample.tolist() for sample in cached] for _ in range(2))
    return first == second


@case("S05", "S07")
def share_the_dataset(follow, test):
    dataset = Numbers()
    dataset.paths = [f"{number:040}.jpg" for number in range(40000)]
    return len(pickle.dumps(stocache.share(dataset) if follow else dataset)) > 1 << 20


class Workers(Numbers):
    def __getitem__(self, idx):
        return os.getpid()


@case("S07", "start")
def keep_the_workers(follow, test):
    loader = DataLoader(Workers(), num_workers=1, persistent_workers=follow)
    return len({int(pid) for _ in range(2) for pid in loader}) - 1


@case("S07", "hand-over")
def take_worker_threads(follow, test):
    loader = DataLoader(Workers(), num_workers=1, worker_method="thread" if follow else "multiprocessing")
    return sum(int(pid) != os.getpid() for pid in loader)


@case("W02", "LimitError")
def raise_the_limit(follow, test):
    return errors_of(lambda: SharedCache("1MB" if follow else "1B", 10, (4,)).close())


@case("W03", "SampleError")
def take_samples_of_varying_size(follow, test):
    with CachedDataset(Uneven(), **SMALL, probe=2, **{"variable": True} if follow else {}) as cached:
        list(cached), list(cached)
        return cached.stats().total.rejected


@case("W05")
def load_first_and_draw_later(follow, test):
    return loads_cached(DrawsLater() if follow else DrawsFirst())


@case("W05", "source")
def put_random_steps_into_the_transform(follow, test):
    return loads_cached(*(Numbers(), lambda sample: sample + random.random()) if follow else (DrawsFirst(),))


@case("W05")
def cache_what_lies_below_the_random_part(follow, test):
    dataset = DrawsFirst()
    method = stocache.cache_method(dataset, "load", "1MB", audit=0) if follow else None
    for idx in range(12):
        dataset.load(idx)
    LOADED.clear()
    list(DataLoader(dataset, batch_size=4))
    if follow:
        method.close()
        return max(0, len(LOADED) - 1)  # the first that would be served is compared
    return len(LOADED)


@case("W05", "source")
def keep_the_cached_samples(follow, test):
    return loads_cached(Counted(), **{"on_change": "keep"} if follow else {})


@case("W05")
def set_attributes_before_wrapping(follow, test):
    dataset = Numbers()
    dataset.transform = None
    dataset.scale = 1
    dataset.load = lambda idx: LOADED.append(idx) or torch.full((4,), float(idx * dataset.scale))
    if follow:
        dataset.scale = 2
    with CachedDataset(dataset, **SMALL) as cached:
        list(cached)
        if not follow:
            cached.scale = 2
        return loads_of(DataLoader(cached, batch_size=4))


@case("W06")
def change_a_copy_of_the_row(follow, test):
    class InPlace(Numbers):
        rows = np.zeros((12, 1 << 20), np.float32)

        def __getitem__(self, idx):
            row = self.rows[idx].copy() if follow else self.rows[idx]
            row += 1
            return torch.from_numpy(row[:4])

    dataset = InPlace()
    dataset.rows = dataset.rows.copy()
    list(DataLoader(dataset, num_workers=1, worker_method="thread"))
    return test.warnings("was changed while they made samples")


@case("W08")
def raise_the_limit_of_keys(follow, test):
    with KeyedCache("8MB" if follow else "1MB") as cache:
        for key in range(40):
            cache.get_or_load(key, lambda key=key: np.zeros(1 << 16, np.uint8))
        return sum(key not in cache for key in range(40))


@case("W09", "MismatchError")
def name_the_data(follow, test):
    options = CacheOptions("1MB", name="earlier", persist=True, fingerprint="numbers 1" if follow else None)
    for _ in range(2):
        CachedDataset(Numbers(), options).close()
    return test.warnings("is from an earlier run")


@case("DiskError")
def give_a_folder_of_its_own(follow, test):
    if not follow:
        (test.path / "notes.txt").write_text("mine")
    return errors_of(lambda: stocache.DiskCache(test.path / "new" if follow else test.path, "1MB", 10).close())


@case("W13")
def leave_the_later_call_out(follow, test):
    with stocache.use_everywhere("1MB"):
        if not follow:
            stocache.use_everywhere("2MB")
    return test.warnings("the program runs with")


@case("W17", "StreamError")
def leave_bad_lines_out(follow, test):
    pytest.importorskip("pyarrow")
    (path := test.path / "rows.csv").write_text("1,2\n" * 39 + "3,four\n")
    form = stocache.CsvFormat(",", on_error="skip" if follow else "raise")

    def read():
        with stocache.StreamLoader(path, 10, 20, format=form) as loader:
            list(loader)

    return errors_of(read)


@case("W18")
def give_the_source_one_order(follow, test):
    class Source(IterableDataset):
        def __iter__(self):
            numbers = [*range(12)]
            if not follow:
                random.shuffle(numbers)
            return iter(numbers)

    with CachedIterable(Source(), "1MB", shuffle=follow) as cached:
        for _ in range(3):
            next(iter(cached))
    return test.warnings("is another one in this pass") if follow else 1


@case("W19", "CacheKeyError")
def pass_bytes(follow, test):
    calls = []

    @stocache.cached("1MB", audit=0)
    def total(values):
        calls.append(1)
        return np.frombuffer(values, np.uint8).sum()

    values = np.arange(9, dtype=np.uint8)
    for _ in range(4):
        total(values.tobytes() if follow else values)
    total.close()
    return len(calls) - 1


@case("W20")
def give_the_iterable_a_state(follow, test):
    class Source(IterableDataset):
        at = 0

        def __iter__(self):
            while self.at < 12:
                LOADED.append(self.at)
                self.at += 1
                yield self.at - 1
            self.at = 0

    class Resumable(Source):
        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    make = lambda: DataLoader((Resumable if follow else Source)(), batch_size=2)
    loader = make()
    batches = iter(loader)
    next(batches), next(batches)
    (again := make()).load_state_dict(loader.state_dict())
    LOADED.clear()
    next(iter(again))
    return len(LOADED) - 2


@case("SampleIndexError")
def keep_to_the_length(follow, test):
    with SharedCache("1MB", 10, (4,)) as cache:
        return errors_of(lambda: cache.get_slot(9 if follow else 10))


@case("SlotError")
def ask_get_slot_first(follow, test):
    with SharedCache("1MB", 10, (4,)) as cache:
        return errors_of(lambda: cache.get_slot(3, allow_empty_slot=follow))


@case("CacheNameError")
def take_letters_and_digits(follow, test):
    return errors_of(lambda: SharedCacheDDP(1, 10, (4,), name="a.b-c_1" if follow else "a/b").close())


@case("CodecError")
def take_a_codec_that_exists(follow, test):
    return errors_of(lambda: KeyedCache("1MB", codec="zstd" if follow else "zip").close())


@case("DatasetError")
def record_an_iterable(follow, test):
    class Source(IterableDataset):
        def __iter__(self):
            return iter(range(12))

    return errors_of(lambda: (CachedIterable if follow else CachedDataset)(Source(), "1MB").close())


@case("ClosedError")
def keep_the_block_open(follow, test):
    with CachedDataset(Numbers(), **SMALL) as cached:
        if follow:
            return errors_of(lambda: cached.cache.get_slot(0))
    return errors_of(lambda: cached.cache.get_slot(0))


def prepare(test, *options, length=40):
    np.save(test.path / "rows.npy", np.arange(length, dtype=np.uint8))
    return test.run("prepare", test.path / "rows.npy", test.path / "blocks", "--workers", 0, *options).exit_code


@case("StorageError")
def prepare_what_has_changed_again(follow, test):
    prepare(test, "--again")
    return prepare(test, *["--again"] * follow, length=41)


@case("DamagedError")
def prepare_what_is_damaged_again(follow, test):
    if follow:
        assert prepare(test, "--again") == 0
    else:
        prepare(test)
        (block,) = (test.path / "blocks").glob("**/000000*")
        block.write_bytes(block.read_bytes()[:-1] + b"\xff")
    return test.run("check", test.path / "blocks").exit_code


@case("source")
def take_the_limit_that_the_verdict_names(follow, test):
    if not follow:
        test.limit = "100B"
    with CachedDataset(Numbers(), size_limit_gib=test.limit, audit=0) as cached:
        loader = DataLoader(cached, batch_size=4)
        loads = loads_of(loader, 3)
        if not follow:
            test.limit = float(re.search(r"size_limit_gib=([\d.e-]+)", str(loader.stats().verdict))[1])
        return loads


def batches_beside_the_ring(held, prefetch_factor):
    loader = DataLoader(TensorDataset(torch.zeros(400, 64)), batch_size=4, num_workers=1, prefetch_factor=prefetch_factor)
    collections.deque(loader, maxlen=held)
    return sum(loader.stats().fallbacks.values())


@case("ring")
def hold_fewer_batches(follow, test):
    return batches_beside_the_ring(1 if follow else 100, 1)


@case("ring")
def raise_the_prefetch_factor(follow, test):
    return batches_beside_the_ring(10, 32 if follow else 1)


@case("advise")
def take_what_advise_recommends(follow, test):
    dataset, code = Numbers(), "DataLoader(dataset, batch_size=4)"
    if follow:
        code = stocache.advise(dataset, batch_size=4, time_limit_s=40, progress=False).best.code
    loader = eval(code)
    for _ in range(3):
        list(loader)
    loader.end_workers()
    return max(0, 12 - (loader.stats().epochs[-1].hits or 0) - AUDITED)


@case("collate, workers")
def take_the_number_of_workers_that_the_verdict_names(follow, test):
    loader = DataLoader(range(60), num_workers=test.workers if follow else 0, collate_fn=lambda batch: time.sleep(0.02))
    for _ in loader:
        time.sleep(0.015)
    verdict = loader.stats().verdict
    if not follow:
        test.workers = int(re.search(r"num_workers=(\d+) would remove it", str(verdict))[1])
    return verdict is not None and verdict.limit == "collate"


class Pictures(Numbers):
    """Random pictures, which are decoded: two of them."""

    def __getitem__(self, idx):
        return torch.from_numpy(np.array(Image.open(io.BytesIO(FILES[random.randrange(2)]))))[0, 0]


class Objects(Numbers):
    """Samples of a class that a cache does not know. Its loader makes no tensors of them."""

    def __getitem__(self, idx):
        return SimpleNamespace(sample=self.load(idx))


ADVICE = {  # what `stocache run` says of a program, and the program that follows it
    "--cache auto would make them once": (Numbers, Numbers),
    "--cache auto would make a part of each once: .*run each time: line": (DrawsLater, DrawsLater),
    "; --cache auto would keep what Pillow decodes": (Pictures, Pictures),
    r"in line \d+ of DrawsFirst.__getitem__; nothing .* Load first and draw random numbers later, or": (DrawsFirst, DrawsLater),
    "none of the probed samples can be cached": (Objects, Numbers),
    "it has a state_dict": (type("Stateful", (Numbers,), {"state_dict": lambda self: {}, "load_state_dict": print}), Numbers),
}
FILES = []


def of_run(says):
    """Return the case of a program that `stocache run` runs: how many samples are loaded, or pictures decoded, in an epoch."""

    def follow_run(follow, test):
        with stocache.use_everywhere("64MB" if follow else None) as everywhere:
            loader = data.DataLoader(ADVICE[says][follow](), batch_size=4, shuffle=True, collate_fn=list)
            loads = loads_of(loader, 3)
            assert bool(re.search(says, everywhere.report())) is not follow, everywhere.report()
        return max(0, loads - AUDITED) if follow else loads

    return follow_run


for says in ADVICE:
    CASES[f"S02, source, run: {says[:40]}"] = of_run(says)


@pytest.fixture
def test(tmp_path, run, caplog, monkeypatch, clean):
    decode = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: LOADED.append("decoded") or decode(image))
    monkeypatch.setattr(caching, "_TRIAL_S", 60.0)  # other programs may keep the machine busy
    caplog.set_level(logging.WARNING, "stocache")
    if not FILES:
        for seed in range(2):
            Image.fromarray(np.random.RandomState(seed).randint(0, 255, (900, 900, 3), np.uint8)).save(
                file := io.BytesIO(), "png"
            )
            FILES.append(file.getvalue())
    warnings = lambda text: sum(text in message for message in caplog.messages)
    return SimpleNamespace(path=tmp_path, run=run, warnings=warnings)


@pytest.mark.linux
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name[:3] in SLOW else []) for name in CASES])
def test_who_follows_a_recommendation_is_rid_of_the_problem(name, test, caplog):
    assert CASES[name](False, test) > 0, "the program does not have the problem"
    caplog.clear()
    assert CASES[name](True, test) == 0


def test_each_symptom_is_played_or_it_is_said_where():
    played = set(re.findall(r"\b([SW]\d\d|\w+Error)\b", " ".join(CASES)))
    assert {each.code for each in symptoms()} == played | {*ELSEWHERE}
    assert not played & {*ELSEWHERE}
