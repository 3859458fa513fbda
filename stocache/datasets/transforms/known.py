"""Say which transforms of well-known libraries are deterministic: same input, same output, no random number drawn.

A transform is recognised by the name and module of its class, so no library is imported here. A class that is not in the table
counts as random. So does a subclass of one that is, as it may do anything. Kornia has its random transforms in one module; of
its other modules only the classes that learn are named. MONAI marks its classes, and so do its users. The lists follow
torchvision 0.29, timm 1.0, albumentations 2.0 and Kornia 0.9.
"""

import functools
import numbers
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

DETERMINISTIC_ATTRIBUTE = "__stocache_deterministic__"
"""The attribute of functions, classes and objects that `stocache.deterministic` has marked."""


def mark_value(transform: object) -> Any:
    """Return the value to mark a transform with: for a function its place in the source, as `functools.wraps` copies marks."""
    code = getattr(transform, "__code__", None)
    return True if code is None else (code.co_filename, code.co_firstlineno)


class Library(NamedTuple):
    """The deterministic transforms of a library.

    Attributes:
        module: the module that defines them, itself or in submodules. Its other transforms may be random.
        deterministic: names of classes; None for all.
        condition: returns whether an object of one of these classes is deterministic with its options.
    """

    module: str
    deterministic: frozenset[str] | None = None
    condition: Callable[[Any], bool] = lambda transform: True


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _albumentation_is_deterministic(transform: Any) -> bool:
    """Whether a transform is always applied, at a fixed position, with a fixed size."""
    fixed = all(getattr(transform, name, "center") != "random" for name in ("position", "pad_position"))
    return transform.p >= 1 and fixed and isinstance(getattr(transform, "max_size", 0), numbers.Integral | None)


def _learns_nothing(module: Any) -> bool:
    """Whether a module of Kornia is a fixed function: it has no parameters, learns from no inputs, and is no network."""
    return type(module).__name__ not in _LEARNING and not any(True for _ in module.parameters())


_LEARNING = {"ZCAWhitening", "StableDiffusionDissolving", "BaseModel", "BaseWarper", "ImageRegistrator"}


LIBRARIES = (
    Library(
        "torchvision.transforms",
        _names(
            """CenterCrop ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat ConvertImageDtype FiveCrop Grayscale
            Identity LinearTransformation Normalize PILToTensor Pad RGB Resize SanitizeBoundingBoxes SanitizeKeyPoints
            SetClampingMode TenCrop ToDtype ToImage ToPILImage ToPureTensor ToTensor UniformTemporalSubsample
            ImageClassification ObjectDetection OpticalFlow SemanticSegmentation VideoClassification"""
        ),
    ),
    Library(
        "timm.data",
        _names("CenterCropOrPad MaybePILToTensor MaybeToTensor ResizeKeepRatio ToNumpy ToTensor TrimBorder"),
        lambda transform: not (getattr(transform, "random_scale_prob", 0) or getattr(transform, "random_aspect_prob", 0)),
    ),
    Library(
        "albumentations",
        _names(
            """AutoContrast CenterCrop Crop Equalize FromFloat HorizontalFlip InvertImg LongestMaxSize NoOp Normalize Pad Pad3D
            PadIfNeeded Resize SmallestMaxSize TimeReverse ToFloat ToGray ToRGB ToSepia ToTensor3D ToTensorV2 Transpose
            VerticalFlip"""
        ),
        _albumentation_is_deterministic,
    ),
    Library(
        "kornia.augmentation",
        _names("CenterCrop CenterCrop3D Denormalize LongestMaxSize Normalize PadTo Resize SmallestMaxSize"),
        lambda transform: transform.p == 1 and transform.p_batch == 1,
    ),
    Library("kornia.color"),
    Library("kornia.enhance", condition=_learns_nothing),
    Library("kornia.filters", condition=_learns_nothing),
    Library("kornia.geometry.transform", condition=_learns_nothing),
    Library("audiomentations", frozenset()),  # each draws a number, also with p=1
)

_MODULES = (torch.nn.Flatten, torch.nn.Identity, torch.nn.Unflatten, torch.nn.Upsample, torch.nn.ZeroPad2d)
"""Modules of torch that are deterministic, and have no parameters."""

_FUNCTIONS: frozenset[Any] = frozenset(
    {bool, bytes, complex, dict, float, int, list, set, str, tuple}
    | {np.array, np.asarray, np.ascontiguousarray, np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.squeeze}
    | {torch.as_tensor, torch.asarray, torch.from_numpy, torch.squeeze, torch.stack, torch.tensor}
)
"""Functions and types that are deterministic."""

_FUNCTION_MODULES = ("torchvision.transforms.functional", "torchvision.transforms.v2.functional", "PIL.ImageOps")
"""Modules whose functions are all deterministic."""


def find_library(cls: type) -> Library | None:
    """Return the library that defines a class of transforms."""
    module = f"{cls.__module__}."
    return next((library for library in LIBRARIES if module.startswith(f"{library.module}.")), None)


def is_known(cls: type) -> bool:
    """Whether a class is of a library in the table, or is a transform of MONAI."""
    return find_library(cls) is not None or _is_of_monai(cls)


def is_deterministic(transform: object) -> bool:
    """Whether a transform is known to be deterministic."""
    cls = type(transform)
    mark = getattr(transform, "__dict__", {}).get(DETERMINISTIC_ATTRIBUTE, mark_value)
    if DETERMINISTIC_ATTRIBUTE in vars(cls) or mark == mark_value(transform):
        return True
    if isinstance(transform, functools.partial):
        return is_deterministic(transform.func)
    if cls.__name__ == "Lambda":  # of torchvision, MONAI or albumentations: as its function
        function = getattr(transform, "lambd", getattr(transform, "func", None))
        if function is not None and find_library(cls) is not None:
            return is_deterministic(function)
    if _is_of_monai(cls):
        return not isinstance(transform, sys.modules["monai.transforms.traits"].RandomizableTrait)
    library = find_library(cls)
    if library is not None:
        try:
            listed = library.deterministic is None or cls.__name__ in library.deterministic
            return listed and library.condition(transform)
        except AttributeError:  # in a different version of the library
            return False
    known = cls in _MODULES or any(transform is function for function in _FUNCTIONS)
    return known or _is_library_function(transform)


def _is_library_function(function: object) -> bool:
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", None)
    if not module.startswith(_FUNCTION_MODULES) or not isinstance(name, str):
        return False
    return getattr(sys.modules.get(module), name, None) is function


def _is_of_monai(cls: type) -> bool:
    """Whether a class is a transform of MONAI, or is derived from one; random ones carry a mark."""
    transforms = sys.modules.get("monai.transforms.transform")
    return transforms is not None and issubclass(cls, transforms.Transform)
