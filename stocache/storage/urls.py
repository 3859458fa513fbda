"""Recognise URLs, and open the fsspec file system of a URL (extra ``remote``)."""

from typing import Any

from stocache.errors import StocacheError


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL for fsspec, and not a path on this machine."""
    return "://" in path


def file_system(url: str, options: dict[str, Any], problem: type[StocacheError]) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it. Call it in each process: few file systems survive a fork.

    Raises:
        problem: fsspec, or a package that it needs for this URL, is not installed.
    """
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise problem(f"{url} cannot be opened: {error}. pip install 'stocache[remote]', and the package it names.") from None
    return fs, path
