"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

from stocache.cache.base import SlotState
from stocache.cache.placement import Placement
from stocache.cache.ragged import RaggedCache
from stocache.cache.shared import SharedCache, SharedCacheDDP
from stocache.cache.stats import CacheStats
from stocache.datasets.cached import CachedDataset
from stocache.datasets.epochs import DatasetStats, EpochStats
from stocache.datasets.stored import StorageDataset
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
from stocache.loader.dataloader import DataLoader, LoaderStats
from stocache.preparation.prepare import DataPreparer, prepare
from stocache.samplers.block import BlockSampler, ShuffleQuality, shuffle_quality
from stocache.samplers.locality import LocalityDistributedSampler
from stocache.samplers.permutation import Permutation
from stocache.samples.spec import Structure
from stocache.storage.storage import DataStorage, InMemoryDataStorage, OnDiskBlockDataStorage
from stocache.system.limits import get_shm_size, recommended_limit
from stocache.text.formats import CsvFormat, CustomFormat, FixedWidthFormat, JsonLinesFormat
from stocache.text.loader import StreamLoader, StreamStats
from stocache.text.options import CacheName, ReadOptions, ShardOptions
from stocache.transforms.pipelines import deterministic, split_transforms

__version__ = "0.1.0"

__all__ = [
    "BlockSampler",
    "BusyError",
    "CacheName",
    "CacheNameError",
    "CacheStats",
    "CachedDataset",
    "ClosedError",
    "CodecError",
    "CsvFormat",
    "CustomFormat",
    "DamagedError",
    "DataLoader",
    "DataPreparer",
    "DataStorage",
    "DatasetError",
    "DatasetStats",
    "EpochStats",
    "FixedWidthFormat",
    "InMemoryDataStorage",
    "JsonLinesFormat",
    "LimitError",
    "LoaderStats",
    "LocalityDistributedSampler",
    "MismatchError",
    "OnDiskBlockDataStorage",
    "Permutation",
    "Placement",
    "RaggedCache",
    "ReadOptions",
    "SampleError",
    "SampleIndexError",
    "SegmentError",
    "ShardOptions",
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
