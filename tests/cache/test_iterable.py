"""A stream that was recorded is replayed without its source, whoever reads it, and never has other samples."""

import multiprocessing
import random

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from stocache import CachedIterable, DataLoader
from tests.support.equality import same
from tests.support.processes import leave_process_group, run_all

N = 60


class Numbers(IterableDataset):
    """Numbers, divided among workers, each of which is noted when it is read."""

    def __init__(self, log, length=N, shuffled=False):
        self.log, self.length, self.shuffled, self.epoch = log, length, shuffled, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers = list(range(number, self.length, workers))
        if self.shuffled:
            random.Random(self.epoch).shuffle(numbers)
        for each in numbers:
            with self.log.open("a") as log:
                log.write(f"{each}\n")
            yield {"x": torch.full((500,), each), "text": str(each)}


@pytest.fixture
def reads(tmp_path):
    """A function that returns how many samples were read of the source since it was last called."""
    path, seen = tmp_path / "log", [0]
    path.touch()

    def count():
        before, seen[0] = seen[0], len(path.read_text().split())
        return seen[0] - before

    count.path = path
    return count


TEXTS = [str(number) for number in range(N)]


def texts(dataset, loader=TorchDataLoader, num_workers=0, **options):
    method = "fork" if num_workers else None
    loader = loader(dataset, 4, num_workers=num_workers, multiprocessing_context=method, **options)
    return [text for batch in loader for text in batch["text"]]


@pytest.mark.linux
@pytest.mark.parametrize(("loader", "options"), [
    (TorchDataLoader, {}), (DataLoader, {}), (TorchDataLoader, {"num_workers": 2}),
    (DataLoader, {"num_workers": 3, "persistent_workers": True}),
], ids=str)  # fmt: skip
def test_the_first_pass_reads_the_source_and_later_ones_do_not(reads, options, loader):
    plain = texts(Numbers(reads.path), **options)
    reads()
    with CachedIterable(Numbers(reads.path), "4MB") as dataset:
        assert [texts(dataset, loader, **options) for _ in range(3)] == [plain] * 3
        assert reads() == N
        sample = dataset.cache.get((0, 1, options["num_workers"], 0, 1)) if options else list(dataset)[1]
        assert same(sample["x"], torch.full((500,), options.get("num_workers", 1)))


def test_what_does_not_fit_is_read_again_and_comes_in_its_place(reads):
    with CachedIterable(Numbers(reads.path), "130KB") as dataset:
        assert [texts(dataset) for _ in range(3)] == [TEXTS] * 3
        assert 5 < dataset.stats().filled < N
        assert reads() == 3 * N


def test_a_pass_that_was_left_early_goes_on_behind_what_it_has_recorded(reads):
    with CachedIterable(Numbers(reads.path), "4MB") as dataset:
        items = iter(dataset)
        assert [next(items)["text"] for _ in range(10)] == TEXTS[:10]
        del items
        assert reads() == 10
        for expected in (N, 0):  # ten of them to reach the position
            assert texts(dataset) == TEXTS
            assert reads() == expected


def test_a_source_without_one_order_is_found_out_when_a_pass_goes_on(reads, caplog):
    with CachedIterable(Numbers(reads.path, shuffled=True), "4MB") as dataset:
        items = iter(dataset)
        first = [next(items)["text"] for _ in range(10)]
        del items
        dataset.set_epoch(1)
        assert texts(dataset)[:10] == first
    assert "another one in this pass" in caplog.text


@pytest.mark.linux
@pytest.mark.parametrize(("limit", "before", "after"), [
    *(("4MB", *workers) for workers in ((2, 3), (3, 2), (2, 0))),
    *(("130KB", *workers) for workers in ((2, 3), (2, 2), (2, 0), (0, 2))),
])  # fmt: skip
def test_other_workers_divide_what_is_recorded_and_read_what_did_not_fit(reads, limit, before, after):
    with CachedIterable(Numbers(reads.path), limit) as dataset:
        texts(dataset, num_workers=before)
        reads()
        for _ in range(2):
            assert sorted(texts(dataset, num_workers=after)) == sorted(TEXTS)
        assert (reads() == 0) == (limit == "4MB")


def test_it_is_shuffled_by_the_seed_and_the_epoch_or_by_torchs_random_numbers(reads):
    with CachedIterable(Numbers(reads.path), "4MB", shuffle=True, seed=5) as dataset:
        assert texts(dataset) == TEXTS
        orders = []
        for epoch in (0, 1, 0):
            dataset.set_epoch(epoch)
            orders.append(texts(dataset))
        assert orders[0] == orders[2] != orders[1]
        assert sorted(orders[0]) == sorted(TEXTS) != orders[0]
        dataset.epoch = None
        torch.manual_seed(3)
        one, other = texts(dataset), texts(dataset)
        torch.manual_seed(3)
        assert one == texts(dataset) != other
        assert reads() == N


def test_by_a_name_and_on_a_disk_the_next_run_reads_nothing(reads, tmp_path):
    options = {"disk": tmp_path / "d", "disk_limit": "20MB", "fingerprint": "v1"}
    for expected in (N, 0):
        with CachedIterable(Numbers(reads.path), "60KB", **options) as dataset:
            assert texts(dataset) == TEXTS
            assert reads() == expected


def test_hugging_face_streams_are_recorded():
    datasets, loads = pytest.importorskip("datasets"), []

    def rows():
        for number in range(20):
            loads.append(number)
            yield {"text": str(number)}

    stream = datasets.IterableDataset.from_generator(rows).map(lambda row: {"text": row["text"] + "!"})
    with CachedIterable(stream, "4MB") as dataset:
        for _ in range(3):
            dataset.set_epoch(0)
            assert texts(dataset) == [f"{number}!" for number in range(20)]
    assert loads == list(range(20))


def test_a_source_that_gets_shorter_is_replayed_as_far_as_it_goes(reads, caplog):
    source = Numbers(reads.path)
    with CachedIterable(source, "130KB") as dataset:
        texts(dataset)
        source.length = 50
        assert texts(dataset) == TEXTS[:50]
    assert "ends earlier" in caplog.text


def of_rank(rank, dataset, folder):
    """Take a pass by spawned workers, which know nothing of ranks, as one of two ranks of a group."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    dataset.dataset.first = 100 * rank
    texts = [
        text for batch in TorchDataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn") for text in batch["text"]
    ]
    assert texts == [str(100 * rank + number) for number in range(8)]
    leave_process_group()


class Ranked(IterableDataset):
    first = 0

    def __iter__(self):
        for number in range(8):
            yield {"text": str(self.first + number)}


@pytest.mark.slow
def test_ranks_that_share_a_cache_by_name_have_parts_of_their_own(tmp_path):
    with CachedIterable(Ranked(), "1MB", name="streams") as dataset:
        run_all(multiprocessing.get_context("spawn"), 2, of_rank, dataset, tmp_path)
        run_all(multiprocessing.get_context("spawn"), 2, of_rank, dataset, tmp_path / "..")
        assert dataset.stats().fills == 16


@pytest.mark.linux
def test_persistent_workers_get_another_order_in_each_pass(reads):
    with CachedIterable(Numbers(reads.path), "4MB", shuffle=True) as dataset:
        loader = TorchDataLoader(dataset, 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        orders = [[text for batch in loader for text in batch["text"]] for _ in range(4)]
        assert len({tuple(order) for order in orders}) == 4
        assert len({tuple(sorted(order)) for order in orders}) == 1


class OwnIterator(IterableDataset):  # as those of LitData
    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return {"at": self.at, "data": torch.full((50,), self.at)}


@pytest.mark.parametrize("limit", ["1MB", "16KB"])
def test_a_stream_that_is_its_own_iterator_and_begins_anew_is_recorded(limit):
    with CachedIterable(OwnIterator(), limit) as dataset:
        next(iter(dataset))
        for _ in range(3):
            assert [sample["at"] for sample in dataset] == list(range(1, N + 1))
        assert (len(dataset.cache) == N) == (limit == "1MB")


def test_a_cache_that_is_cleared_in_a_pass_and_a_list_in_place_of_a_dataset(reads):
    with CachedIterable(Numbers(reads.path), "4MB", shuffle=True) as dataset:
        list(dataset)
        items = iter(dataset)
        first = [next(items)["text"] for _ in range(5)]
        dataset.cache.clear()
        assert sorted(first + [item["text"] for item in items]) == sorted(TEXTS)
    with CachedIterable([5, 6, 7], "1MB") as dataset:
        assert (len(dataset), list(dataset), dataset.stats().hits) == (3, [5, 6, 7], 0)
