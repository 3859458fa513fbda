"""The exceptions of stocache that a caller catches. Each is also a built-in exception, named in parentheses.

Errors defined in other modules are subclasses of these, or stay inside the package. Only the reading services
raise `GraphError`.

StocacheError
├── LimitError        (ValueError)                  a size limit is not a size, or is too small for one slot
├── SampleError       (ValueError, RuntimeError)    a sample, shape or dtype does not fit the slots
├── SampleIndexError  (IndexError)                  an index is not an integer, or lies outside the dataset or the cache
├── SlotError         (RuntimeError)                a slot is empty and cannot be read, or is set and cannot be overwritten
├── CacheKeyError     (TypeError, ValueError)       a key of a KeyedCache is of a different type, or NaN
├── CacheNameError    (ValueError)                  a name cannot name a cache, or options need a name
├── CodecError        (ValueError)                  a codec does not exist, or is not installed
├── DatasetError      (TypeError)                   a dataset cannot be cached by index
├── SegmentError      (OSError)                     shared memory cannot be allocated or attached to
│   ├── MismatchError (ValueError)                  a named cache is in use for other data
│   └── BusyError     (TimeoutError)                another process does not release a lock
├── DiskError         (OSError)                     a folder cannot be a disk cache
├── ClosedError       (ValueError)                  a cache was used after close()
├── StorageError      (RuntimeError)                a storage was used in the wrong order, or its files cannot be read
│   └── DamagedError  (OSError)                     a file of a storage is missing, cut or changed
├── StreamError       (ValueError)                  a line, a file or an argument of a StreamLoader is wrong
├── GraphError        (ValueError, RuntimeError)    a graph of DataPipes cannot be run as asked
├── WorkerError       (RuntimeError)                a worker process of a DataLoader or of Ray died
└── StateError        (ValueError)                  a state does not belong to this DataLoader, or cannot be taken
"""


class StocacheError(Exception):
    """Base of all stocache errors. Their tracebacks end with the command that explains them, from Python 3.11 on."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        add_note = getattr(self, "add_note", None)  # Python 3.11
        if public is not StocacheError and add_note is not None:
            add_note(f"(stocache explain {public.__name__})")


class LimitError(StocacheError, ValueError):
    """A size limit is not a size, or is too small for one slot."""


class SampleError(StocacheError, ValueError, RuntimeError):
    """A sample, shape or dtype does not fit the slots: it would not come back unchanged.

    It is a RuntimeError too, because torch raises that for shapes that stocaching passes to it.
    """


class SampleIndexError(StocacheError, IndexError):
    """An index is not an integer, or lies outside the dataset or (when asked for) the cache."""


class SlotError(StocacheError, RuntimeError):
    """A slot is empty and cannot be read, or is set and cannot be overwritten, unless the call allows it."""


class SegmentError(StocacheError, OSError):
    """Shared memory cannot be allocated or attached to."""


class CacheKeyError(StocacheError, TypeError, ValueError):
    """A key of a `KeyedCache` is of a type whose bytes may differ between processes or change, or it is NaN."""


class CacheNameError(StocacheError, ValueError):
    """A name cannot name a cache, or options need a name."""


class CodecError(StocacheError, ValueError):
    """A codec does not exist, or is not installed."""


class DatasetError(StocacheError, TypeError):
    """A dataset cannot be cached by index: it is iterable, or has no length."""


class MismatchError(SegmentError, ValueError):
    """A named cache is in use for other shapes, sizes or data."""


class BusyError(SegmentError, TimeoutError):
    """Another process, which may be stopped, does not release a lock that it should hold for milliseconds."""


class DiskError(StocacheError, OSError):
    """A folder cannot be a disk cache: it is a file, another user's, open to others, or in use by another machine."""


class ClosedError(StocacheError, ValueError):
    """The cache was used after ``close()``."""


class StorageError(StocacheError, RuntimeError):
    """A storage was used in the wrong order, or its files cannot be read."""


class DamagedError(StorageError, OSError):
    """A file of a storage is missing, cut or changed."""


class StreamError(StocacheError, ValueError):
    """A line, a file or an argument of a `StreamLoader` is wrong."""


class GraphError(StocacheError, ValueError, RuntimeError):
    """A graph of DataPipes cannot be run as asked.

    It is a RuntimeError too, because torch and torchdata raise that.
    """


class WorkerError(StocacheError, RuntimeError):
    """A worker process of a `DataLoader` or of Ray died, and its batch or block is lost."""


class StateError(StocacheError, ValueError):
    """A state belongs to a different loader or dataset, or an exact state cannot be taken."""
