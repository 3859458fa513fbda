"""Share what pandas, Arrow and scipy hold in columns: the same classes, over arrays in shared memory.

A Series, a DataFrame and a sparse matrix are ordinary objects whose arrays are shared ones, which pickle as handles. Whoever
writes to one replaces such an array by another, so a changed object pickles as ever. Arrow's classes cannot be derived from:
`SharedArrow` stands before them.
"""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from stocache.errors import SampleError
from stocache.shm.tables.sharing import SharedArray


def share_scipy(matrix: Any) -> Any:
    """Return a compressed sparse matrix or array with shared arrays. Raises SampleError: it is of another format."""
    if getattr(matrix, "format", None) not in ("csr", "csc"):
        raise SampleError(f"a {type(matrix).__name__} cannot be shared. Share matrix.tocsr().")
    made = copy.copy(matrix)
    for name in ("data", "indices", "indptr"):
        setattr(made, name, SharedArray.of(getattr(matrix, name)))
    return made


class SharedArrow:
    """An Arrow table or column in shared memory: it is indexed, sliced and walked through as that, and has its attributes.

    Attributes:
        value: the `pyarrow.Table`, or the `pyarrow.ChunkedArray`.
    """

    def __init__(self, stream: SharedArray, is_column: bool) -> None:
        import pyarrow as pa

        self._stream, self._is_column = stream, is_column
        table = pa.ipc.open_stream(pa.py_buffer(stream)).read_all()
        self.value = table.column(0) if is_column else table

    @classmethod
    def of(cls, value: Any) -> "SharedArrow":
        """Return a table, a record batch or a column in shared memory. Raises SampleError: it is something else."""
        import pyarrow as pa

        is_column = isinstance(value, pa.Array | pa.ChunkedArray)
        if isinstance(value, pa.RecordBatch):
            value = pa.Table.from_batches([value])
        if not is_column and not isinstance(value, pa.Table):
            raise SampleError(f"{type(value).__name__} of Arrow cannot be shared. Share a table or a column.")
        table = pa.table({"": value}) if is_column else value
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return cls(SharedArray.of(np.frombuffer(sink.getvalue(), np.uint8)), is_column)

    def __getattr__(self, name: str) -> Any:
        if name == "value":  # __init__ has not run
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, SharedArrow) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<shared {self.value!r}>"

    def __reduce__(self) -> Any:
        return SharedArrow, (self._stream, self._is_column)


share_pyarrow = SharedArrow.of


def share_pandas(value: Any) -> Any:
    """Return a Series or DataFrame with shared columns.

    Raises:
        SampleError: neither a numpy array nor Arrow holds the values of a column as they are; or the index is not a plain one.
    """
    import pandas

    if type(value) is pandas.Series:
        if type(value.index) is not pandas.RangeIndex:  # pandas pickles a copy of it besides
            raise SampleError("a Series with an index of its own cannot be shared. Share series.to_frame().")
        return pandas.Series(_shared_values(value), value.index, name=value.name, copy=False)
    if type(value) is not pandas.DataFrame:
        raise SampleError(f"{type(value).__name__} of pandas cannot be shared. Share a Series or a DataFrame.")
    index = _shared_index(value.index)
    columns = {at: pandas.Series(_shared_values(value.iloc[:, at]), index, copy=False) for at in range(value.shape[1])}
    made = pandas.DataFrame(columns, index, copy=False)
    made.columns = value.columns
    return made


def _shared_index(index: Any) -> Any:
    import pandas

    if type(index) is pandas.RangeIndex:
        return index
    if type(index) is not pandas.Index:
        raise SampleError(f"{type(index).__name__} of pandas cannot be shared. Make it a column: table.reset_index().")
    return pandas.Index(_shared_values(index), name=index.name, copy=False)


def _shared_values(column: Any) -> Any:
    if isinstance(column.dtype, np.dtype) and not column.dtype.hasobject:
        return SharedArray.of(column.to_numpy())
    in_arrow = getattr(column.array, "__arrow_array__", object)
    if in_arrow() is not in_arrow():  # it would be made of other memory each time
        raise SampleError(
            f"a column {column.name!r} of {column.dtype} cannot be shared. Convert it to numbers, or with "
            "astype('string[pyarrow]'), or leave it out."
        )
    return _over_arrow(column.dtype, SharedArrow.of(in_arrow()))


def _over_arrow(dtype: Any, shared: SharedArrow) -> Any:
    """Return a column of pandas over one of Arrow."""
    made = dtype.__from_arrow__(shared.value)
    made.__class__ = _sharing(type(made))  # type: ignore[arg-type]
    made._shared = shared, made.__arrow_array__()
    return made


def _plain(dtype: Any, values: Any) -> Any:
    return dtype.__from_arrow__(values)


@cache
def _sharing(cls: Any) -> Any:
    """Return a class of columns that pickle as handles, until they are written to."""

    def reduce(self: Any, _: Any) -> Any:
        (shared, ours), now = self._shared, self.__arrow_array__()
        return (_over_arrow, (self.dtype, shared)) if now is ours else (_plain, (self.dtype, now))

    return type(cls.__name__, (cls,), {"_shared": (None, None), "__reduce_ex__": reduce, "__module__": cls.__module__})
