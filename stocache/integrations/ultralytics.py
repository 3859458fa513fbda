"""Ultralytics: one copy of the decoded and resized images for all workers and ranks, in front of mosaics.

    model.train(trainer=with_cached_images(DetectionTrainer, "16GiB"), data="coco.yaml", cache=False)

Unlike its ``cache="ram"``, which draws the images of a mosaic from all images, training stays bit for bit that of
``cache=False``. Tried with ultralytics 8.4.190.
"""

import copy
from typing import Any

from stocache.cache.keyed.cache import KeyedCache
from stocache.integrations import shared_by_ranks


def with_cached_images(trainer: type, size_limit_gib: float | str = "auto", **options: Any) -> type:
    """Return a trainer whose datasets share one `KeyedCache` of images. The arguments are the arguments of `KeyedCache`.

    Ranks of a job share it. With a name or a disk, say by a ``fingerprint`` which version of the images it is.
    """
    options = shared_by_ranks(options, "images by path and size")

    class CachedTrainer(trainer):  # type: ignore[misc]
        images: KeyedCache[Any, Any] | None = None

        def build_dataset(self, *args: Any, **kwargs: Any) -> Any:
            dataset = super().build_dataset(*args, **kwargs)
            if not hasattr(dataset, "load_image"):
                name = type(dataset).__name__
                raise TypeError(f"{name} has no load_image: its samples are not mosaics. Use `stocache run --cache auto`.")
            if self.images is None:
                self.images = KeyedCache(size_limit_gib, **options)
            dataset.load_image = CachedImages(dataset, self.images)
            return dataset

    return CachedTrainer


class CachedImages:
    """Stands in for ``load_image`` of a dataset: an image that this process has not at hand comes from the cache."""

    def __init__(self, dataset: Any, cache: KeyedCache[Any, Any]) -> None:
        self.dataset, self.cache = dataset, cache

    def __call__(self, i: int, *how: bool, **named: bool) -> Any:
        """Return an image, its shape, and the shape before it was resized. Arguments: as of the dataset's method."""
        dataset = self.dataset
        if dataset.ims[i] is not None:
            return type(dataset).load_image(dataset, i, *how, **named)
        key = dataset.im_files[i], str(dataset.imgsz), how, tuple(sorted(named.items()))
        found = self.cache.get_or_load(key, lambda _: self._decoded(i, *how, **named))
        if dataset.augment:  # the images that mosaics choose from are the images that came last, as without a cache
            dataset.ims[i], dataset.im_hw0[i], dataset.im_hw[i] = found
            dataset.buffer.append(i)
            if 1 < len(dataset.buffer) >= dataset.max_buffer_length:
                oldest = dataset.buffer.pop(0)
                dataset.ims[oldest] = dataset.im_hw0[oldest] = dataset.im_hw[oldest] = None
        return found

    def _decoded(self, i: int, *how: bool, **named: bool) -> Any:
        plain = copy.copy(self.dataset)
        plain.augment = False  # then the method keeps nothing
        return type(plain).load_image(plain, i, *how, **named)
