"""Transforms in a dataset are split by the one line: the deterministic beginning before the cache, the rest after it.

Every sample of every epoch is that of the dataset without a cache, bit for bit, and so are the random numbers.
"""

import copy
import logging
import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from benchmark.support.describe import describe, difference
from stocache import CachedDataset, DataLoader, DatasetError, LimitError, deterministic, split_transforms
from tests.support.lookalikes import (
    CenterCrop,
    Compose,
    ImageFolder,
    JointCompose,
    Lambda,
    Normalize,
    PILToTensor,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    StandardTransform,
    ToDtype,
    ToImage,
    ToPILImage,
    ToTensor,
    VisionDataset,
    training,
)

N = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(N):
        (root / f"class{number % 3}").mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"class{number % 3}" / f"{number:02}.png")
    return root


def middle(size=16):
    """Deterministic, random, deterministic."""
    return Compose([Resize(24), CenterCrop(20), RandomCrop(size), RandomHorizontalFlip(), ToTensor()])


def normal():
    return Normalize([0.5] * 3, [0.2] * 3)


def plus_noise(target):
    return target + random.random()


class Detection(VisionDataset):
    """Images with boxes, whose ``transforms`` take both."""

    def __len__(self):
        return N

    def __getitem__(self, idx):
        rng = np.random.default_rng(idx)
        image = Image.fromarray(rng.integers(0, 256, (20 + idx, 30, 3), dtype=np.uint8))
        target = {"boxes": torch.tensor([[1.0, 2.0, 8.0, 9.0]]) + idx, "labels": torch.tensor([idx])}
        return self.transforms(image, target)


class Views(ImageFolder):
    """Several views of each image, as for contrastive learning."""

    def __getitem__(self, index):
        path, target = self.samples[index]
        image = self.loader(path)
        return {"views": [self.transform(image), self.transform(image)], "target": target}


class Transformed(Dataset):
    """What people write to give the parts of a split transforms of their own."""

    def __init__(self, subset, transform):
        self.subset, self.tfm = subset, transform

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, idx):
        image, target = self.subset[idx]
        return self.tfm(image), target


class Steps(ImageFolder):
    """A list of transforms that the dataset itself goes through."""

    def __getitem__(self, index):
        path, target = self.samples[index]
        image = self.loader(path)
        for transform in self.transform:
            image = transform(image)
        return image, target


class Batches(ImageFolder):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def detection(transforms):
    return lambda folder: Detection(transforms=transforms)


MADE = {
    "training": lambda folder: ImageFolder(folder, training(16)),
    "middle": lambda folder: ImageFolder(folder, middle()),
    "target": lambda folder: ImageFolder(folder, middle(), target_transform=plus_noise),
    "only target": lambda folder: ImageFolder(folder, target_transform=plus_noise),
    "sequential": lambda folder: ImageFolder(folder, torch.nn.Sequential(PILToTensorModule(), torch.nn.Dropout(0.5))),
    "nested": lambda folder: ImageFolder(folder, Compose([Compose([Resize(24)]), Compose([RandomCrop(16), ToTensor()])])),
    "opaque": lambda folder: ImageFolder(folder, augment),
    "views": lambda folder: Views(folder, middle()),
    "views of training": lambda folder: Views(folder, training(16)),
    "steps": lambda folder: Steps(folder, [Resize(24), RandomCrop(16), ToTensor()]),
    "batches": lambda folder: Batches(folder, middle()),
    "joint": detection(JointCompose([ToImage(), RandomVerticalFlip(), ToDtype()])),
    "pair": lambda folder: Detection(transform=middle(), target_transform=lambda target: target["labels"]),
    "subset": lambda folder: Subset(ImageFolder(folder, middle()), [7, 3, 5, 11, 0, 1]),
    "parts": lambda folder: Transformed(Subset(ImageFolder(folder), range(1, N)), training(16)),
    "parts, both": lambda folder: Transformed(ImageFolder(folder, Compose([Resize(24), RandomCrop(20)])), training(16)),
    "concatenated": lambda folder: ConcatDataset([ImageFolder(folder, middle()), ImageFolder(folder, training(16))]),
    "split": lambda folder: random_split(ImageFolder(folder, middle()), [8, 4], torch.Generator().manual_seed(0))[0],
}


class PILToTensorModule(torch.nn.Module):
    def forward(self, image):
        return PILToTensor()(Resize(20)(CenterCrop(20)(image))).float()


def augment(image):
    return middle()(image)


def seed(worker=None):
    number = torch.initial_seed() % 2**32 if worker is not None else 0
    random.seed(number)
    np.random.seed(number)
    if worker is None:
        torch.manual_seed(0)


def epochs(dataset, num_workers=0, context=None, count=3):
    """Return the batches of some epochs, and where the random numbers stand after them."""
    seed()
    batches = []
    for _ in range(count):
        options = {"multiprocessing_context": context} if num_workers else {}
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=num_workers, collate_fn=list, worker_init_fn=seed, **options)
        batches += list(loader)
    return describe([batches, torch.rand(()), random.random(), np.random.random()])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.sampled(4)
def test_samples_and_random_numbers_are_those_without_a_cache(name, num_workers, folder, caplog):
    make = MADE[name]
    plain = epochs(make(folder), num_workers, "fork")
    dataset = make(folder)
    before = describe(dataset)
    with CachedDataset(dataset, 1) as cached:
        assert difference(before, describe(dataset)) is None
        assert difference(plain, epochs(cached, num_workers, "fork")) is None
        total = cached.stats().total
        assert (total.misses, total.hits, total.rejected) == (len(dataset), 2 * len(dataset) + probed(cached), 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def probed(cached):
    """Return how many samples the probe loaded, which are hits in the first epoch; it read them itself."""
    return min(8, len(cached))


@pytest.mark.parametrize("limit", [0, "half"])
@pytest.mark.parametrize("name", ["training", "middle", "concatenated"])
def test_half_a_cache_and_none_give_the_same(name, limit, folder):
    dataset = MADE[name](folder)
    with CachedDataset(dataset, 1) as whole:
        whole.warm(progress=False)
        used = whole.cache.stats().used_bytes if hasattr(whole.cache.stats(), "used_bytes") else 20_000
    gib = 0 if limit == 0 else (used / 2 + 5_000) / 2**30
    plain = epochs(MADE[name](folder))
    with CachedDataset(dataset, gib, cut="latest") as cached:
        assert difference(plain, epochs(cached)) is None
        total = cached.stats().total
        assert total.filled < len(dataset)
        assert (total.filled > 0) == (limit != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", "target", "views", "joint", "concatenated", "parts"])
def test_the_split_goes_to_spawned_workers(name, folder):
    plain = epochs(MADE[name](folder), 2, "fork", 2)
    with CachedDataset(MADE[name](folder), 1) as cached:
        assert difference(plain, epochs(cached, 2, "spawn", 2)) is None


def test_a_pickle_has_the_split(folder):
    with CachedDataset(ImageFolder(folder, training(16)), 1) as cached, pickle.loads(pickle.dumps(cached)) as again:
        seed()
        one = describe(cached[3])
        seed()
        assert difference(one, describe(again[3])) is None


def test_one_line_says_what_runs_where(folder, caplog):
    caplog.set_level(logging.INFO)
    with CachedDataset(ImageFolder(folder, training(16)), 1):
        pass
    (line,) = [record.message for record in caplog.records if "before the cache" in record.message]
    assert line.startswith("before the cache: decode; after it: RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize")


def test_transforms_that_two_datasets_share_stay_as_they_are(folder):
    shared = middle()
    steps = list(shared.transforms)
    train, val = ImageFolder(folder, shared), ImageFolder(folder, Compose([*shared.transforms[:2], ToTensor()]))
    with CachedDataset(Subset(train, range(6)), 1) as first, CachedDataset(Subset(val, range(6, N)), 1) as second:
        seed()
        assert first[0][0].shape == (3, 16, 16)
        assert second[0][0].shape == (3, 20, 20)
    assert train.transform is shared
    assert shared.transforms == steps
    assert train.loads == val.loads == 0 or train.loads + val.loads == 2


def test_without_splitting_the_first_version_is_kept(folder, caplog):
    with CachedDataset(ImageFolder(folder, training(16)), 1, split=False) as cached:
        assert torch.equal(cached[0][0], cached[0][0])
    assert "was different the second time it was loaded" in caplog.text


# ------------------------------------------------------------------------------------------------ setting transforms


def test_a_transform_that_is_set_is_split_anew(folder):
    dataset = ImageFolder(folder)
    with CachedDataset(dataset, 1) as cached:
        assert isinstance(cached[0][0], Image.Image)
        cached.transform = training(16)
        assert dataset.transform is cached.transform
        assert difference(epochs(ImageFolder(folder, training(16))), epochs(cached)) is None
        cached.transform = Compose([Resize(20), CenterCrop(20), ToTensor()])
        assert cached[0][0].shape == (3, 20, 20)
        cached.transform = None
        assert isinstance(cached[0][0], Image.Image)


def test_a_transform_with_the_same_beginning_may_be_set(folder):
    with CachedDataset(ImageFolder(folder, middle()), 1) as cached:
        filled = cached.stats().total.filled
        cached.transform = Compose([Resize(24), CenterCrop(20), RandomCrop(8), PILToTensor()])  # of equal steps, not the same
        assert cached[0][0].shape == (3, 8, 8)
        assert cached.stats().total.filled == filled


def test_a_transform_with_another_beginning_is_refused(folder):
    dataset = ImageFolder(folder, middle())
    before = dataset.transform
    with CachedDataset(dataset, 1) as cached:
        for other in (Compose([Resize(28), RandomCrop(8)]), Compose([RandomCrop(8)]), None, augment):
            with pytest.raises(DatasetError, match=r"samples are cached as they are after Resize, CenterCrop.*Set it before"):
                cached.transform = other
        assert dataset.transform is before
        assert cached[0][0].shape == (3, 16, 16)


def test_a_transform_that_is_taken_away_is_refused_if_samples_are_cached_after_it(folder):
    class Plain(Dataset):  # with one attribute only, not three
        def __init__(self, transform):
            self.images, self.tfm = ImageFolder(folder), transform

        def __len__(self):
            return N

        def __getitem__(self, idx):
            image = self.images[idx][0]
            return image if self.tfm is None else self.tfm(image)

    for transform in (middle(), Compose([Resize(24), CenterCrop(20)])):
        dataset = Plain(transform)
        with CachedDataset(dataset, 1) as cached:
            assert min(cached[0].size if isinstance(cached[0], Image.Image) else cached[0].shape[1:]) in (16, 20)
            dataset.tfm = None
            with pytest.raises(DatasetError, match=r"cannot be (set|split any more)"):
                cached[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_that_is_set_behind_the_cache_is_noticed(folder, num_workers):
    dataset = ImageFolder(folder)
    with CachedDataset(dataset, 1) as cached:
        cached.warm(progress=False)
        dataset.transform = training(16)
        assert difference(epochs(ImageFolder(folder, training(16)), num_workers), epochs(cached, num_workers)) is None
        dataset.transform.transforms.insert(0, Resize(18))
        assert difference(epochs(copy.copy(dataset), num_workers), epochs(cached, num_workers)) is None


def test_a_beginning_that_is_changed_behind_the_cache_is_refused(folder):
    dataset = ImageFolder(folder, middle())
    with CachedDataset(dataset, 1) as cached:
        dataset.transform = training(16)
        with pytest.raises(DatasetError, match="samples are cached as they are after Resize, CenterCrop"):
            cached[0]


def test_the_transform_after_the_cache_runs_last(folder):
    with CachedDataset(ImageFolder(folder, middle()), 1, transform={0: torch.neg}) as cached:
        seed()
        image = cached[0][0]
        cached.after_cache = None
        seed()
        assert torch.equal(image, -cached[0][0])
        assert cached.transform is cached.dataset.transform


# ------------------------------------------------------------------------------------------------ where to cut

FIXED = [Resize(24), CenterCrop(20), ToTensor(), normal()]


@pytest.mark.parametrize(("cut", "kind"), [(None, torch.Tensor), ("latest", torch.Tensor), ("smallest", Image.Image)])
def test_the_cut_is_the_latest_while_everything_fits(cut, kind, folder):
    with CachedDataset(ImageFolder(folder, Compose(FIXED)), 1, cut=cut) as cached:
        assert isinstance(cached.cache.get_slot(0)[0], kind)
        assert difference(epochs(ImageFolder(folder, Compose(FIXED))), epochs(cached)) is None


def test_the_cut_is_where_samples_are_smallest_if_not_all_fit(folder, caplog, monkeypatch):
    monkeypatch.setattr("stocache.transforms.planning._NEGLIGIBLE_S", 1.0)  # a busy machine measures more than there is
    caplog.set_level(logging.INFO)
    floats = 20 * 20 * 3 * 4 * N
    with CachedDataset(ImageFolder(folder, Compose(FIXED)), floats * 0.7 / 2**30) as cached:
        assert isinstance(cached.cache.get_slot(0)[0], Image.Image)
        cached.warm(progress=False)
        assert cached.stats().total.filled == N
    (line,) = [record.message for record in caplog.records if "before the cache" in record.message]
    assert "before the cache: decode, Resize, CenterCrop; after it: ToTensor, Normalize" in line
    assert "the latest cut caches 4.7 KiB a sample" in line


@deterministic
class Load:
    """Of a path, an image that takes long to decode."""

    def __call__(self, path):
        for _ in range(20):
            image = Image.open(path).convert("RGB")
            image.load()
        return PILToTensor()(image)


def test_a_path_is_not_cached_instead_of_its_image(folder):
    paths = ImageFolder(folder, Compose([Load()]), loader=str)
    with CachedDataset(paths, 40_000 / 2**30) as cached:
        assert isinstance(next(its for its in map(cached.cache.get_slot, range(N)) if its)[0], torch.Tensor)


@pytest.mark.parametrize(("options", "message"), [({"cut": "middle"}, "cut='middle'"), ({"store": "jpeg"}, "store='jpeg'")])
def test_other_cuts_and_forms_are_refused(options, message):
    with pytest.raises(LimitError, match=message):
        CachedDataset([1, 2], 1, **options)


# ------------------------------------------------------------------------------------------------ files as they are


@pytest.mark.parametrize("num_workers", [0, 2])
def test_encoded_files_are_decoded_after_the_cache(folder, num_workers):
    plain = epochs(ImageFolder(folder, training(16)), num_workers, "fork")
    with CachedDataset(ImageFolder(folder, training(16)), 1, store="encoded") as cached:
        assert cached.cache.get_slot(0)[0] == Path(cached.samples[0][0]).read_bytes()
        assert difference(plain, epochs(cached, num_workers, "fork")) is None
        assert cached.stats().total.misses == N


@pytest.mark.parametrize("dataset", [[torch.zeros(3)] * 4, Detection(transforms=JointCompose([ToImage()]))])
def test_what_loads_no_files_cannot_be_kept_encoded(dataset):
    with pytest.raises(DatasetError, match=r"store='encoded' is for datasets that load each file by an attribute `loader`"):
        CachedDataset(dataset, 1, store="encoded")


# ------------------------------------------------------------------------------------------------ names


def test_another_beginning_is_another_cache(folder):
    options = {"name": "split-a", "fingerprint": "v1"}
    with CachedDataset(ImageFolder(folder, middle()), 1, **options) as first:
        first.warm(progress=False)
        with CachedDataset(
            ImageFolder(folder, Compose([*middle().transforms[:2], ToTensor()])), 1, cut="smallest", **options
        ) as second:
            assert second.stats().total.filled == N  # another end
        other = Compose([Resize(26), *middle().transforms[1:]])
        with pytest.raises(DatasetError, match="CenterCrop"):
            first.transform = other
        with pytest.raises(ValueError, match=r"Resize\(size=24\).*Resize\(size=26\)"):
            CachedDataset(ImageFolder(folder, other), 1, **options)


def test_a_cache_that_is_there_decides_where_to_cut(folder):
    options = {"name": "split-b", "fingerprint": "v1"}
    with CachedDataset(ImageFolder(folder, Compose(FIXED)), 1, cut="smallest", **options) as first:
        with CachedDataset(ImageFolder(folder, Compose(FIXED)), 1, **options) as second:
            assert isinstance(second.cache.get_slot(0)[0], Image.Image)
            assert difference(describe(first[1]), describe(second[1])) is None


# ------------------------------------------------------------------------------------------------ what cannot be split


def not_split(dataset, caplog):
    """Cache a dataset that cannot be split; return the warning."""
    caplog.clear()
    CachedDataset(dataset, 1).close()
    told = [record.message for record in caplog.records if "are not split" in record.message]
    assert len(told) == 1
    assert "every epoch will see the first outcome of" in told[0]
    assert "split_transforms() cuts it off" in told[0]
    return told[0]


class Ignoring(ImageFolder):
    def __getitem__(self, index):
        return PILToTensor()(self.loader(self.samples[index][0]))


class Scaling(ImageFolder):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image * 2, target


class Measuring(ImageFolder):
    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, float(np.asarray(image).mean())


class Seeding(ImageFolder):
    def __getitem__(self, index):
        torch.manual_seed(index)
        return super().__getitem__(index)


class Varying(ImageFolder):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return (image, target) if index % 2 else (target, image)


@pytest.mark.parametrize(
    ("cls", "transform", "reason"),
    [
        (Ignoring, training(16), "Ignoring does not call its transform"),
        (Scaling, training(16), "unsupported operand type|not in the sample"),
        (Measuring, training(16), "sample 0 would not be the same"),
        (Seeding, training(16), "sets the seed of random numbers"),
        (Varying, training(16), "in another place"),
    ],
)
def test_what_cannot_be_followed_is_not_split(cls, transform, reason, folder, caplog):
    told = not_split(cls(folder, transform), caplog)
    assert "RandomResizedCrop" in told
    assert pytest.importorskip("re").search(reason, told), told


def test_a_cache_within_is_left_alone(folder, caplog):
    with CachedDataset(ImageFolder(folder, middle()), 1) as inner:
        outer = Transformed(Subset(inner, range(N)), Normalize([0.5] * 3, [0.2] * 3))
        with CachedDataset(outer, 1) as cached:  # whose samples are random
            assert cached[0][0].shape == (3, 16, 16)
        assert isinstance(inner.cache.get_slot(0)[0], Image.Image)
        assert difference(epochs(ImageFolder(folder, middle())), epochs(inner)) is None
    assert "was different the second time" in caplog.text


def test_a_list_of_transforms_that_grows_is_noticed(folder):
    dataset = Steps(folder, [Resize(24), RandomCrop(16), ToTensor()])
    with CachedDataset(dataset, 1) as cached:
        cached.warm(progress=False)
        dataset.transform.append(normal())
        assert difference(epochs(copy.copy(dataset)), epochs(cached)) is None


def slow_and_unknown(image):
    time.sleep(0.002)
    return PILToTensor()(image)


def test_a_slow_step_that_is_not_known_is_told_of(folder, caplog):
    with CachedDataset(ImageFolder(folder, slow_and_unknown), 1):
        assert "mark it: stocache.deterministic(slow_and_unknown)" in caplog.text
    caplog.clear()
    with CachedDataset(ImageFolder(folder, deterministic(slow_and_unknown)), 1) as cached:
        assert isinstance(cached.cache.get_slot(0)[0], torch.Tensor)
    assert not caplog.records


def test_without_a_probe_nothing_is_split(folder, caplog):
    for options in ({"probe": 0}, {"example": (torch.zeros(3, 16, 16), 0)}):
        caplog.clear()
        with CachedDataset(ImageFolder(folder, training(16)), 1, **options):
            assert "are not split" in caplog.text
    with pytest.raises(LimitError, match="store='encoded' is for samples that are probed"):
        CachedDataset(ImageFolder(folder), 1, store="encoded", probe=0)


class Sometimes(ImageFolder):
    """Of its last image, the transform is called twice."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        if index == N - 2:
            image = self.transform(ToPILImage()((image * 255).byte()))
        return image, target


def test_a_sample_made_in_another_way_is_right_and_uncached(folder):
    make = lambda: Sometimes(folder, Compose([RandomResizedCrop(16), RandomHorizontalFlip(), ToTensor()]))
    with CachedDataset(make(), 1) as cached:
        assert difference(epochs(make()), epochs(cached)) is None
        total = cached.stats().total
        assert (total.rejected, total.filled) == (1, N - 1)


def test_randomness_of_the_dataset_itself_is_still_warned_of(folder, caplog):
    class Drawing(ImageFolder):
        def __getitem__(self, index):
            noise = torch.rand(())
            image, target = super().__getitem__(index)
            return image, target + noise

    with CachedDataset(Drawing(folder, training(16)), 1) as cached:
        assert not torch.equal(cached[0][0], cached[0][0])
    assert "was different the second time" in caplog.text


# ------------------------------------------------------------------------------------------------ strange transforms


class Counting:
    """Holds state, which an epoch changes."""

    def __init__(self):
        self.calls = self.epoch = 0

    def __call__(self, image):
        self.calls += 1
        return ToTensor()(image) + self.epoch


def test_a_transform_with_state_goes_on_with_it(folder):
    counting = Counting()
    with CachedDataset(ImageFolder(folder, Compose([Resize(20), CenterCrop(20), counting])), 1) as cached:
        assert counting.calls == 0  # by the probe: it was a child's
        first = cached[0][0]
        counting.epoch = 2
        assert torch.equal(cached[0][0], first + 2)
        assert counting.calls == 2


def test_types_may_change_half_way(folder):
    transform = lambda: Compose(
        [PILToTensor(), ToPILImage(), Resize(20), CenterCrop(20), RandomCrop(16), PILToTensor(), ToPILImage()]
    )
    with CachedDataset(ImageFolder(folder, transform()), 1) as cached:
        assert difference(epochs(ImageFolder(folder, transform())), epochs(cached)) is None


def fail(image):
    raise ArithmeticError("no such image")


@pytest.mark.parametrize("steps", [[Resize(20), fail], [fail, Resize(20)]])
def test_a_transform_that_fails_raises_its_own_error(steps, folder):
    with pytest.raises(ArithmeticError, match=r"probing sample 0 of ImageFolder.*no such image"):
        CachedDataset(ImageFolder(folder, Compose(steps)), 1)


def test_a_transform_that_fails_later_raises_its_own_error(folder):
    failing = Compose([Resize(20), RandomHorizontalFlip(), ToTensor()])
    with CachedDataset(ImageFolder(folder, failing), 1) as cached:
        failing.transforms[1].p = "half"
        with pytest.raises(TypeError, match="'<' not supported between instances of 'Tensor' and 'str'"):
            cached[0]


@pytest.mark.parametrize("transform", [Compose([]), "resize", 3, {"size": 4}])
def test_what_is_not_a_transform_is_left_alone(transform, folder, caplog):
    class Holding(ImageFolder):
        def __getitem__(self, index):
            return PILToTensor()(self.loader(self.samples[index][0])), str(self.transform)[:3]

    with CachedDataset(Holding(folder, transform), 1) as cached:
        assert cached[0][1] == str(transform)[:3]
    assert "not split" not in caplog.text


def test_an_empty_compose_changes_nothing(folder):
    with CachedDataset(ImageFolder(folder, Compose([])), 1) as cached:
        assert isinstance(cached[0][0], Image.Image)


# ------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("transform", "before", "after"),
    [
        (middle(), 2, 3),
        (Compose([Resize(4), ToTensor(), normal()]), 3, 0),
        (training(), 0, 4),
        (torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()), 1, 1),
        ([Resize(4), RandomCrop(2)], 1, 1),
        ((np.asarray, torch.from_numpy, augment), 2, 1),
        (augment, 0, 1),
        (deterministic(lambda image: image), 1, 0),
        (Compose([Compose([Resize(4), Compose([RandomCrop(2)])]), ToTensor()]), 1, 2),
        (Compose([]), 0, 0),
        (StandardTransform(middle(), None), 2, 3),
        ([Lambda(float), Lambda(augment)], 1, 1),
    ],
)
def test_split_transforms_cuts_at_the_first_random_step(transform, before, after):
    parts = split_transforms(transform)
    assert all(map(callable, parts))
    lengths = [len(split_steps(part)) for part in parts]
    assert lengths == [before, after]


def split_steps(transform):
    from stocache.transforms.pipelines import open_pipeline

    return open_pipeline(transform).steps


def test_the_two_parts_do_what_the_whole_does():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    before, after = split_transforms(middle())
    seed()
    whole = middle()(image)
    seed()
    beginning = before(image)
    assert torch.initial_seed() == 0
    assert torch.equal(after(beginning), whole)
    assert repr(before) == "Chain([Resize(size=24), CenterCrop(size=20)])"
    assert pickle.loads(pickle.dumps(before))(image).size == (20, 20)


@pytest.mark.parametrize("transform", ["resize", 3, [Resize(2), 7]])
def test_split_transforms_wants_transforms(transform):
    with pytest.raises(DatasetError, match="is not a transform: it is not callable"):
        split_transforms(transform)
