"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

import importlib
from typing import TYPE_CHECKING, Any

from stocache.errors import (
    BusyError,
    CacheNameError,
    ClosedError,
    CodecError,
    DamagedError,
    DatasetError,
    DiskError,
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

if TYPE_CHECKING:
    from stocache.advice.advise import Advice, advise
    from stocache.cache.base import SlotState
    from stocache.cache.options import CacheOptions
    from stocache.cache.placement import Placement
    from stocache.cache.ragged import RaggedCache
    from stocache.cache.shared import SharedCache, SharedCacheDDP
    from stocache.cache.stats import CacheStats
    from stocache.datasets.cached import CachedDataset
    from stocache.datasets.epochs import DatasetStats, EpochStats
    from stocache.datasets.stored import StorageDataset
    from stocache.disk.cache import DiskCache
    from stocache.loader.dataloader import DataLoader, LoaderStats
    from stocache.loader.sample_seed import SampleSeed
    from stocache.preparation.prepare import DataPreparer, prepare
    from stocache.samplers.block import BlockSampler, ShuffleQuality, shuffle_quality
    from stocache.samplers.distributed import StatefulDistributedSampler
    from stocache.samplers.locality import LocalityDistributedSampler
    from stocache.samplers.permutation import Permutation
    from stocache.samples.spec import Structure
    from stocache.storage.storage import DataStorage, InMemoryDataStorage, OnDiskBlockDataStorage
    from stocache.system.limits import get_shm_size, recommended_limit
    from stocache.text.formats import CsvFormat, CustomFormat, FixedWidthFormat, JsonLinesFormat
    from stocache.text.loader import StreamLoader, StreamStats
    from stocache.text.options import ReadOptions
    from stocache.transforms.pipelines import deterministic, split_transforms

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "BlockSampler",
    "BusyError",
    "CacheNameError",
    "CacheOptions",
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
    "DiskCache",
    "DiskError",
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
    "SampleSeed",
    "SegmentError",
    "SharedCache",
    "SharedCacheDDP",
    "ShuffleQuality",
    "SlotError",
    "SlotState",
    "StateError",
    "StatefulDistributedSampler",
    "StocacheError",
    "StorageDataset",
    "StorageError",
    "StreamError",
    "StreamLoader",
    "StreamStats",
    "Structure",
    "WorkerError",
    "advise",
    "deterministic",
    "get_shm_size",
    "prepare",
    "recommended_limit",
    "shuffle_quality",
    "split_transforms",
]

_LAZY_EXPORTS = {  # imported on first use: torch takes seconds to import
    "advice.advise": "Advice advise",
    "cache.base": "SlotState",
    "cache.options": "CacheOptions",
    "cache.placement": "Placement",
    "cache.ragged": "RaggedCache",
    "cache.shared": "SharedCache SharedCacheDDP",
    "cache.stats": "CacheStats",
    "datasets.cached": "CachedDataset",
    "datasets.epochs": "DatasetStats EpochStats",
    "datasets.stored": "StorageDataset",
    "disk.cache": "DiskCache",
    "loader.dataloader": "DataLoader LoaderStats",
    "loader.sample_seed": "SampleSeed",
    "preparation.prepare": "DataPreparer prepare",
    "samplers.block": "BlockSampler ShuffleQuality shuffle_quality",
    "samplers.distributed": "StatefulDistributedSampler",
    "samplers.locality": "LocalityDistributedSampler",
    "samplers.permutation": "Permutation",
    "samples.spec": "Structure",
    "storage.storage": "DataStorage InMemoryDataStorage OnDiskBlockDataStorage",
    "system.limits": "get_shm_size recommended_limit",
    "text.formats": "CsvFormat CustomFormat FixedWidthFormat JsonLinesFormat",
    "text.loader": "StreamLoader StreamStats",
    "text.options": "ReadOptions",
    "transforms.pipelines": "deterministic split_transforms",
}
_MODULES = {name: f"stocache.{module}" for module, names in _LAZY_EXPORTS.items() for name in names.split()}

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every attribute

    def __getattr__(name: str) -> Any:
        """Import an export, or the subpackage ``loader``, on first use (PEP 562)."""
        if name == "loader":
            return importlib.import_module("stocache.loader")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
