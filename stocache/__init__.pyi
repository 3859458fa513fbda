# isort: skip_file
# fmt: off
"""The names of the package, by what they are for. They are imported on first use, because torch takes seconds to import."""

from . import errors as errors
from . import loader as loader

# Caching
from .cache.options import AuditOptions as AuditOptions, CacheOptions as CacheOptions, SampleOptions as SampleOptions
from .cache.placement import Placement as Placement
from .cache.ragged import RaggedCache as RaggedCache
from .cache.shared import SharedCache as SharedCache, SharedCacheDDP as SharedCacheDDP
from .cache.stats import SlotState as SlotState
from .cache.disk.cache import DiskCache as DiskCache
from .cache.keyed.cache import KeyedCache as KeyedCache
from .cache.keyed.functions import cache_method as cache_method, cached as cached
from .cache.keyed.iterable import CachedIterable as CachedIterable
from .datasets.cached import CachedDataset as CachedDataset
from .datasets.decoders.cache import cached_decoders as cached_decoders
from .datasets.transforms.pipelines import deterministic as deterministic, split_transforms as split_transforms
from .shm.tables.sharing import share as share

# Preparing
from .storage.dataset import StorageDataset as StorageDataset
from .storage.in_memory import InMemoryDataStorage as InMemoryDataStorage
from .storage.preparation.prepare import prepare as prepare
from .storage.preparation.source import DataPreparer as DataPreparer
from .storage.storage import DataStorage as DataStorage, OnDiskBlockDataStorage as OnDiskBlockDataStorage

# Loading
from .loader.dataloader import DataLoader as DataLoader
from .loader.sample_seed import SampleSeed as SampleSeed
from .system.on_error import Retry as Retry, Skip as Skip
from .loader.samplers.block import BlockSampler as BlockSampler
from .loader.samplers.distributed import StatefulDistributedSampler as StatefulDistributedSampler
from .loader.samplers.locality import LocalityDistributedSampler as LocalityDistributedSampler
from .text.formats import (
    CsvFormat as CsvFormat,
    CustomFormat as CustomFormat,
    FixedWidthFormat as FixedWidthFormat,
    JsonLinesFormat as JsonLinesFormat,
)
from .text.loader import StreamLoader as StreamLoader
from .text.options import ReadOptions as ReadOptions

# Looking on
from .system.limits import get_shm_size as get_shm_size
from .tools.advise import advise as advise
from .tools.plot import plot as plot
from .tools.run.everywhere import use_everywhere as use_everywhere

# Errors
from .errors import (
    BusyError as BusyError,
    CacheKeyError as CacheKeyError,
    CacheNameError as CacheNameError,
    ClosedError as ClosedError,
    CodecError as CodecError,
    DamagedError as DamagedError,
    DatasetError as DatasetError,
    DiskError as DiskError,
    GraphError as GraphError,
    LimitError as LimitError,
    MismatchError as MismatchError,
    SampleError as SampleError,
    SampleIndexError as SampleIndexError,
    SegmentError as SegmentError,
    SlotError as SlotError,
    StateError as StateError,
    StocacheError as StocacheError,
    StorageError as StorageError,
    StreamError as StreamError,
    WorkerError as WorkerError,
)

__version__: str
