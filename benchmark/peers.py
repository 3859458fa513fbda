"""The peers that stocache is measured beside, behind the calls the benchmarks make."""

import contextlib
import io
from typing import Any

GIB = 1024**3


def stocaching(limit_bytes: int, dataset_len: int, data_dims: tuple[int, ...]) -> Any:
    """Return a cache of stocaching 0.2.1 (``pip install --no-deps stocaching==0.2.1``), without what it prints."""
    import stocaching

    with contextlib.redirect_stdout(io.StringIO()):
        return stocaching.SharedCache((limit_bytes + 0.5) / GIB, dataset_len, data_dims)
