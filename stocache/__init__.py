"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

from stocache.cache import SharedCache, SharedCacheDDP, SlotState
from stocache.errors import (
    CacheNameError,
    ClosedError,
    LimitError,
    MismatchError,
    SampleError,
    SampleIndexError,
    SegmentError,
    SlotError,
    StocacheError,
)
from stocache.limits import get_shm_size, recommended_limit
from stocache.placement import Placement
from stocache.stats import CacheStats
from stocache.structure import Structure

__version__ = "0.1.0"

__all__ = [
    "CacheNameError",
    "CacheStats",
    "ClosedError",
    "LimitError",
    "MismatchError",
    "Placement",
    "SampleError",
    "SampleIndexError",
    "SegmentError",
    "SharedCache",
    "SharedCacheDDP",
    "SlotError",
    "SlotState",
    "StocacheError",
    "Structure",
    "get_shm_size",
    "recommended_limit",
]
