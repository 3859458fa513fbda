"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

from stocache.cache import SharedCache, SharedCacheDDP
from stocache.dataset import CachedDataset
from stocache.epochs import DatasetStats, EpochStats
from stocache.errors import (
    BusyError,
    CacheNameError,
    ClosedError,
    CodecError,
    DamagedError,
    DatasetError,
    LimitError,
    MismatchError,
    SampleError,
    SampleIndexError,
    SegmentError,
    SlotError,
    StateError,
    StocacheError,
    StorageError,
    StreamError,
    WorkerError,
)
from stocache.limits import get_shm_size, recommended_limit
from stocache.loader import DataLoader, LoaderStats
from stocache.locality import LocalityDistributedSampler
from stocache.permutation import Permutation
from stocache.pipelines import deterministic, split_transforms
from stocache.placement import Placement
from stocache.prepare import DataPreparer, prepare
from stocache.protocol import SlotState
from stocache.ragged import RaggedCache
from stocache.sampler import BlockSampler, ShuffleQuality, shuffle_quality
from stocache.stats import CacheStats
from stocache.storage import DataStorage, InMemoryDataStorage, OnDiskBlockDataStorage
from stocache.stored import StorageDataset
from stocache.stream import StreamLoader, StreamStats
from stocache.structure import Structure

__version__ = "0.1.0"

__all__ = [
    "BlockSampler",
    "BusyError",
    "CacheNameError",
    "CacheStats",
    "CachedDataset",
    "ClosedError",
    "CodecError",
    "DamagedError",
    "DataLoader",
    "DataPreparer",
    "DataStorage",
    "DatasetError",
    "DatasetStats",
    "EpochStats",
    "InMemoryDataStorage",
    "LimitError",
    "LoaderStats",
    "LocalityDistributedSampler",
    "MismatchError",
    "OnDiskBlockDataStorage",
    "Permutation",
    "Placement",
    "RaggedCache",
    "SampleError",
    "SampleIndexError",
    "SegmentError",
    "SharedCache",
    "SharedCacheDDP",
    "ShuffleQuality",
    "SlotError",
    "SlotState",
    "StateError",
    "StocacheError",
    "StorageDataset",
    "StorageError",
    "StreamError",
    "StreamLoader",
    "StreamStats",
    "Structure",
    "WorkerError",
    "deterministic",
    "get_shm_size",
    "prepare",
    "recommended_limit",
    "shuffle_quality",
    "split_transforms",
]
