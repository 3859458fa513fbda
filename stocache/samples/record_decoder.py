"""Read records back into samples; see NOTE [ Records ].

A record may be damaged or forged. So names in a treedef are only looked up (NOTE [ Names in data ]), sizes are compared with
the record before anything is allocated, and the length of lists is limited (NOTE [ Items without bytes ]). Most of that is
checked once, when a treedef is compiled.
"""

import functools
import importlib
import math
import struct
from typing import Any

from stocache.errors import SegmentError
from stocache.samples.codecs import Codec
from stocache.samples.containers import container_of
from stocache.samples.leaves.kind import BARE_NODES, BYTES, DAMAGED_RECORD, ITEMS, NUMBER, TEXT, Step
from stocache.samples.leaves.kinds import kind_of
from stocache.samples.leaves.plain_kinds import SEQUENCES, PickleKind
from stocache.samples.leaves.type_lookup import NotImported, Unresolved
from stocache.samples.pytree import DEEP, Tree, joiner_of
from stocache.samples.record_encoder import COMPRESSED, EncodedRecord, RecordEncoder, bare_nodes, integers_codec, parse_treedef


class RecordReader:
    """Reads the records of one treedef.

    Args:
        text: the treedef.
        allow_pickle: whether to load pickles, and to import the modules of classes.
        codec: reads compressed records.

    Raises:
        Unresolved: the text names classes that are not here or have changed; or something was pickled, and ``allow_pickle`` is
            False.
        Exception: it is not a treedef.
    """

    def __init__(self, text: bytes, allow_pickle: bool, codec: Codec | None = None) -> None:
        self._codec = codec
        streams = set[int]()
        self._program = _program_of(parse_treedef(text.decode("utf-8", "surrogatepass")), allow_pickle, streams)
        self._steps, self._join = self._program.steps, self._program.join
        *self._streams, self._last = sorted(streams) or [0]

    def read(
        self,
        memory: Any,
        start: int,
        nbytes: int,
        packed: int,
        copy: bool | None,
        integers: tuple[int, ...] | None = None,
    ) -> Any:
        """Return a sample.

        Args:
            memory: a buffer that holds the leaves, and the integers behind them.
            start, nbytes: where the leaves are.
            packed: the number that describes the integers; see `record_encoder.pack_integers`.
            copy: True for a private sample; False for one whose tensors and arrays are views of ``memory``. None for memory of
                the sample's own: only large leaves are views, because the user may keep a small one, such as a label.
            integers: the integers of a row; None if they lie behind the leaves.

        Raises:
            SegmentError: the record is damaged.
            struct.error, OverflowError, MemoryError: it reaches beyond ``memory``.
        """
        if integers is None:
            integers = integers_codec(packed).unpack_from(memory, start + nbytes)
            if packed & COMPRESSED:
                memory, integers = self._decompressed(memory[start : start + nbytes], integers), integers[:-1]
                start, nbytes, copy = 0, len(memory), True
        least = nbytes + 1 if copy else 0 if copy is False else nbytes >> 2
        streams = self._streams
        at = [start, start, start, start, start + nbytes, BARE_NODES + nbytes + len(integers), len(streams)]
        for length, stream in zip(integers, streams):  # noqa: B905  there are more integers
            at[stream] = start
            start += length
        at[self._last] = start
        try:
            sample = self._join(_read(self._steps, memory, at, integers, least))
            if at[_USED] != len(integers):
                raise SegmentError(DAMAGED_RECORD)
            return sample
        except SegmentError:
            raise
        except Exception as error:  # whatever a class raises for parts it does not expect
            raise SegmentError(f"the cache is damaged, or holds a sample that cannot be read here: {error}") from error

    def _decompressed(self, data: object, integers: tuple[int, ...]) -> memoryview:
        if self._codec is None:
            raise SegmentError("the cache is damaged: it has a compressed sample, but no codec.")
        try:
            return memoryview(self._codec.decompress(data, integers[-1]))
        except (IndexError, ValueError, MemoryError) as error:
            raise SegmentError(f"the cache is damaged: {error}.") from error


def reader_of_cache(text: bytes, allow_pickle: bool, codec: Codec | None = None) -> RecordReader:
    """Return the reader of the records of a cache; arguments as for `RecordReader`.

    Raises:
        SegmentError: the text is not a treedef, or names classes that are not here or have changed; or something was pickled,
            and ``allow_pickle`` is False.
        NotImported: it names a class whose module is not imported, and ``allow_pickle`` is False.
    """
    try:
        return RecordReader(text, allow_pickle, codec)
    except Exception as error:  # whatever a forged text raises
        if isinstance(error, Unresolved) and error.module:
            raise NotImported(f"the cache holds samples that cannot be read here: {error}") from None
        problem = str(error).rstrip(".")
        raise SegmentError(f"the cache holds samples that cannot be read here: {problem}. Treedef: {text[:200]!r}") from error


_END, _BARE, _USED = 4, 5, 6
"""What follows the positions in the four streams: the end of the leaves; how many bare nodes lists may still make (see NOTE
[ Items without bytes ]); how many integers are used."""


def _read(steps: list[Step], memory: Any, at: list[int], integers: tuple[int, ...], least: int) -> list[Any]:
    """Return the leaves of one value. One loop for all of them takes less time than a call for each.

    ``least``: bytes of a tensor or array, from which on it is a view of ``memory``.
    """
    values: list[Any] = []
    end, used = at[_END], at[_USED]
    for stream, dims, size, make in steps:
        begin = at[stream]
        if dims == TEXT:
            after = at[stream] = begin + integers[used]
            used += 1
            if after > end:
                raise SegmentError(DAMAGED_RECORD)
            values.append(make(memory[begin:after]))
        elif dims == NUMBER:
            after = at[stream] = begin + size
            if after > end:
                raise SegmentError(DAMAGED_RECORD)
            values += make(memory, begin)
        elif dims == ITEMS:
            at[_USED] = used
            values.append(make(memory, at, integers, least))
            used = at[_USED]
        else:
            shape = integers[used : used + dims]
            used += dims
            count = math.prod(shape)
            after = at[stream] = begin + count * size
            if after > end or len(shape) != dims:
                raise SegmentError(DAMAGED_RECORD)
            values.append(make(memory, begin, count, shape, after - begin < least))
    at[_USED] = used
    return values


def _program_of(treedef: Any, allow_pickle: bool, streams: set[int]) -> "_Program":
    """Return the program of a treedef. With ``allow_pickle`` import the modules of its classes, as pickle would."""
    try:
        return _Program(treedef, allow_pickle, streams)
    except Unresolved as error:
        if not (allow_pickle and error.module):
            raise
        try:
            importlib.import_module(error.module)
        except Exception as failure:  # whatever the module raises
            raise Unresolved(f"its samples are made of classes of {error.module}, which is not here: {failure}.") from None
    return _program_of(treedef, allow_pickle, streams)


_LEVELS = DEEP + 2
_PIXELS = 4  # their position among the parts of an image


class _Program:
    """How values of a treedef are read: step by step, one for each leaf or list, and then put together.

    Args:
        allow_pickle: as for `RecordReader`.
        streams: is given the numbers of the streams that it reads.

    Raises:
        ValueError, TypeError, LookupError: it is not a treedef.
        Unresolved: a class in it is not here, or may not be used.
    """

    def __init__(self, treedef: Any, allow_pickle: bool, streams: set[int], depth: int = 0) -> None:
        self.steps: list[Step] = []
        self._allow_pickle, self._streams = allow_pickle, streams
        self.join = joiner_of(self._tree(treedef, depth))

    def _tree(self, treedef: Any, depth: int) -> Tree | None:
        """Add the steps that read the leaves of a value, and return how they are put together."""
        if type(treedef) is not tuple or not treedef or depth > _LEVELS:
            raise ValueError(f"{treedef!r:.80} is not a treedef, or too deep")
        if treedef[0] == "in":
            _, kind, name, keys, _, children, *coded = treedef  # an empty tuple lies behind the keys
            container = container_of(kind, name, keys, bool(coded), len(children))
            parts = []
            for position, child in enumerate(children):
                parts.append(self._tree(child, depth + 1))
                if kind == "image" and position == _PIXELS and child == ("bytes",):
                    self.steps[-1] = (BYTES, TEXT, 1, lambda view: view)  # the image copies them
            return Tree(container, tuple(parts))
        if treedef[0] == "items":
            programs = [_Program(item, self._allow_pickle, self._streams, depth + 1) for item in treedef[2]]
            bare = max(map(bare_nodes, treedef[2]))
            self.steps.append((BYTES, ITEMS, 0, _Items(SEQUENCES[treedef[1]], programs, bare)))
        else:
            kind = kind_of(treedef)
            if type(kind) is PickleKind and not self._allow_pickle:
                raise Unresolved(
                    "its samples are partly pickled. To run the code that the pickles name, pass allow_pickle=True."
                )
            self.steps.append(kind.step())
            self._streams.add(self.steps[-1][0])
        return None


class _Items:
    """Reads lists or tuples of any length: their items as one of the programs says."""

    def __init__(self, cls: Any, programs: list[_Program], bare: int) -> None:
        self._cls, self._programs, self._bare = cls, programs, bare

    def __call__(self, memory: Any, at: list[int], integers: tuple[int, ...], least: int) -> Any:
        count = integers[at[_USED]]
        at[_USED] += 1
        at[_BARE] -= count * self._bare  # items that are not bare take bytes or an integer
        if at[_BARE] < 0:
            raise SegmentError(DAMAGED_RECORD)
        first, *others = self._programs
        if not others:
            steps, join = first.steps, first.join
            return self._cls([join(_read(steps, memory, at, integers, least)) for _ in range(count)])
        items = []
        for _ in range(count):
            program = self._programs[integers[at[_USED]]]
            at[_USED] += 1
            items.append(program.join(_read(program.steps, memory, at, integers, least)))
        return self._cls(items)


_FOOT = struct.Struct("<QII")  # behind a record: bytes of its leaves, the number for its integers, bytes of its treedef
_READERS = 1024  # readers of treedefs that are kept


class Records:
    """Turns samples of any size into bytes, and back: records, each with the text of its treedef behind it.

    Attributes:
        nbytes: None: samples vary in their bytes.
        fills_batches: False: a record cannot be read into the memory of a batch.
        unreadable: why `decode` raised NotImported in this process, if it did.
    """

    nbytes = None
    fills_batches = False

    def __init__(self, allow_pickle: bool, codec: Codec | None = None) -> None:
        self.unreadable = ""
        self._encoder = RecordEncoder(allow_pickle, codec)
        self._reader = functools.lru_cache(_READERS)(lambda text: reader_of_cache(text, allow_pickle, codec))

    def encode(self, sample: object, where: str) -> list[Any]:
        """Return the bytes of a sample, in buffers that may be its own memory. Raises SampleError, which names ``where``."""
        return self.buffers(self._encoder.pack(sample, where))

    @staticmethod
    def buffers(record: EncodedRecord) -> list[Any]:
        """Return the bytes of a sample, given its record."""
        foot = _FOOT.pack(record.nbytes, record.packed, len(record.treedef))
        return [*record.leaves, record.tail, record.treedef, foot]

    def decode(self, data: Any, nbytes: int, copy: bool | None = None) -> Any:
        """Return the sample in the first ``nbytes`` of memory; ``copy`` as for `RecordReader.read`.

        Raises:
            SegmentError: it is damaged.
            NotImported: it has a class of a module that is not imported here.
        """
        memory = memoryview(data)
        try:
            leaves, packed, text_bytes = _FOOT.unpack_from(memory, nbytes - _FOOT.size)
            end = nbytes - _FOOT.size - text_bytes
            return self._reader(bytes(memory[end : end + text_bytes])).read(memory, 0, leaves, packed, copy)
        except NotImported as error:
            self.unreadable = str(error)
            raise
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise SegmentError(str(error)) from error


def pack_sample(sample: object, where: str = "sample") -> bytes:
    """Return a sample as bytes, to send and to compare; objects without own bytes are pickled. Raises SampleError."""
    return b"".join(Records(allow_pickle=True).encode(sample, where))


def unpack_sample(data: bytes) -> Any:
    """Return the sample in bytes that `pack_sample` has made."""
    return Records(allow_pickle=True).decode(bytearray(data), len(data))
