"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

from stocache.cache import SharedCache, SharedCacheDDP
from stocache.dataset import CachedDataset
from stocache.epochs import DatasetStats, EpochStats
from stocache.errors import (
    CacheNameError,
    ClosedError,
    CodecError,
    DatasetError,
    LimitError,
    MismatchError,
    SampleError,
    SampleIndexError,
    SegmentError,
    SlotError,
    StateError,
    StocacheError,
    WorkerError,
)
from stocache.limits import get_shm_size, recommended_limit
from stocache.loader import DataLoader, LoaderStats
from stocache.placement import Placement
from stocache.protocol import SlotState
from stocache.ragged import RaggedCache
from stocache.stats import CacheStats
from stocache.structure import Structure

__version__ = "0.1.0"

__all__ = [
    "CacheNameError",
    "CacheStats",
    "CachedDataset",
    "ClosedError",
    "CodecError",
    "DataLoader",
    "DatasetError",
    "DatasetStats",
    "EpochStats",
    "LimitError",
    "LoaderStats",
    "MismatchError",
    "Placement",
    "RaggedCache",
    "SampleError",
    "SampleIndexError",
    "SegmentError",
    "SharedCache",
    "SharedCacheDDP",
    "SlotError",
    "SlotState",
    "StateError",
    "StocacheError",
    "Structure",
    "WorkerError",
    "get_shm_size",
    "recommended_limit",
]
