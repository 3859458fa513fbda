"""Read forged blocks, indices and records of caches: is each one read, or refused, without harm?

    python -m benchmark fuzz [--cases 20000] [--seed 0]

Forged are structures, names of classes, dtypes, shapes, offsets, integers, skeletons and compressed payloads. Their checksums
are right. Each case ends in one of:

equal      the sample is the one that was saved: the change did not matter, or concerned another sample
another    a sample that the forged bytes do describe: checksums are not signatures
refused    an error of stocache

All else is a failure: another exception, a signal, more than 20 s, growth of the process by more than 96 MiB, an import, a
started program, an opened file. Cases run in child processes with limited memory.
"""

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from PIL import Image

from stocache import OnDiskBlockDataStorage, RaggedCache, StocacheError
from stocache.samples.record_decoder import pack_sample
from stocache.samples.record_encoder import HEAD, EncodedSample, pack_integers, parse_treedef
from stocache.storage.block import Block, encode
from stocache.storage.files import BytesFile
from stocache.system.hashing import ZEROS, embed_checksum

CLAIM = "Forged blocks, indices and records are read or refused, without harm."
NEEDS = (("PIL", '-e ".[bench]"'), ("zstandard", '-e ".[bench]"'), ("lz4", '-e ".[bench]"'))

GROWTH_KB = 96 << 10
SECONDS = 20
_CASES_PER_CHILD = 2500
_MOST_SEALED = 1000  # samples that a forged block may claim for its checksums to be right


class Kind(enum.Enum):
    """Members that samples have."""

    BOX = "box"
    MASK = "mask"


class Access(enum.Flag):
    """Flags that samples have."""

    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    """A namedtuple that samples are made of."""

    image: Any
    label: Any


@dataclasses.dataclass
class Box:
    """A dataclass that samples are made of."""

    corners: Any
    score: float = 0.5


class Tagged(torch.Tensor):
    """A tensor with attributes."""


def _tagged() -> torch.Tensor:
    value = torch.arange(4.0).as_subclass(Tagged)
    value.space = "xyxy"
    return value


def samples() -> list[Any]:
    """Return samples with leaves and containers of all kinds, two of each structure."""
    record = np.array([(1, 2.0, "ab")], dtype=[("a", "<i2"), ("b", "<f8", (2,)), ("c", "<U3")])
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    picture = Image.frombytes("RGB", (4, 3), bytes(range(36)))
    return [
        value
        for n in range(2)
        for value in (
            (torch.full((3, 4), n, dtype=torch.uint8), n),
            {"image": torch.full((2, n + 1), n * 1.0), "text": "ab" * n, "tags": ["x"] * n, "maybe": None if n else 0.5},
            {"list": [None] * (18 + n), "empty": [{}] * (20 + n), "deep": [[[n] * 2, ["a"]] * 3], "numbers": list(range(n))},
            [np.arange(6, dtype=">i4").reshape(2, 3), record, np.float32(n), np.datetime64("2026-11-22"), np.str_("")],
            {"kind": list(Kind)[n], "flags": Access.READ | Access.WRITE, Kind.BOX: (Kind.MASK, 1), (1, "a"): b"x", True: 1j},
            Pair(Box([1.0, 2.0], n), collections.OrderedDict(a={"a": 1}, b=(1, 3))),
            [zone and datetime.datetime(2026, 1, 1, tzinfo=zone), datetime.timedelta(n), fractions.Fraction(1, 3), range(5)],
            [decimal.Decimal("1.5"), pathlib.Path("a/b"), torch.float16, torch.device("cpu"), 10**30, bytearray(b"xy")],
            [picture, {"a": [n]}, torch.Size([2, n])],
            {"boxes": _tagged(), "empty": torch.zeros(0, 4), "zero": np.zeros((2, 0), "<f4"), "t": torch.zeros(2, 3).t()},
            [[{"a": i, "b": "x" * i} for i in range(n + 2)], [torch.ones(i) for i in range(n + 1)], [1, "a", None] * 7],
        )
    ]


# ---------------------------------------------------------------------------------------------------- the samples


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_INTS = [-1, 0, 1, 2, 3, 7, 8, 17, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, -(2**63), 2**64]
_ODD = [True, False, None, 1.5, float("nan"), float("inf"), "3", "", [], {}, [[]], {"a": 1}, {"enum": ["os:system", "A"]}]
_SHAPES = [
    [], [0], [1], [2**40], [0, 2**40], [2**62, 2**62, 0], [-1], [1.5], [True], [1] * 65, [2**63], "ab", [[1]], [2**31,
    2**31],
]  # fmt: skip
_DTYPES = [
    *("|O8", "O", "object", "|V8", "|V0", "|V2147483647", "<f4", "<f8", "(2,)f4", "f4,O", "<U1000000000", "<U0", "|S0"),
    *("<M8[ns]", "<M8[5Z]", "<m8", "bfloat16", "qint8", "quint4x2", "save", "float8_e5m2", "bits8", "int1", "nn", "bool",
    "uint8"), *([["a", "|O8"]], [["a", "<f4"], ["b", [["c", "|O"]]]], [["a", "<f4", [2, 3]]], [["a", "|O8", [2]]], [["a",
    "|V0", [2**40]]]), *([["a", "<f4", [2**31, 2**31]]], [["a", "<f4"], ["a", "<f4"]], [[["t", "a"], "<i8"]], _nested(40),
    [], [["", "|V100000000"]]),
]  # fmt: skip
_CLASSES = [
    *("subprocess:Popen", "os:system", "builtins:exec", "builtins:eval", "antigravity:fly", "this:s", "builtins:list"),
    *("builtins:dict", "builtins:tuple", "collections:Counter", "collections:UserDict", "torch:Tensor", "torch:Size"),
    *("torch.nn.parameter:Parameter", "PIL.Image:Image", "PIL.ImageFile:ImageFile", "numpy:memmap", "enum:Enum",
    "enum:IntFlag"), *("os:environ", "sys:modules", "ctypes:c_char_p", "pathlib:Path", "builtins:type", "types:ModuleType",
    "a", "", ":", "os:"), *("torch.return_types:max", "shelve:Shelf", "collections.abc:Mapping", "builtins:NoneType",
    "collections:OrderedDict", ".:x"), *("builtins:set", "collections:defaultdict", "builtins:slice", f"{__name__}:Pair",
    f"{__name__}:Box", f"{__name__}:Kind"),
]  # fmt: skip
_KINDS = [
    *("in", "list", "tuple", "union", "tensor", "array", "scalar", "number", "numbers", "enum", "pickle", "str", "bytes",
    "long"), *("items", "range", "date", "datetime", "time", "timedelta", "Decimal", "Fraction", "torch.dtype",
    "torch.device", "void"), *("PosixPath", "PureWindowsPath", "bytearray"),
]  # fmt: skip
_CONTAINERS = [
    *("dict", "list", "tuple", "none", "namedtuple", "mapping", "dataclass", "tensor", "image", "set",
    "deque"), *("slice", "defaultdict", "memmap", "void"),
]  # fmt: skip
_POOLS: dict[str, list[Any]] = {
    **{
        "dtype": _DTYPES,
        "shape": _SHAPES,
        "class": _CLASSES,
        "kind": _KINDS,
        "container": _CONTAINERS,
        "order": [*_SHAPES, [1, 0]],
    },
    **{"dims": _INTS, "extra": [[], [2**40], ["os:system"], ["builtins:list"], [None], [[1]], ["collections:deque"]]},
    "type": ["int", "float", "bool", "complex", "str", 1],
}


def _imported_classes() -> list[str]:
    """Return the names of all classes in imported modules."""
    return sorted(
        f"{name}:{item.__qualname__}"
        for name, module in list(sys.modules.items())
        for item in list(getattr(module, "__dict__", {}).values())
        if isinstance(item, type) and item.__module__ == name
    )


_everywhere: list[str] = []


def _class(rng: random.Random) -> str:
    if not _everywhere:
        _everywhere.extend(_imported_classes())
    return rng.choice(_everywhere) if rng.random() < 0.4 else rng.choice(_CLASSES)


def _places(tree: Any, root: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield all places in a tree of lists and dicts: the container, and the key in it."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def mutate(tree: Any, rng: random.Random) -> None:
    """Change a tree of lists and dicts in one to three places."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return
        if rng.random() < 0.6:  # where names, dtypes and sizes are, rather than anywhere
            places = [place for place in places if place[1] in _POOLS] or places
        owner, key = rng.choice(places)
        way = rng.random()
        if key == "class" and way < 0.8:
            owner[key] = _class(rng)
        elif key in _POOLS and way < 0.8:
            owner[key] = copy.deepcopy(rng.choice(_POOLS[key]))
        elif type(owner[key]) is int and way < 0.7:
            owner[key] = rng.choice(_INTS)
        elif type(owner[key]) is str and way < 0.5:
            others = [other for inner, where in places if isinstance(other := inner[where], str)]
            owner[key] = rng.choice([*others, *_DTYPES[:20], _class(rng), rng.choice(_KINDS)])
        elif way < 0.7:
            inner, where = rng.choice(places)
            owner[key] = copy.deepcopy(inner[where])
        elif way < 0.8:
            del owner[key]
        elif way < 0.85:
            owner[key] = _nested(rng.choice((50, 150, 300)))
        elif way < 0.9 and isinstance(owner[key], list):
            owner[key] = owner[key] * rng.choice((2, 100))
        else:
            owner[key] = copy.deepcopy(rng.choice(_INTS + _ODD))


# ---------------------------------------------------------------------------------------------------- blocks


def _block(rng: random.Random) -> tuple[list[Any], bytes, dict[str, Any], dict[str, Any], bytearray]:
    """Return the values of a block, its file, header, facts, and columns."""
    values = [value for value in rng.sample(SAMPLES, rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2)))]
    data = b"".join(encode(values)[0])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return values, data, header, json.loads(header["__metadata__"]["stocache"]), bytearray(data[8 + length :])


def seal_block(header: dict[str, Any], facts: Any, columns: bytearray) -> bytes:
    """Return the file of a block with the checksums that it should have, as far as it can be read for that."""
    if isinstance(facts, dict):
        facts["checksum"] = ZEROS
    header["__metadata__"] = {"stocache": facts if isinstance(facts, str) else json.dumps(facts)}
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    try:
        first, middle = header["checks"]["data_offsets"][1], header["samples"]["data_offsets"][0]
        bounds = np.frombuffer(columns, "<i8", (middle - first) // 8, first).tolist()
        if row := facts["row"]:
            width = -(-row[0] // 8) * 8
            bounds = [width * number for number in range(facts["samples"] + 1)] if facts["samples"] < _MOST_SEALED else []
        pieces = (columns[middle + begin : middle + end] for begin, end in itertools.pairwise(bounds))
        checks = b"".join(xxhash.xxh3_64_intdigest(bytes(piece)).to_bytes(8, "little") for piece in pieces)
        columns[: min(first, len(checks))] = checks[:first]
    except Exception:  # its samples cannot be found
        pass
    try:
        covered = bytes(columns[: header["samples"]["data_offsets"][0]])
        return embed_checksum(head, b'\\"checksum\\": \\"', covered) + bytes(columns)
    except Exception:
        return head + bytes(columns)


def _read_block(values: list[Any], data: bytes) -> str:
    block = Block(BytesFile(data), "forged")
    _copy_records(block)
    for row in range(block.samples):
        block.prefetch(row)
    return _compared(block.all(), values)


def _copy_records(block: Block) -> None:
    """Copy the records of a block into a cache. Those that are copied must be read there as they are read from the block."""
    try:
        records = block.encoded(range(block.samples)) or {}
    except TimeoutError:
        raise
    except Exception:  # then the samples are made
        return
    with RaggedCache("2MB", max(records, default=0) + 1) as cache:
        cache.set_encoded_if_empty(records)
        for row in np.flatnonzero(cache.aux_array.numpy() == 1).tolist():
            found = [cache.get_slot(row, allow_empty_slot=False)]
            try:
                expected = [block.sample(row)]
            except StocacheError as error:
                raise AssertionError(f"sample {row} was copied, and cannot be read") from error
            if _compared(found, expected) != "equal" and _compared(expected, expected) == "equal":
                raise AssertionError(f"sample {row} differs from that of the block")


def forged_tree(rng: random.Random) -> str:
    """A block with another treedef."""
    values, _, header, facts, columns = _block(rng)
    texts = facts["treedefs"]
    which = rng.randrange(len(texts))
    texts[which] = _mutate_skeleton(parse_treedef(texts[which]), rng).decode("utf-8", "surrogatepass")
    return _read_block(values, seal_block(header, facts, columns))


def forged_integers(rng: random.Random) -> str:
    """A block with other sizes of rows; or other offsets, or other heads of records."""
    values, _, header, facts, columns = _block(rng)
    for _ in range(rng.choice((1, 2, 4))):
        if facts["row"]:
            owner, key = rng.choice(list(_places(facts["row"])))
            owner[key] = copy.deepcopy(rng.choice(_INTS + _ODD))
        else:
            first, middle = header["offsets"]["data_offsets"]
            at = rng.randrange(first, middle, 8)
            if rng.random() < 0.6:
                at = middle + int.from_bytes(columns[at : at + 8], "little") + rng.choice((0, 8, 12))
            columns[at : at + 8] = (rng.choice(_INTS) % 2**64).to_bytes(8, "little")
    return _read_block(values, seal_block(header, facts, columns))


def forged_header(rng: random.Random) -> str:
    """A block with other columns, other samples, or broken JSON."""
    values, _, header, facts, columns = _block(rng)
    if rng.random() < 0.2:
        text = json.dumps(facts)
        deep = rng.choice((300, 100_000))
        return _read_block(values, seal_block(header, text[:-1] + ', "more": ' + "[" * deep + "]" * deep + "}", columns))
    if rng.random() < 0.4:
        facts[rng.choice(("samples", "version", "treedefs", "row"))] = copy.deepcopy(rng.choice(_INTS + _ODD))
    else:
        del header["__metadata__"]
        mutate(header, rng)
    return _read_block(values, seal_block(header, facts, columns))


def forged_values(rng: random.Random) -> str:
    """A block with other bytes in its leaves."""
    values, _, header, facts, columns = _block(rng)
    for _ in range(rng.choice((1, 3, 20))):
        columns[rng.randrange(len(columns))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return _read_block(values, seal_block(header, facts, columns))


def cut_file(rng: random.Random) -> str:
    """A block that is cut or longer, with any length of the header."""
    values, data, _, _, _ = _block(rng)
    changed = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(rng.randrange(100)))
    if rng.random() < 0.5:
        changed[:8] = (rng.choice(_INTS) % 2**64).to_bytes(8, "little")
    return _read_block(values, bytes(changed))


def forged_index(rng: random.Random) -> str:
    """A folder with another index."""
    folder = _prepared()
    facts = json.loads(_INDEX[0])
    if rng.random() < 0.1:
        deep = rng.choice((300, 100_000))
        text = json.dumps(facts)[:-1] + ', "more": ' + "[" * deep + "]" * deep + "}"
    else:
        part = rng.choice((facts, facts["blocks"]))
        mutate(part, rng)
        facts["checksum"] = ZEROS
        text = json.dumps(facts)
    try:
        sealed = embed_checksum(text.encode(), b'"checksum": "')
    except ValueError:
        sealed = text.encode()
    pathlib.Path(folder, "index.json").write_bytes(sealed)
    with OnDiskBlockDataStorage[Any, Any](folder) as storage:
        count = len(storage)
        storage.load_dataset_info()
        found = [storage.load_sample(idx) for idx in (0, 1, count - 1)]
        return _compared(found, [SAMPLES[0], SAMPLES[1], SAMPLES[5]])


_INDEX: list[bytes] = []
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _prepared() -> str:
    if not _FOLDERS:
        folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        _FOLDERS.append(folder)
        with OnDiskBlockDataStorage[Any, Any](folder.name, 2) as storage:
            storage.start_preparation()
            for sample in SAMPLES[:6]:
                storage.save_sample(sample)
            storage.finish_preparation({"mean": 0.5})
        _INDEX.append(pathlib.Path(folder.name, "index.json").read_bytes())
    return _FOLDERS[0].name


# ---------------------------------------------------------------------------------------------------- records


def _as_lists(skeleton: Any) -> Any:
    return list(map(_as_lists, skeleton)) if isinstance(skeleton, tuple) else skeleton


def _as_tuples(tree: Any) -> Any:
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list) else tree


_NAMES = [
    *_CLASSES, *_KINDS, *_CONTAINERS, *[name for name in _DTYPES if isinstance(name, str)], "coded", "items", "int", "list",
]  # fmt: skip


def _mutate_skeleton(skeleton: Any, rng: random.Random) -> bytes:
    tree = [_as_lists(skeleton)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            break
        owner, key = rng.choice(places)
        way = rng.random()
        if isinstance(owner[key], str) and way < 0.7:
            owner[key] = _class(rng) if ":" in owner[key] else rng.choice(_NAMES)
        elif isinstance(owner[key], int) and way < 0.7:
            owner[key] = rng.choice(_INTS)
        elif way < 0.8:
            inner, where = rng.choice(places)
            owner[key] = copy.deepcopy(inner[where])
        elif way < 0.87:
            del owner[key]
        elif way < 0.92:
            owner[key] = _nested(rng.choice((50, 90, 150, 300)))
        else:
            owner[key] = rng.choice(_INTS + _ODD + _DTYPES + _SHAPES)
    return repr(_as_tuples(tree[0]) if tree else ()).encode("utf-8", "surrogatepass")


def read_record(
    sample: Any,
    text: bytes,
    data: bytes,
    integers: list[int],
    codec: Any = None,
    packed: int | None = None,
    copies: bool = True,
) -> str:
    """Put a record into a cache, and read it."""
    with RaggedCache("2MB", 1, codec=codec) as cache:
        integers = [number % 2**64 for number in integers]
        tail, own = pack_integers(integers)
        arena = cache._store.arena
        with cache._segment.guard:
            number = arena.run_locked(lambda: arena.number_of(text), -1)
            blob = HEAD.pack(len(data), max(number, 0), (own if packed is None else packed) % 2**32) + data + tail
            at = arena.run_locked(lambda: arena.take(len(blob)), -1)
            if at >= 0:
                cache._segment.write(at, blob, len(blob))
            arena.offsets[0] = max(0, at)
            cache._states[0] = 1
        return _compared([cache.get_slot(0, allow_empty_slot=False, copy=copies)], [sample])


def _record(rng: random.Random) -> tuple[Any, EncodedSample, bytes, list[int]]:
    sample = rng.choice(SAMPLES)
    record = EncodedSample(sample)
    return sample, record, *record.pack()


def forged_skeleton(rng: random.Random) -> str:
    """A record with another skeleton."""
    sample, record, data, integers = _record(rng)
    return read_record(sample, _mutate_skeleton(record.treedef, rng), data, integers, copies=rng.random() < 0.7)


def forged_text(rng: random.Random) -> str:
    """A record whose skeleton is not a literal, or a very deep one."""
    sample, record, data, integers = _record(rng)
    text = bytearray(repr(record.treedef).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.2:
        deep = rng.choice((50, 150, 5000, 200_000))
        text = bytearray(b"(" * deep + b"1," + b")" * deep if rng.random() < 0.5 else b"-" * deep + b"1")
    else:
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.choice((b"(", b")", b"'", b",", b"9" * 30, b"\xff", b"None", b""))
    return read_record(sample, bytes(text), data, integers)


def forged_sizes(rng: random.Random) -> str:
    """A record with other integers, or fewer, or more."""
    sample, record, data, integers = _record(rng)
    for _ in range(rng.choice((1, 2))):
        if integers and rng.random() < 0.8:
            integers[rng.randrange(len(integers))] = rng.choice(_INTS)
        else:
            integers = integers[: rng.randrange(len(integers) + 1)] + [rng.choice(_INTS)] * rng.randrange(3)
    return read_record(sample, repr(record.treedef).encode(), data, integers, copies=rng.random() < 0.7)


def forged_leaves(rng: random.Random) -> str:
    """A record with other bytes in its leaves."""
    sample, record, data, integers = _record(rng)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 5)) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return read_record(sample, repr(record.treedef).encode(), bytes(changed), integers, copies=rng.random() < 0.7)


def forged_head(rng: random.Random) -> str:
    """A record with another head, or with any offset."""
    sample, *_ = _record(rng)
    with RaggedCache("2MB", 1) as cache:
        cache.set_slot(0, sample)
        at = cache._store.arena.offsets[0]
        if rng.random() < 0.3:
            cache._store.arena.offsets[0] = rng.choice(_INTS) % 2**64
        else:
            fields = list(HEAD.unpack_from(cache._store._memory, at))
            which = rng.randrange(3)
            fields[which] = rng.choice(_INTS) % (2**64, 2**32, 2**32)[which]
            HEAD.pack_into(cache._store._memory, at, *fields)
        return _compared([cache.get_slot(0, allow_empty_slot=False)], [sample])


def compressed(rng: random.Random) -> str:
    """A compressed record whose payload is damaged, is something else, or expands to gigabytes."""
    sample, record, data, integers = _record(rng)
    sample, record = (
        (sample, "much that is easy to compress " * 20),
        EncodedSample((sample, "much that is easy to compress " * 20)),
    )
    data, integers = record.pack()
    integers.append(len(data))
    name = rng.choice(("zstd", "lz4"))
    packed = compress(name, data)
    way = rng.random()
    if way < 0.3:
        packed = _bomb(name)
    elif way < 0.5:
        packed = packed[: rng.randrange(len(packed))]
    elif way < 0.6:
        packed = compress(name, data + bytes(rng.choice((1, 100, 10_000))))
    elif way < 0.8:
        changed = bytearray(packed)
        for _ in range(rng.choice((1, 4))):
            changed[rng.randrange(min(len(changed), 12 if rng.random() < 0.5 else len(changed)))] = rng.randrange(256)
        packed = bytes(changed)
    else:
        integers = [rng.choice(_INTS) if rng.random() < 0.3 else number for number in integers]
    head = pack_integers([number % 2**64 for number in integers])[1] | 4
    return read_record(sample, repr(record.treedef).encode(), packed, integers, codec=name, packed=head)


def compress(name: str, data: bytes) -> bytes:
    """Return bytes compressed by the codec of a name."""
    if name == "zstd":
        import zstandard

        return zstandard.ZstdCompressor(level=1).compress(data)
    import lz4.block

    return bytes(lz4.block.compress(data))


_BOMBS: dict[str, bytes] = {}


def _bomb(name: str) -> bytes:
    if name not in _BOMBS:
        _BOMBS[name] = compress(name, bytes(64 << 20))
    return _BOMBS[name] if name == "zstd" else b"\xff\xff\xff\x7f" + _BOMBS[name][4:]


# ---------------------------------------------------------------------------------------------------- running

FORGERS: list[Callable[[random.Random], str]] = [
    *(forged_tree, forged_tree, forged_tree, forged_integers, forged_header, forged_values, cut_file, forged_index),
    *(forged_skeleton, forged_skeleton, forged_skeleton, forged_text, forged_sizes, forged_leaves, forged_head, compressed),
]
SAMPLES: list[Any] = []


def _compared(found: list[Any], values: list[Any]) -> str:
    """Say whether samples are those that were saved."""
    try:
        return "equal" if list(map(pack_sample, found)) == list(map(pack_sample, values)) else "another"
    except Exception:  # forged values may be of any kind
        return "another"


_HARM = (
    "import",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.remove",
    "socket.connect",
)
_HARM += ("ctypes.dlopen", "os.rename", "os.mkdir", "os.kill", "os.putenv", "pickle.find_class", "webbrowser.open")


class RngMonitor:
    """A forbidden action of a case."""

    def __init__(self) -> None:
        self.active, self.seen = False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: Any) -> None:
        if not self.active:
            return
        if event in _HARM:
            self.seen.append(f"{event} {str(arguments[:1])[:80]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if not path.startswith((*(folder.name for folder in _FOLDERS), "/dev/shm", "/proc", "/sys", *zoneinfo.TZPATH)):
                self.seen.append(f"open {path[:80]}")


def run(seed: int, watch: RngMonitor) -> tuple[str, str]:
    """Run a case; return the name of the forger, and the result: "equal", "another", "refused", or the failure."""
    rng = random.Random(seed)
    forger = FORGERS[seed % len(FORGERS)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.seen.clear()
    watch.active = True
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome = forger(rng)
    except StocacheError:
        outcome = "refused"
    except BaseException as error:  # a SystemExit, too
        outcome = f"raised {type(error).__name__}: {str(error)[:120]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.active = False
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if watch.seen:
        outcome = f"did {watch.seen[0]}"
    elif grown > GROWTH_KB:
        outcome = f"grew by {grown >> 10} MiB ({outcome})"
    return forger.__name__, outcome


def _ready() -> RngMonitor:
    """Trigger imports and opened files that are harmless, and limit the memory."""
    SAMPLES.extend(samples())
    _prepared()
    _class(random.Random(0))
    for name in ("zstd", "lz4"):
        _bomb(name)
    watch = RngMonitor()
    for seed in range(len(FORGERS)):  # not watched: their imports are done now, not later
        with io.StringIO() as _:
            run(-1 - seed, watch)
    for sample in SAMPLES:
        for copies in (True, False):
            data, integers = (record := EncodedSample(sample)).pack()
            read_record(sample, repr(record.treedef).encode("utf-8", "surrogatepass"), data, integers, copies=copies)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + (1 << 30),) * 2)
    return watch


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        (kilobytes,) = (int(line.split()[1]) for line in file if line.startswith("VmData"))
    return kilobytes << 10


def child(begin: int, end: int) -> None:
    """Run the cases of these seeds, and print a line before and after each."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, expired)
    watch = _ready()
    out = sys.stdout
    sys.stdout = sys.stderr
    for seed in range(begin, end):
        print(f"begin {seed} {FORGERS[seed % len(FORGERS)].__name__}", file=out, flush=True)
        print("end", json.dumps(run(seed, watch)), file=out, flush=True)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=out, flush=True)


def trials(cases: int, seed: int) -> tuple[collections.Counter[tuple[str, str]], list[str], int]:
    """Return the number of cases by result, the failures, and the peak of the memory in KiB."""
    counts, failures, peak = collections.Counter[tuple[str, str]](), list[str](), 0
    at, end = seed, seed + cases
    while at < end:
        command = [sys.executable, "-m", "benchmark.fuzz", "--child", str(at), str(min(end, at + _CASES_PER_CHILD))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in ("", *sys.path) if path is not None)}
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        begun: tuple[int, str] | None = None
        for line in process.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word == "begin":
                number, name = rest.split()
                begun = int(number), name
                at = begun[0] + 1
            elif word == "end" and begun is not None:
                name, outcome = json.loads(rest)
                good = outcome in ("equal", "another", "refused")
                counts[name, outcome if good else "failed"] += 1
                if not good:
                    failures.append(f"seed {begun[0]}: {name}: {outcome}")
                begun = None
            elif word == "peak":
                peak = max(peak, int(rest))
        if begun is not None:
            counts[begun[1], "failed"] += 1
            failures.append(f"seed {begun[0]}: {begun[1]}: ended with {process.returncode}: {process.stderr[-200:]!r}")
        elif process.returncode:
            raise RuntimeError(process.stderr[-2000:])
    return counts, failures, peak


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    counts, failures, peak = trials(arguments.cases, arguments.seed)
    print("| what is forged | cases | refused | equal | another | failed |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in dict.fromkeys(forger.__name__ for forger in FORGERS):
        row = [counts[name, outcome] for outcome in ("refused", "equal", "another", "failed")]
        print(f"| {name.replace('_', ' ')} | {sum(row)} | {' | '.join(map(str, row))} |")
    print(f"\nPeak of the memory of a process: {peak >> 10} MiB")
    print("\n".join(failures))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
