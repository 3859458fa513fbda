"""float32 that is made of bytes is stored as these, and comes back to the last bit; other values are not taken."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader, SampleError, SharedCache
from stocache.cache.options import CacheOptions
from stocache.datasets.batches import BatchSpec
from stocache.samples.spec import NarrowLeaf, Structure
from stocache.samples.type_lookup import Unfit
from tests.support.equality import same

N = 40
BYTES = np.arange(256, dtype=np.uint8)


class Images(Dataset):
    """Float images made of bytes, and a label; some of other numbers from an index on."""

    def __init__(self, make, other_from=N, shape=(3, 20, 20)):
        self.make, self.other_from, self.shape = make, other_from, shape

    def __len__(self):
        return N

    def __getitem__(self, idx):
        image = torch.from_numpy(np.random.default_rng(idx).integers(0, 256, self.shape, np.uint8))
        image = self.make(image)
        return (image + 1e-6 if idx >= self.other_from else image), idx


MAKERS = {
    "to tensor": lambda image: image.float().div(255),
    "times": lambda image: image.to(torch.float32) / 255.0,
    "float": lambda image: image.float(),
    "array": lambda image: image.numpy().astype(np.float32) / np.float32(255),
    "channels last": lambda image: (image.float() / 255).permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_way_to_read_gives_what_the_dataset_gives(make, tmp_path):
    dataset = Images(make)
    expected = [dataset[idx] for idx in range(N)]
    with CachedDataset(dataset, "1MB", narrow=True) as cached:
        leaf = cached.cache.structure.leaves[0]
        assert type(leaf) is NarrowLeaf
        assert cached.cache.structure.nbytes == 3 * 20 * 20 + 8
        for _ in range(2):
            assert same([cached[idx] for idx in range(N)], expected)
            assert same(cached.__getitems__(list(range(N))), expected)
            for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}):
                plain = list(TorchDataLoader(dataset, 8))
                if options.get("num_workers") and "worker_method" not in options:
                    options["multiprocessing_context"] = "fork"
                assert same(list(DataLoader(cached, 8, **options)), plain)
        assert cached.stats().total.filled == N
        assert not cached.stats().left
        cached[3][0][...] = 7  # the caller's own
        assert same(cached[3], expected[3])


def test_four_times_as_many_samples_fit(caplog):
    caplog.set_level("INFO", "stocache")
    dataset = Images(MAKERS["to tensor"])
    limit = f"{N + 10 * (4 * 1200 + 8)}B"
    filled = []
    for narrow in (False, True):
        with CachedDataset(dataset, limit, narrow=narrow) as cached:
            for idx in range(N):
                assert same(cached[idx], dataset[idx])
            filled.append(cached.stats().total.filled)
    assert filled == [10, 39]
    assert "3.98 times as many samples fit" in caplog.text


@pytest.mark.parametrize("loader", [None, DataLoader])
def test_a_sample_that_is_made_of_other_numbers_stays_uncached_and_right(loader, caplog):
    dataset = Images(MAKERS["to tensor"], other_from=N - 3)
    with CachedDataset(dataset, "1MB", narrow=True, probe=1) as cached:
        for _ in range(2):
            if loader is None:
                assert same([cached[idx] for idx in range(N)], [dataset[idx] for idx in range(N)])
            else:
                assert same(list(loader(cached, 8)), list(TorchDataLoader(dataset, 8)))
        stats = cached.stats().total
        assert (stats.filled, stats.rejected) == (N - 3, 3)
    assert "is not made of bytes" in caplog.text


def test_where_the_probe_finds_other_numbers_nothing_is_narrowed():
    for make in (lambda image: image.float() / 254, lambda image: torch.randn(3, 4), lambda image: image.double() / 255):
        with CachedDataset(Images(make), "4MB", narrow=True, on_change="keep") as cached:
            assert not cached.cache.structure.is_narrow


def test_on_a_disk_samples_are_narrow_too_and_come_back(tmp_path):
    dataset = Images(MAKERS["to tensor"])
    for _ in range(2):
        with CachedDataset(dataset, "10KB", narrow=True, disk=tmp_path / "d", disk_limit="10MB", fingerprint="v") as cached:
            for _ in range(2):
                assert same(list(DataLoader(cached, 8)), list(TorchDataLoader(dataset, 8)))
                assert same([cached[idx] for idx in range(N)], [dataset[idx] for idx in range(N)])
        assert (tmp_path / "d" / "samples").stat().st_size < 2 * N * 1300


def narrow_leaf(values):
    (leaf,) = Structure.of(values).narrowed([values]).leaves
    return leaf


def taken(leaf, value):
    """Whether a leaf takes a value; demand that it then comes back to the last bit."""
    try:
        narrow = leaf.encode(torch.from_numpy(value))
    except Unfit:
        return False
    again = leaf.decoder()(narrow.tobytes(), 0, True).numpy()
    assert np.array_equal(again.view(np.uint32), value.view(np.uint32))
    return True


@pytest.mark.parametrize("black", [0, 5])
def test_a_second_run_over_a_disk_decides_as_the_first_one_although_samples_fit_both(black, tmp_path):
    def make(image):
        return image.float() * (int(image.sum()) != total)

    total = int(np.random.default_rng(black).integers(0, 256, (3, 20, 20), np.uint8).sum())
    dataset = Images(make)
    for _ in range(2):
        with CachedDataset(dataset, "1MB", narrow=True, disk=tmp_path / "d", disk_limit="10MB", fingerprint="v") as cached:
            assert same([cached[idx] for idx in range(N)], [dataset[idx] for idx in range(N)])


def test_batches_are_gathered_from_a_narrow_cache():
    with CachedDataset(Images(MAKERS["to tensor"]), "1MB", narrow=True) as cached:
        assert BatchSpec.of(cached.cache) is not None


@pytest.mark.parametrize("divisor", [1, 255])
def test_a_leaf_takes_a_value_only_if_what_comes_back_is_the_same_to_the_last_bit(divisor):
    made = BYTES / np.float32(divisor)
    leaf, bits = narrow_leaf(torch.from_numpy(made)), made.view(np.uint32)
    assert leaf.divisor == divisor
    assert taken(leaf, made)
    assert taken(leaf, made[::-1].copy())
    special = np.float32([-0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, -1e-40, 256, -1, 3e38]).view(np.uint32)
    for each in np.concatenate([bits + np.uint32(1), bits[1:] - np.uint32(1), special, np.uint32([0x7FC00001, 0x7F800001])]):
        value = made.copy()
        value[7] = each.view(np.float32)
        assert not taken(leaf, value)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        assert not taken(leaf, rng.integers(0, 2**32, 256, np.uint32).view(np.float32))


def test_a_cache_by_itself_and_its_batches():
    sample = {"x": torch.from_numpy(BYTES / np.float32(255)), "y": 1}
    structure = Structure.of(sample).narrowed([sample])
    with SharedCache.from_options(CacheOptions("1MB"), 10, structure) as cache:
        cache.set_slot(3, sample)
        assert same(cache.get_slot(3), sample)
        assert same(cache.get_slot(3, copy=False), sample)
        rows, mask = cache.get_slots([3, 4, 3])
        assert mask.tolist() == [True, False, True]
        assert same(rows["x"][0], sample["x"])
        assert not rows["x"][1].any()
        cache.set_slots([5, 6], {"x": torch.stack([sample["x"], sample["x"].flip(0)]), "y": torch.tensor([1, 2])})
        assert same(cache.get_slot(6)["x"], sample["x"].flip(0))
        with pytest.raises(SampleError, match="not made of bytes"):
            cache.set_slot(7, sample | {"x": sample["x"] + 1e-7})
        assert same(cache.get_or_load_many([3, 7], lambda indices: [sample] * len(indices)), [sample, sample])
