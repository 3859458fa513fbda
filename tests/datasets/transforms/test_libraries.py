"""Random transforms of libraries, as they are usually used: split, and equal to the run without a cache."""

import importlib

import pytest

from benchmark.libraries import LIBRARIES, outcome

SOME = {  # `python -m benchmark libraries` runs all
    "albumentations": ("RandomCrop", "Rotate", "GaussNoise"), "kornia": ("RandomAffine", "RandomGaussianNoise"),
    "audiomentations": ("Gain", "AddGaussianNoise"), "monai": ("RandRotate90d", "RandSpatialCropd"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", SOME)
def test_random_transforms_of_libraries_are_split(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    module = importlib.import_module(LIBRARIES[name].modules[0])
    for transform in SOME[name]:
        assert outcome(getattr(module, transform), LIBRARIES[name]) == ("split", 0), transform
