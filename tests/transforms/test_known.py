"""What is known of the libraries' transforms: every public one is in the table, and those called deterministic draw nothing."""

import functools
import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stocache import DatasetError, deterministic
from stocache.system.rng import RngMonitor
from stocache.transforms.known import LIBRARIES, is_deterministic, is_known, library_of
from tests.support import lookalikes


def classes(module, base=object):
    found = [value for name, value in vars(module).items() if inspect.isclass(value) and not name.startswith("_")]
    return [cls for cls in found if issubclass(cls, base)]


def unplaced(found):
    return [cls.__name__ for cls in found if not is_known(cls)]


def test_albumentations_are_all_placed():
    albumentations = pytest.importorskip("albumentations")
    core = albumentations.core
    found = classes(albumentations, core.transforms_interface.BasicTransform)
    found += classes(albumentations, core.composition.BaseCompose)
    assert len(found) > 100
    assert unplaced(found) == []


def test_audiomentations_are_all_placed():
    audiomentations = pytest.importorskip("audiomentations")
    found = [cls for cls in classes(audiomentations) if hasattr(cls, "randomize_parameters")]
    assert len(found) > 30
    assert unplaced(found) == []


@pytest.mark.parametrize("name", ["augmentation", "color", "enhance", "filters", "geometry.transform"])
def test_modules_of_kornia_are_all_placed(name):
    kornia = pytest.importorskip("kornia")
    module = functools.reduce(getattr, name.split("."), kornia)
    found = [cls for cls in classes(module, torch.nn.Module) if cls.__module__.startswith("kornia.")]
    assert found
    assert unplaced(found) == []


def test_transforms_of_monai_are_as_they_are_marked():
    transforms = pytest.importorskip("monai.transforms")
    found = classes(transforms, transforms.Transform)
    assert len(found) > 400
    assert unplaced(found) == []
    made = {"Flip": transforms.Flip(0), "RandFlip": transforms.RandFlip(), "Resized": transforms.Resized("x", (2, 2))}
    assert {name: is_deterministic(its) for name, its in made.items()} == {"Flip": True, "RandFlip": False, "Resized": True}


@pytest.mark.parametrize("name", ["torchvision.transforms", "torchvision.transforms.v2"])
def test_transforms_of_torchvision_are_all_placed(name):
    module = pytest.importorskip(name)
    enums = {"AutoAugmentPolicy", "InterpolationMode"}
    assert set(unplaced(classes(module))) <= enums


@pytest.mark.parametrize("name", ["transforms", "auto_augment", "random_erasing"])
def test_transforms_of_timm_are_all_placed(name):
    pytest.importorskip("timm")
    module = sys.modules[f"timm.data.{name}"]
    assert unplaced([cls for cls in classes(module) if cls.__module__ == module.__name__]) == []


def test_no_class_is_in_both_lists():
    for library in LIBRARIES:
        assert not library.deterministic & library.random


@pytest.mark.filterwarnings("ignore")  # an image that is an RGB already, an alias
def test_what_is_called_deterministic_in_albumentations_draws_nothing():
    albumentations = pytest.importorskip("albumentations")
    options = {
        "CenterCrop": {"height": 8, "width": 8},
        "Crop": {"x_max": 8, "y_max": 8},
        "LongestMaxSize": {"max_size": 20},
        "SmallestMaxSize": {"max_size": 20},
        "Pad": {"padding": 2},
        "Pad3D": {"padding": 2},
        "PadIfNeeded": {"min_height": 40, "min_width": 40},
        "Resize": {"height": 8, "width": 8},
        "ToFloat": {"max_value": 255.0},
    }
    image = np.random.default_rng(0).integers(0, 256, (30, 24, 3), dtype=np.uint8)
    tried = 0
    for name in library_of(albumentations.Resize).deterministic:
        transform = getattr(albumentations, name)(p=1.0, **options.get(name, {}))
        assert is_deterministic(transform), name
        given = {"volume": np.stack([image] * 4)} if name in ("Pad3D", "ToTensor3D") else {"image": image}
        if name == "FromFloat":
            given = {"image": image.astype(np.float32) / 255}
        if name in ("TimeReverse", "ToRGB"):
            given = {"image": image[..., 0]}
        transform.set_random_seed(5)
        own, watch = repr((transform.py_random.getstate(), transform.random_generator.bit_generator.state)), RngMonitor()
        results = [transform(**given) for _ in range(2)]
        assert repr((transform.py_random.getstate(), transform.random_generator.bit_generator.state)) == own, name
        assert not watch.changed(), name
        for key, value in results[0].items():
            assert np.array_equal(np.asarray(value), np.asarray(results[1][key])), name
        tried += 1
    assert tried > 20


def test_what_albumentations_may_draw_for_is_random():
    albumentations = pytest.importorskip("albumentations")
    for transform in (
        albumentations.HorizontalFlip(p=0.5),
        albumentations.Resize(4, 4, p=0.9),
        albumentations.PadIfNeeded(40, 40, position="random"),
        albumentations.LongestMaxSize([20, 30]),
        albumentations.Lambda(image=np.copy),
    ):
        assert not is_deterministic(transform)
        assert is_known(type(transform))


def test_what_is_called_deterministic_in_kornia_draws_nothing():
    augmentation = pytest.importorskip("kornia.augmentation")
    image = torch.rand(1, 3, 12, 10)
    for transform in (
        augmentation.CenterCrop(4),
        augmentation.Normalize(0.5, 0.5),
        augmentation.Denormalize(0.5, 0.5),
        augmentation.PadTo((16, 16)),
        augmentation.Resize((4, 4)),
        augmentation.LongestMaxSize(8),
        augmentation.SmallestMaxSize(8),
    ):
        watch = RngMonitor()
        assert is_deterministic(transform)
        assert torch.equal(transform(image), transform(image))
        assert not watch.changed()
    assert not is_deterministic(augmentation.Normalize(0.5, 0.5, p=0.5))
    assert not is_deterministic(augmentation.RandomHorizontalFlip(p=1.0))


def test_kornia_without_parameters_is_deterministic():
    kornia = pytest.importorskip("kornia")
    assert is_deterministic(kornia.color.RgbToGrayscale())
    assert is_deterministic(kornia.enhance.Normalize(torch.zeros(3), torch.ones(3)))
    assert not is_deterministic(kornia.enhance.ZCAWhitening())


# ------------------------------------------------------------------------------------------------ the user's own


def own(image):
    return image


class Own:
    def __call__(self, image):
        return image


@pytest.mark.parametrize(
    "transform",
    [own, lambda image: image, Own(), torch.nn.Dropout(), len, print, functools.partial(own), SimpleNamespace(p=1), "resize"],
)
def test_what_is_not_known_is_not_deterministic(transform):
    assert not is_deterministic(transform)


@pytest.mark.parametrize(
    "transform", [np.asarray, torch.from_numpy, float, functools.partial(np.array, dtype=float), torch.nn.Identity()]
)
def test_common_functions_are_deterministic(transform):
    assert is_deterministic(transform)


def test_a_mark_holds_for_what_was_marked():
    marked = deterministic(lambda image: image)
    assert is_deterministic(marked)
    assert marked(3) == 3
    assert is_deterministic(functools.partial(marked))
    assert is_deterministic(lookalikes.Lambda(marked))

    @functools.wraps(marked)
    def wrapper(image):
        return image + torch.rand(())

    assert not is_deterministic(wrapper)  # although it has the attributes of the other

    @deterministic
    class Marked(Own):
        pass

    class Derived(Marked):
        pass

    assert is_deterministic(Marked())
    assert not is_deterministic(Derived())
    transform = deterministic(Own())
    assert is_deterministic(transform)
    assert not is_deterministic(Own())
    for unmarkable in (len, Own().__call__):
        its = deterministic(unmarkable)
        assert is_deterministic(its)
    assert deterministic(len)([1, 2]) == 2


def test_only_callables_can_be_marked():
    with pytest.raises(DatasetError, match="'resize' is not a transform: it is not callable"):
        deterministic("resize")


def test_a_subclass_of_a_known_transform_is_not_known():
    class Mine(lookalikes.Resize):
        pass

    Mine.__module__ = "mine"
    assert is_deterministic(lookalikes.Resize(4))
    assert not is_deterministic(Mine(4))
    assert not is_deterministic(lookalikes.RandomCrop(4))
