"""DataLoader2 and its reading services for torch's DataPipes, with exact resuming and the shared cache.

    from stocache.reading import DataLoader2, MultiProcessingReadingService

The names are the names of torchdata up to 0.9, which need not be installed. Importing this package makes the pipes
``prefetch``, ``sharding_round_robin_dispatch``, ``fullsync``, ``unzip``, ``pin_memory`` and ``shared_cache`` methods of every
DataPipe, if these names are free. The rest of stocache does not need this package: of DataPipes it imports only
torch's base classes and ``graph_settings``.
"""

from stocache.reading.graph.caching import SharedCacher
from stocache.reading.graph.graph import find_dps, list_dps, remove_dp, replace_dp, traverse_dps
from stocache.reading.graph.pipes import FullSync, PinMemory, Prefetcher, ShardingRoundRobinDispatcher, UnZipper
from stocache.reading.graph.seeds import SeedGenerator, set_graph_random_seed
from stocache.reading.interfaces import CheckpointableReadingServiceInterface, ReadingServiceInterface
from stocache.reading.loader import DataLoader2, DataLoader2Iterator, Shuffle
from stocache.reading.ranks import DistributedReadingService
from stocache.reading.run.replica import WorkerInfo
from stocache.reading.services import (
    CachingReadingService,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)

__all__ = [
    "CachingReadingService",
    "CheckpointableReadingServiceInterface",
    "DataLoader2",
    "DataLoader2Iterator",
    "DistributedReadingService",
    "FullSync",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "PinMemory",
    "Prefetcher",
    "ReadingServiceInterface",
    "SeedGenerator",
    "SequentialReadingService",
    "ShardingRoundRobinDispatcher",
    "SharedCacher",
    "Shuffle",
    "UnZipper",
    "WorkerInfo",
    "find_dps",
    "list_dps",
    "remove_dp",
    "replace_dp",
    "set_graph_random_seed",
    "traverse_dps",
]
