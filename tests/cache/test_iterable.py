"""A stream that was recorded is replayed without its source, whoever reads it, and never has other samples."""

import multiprocessing
import random

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from stocache import CachedDataset, CachedIterable, DataLoader, DatasetError
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


def texts(dataset, loader=TorchDataLoader, **options):
    if options.get("num_workers"):
        options |= {} if "worker_method" in options else {"multiprocessing_context": "fork"}
    return [text for batch in loader(dataset, 4, **options) for text in batch["text"]]


@pytest.mark.linux
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 3, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("loader", [TorchDataLoader, DataLoader])
def test_the_first_pass_reads_the_source_and_later_ones_do_not(reads, options, loader):
    plain = texts(Numbers(reads.path), **options)
    reads()
    with CachedIterable(Numbers(reads.path), "4MB") as dataset:
        assert [texts(dataset, loader, **options) for _ in range(3)] == [plain] * 3
        assert reads() == N
        samples = list(dataset) if not options else [dataset.cache.get((0, 1, options["num_workers"], 0, 1))]
        assert same(samples[1 if not options else 0]["x"], torch.full((500,), options.get("num_workers", 1)))


def test_what_does_not_fit_is_read_again_and_comes_in_its_place(reads):
    with CachedIterable(Numbers(reads.path), "130KB") as dataset:
        assert [texts(dataset) for _ in range(3)] == [[str(number) for number in range(N)]] * 3
        first = dataset.stats().filled
        assert 5 < first < N
        assert reads() == 3 * N


def test_a_pass_that_was_left_early_goes_on_behind_what_it_has_recorded(reads):
    with CachedIterable(Numbers(reads.path), "4MB") as dataset:
        items = iter(dataset)
        assert [next(items)["text"] for _ in range(10)] == [str(number) for number in range(10)]
        del items
        assert reads() == 10
        assert texts(dataset) == [str(number) for number in range(N)]
        assert reads() == N  # ten of them to reach the position
        assert texts(dataset) == [str(number) for number in range(N)]
        assert reads() == 0


def test_a_source_without_one_order_is_found_out_when_a_pass_goes_on(reads, caplog):
    with CachedIterable(Numbers(reads.path, shuffled=True), "4MB") as dataset:
        items = iter(dataset)
        first = [next(items)["text"] for _ in range(10)]
        del items
        dataset.set_epoch(1)
        assert texts(dataset)[:10] == first
    assert "another one in this pass" in caplog.text


@pytest.mark.linux
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 0), (4, 1)])
def test_with_other_workers_the_recorded_parts_are_divided_among_them(reads, before, after):
    with CachedIterable(Numbers(reads.path), "4MB") as dataset:
        texts(dataset, num_workers=before)
        reads()
        assert sorted(texts(dataset, num_workers=after)) == sorted(map(str, range(N)))
        assert reads() == 0


def test_it_is_shuffled_by_the_seed_and_the_epoch_or_by_torchs_random_numbers(reads):
    with CachedIterable(Numbers(reads.path), "4MB", shuffle=True, seed=5) as dataset:
        plain = texts(dataset)
        assert plain == [str(number) for number in range(N)]
        orders = []
        for epoch in (0, 1, 0):
            dataset.set_epoch(epoch)
            orders.append(texts(dataset))
        assert orders[0] == orders[2] != orders[1]
        assert sorted(orders[0]) == sorted(plain) != orders[0]
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
            assert texts(dataset) == [str(number) for number in range(N)]
            assert reads() == expected


def test_hugging_face_streams_are_recorded(reads):
    datasets = pytest.importorskip("datasets")

    def rows():
        for number in range(20):
            with reads.path.open("a") as log:
                log.write(f"{number}\n")
            yield {"text": str(number)}

    stream = datasets.IterableDataset.from_generator(rows).map(lambda row: {"text": row["text"] + "!"})
    with CachedIterable(stream, "4MB") as dataset:
        for _ in range(3):
            dataset.set_epoch(0)
            assert texts(dataset) == [f"{number}!" for number in range(20)]
        assert reads() == 20


def test_what_is_no_stream_and_one_that_gets_shorter(reads, caplog):
    with pytest.raises(DatasetError, match="goes into CachedDataset"):
        CachedIterable(5)
    with pytest.raises(DatasetError, match="CachedIterable records"):
        CachedDataset(Numbers(reads.path), "1MB")
    source = Numbers(reads.path)
    with CachedIterable(source, "130KB") as dataset:
        texts(dataset)
        source.length = 50
        assert texts(dataset) == [str(number) for number in range(50)]
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


def test_a_stream_that_is_its_own_iterator_and_begins_anew_is_recorded():
    class Stream(IterableDataset):  # as those of LitData
        def __iter__(self):
            self.at = 0
            return self

        def __next__(self):
            if self.at == N:
                raise StopIteration
            self.at += 1
            return {"at": self.at, "data": torch.full((50,), self.at)}

    for limit, kept in (("1MB", N), ("16KB", 0)):
        with CachedIterable(Stream(), limit) as dataset:
            next(iter(dataset))
            for _ in range(3):
                assert [sample["at"] for sample in dataset] == list(range(1, N + 1))
            assert len(dataset.cache) == N if kept else len(dataset.cache) < N


def test_a_cache_that_is_cleared_in_a_pass_and_an_iterator_in_place_of_a_dataset(reads):
    with CachedIterable(Numbers(reads.path), "4MB", shuffle=True) as dataset:
        list(dataset)
        items = iter(dataset)
        first = [next(items)["text"] for _ in range(5)]
        dataset.cache.clear()
        assert sorted(first + [item["text"] for item in items]) == sorted(map(str, range(N)))
    with pytest.raises(DatasetError, match="again and again"):
        CachedIterable(iter([1, 2]))
    with CachedIterable([5, 6, 7], "1MB") as dataset:
        assert (len(dataset), list(dataset)) == (3, [5, 6, 7])
        assert dataset.stats().hits == 0


class Parts(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, 53, step):
            yield torch.full((64,), number)


@pytest.mark.parametrize(("first", "then"), [(2, 0), (0, 2), (2, 3), (2, 2)])
def test_with_other_workers_samples_that_did_not_fit_are_read_of_the_source(first, then):
    with CachedIterable(Parts(), "20KB") as source:
        for workers in (first, then, then):
            loader = TorchDataLoader(
                source, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            assert sorted(int(sample[0]) for sample in loader) == [*range(53)]
