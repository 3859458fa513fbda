# The names of the package, by what they are for. They are imported on first use, because torch takes seconds to import.

from . import errors as errors
from . import loader as loader
from .cache.keyed.cache import KeyedCache as KeyedCache
from .cache.keyed.functions import cache_method as cache_method
from .cache.keyed.functions import cached as cached
from .cache.keyed.iterable import CachedIterable as CachedIterable
from .cache.options import CacheOptions as CacheOptions
from .cache.placement import Placement as Placement
from .cache.ragged import RaggedCache as RaggedCache
from .cache.shared import SharedCache as SharedCache
from .cache.states import SlotState as SlotState

# Caching
# Names of others
from .compat import SharedCacheDDP as SharedCacheDDP
from .compat import get_shm_size as get_shm_size
from .datasets.cached import CachedDataset as CachedDataset

# Preparing
from .datasets.stored import StorageDataset as StorageDataset
from .disk.cache import DiskCache as DiskCache

# Errors
from .errors import (
    BusyError as BusyError,
)
from .errors import (
    CacheKeyError as CacheKeyError,
)
from .errors import (
    CacheNameError as CacheNameError,
)
from .errors import (
    ClosedError as ClosedError,
)
from .errors import (
    CodecError as CodecError,
)
from .errors import (
    DamagedError as DamagedError,
)
from .errors import (
    DatasetError as DatasetError,
)
from .errors import (
    DiskError as DiskError,
)
from .errors import (
    GraphError as GraphError,
)
from .errors import (
    LimitError as LimitError,
)
from .errors import (
    MismatchError as MismatchError,
)
from .errors import (
    SampleError as SampleError,
)
from .errors import (
    SampleIndexError as SampleIndexError,
)
from .errors import (
    SegmentError as SegmentError,
)
from .errors import (
    SlotError as SlotError,
)
from .errors import (
    StateError as StateError,
)
from .errors import (
    StocacheError as StocacheError,
)
from .errors import (
    StorageError as StorageError,
)
from .errors import (
    StreamError as StreamError,
)
from .errors import (
    WorkerError as WorkerError,
)

# Loading
from .loader.dataloader import DataLoader as DataLoader
from .loader.program.everywhere import use_everywhere as use_everywhere
from .loader.sample_seed import SampleSeed as SampleSeed

# Observing
from .observe.advice.advise import advise as advise
from .observe.drawing import plot as plot
from .preparation.prepare import DataPreparer as DataPreparer
from .preparation.prepare import prepare as prepare

# Samplers
from .samplers.block import BlockSampler as BlockSampler
from .samplers.distributed import StatefulDistributedSampler as StatefulDistributedSampler
from .samplers.locality import LocalityDistributedSampler as LocalityDistributedSampler

# Sharing
from .shm.tables.sharing import share as share
from .storage.storage import (
    DataStorage as DataStorage,
)
from .storage.storage import (
    InMemoryDataStorage as InMemoryDataStorage,
)
from .storage.storage import (
    OnDiskBlockDataStorage as OnDiskBlockDataStorage,
)
from .text.formats import (
    CsvFormat as CsvFormat,
)
from .text.formats import (
    CustomFormat as CustomFormat,
)
from .text.formats import (
    FixedWidthFormat as FixedWidthFormat,
)
from .text.formats import (
    JsonLinesFormat as JsonLinesFormat,
)
from .text.loader import StreamLoader as StreamLoader
from .text.options import ReadOptions as ReadOptions
from .transforms.pipelines import deterministic as deterministic
from .transforms.pipelines import split_transforms as split_transforms

__version__: str
