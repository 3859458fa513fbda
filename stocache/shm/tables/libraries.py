"""Share the tables of libraries (pandas, Arrow, scipy) by one protocol: as they pickle, with their data in shared memory.

NOTE [ Tables of libraries ]
    Such an object pickles as a few facts and the memory that holds its values: arrays of numpy and buffers of Arrow.
    `share_table` pickles the facts, writes the memory into one segment, and unpickles the object over that segment. So the
    result has the class of the object. Its arrays are a `SharedArray`, which pickles as a handle. Arrow's buffers cannot be
    derived from: `multiprocessing` pickles them by a function that knows which of them lie in shared memory, and plain
    ``pickle`` copies them. An object that is written to replaces its arrays and buffers, and the new ones pickle as ever.
"""

import io
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stocache.errors import SampleError
from stocache.shm.tables.arrays import SharedArray

_MOST_FACTS = 1 << 16  # bytes, or an eighth of the table if that is more


def share_table(table: Any, nbytes: int) -> Any:
    """Return a table of about ``nbytes`` in shared memory.

    Raises:
        SampleError: it has no arrays and buffers; or too much besides them that would be copied for each process.
    """
    most = max(_MOST_FACTS, nbytes // 8)
    try:
        facts = _Facts(most)
        pickler = _TablePickler(facts)
        pickler.dump(table)
        if not pickler.arrays:
            raise ValueError("it holds no arrays")
        made = _TableUnpickler(facts.getvalue(), SharedArray.all_of(pickler.arrays)).load()
        ForkingPickler(_Facts(most), 5).dump(made)  # an array may have been copied meanwhile
    except SampleError:
        raise
    except Exception as error:  # the classes may raise anything
        raise SampleError(
            f"a {type(table).__name__} cannot be shared: {error}. Share a table, column or matrix. Convert Python objects in "
            f"it to numbers, or with astype('string[pyarrow]'), or leave them out; convert a sparse matrix with tocsr()."
        ) from error
    return made


class _Facts(io.BytesIO):
    """The pickle of an object without its arrays and buffers, which has a limit."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most:
            raise ValueError(f"more than {self._most} bytes of it are not in arrays")
        return super().write(data)


class _TablePickler(pickle.Pickler):
    """Pickles a table without its arrays and buffers.

    Attributes:
        arrays: the arrays, and the buffers as bytes.
    """

    def __init__(self, file: _Facts) -> None:
        super().__init__(file, 5)
        self.arrays: list[NDArray[Any]] = []

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        is_buffer = _is(value, "pyarrow", "Buffer")
        if not is_buffer and (type(value) is not np.ndarray or value.dtype.hasobject):
            return None
        self.arrays.append(np.frombuffer(value, np.uint8) if is_buffer else value)
        return len(self.arrays) - 1, is_buffer

    def reducer_override(self, value: Any) -> Any:
        if _is(value, "pandas", "arrays.ArrowExtensionArray"):  # its own pickle joins the chunks, which copies them
            return _column_of, (value.dtype, value.__arrow_array__())
        if _is(value, "pyarrow", "Array") and value.get_total_buffer_size() > 2 * value.nbytes:
            return value.take(np.arange(len(value))).__reduce__()  # a slice: Arrow pickles all that it was cut from
        return NotImplemented


def _is(value: object, library: str, name: str) -> bool:
    """Return whether a value is of a class of a library, which may not have been imported."""
    module = sys.modules.get(library)
    return module is not None and isinstance(value, attrgetter(name)(module))


class _TableUnpickler(pickle.Unpickler):
    def __init__(self, facts: bytes, arrays: list[SharedArray]) -> None:
        super().__init__(io.BytesIO(facts))
        self._arrays = arrays

    def persistent_load(self, found: tuple[int, bool]) -> Any:
        number, is_buffer = found
        return _buffer_over(self._arrays[number]) if is_buffer else self._arrays[number]


_under_buffers: "WeakValueDictionary[int, SharedArray]" = WeakValueDictionary()  # by address; a buffer keeps its array alive


def _is_shared(buffer: Any) -> bool:
    array = _under_buffers.get(buffer.address)
    return array is not None and array.nbytes == buffer.size


def _buffer_over(array: SharedArray) -> Any:
    """Return the Arrow buffer over an array, which processes of `multiprocessing` pickle as a handle."""
    import pyarrow as pa

    ForkingPickler.register(pa.Buffer, _reduce_buffer)
    return pa.py_buffer(_under_buffers.setdefault(array.ctypes.data, array))


def _reduce_buffer(buffer: Any) -> Any:
    if _is_shared(buffer):
        return _buffer_over, (_under_buffers[buffer.address],)
    return buffer.__reduce_ex__(4)  # its bytes: `multiprocessing` may have an earlier protocol than 5


def _column_of(dtype: Any, values: Any) -> Any:
    """Return the column of pandas over one of Arrow."""
    column = dtype.__from_arrow__(values)
    ForkingPickler.register(type(column), _reduce_column)
    return column


def _reduce_column(column: Any) -> Any:
    values = column.__arrow_array__()
    if any(_is_shared(buffer) for chunk in values.chunks for buffer in chunk.buffers() if buffer is not None):
        return _column_of, (column.dtype, values)
    return column.__reduce_ex__(4)
