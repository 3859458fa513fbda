"""Every exception of stocache. Each also is the built-in a caller would catch.

StocacheError
├── LimitError        (ValueError)                  a size limit that is no size, or holds not one slot
├── SampleError       (ValueError, RuntimeError)    a sample, shape or dtype the slots cannot hold unchanged
├── SampleIndexError  (IndexError)                  an index that is no integer, or outside the dataset or the cache
├── SlotError         (RuntimeError)                an empty slot was to be read, or a set one to be overwritten
├── CacheNameError    (ValueError)                  a name that cannot name a cache, or options that need one
├── CodecError        (ValueError)                  a codec that does not exist, or is not installed
├── DatasetError      (TypeError)                   a dataset that cannot be cached by index
├── SegmentError      (OSError)                     shared memory that cannot be had, or not be attached to
│   ├── MismatchError (ValueError)                  the named cache is in use for other data
│   └── BusyError     (TimeoutError)                another process keeps what it should hold for milliseconds
├── ClosedError       (ValueError)                  the cache was used after close()
├── StorageError      (RuntimeError)                a storage used out of turn, or a folder that is none
│   └── DamagedError  (OSError)                     a file of a storage is missing, cut or changed
├── StreamError       (ValueError)                  a line, a file or an argument of a StreamLoader is not what it should be
├── GraphError        (ValueError, RuntimeError)    a graph of DataPipes that cannot be run as asked
├── WorkerError       (RuntimeError)                a worker process of a DataLoader or of Ray died
└── StateError        (ValueError)                  a state that does not belong to this DataLoader, or cannot be taken
"""


class StocacheError(Exception):
    """Base of all stocache errors."""


class LimitError(StocacheError, ValueError):
    """A size limit is not a size, or is too small for one slot."""


class SampleError(StocacheError, ValueError, RuntimeError):
    """A sample, shape or dtype that slots cannot hold unchanged.

    A RuntimeError too because torch raises that for the shapes that stocaching hands on to it.
    """


class SampleIndexError(StocacheError, IndexError):
    """An index is not an integer, or lies outside the dataset or (when asked for) the cache."""


class SlotError(StocacheError, RuntimeError):
    """An empty slot was to be read, or a set slot to be overwritten, without permission."""


class SegmentError(StocacheError, OSError):
    """Shared memory cannot be had or not be attached to."""


class CacheNameError(StocacheError, ValueError):
    """A name that cannot name a cache, or options that need one."""


class CodecError(StocacheError, ValueError):
    """A codec does not exist, or is not installed."""


class DatasetError(StocacheError, TypeError):
    """A dataset cannot be cached by index: it is iterable, or has no length."""


class MismatchError(SegmentError, ValueError):
    """A named cache is in use with another geometry or fingerprint."""


class BusyError(SegmentError, TimeoutError):
    """Another process, which is stopped perhaps, keeps a lock that it should hold for milliseconds."""


class ClosedError(StocacheError, ValueError):
    """The cache was used after ``close()``."""


class StorageError(StocacheError, RuntimeError):
    """A storage was used out of turn, or its files are none that could be read here."""


class DamagedError(StorageError, OSError):
    """A file of a storage is missing, cut or changed."""


class StreamError(StocacheError, ValueError):
    """A line, a file or an argument of a `StreamLoader` is not what it should be."""


class GraphError(StocacheError, ValueError, RuntimeError):
    """A graph of DataPipes cannot be run as asked.

    A RuntimeError too because torch and torchdata raise that.
    """


class WorkerError(StocacheError, RuntimeError):
    """A worker process of a `DataLoader` or of Ray died, and a batch or a block with it."""


class StateError(StocacheError, ValueError):
    """A state is none of this `DataLoader` and dataset, or it has none that could be resumed exactly."""
