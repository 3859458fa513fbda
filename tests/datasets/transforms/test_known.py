"""What is known of the libraries' transforms: those called deterministic draw nothing."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stocache import DatasetError, deterministic
from stocache.datasets.transforms.known import find_library, is_deterministic
from stocache.system.generators import Kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # an image that is an RGB already, an alias
def test_what_is_called_deterministic_in_albumentations_draws_nothing():
    albumentations = pytest.importorskip("albumentations", reason="albumentations is not installed")
    image = np.random.default_rng(0).integers(0, 256, (30, 24, 3), dtype=np.uint8)
    others = {"CenterCrop", "Crop", "FromFloat", "LongestMaxSize", "Pad", "Pad3D", "PadIfNeeded", "Resize", "SmallestMaxSize"}
    names = find_library(albumentations.Resize).deterministic - others - {"TimeReverse", "ToFloat", "ToRGB", "ToTensor3D"}
    assert len(names) >= 10  # that take any image, and no options
    for name in names:
        transform = getattr(albumentations, name)(p=1.0)
        assert is_deterministic(transform), name
        transform.set_random_seed(5)
        own = lambda its=transform: repr((its.py_random.getstate(), its.random_generator.bit_generator.state))
        before, watch = own(), Kept()
        results = [transform(image=image)["image"] for _ in range(2)]
        assert (own(), watch.drawn()) == (before, False), name
        assert np.array_equal(*map(np.asarray, results)), name
    padded, flipped = albumentations.PadIfNeeded(40, 40, position="random"), albumentations.HorizontalFlip(p=0.5)
    for transform in (padded, flipped, albumentations.LongestMaxSize([20, 30]), albumentations.Lambda(image=np.copy)):
        assert not is_deterministic(transform)


@pytest.mark.slow
def test_what_is_called_deterministic_in_kornia_draws_nothing_and_monai_s_are_as_they_are_marked():
    kornia = pytest.importorskip("kornia", reason="kornia is not installed")
    image, its = torch.rand(1, 3, 12, 10), kornia.augmentation
    sized = [its.CenterCrop(4), its.PadTo((16, 16)), its.Resize((4, 4)), its.LongestMaxSize(8), its.SmallestMaxSize(8)]
    for transform in (*sized, its.Normalize(0.5, 0.5), its.Denormalize(0.5, 0.5), kornia.color.RgbToGrayscale()):
        watch = Kept()
        assert is_deterministic(transform)
        assert torch.equal(transform(image), transform(image))
        assert not watch.drawn()
    for transform in (its.Normalize(0.5, 0.5, p=0.5), its.RandomHorizontalFlip(p=1.0), kornia.enhance.ZCAWhitening()):
        assert not is_deterministic(transform)
    monai = pytest.importorskip("monai.transforms", reason="monai is not installed")
    assert list(map(is_deterministic, [monai.Flip(0), monai.RandFlip()])) == [True, False]


class Own:
    def __call__(self, image):
        return image


def test_only_common_functions_and_modules_are_known_to_be_deterministic():
    for transform in (np.asarray, torch.from_numpy, float, functools.partial(np.array, dtype=float), torch.nn.Identity()):
        assert is_deterministic(transform)
    own = lambda image: image
    for transform in (own, Own(), torch.nn.Dropout(), len, print, functools.partial(own), SimpleNamespace(p=1), "resize"):
        assert not is_deterministic(transform)


@deterministic
class Marked(Own):
    pass


def test_a_mark_holds_for_what_was_marked():
    marked = deterministic(lambda image: image)
    assert marked(3) == 3

    @functools.wraps(marked)
    def wrapper(image):
        return image + torch.rand(())

    transform = deterministic(Own())
    for its in (marked, functools.partial(marked), Marked(), transform, deterministic(len), deterministic(Own().__call__)):
        assert is_deterministic(its)
    for its in (wrapper, type("Derived", (Marked,), {})(), Own()):  # although the first has the attributes of the other
        assert not is_deterministic(its)
    with pytest.raises(DatasetError, match="'resize' is not a transform: it is not callable"):
        deterministic("resize")


def test_a_subclass_of_a_known_transform_is_not_known():
    pytest.importorskip("PIL", reason="PIL is not installed")
    from tests.support.lookalikes import Lambda, RandomCrop, Resize

    mine = type("Mine", (Resize,), {"__module__": "mine"})
    assert is_deterministic(Resize(4))
    assert is_deterministic(Lambda(deterministic(lambda image: image)))
    for other in (mine(4), RandomCrop(4), Lambda(Own())):
        assert not is_deterministic(other)
