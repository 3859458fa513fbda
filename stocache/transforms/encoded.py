"""Files cached as they are, and decoded after the cache: for image folders with a ``loader``, as torchvision's."""

import os
from collections.abc import Callable
from typing import Any

from stocache.system.limits import open_memfd
from stocache.transforms.pipelines import Pipeline, deterministic
from stocache.transforms.twins import Site


@deterministic
class ReadFile:
    """Returns the bytes of a file."""

    def __call__(self, path: Any) -> bytes:
        """Return the bytes of the file at ``path``."""
        with open(path, "rb") as file:
            return file.read()


class Decode:
    """Calls a loader of files with bytes instead of a path.

    Args:
        loader: called with the path of a file in memory, which has no suffix.
    """

    def __init__(self, loader: Callable[[Any], Any]) -> None:
        self.loader = loader

    def __call__(self, data: bytes) -> Any:
        """Return what the loader makes of a file with these bytes."""
        fd = open_memfd()
        if fd is None:
            raise OSError("this process may not create files in memory, which store='encoded' needs")
        try:
            os.write(fd, data)
            return self.loader(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


def encoded_pipeline(dataset: Any) -> dict[Site, Pipeline]:
    """Return the loader of a dataset as two steps: reading the file, and decoding it."""
    loader = getattr(dataset, "loader", None)
    if not callable(loader) or "loader" not in getattr(dataset, "__dict__", {}):
        return {}
    return {Site((), "loader"): Pipeline(loader, (ReadFile(), Decode(loader)))}
