"""Cache files undecoded, and decode them after the cache: for datasets with a ``loader``, such as torchvision's folders."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from stocache.datasets.transforms.pipelines import deterministic
from stocache.system.limits import open_memfd


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
        with _file_of(data) as path:
            return self.loader(path)


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Give the path of a file of these bytes: in memory, or a temporary file if that is not allowed."""
    fd = open_memfd()
    if fd is None:
        with tempfile.TemporaryDirectory(prefix="stocache-") as folder:
            path = os.path.join(folder, "file")
            with open(path, "wb") as file:
                file.write(data)
            yield path
        return
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
