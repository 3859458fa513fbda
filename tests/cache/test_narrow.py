"""Numbers that are made of small integers are stored as these, and come back to the last bit; other values are not taken."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from stocache import CachedDataset, DataLoader, SegmentError
from stocache.datasets.batches.spec import BatchSpec
from stocache.samples.leaves.kinds import NarrowKind, kind_of
from stocache.samples.leaves.narrow import find
from stocache.samples.record_decoder import reader_of_cache
from stocache.samples.record_encoder import pack_integers
from tests.support.equality import same

N = 40


class Images(Dataset):
    """Float images made of bytes, and a label; some made of other numbers, and one that may be black."""

    def __init__(self, make, others=(), black=N):
        self.make, self.others, self.black = make, others, black

    def __len__(self):
        return N

    def __getitem__(self, idx):
        image = torch.from_numpy(np.random.default_rng(idx).integers(0, 256, (3, 20, 20), np.uint8))
        image = self.make(image * (idx != self.black))
        return (image + 1e-6 if idx in self.others else image), idx


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def normalised(image, constants):
    """As torchvision's ``ToTensor`` and ``Normalize`` do."""
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in constants)
    return image.float().div(255).sub_(mean).div_(std)


MAKERS = {
    "to tensor": lambda image: image.float().div(255), "times": lambda image: image.to(torch.float32) / 255.0,
    "float": lambda image: image.float(), "array": lambda image: image.numpy().astype(np.float32) / np.float32(255),
    "channels last": lambda image: (image.float() / 255).permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "normalised": lambda image: normalised(image, IMAGENET), "float64": lambda image: image.numpy() / 255,
}  # fmt: skip


LOADERS = [{}, {"num_workers": 2, "multiprocessing_context": "fork"}, {"num_workers": 2, "worker_method": "thread"}]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_way_to_read_gives_what_the_dataset_gives(make):
    dataset = Images(make)
    expected, batches = [dataset[idx] for idx in range(N)], list(TorchDataLoader(dataset, 8))
    with CachedDataset(dataset, "1MB", narrow=True) as cached:
        assert type(cached.cache.structure.leaves[0].kind) is NarrowKind
        assert cached.cache.structure.nbytes == 3 * 20 * 20 + 8
        assert (BatchSpec.of(cached.cache) is None) == (make is MAKERS["channels last"])  # else batches are gathered
        for _ in range(2):
            assert same([cached[idx] for idx in range(N)], expected)
            assert same(cached.__getitems__(list(range(N))), expected)
            for options in LOADERS if make is MAKERS["to tensor"] else LOADERS[:1]:
                assert same(list(DataLoader(cached, 8, **options)), batches)
        assert cached.stats().total.filled == N
        assert not cached.stats().left
        cached[3][0][...] = 7  # the caller's own
        assert same(cached[3], expected[3])


def test_four_times_as_many_samples_fit(caplog):
    caplog.set_level("INFO", "stocache")
    dataset = Images(MAKERS["to tensor"])
    limit = f"{N + 10 * (4 * 1200 + 8)}B"
    filled = []
    for narrow in (False, "auto", True):
        with CachedDataset(dataset, limit, narrow=narrow) as cached:
            assert all(same(cached[idx], dataset[idx]) for idx in range(N))
            filled.append(cached.stats().total.filled)
    assert filled == [10, 39, 39]
    assert "float32 made of uint8 / 255 kept as uint8: 3.98 times as many samples fit" in caplog.text
    with CachedDataset(dataset, "1MB", narrow="auto") as cached:
        assert not cached.cache.structure.is_narrow  # all fit


@pytest.mark.parametrize(("others", "probe"), [(range(N - 3, N), 1), ([0], N), ([17], N)], ids=str)
def test_samples_that_are_made_of_other_numbers_stay_uncached_and_right_and_do_not_end_narrowing(others, probe, caplog):
    dataset = Images(MAKERS["to tensor"], others)
    with CachedDataset(dataset, "1MB", narrow=True, probe=probe) as cached:
        assert cached.cache.structure.is_narrow
        for _ in range(2):
            assert same(list(DataLoader(cached, 8)), list(TorchDataLoader(dataset, 8)))
            assert same([cached[idx] for idx in range(N)], [dataset[idx] for idx in range(N)])
        stats = cached.stats().total
        assert (stats.filled, stats.rejected) == (N - len(others), len(others))
    assert "is not made of uint8 / 255" in caplog.text


@pytest.mark.parametrize(("limit", "black"), [("10KB", N), ("1MB", 0), ("1MB", 5)])  # black may be made in several ways
def test_on_a_disk_samples_are_narrow_too_and_a_second_run_decides_as_the_first(limit, black, tmp_path):
    dataset = Images(MAKERS["float"], black=black)
    for _ in range(2):
        with CachedDataset(dataset, limit, narrow=True, disk=tmp_path, disk_limit="10MB", fingerprint="v") as cached:
            for _ in range(2):
                assert same(list(DataLoader(cached, 8)), list(TorchDataLoader(dataset, 8)))
                assert same([cached[idx] for idx in range(N)], [dataset[idx] for idx in range(N)])
        assert (tmp_path / "samples").stat().st_size < 2 * N * 1300


RNG = np.random.default_rng(0)
GREY = np.repeat(RNG.integers(0, 256, (1, 64, 64), np.uint8), 3, 0)
PIXELS = RNG.integers(0, 256, (3, 64, 64), np.uint8)
AS_FOUND = {
    "uint8": PIXELS.astype(np.float32),
    "uint8 / 255": (PIXELS / np.float64(255)),
    "(uint8 / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]": normalised(torch.from_numpy(PIXELS), IMAGENET).numpy(),
    "(uint8 / 255 - [0.5, 0.5, 0.5]) / [0.5, 0.5, 0.5]": PIXELS.astype(np.float32) / np.float32(127.5) - np.float32(1),
    "(uint8 / 255 - [0.1307]) / [0.3081]": normalised(torch.from_numpy(PIXELS[:1]), ((0.1307,), (0.3081,))).numpy(),
    "(uint8 - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]":
        (PIXELS.transpose(1, 2, 0) - np.float32([123.675, 116.28, 103.53])) / np.float32([58.395, 57.12, 57.375]),
    "int16": RNG.integers(-1000, 3000, (64, 64)).astype(np.float32),
    "uint16": RNG.integers(0, 60000, (64, 64)),
    "uint16 / 65535": RNG.integers(0, 65536, (64, 64)).astype(np.float32) / np.float32(65535),
    "uint8 x 3": GREY,
    "(uint8 / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225] x 3": normalised(torch.from_numpy(GREY), IMAGENET).numpy(),
}  # fmt: skip


@pytest.mark.parametrize("way", AS_FOUND)
def test_how_values_are_made_is_found_and_makes_them_again(way):
    values = AS_FOUND[way]
    narrowing = find([values], values.shape)
    assert str(narrowing) == way
    flat = np.ascontiguousarray(values).reshape(-1)
    narrow, again = narrowing.narrow(flat), np.empty_like(flat)
    narrowing.widen(narrow, again)
    assert again.tobytes() == flat.tobytes()
    assert narrow.nbytes * 2 <= flat.nbytes
    bits, is_float, above = np.dtype(f"u{flat.itemsize}"), flat.dtype.kind == "f", np.iinfo(narrow.dtype).max + 1.0
    for number in range(300):
        other, most = flat.copy(), 2 if number % 2 else np.iinfo(bits).max  # the neighbouring number, or any
        other.view(bits)[RNG.integers(flat.size)] ^= RNG.integers(1, most, dtype=bits)
        narrow = narrowing.narrow(other)
        assert narrow is None or not is_float
        if narrow is not None:  # an integer in the range
            narrowing.widen(narrow, again)
            assert again.tobytes() == other.tobytes()
    for value in (-0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, -1e-40, above, 3e38) if is_float else ():
        other = flat.copy()
        other[-1] = value
        assert narrowing.narrow(other) is None


@pytest.mark.parametrize("values", [
    RNG.standard_normal((3, 64, 64)), RNG.integers(0, 2**40, (64, 64)), PIXELS, PIXELS[:1, :3, :3].astype(np.float32),
    (PIXELS / 255).astype(np.float16), PIXELS > 3, PIXELS.astype(">f4"), np.where(PIXELS > 9, -0.0, PIXELS.astype(np.float32)),
], ids=lambda values: f"{values.dtype} {values.size}")  # fmt: skip
def test_what_is_not_made_of_small_integers_is_not_narrow(values):
    assert find([values], values.shape) is None


class Varied(Images):
    """Images of several sizes with text, of which a few are of other numbers."""

    def __getitem__(self, idx):
        image = torch.from_numpy(np.random.default_rng(idx).integers(0, 256, (3, 16 + idx % 7, 20), np.uint8))
        return {
            "image": self.make(image) + (idx in self.others) * 1e-6, "mask": (image[0] % 5).long(), "name": f"image {idx}",
        }  # fmt: skip


@pytest.mark.parametrize(("make", "codec"), [("to tensor", "lz4"), ("array", None), ("normalised", None)])
def test_samples_of_varying_size_are_kept_narrow_or_wide_each(make, codec, caplog):
    pytest.importorskip(codec or "stocache", reason="lz4 comes with the extra codecs")
    caplog.set_level("INFO", "stocache")
    dataset = Varied(MAKERS[make], others=range(N - 3, N))
    expected = [dataset[idx] for idx in range(N)]
    filled = []
    for narrow in (False, "auto"):
        with CachedDataset(dataset, "120KB", narrow=narrow, probe=4, codec=codec) as cached:
            for _ in range(2):
                assert same([cached[idx] for idx in range(N)], expected)
            assert cached.stats().total.rejected == 0
            filled.append(cached.stats().total.filled)
    assert filled[1] > filled[0] * (2 if codec is None else 1)
    assert "times as many samples fit" in caplog.text


WIDE = ("tensor", "float32", 2)


def test_a_forged_way_to_make_numbers_or_a_record_of_it_with_other_channels_is_refused():
    for facts in ((WIDE, "<i8", 1, 1, (), ()), (WIDE, "|u1", 1, 1, (1.0,), (0.0,)), (("str",), "|u1", 1, 1, (), ())):
        with pytest.raises(ValueError, match=r"does not hold numbers|no way to make numbers"):
            kind_of(("narrow", *facts, False))
    reader = reader_of_cache(repr(("narrow", WIDE, "|u1", 255, 1, (0.5, 0.5), (0.5, 0.5), False)).encode(), False)
    tail, packed = pack_integers([3, 2])
    with pytest.raises(SegmentError, match="damaged"):
        reader.read(bytes(6) + tail, 0, 6, packed, True)
