"""Cache files as they are, and decode them after the cache: for datasets with a ``loader``, such as torchvision's folders."""

import os
from collections.abc import Callable
from typing import Any

from stocache.system.limits import open_memfd
from stocache.system.objects import attribute_of, vars_of
from stocache.transforms.patching import Site
from stocache.transforms.pipelines import Pipeline, deterministic


@deterministic
class ReadFile:
    """Returns the bytes of a file."""

    def __call__(self, path: Any) -> bytes:
        """Return the bytes of the file at ``path``."""
        with open(path, "rb") as file:
            return file.read()


class Decode:
    """Calls a loader of files with the bytes of a file in place of its path.

    Args:
        loader: called with the path of a file in memory, which has no suffix.
    """

    def __init__(self, loader: Callable[[Any], object]) -> None:
        self.loader = loader

    def __call__(self, data: bytes) -> Any:
        """Return the result of the loader for a file with these bytes."""
        fd = open_memfd()
        if fd is None:
            raise OSError("store='encoded' needs files in memory, which this process may not create")
        try:
            os.write(fd, data)
            return self.loader(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


def open_loader(dataset: object) -> dict[Site, Pipeline]:
    """Return the loader of a dataset as a pipeline of two steps: read the file, decode it. Empty where there is no loader."""
    loader = attribute_of(dataset, "loader")
    if not callable(loader) or "loader" not in vars_of(dataset):
        return {}
    return {Site((), "loader"): Pipeline(loader, (ReadFile(), Decode(loader)))}
