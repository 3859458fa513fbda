"""URLs: what is one, and the fsspec file system of one (extra ``remote``)."""

from typing import Any

from stocache.errors import StocacheError


def is_url(path: str) -> bool:
    """Whether that is for fsspec, and not a path on this machine."""
    return "://" in path


def file_system(url: str, options: dict[str, Any], problem: type[StocacheError]) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it; in each process anew, since few survive a fork.

    Raises:
        problem: fsspec, or what it needs for this URL, is not installed.
    """
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise problem(f"{url} cannot be opened: {error}. pip install 'stocache[remote]', and what it names.") from None
    return fs, path
