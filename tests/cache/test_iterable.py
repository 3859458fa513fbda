"""A stream that was recorded is replayed without its source, whoever reads it, and never has other samples."""

import pickle
import random

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from stocache import CachedIterable, DataLoader
from tests.support.equality import same

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


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_pass_that_was_left_early_goes_on_and_a_source_without_one_order_is_found_out(shuffled, reads, caplog):
    with CachedIterable(Numbers(reads.path, shuffled=shuffled), "4MB") as dataset:
        items = iter(dataset)
        first = [next(items)["text"] for _ in range(10)]
        del items
        dataset.set_epoch(1)
        assert texts(dataset)[:10] == first
        assert reads() == 10 + N  # ten of them again, to reach the position
        assert shuffled or (texts(dataset), reads()) == (TEXTS, 0)
    assert ("another one in this pass" in caplog.text) == shuffled


@pytest.mark.linux
@pytest.mark.parametrize(("limit", "before", "after"), [
    ("4MB", 2, 3), ("4MB", 2, 0), ("130KB", 2, 3), ("130KB", 2, 2), ("130KB", 0, 2),
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


def test_each_rank_has_a_part_of_its_own_also_in_a_process_that_does_not_know_its_rank(reads, monkeypatch):
    with CachedIterable(Numbers(reads.path, 8), "1MB") as dataset:
        for rank in ("0", "1", "0", "1"):
            with monkeypatch.context() as patch:
                patch.setenv("RANK", rank)
                patch.setenv("WORLD_SIZE", "2")
                packed = pickle.dumps(dataset)
            with pickle.loads(packed) as copied:  # as in a worker that is spawned
                assert texts(copied) == TEXTS[:8]
        assert (reads(), dataset.stats().fills) == (16, 16)


class OwnIterator(IterableDataset):  # as the iterators of LitData
    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return {"at": self.at, "data": torch.full((50,), self.at)}


@pytest.mark.parametrize("limit", ["1MB", "16KB"])  # what does not fit is read again, and comes in its place
def test_a_stream_that_is_its_own_iterator_and_begins_anew_is_recorded(limit):
    with CachedIterable(OwnIterator(), limit) as dataset:
        next(iter(dataset))
        for _ in range(3):
            assert [sample["at"] for sample in dataset] == list(range(1, N + 1))
        assert (len(dataset.cache) == N) == (limit == "1MB")
