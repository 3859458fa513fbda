"""Read forged blocks, indices and records of caches: is each one read, or refused, without harm?

Forged are treedefs, names of classes, dtypes, shapes, offsets, integers and compressed payloads. Their checksums are right.
Each case ends in one of:

equal      the sample is the one that was saved: the change did not matter, or concerned a different sample
another    a sample that the forged bytes do describe: checksums are not signatures
refused    an error of stocache

All else is wrong: a different exception, a signal, more than 20 s, growth of the process by more than 96 MiB, an import, a
started program, an opened file. Cases run in child processes with limited memory.
"""

import collections
import contextlib
import copy
import functools
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import lz4.block
import numpy as np
import xxhash
import zstandard

from benchmark.support.faults import count_table, in_child
from benchmark.support.harness import Run, experiment
from stocache import OnDiskBlockDataStorage, RaggedCache, StocacheError
from stocache.samples.record_decoder import pack_sample
from stocache.samples.record_encoder import COMPRESSED, HEAD, EncodedSample, pack_integers, parse_treedef
from stocache.storage.block import Block, encode
from stocache.storage.files import BytesFile
from stocache.system.hashing import ZEROS, embed_checksum
from tests.support.containers import Box, Point
from tests.support.samples import Kind
from tests.support.storages import COPIED, ROWS, STRUCTURES, save

CLAIM = "Forged blocks, indices and records are read or refused, without harm."

GROWTH_KB = 96 << 10
SECONDS = 20
_CASES_PER_CHILD = 2500
_MOST_SEALED = 1000  # samples that a forged block may claim for its checksums to be right


@functools.cache
def samples() -> list[Any]:
    """Return samples with leaves and containers of all kinds, two of each structure."""
    return [make(idx) for make in (COPIED | STRUCTURES | ROWS).values() for idx in (3, 4)]


# ---------------------------------------------------------------------------------------------------- changes


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_INTS = [-1, 0, 1, 2, 3, 7, 8, 17, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, -(2**63), 2**64]
_ODD = [
    *(True, False, None, 1.5, float("nan"), float("inf"), "3", "", [], {}, [[]], {"a": 1}, {"enum": ["os:system", "A"]}),
    # shapes and dtypes
    *([0], [2**40], [0, 2**40], [2**62, 2**62, 0], [-1], [1.5], [True], [1] * 65, [2**63], "ab", [[1]], [2**31, 2**31]),
    *([["a", "|O8"]], [["a", "<f4"], ["b", [["c", "|O"]]]], [["a", "<f4", [2, 3]]], [["a", "|O8", [2]]], _nested(40)),
    *([["a", "|V0", [2**40]]], [["a", "<f4", [2**31, 2**31]]], [["a", "<f4"], ["a", "<f4"]], [[["t", "a"], "<i8"]]),
]
_DTYPES = """
    |O8 O object |V8 |V0 |V2147483647 <f4 <f8 (2,)f4 f4,O <U1000000000 <U0 |S0 <M8[ns] <M8[5Z] <m8 bfloat16 qint8 quint4x2 save
    float8_e5m2 bits8 int1 nn bool uint8
"""
_CLASSES = f"""
    subprocess:Popen os:system builtins:exec builtins:eval antigravity:fly this:s builtins:list builtins:dict builtins:tuple
    collections:Counter collections:UserDict torch:Tensor torch:Size torch.nn.parameter:Parameter PIL.Image:Image enum:Enum
    PIL.ImageFile:ImageFile numpy:memmap enum:IntFlag os:environ sys:modules ctypes:c_char_p pathlib:Path builtins:type
    types:ModuleType a : os: torch.return_types:max shelve:Shelf collections.abc:Mapping builtins:NoneType builtins:slice .:x
    collections:OrderedDict builtins:set collections:defaultdict {Kind.__module__}:Kind {Box.__module__}:Box
    {Point.__module__}:Point
"""
_KINDS = """
    in items coded list tuple union tensor array scalar number numbers enum pickle str bytes long range date datetime time
    timedelta Decimal Fraction torch.dtype torch.device void PosixPath PureWindowsPath bytearray dict none namedtuple mapping
    dataclass image set deque slice defaultdict memmap int
"""
_NAMES = [*_DTYPES.split(), *_CLASSES.split(), *_KINDS.split()]


@functools.cache
def _imported_classes() -> list[str]:
    """Return the names of all classes in imported modules."""
    return sorted(
        f"{name}:{item.__qualname__}"
        for name, module in list(sys.modules.items())
        for item in list(getattr(module, "__dict__", {}).values())
        if issubclass(type(item), type) and item.__module__ == name  # not isinstance: some warn if their class is asked for
    )


def _class(rng: random.Random) -> str:
    return rng.choice(_imported_classes() if rng.random() < 0.4 else _CLASSES.split())


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
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
        elif way < 0.91:
            owner[key] = _nested(rng.choice((50, 90, 150, 300)))
        elif way < 0.93 and isinstance(owner[key], list):
            owner[key] = owner[key] * rng.choice((2, 100))
        else:
            owner[key] = copy.deepcopy(rng.choice(_INTS + _ODD + _NAMES))


def _as_lists(treedef: Any) -> Any:
    return list(map(_as_lists, treedef)) if isinstance(treedef, tuple) else treedef


def _as_text(tree: Any) -> bytes:
    """Return a treedef in lists as text."""
    return repr(_as_tuples(tree)).encode("utf-8", "surrogatepass")


def _as_tuples(tree: Any) -> Any:
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list) else tree


def _as_integers(tree: Any) -> list[int]:
    """Return the numbers of a list that was changed, as they can be stored."""
    return [number % 2**64 for number in tree if isinstance(number, int)] if isinstance(tree, list) else []


def _mutate_bytes(data: bytes | bytearray, rng: random.Random, times: int) -> bytes:
    changed = bytearray(data)
    for _ in range(times if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return bytes(changed)


def _too_deep(facts: Any, rng: random.Random) -> str:
    """Return an object as JSON, with very deep lists in it."""
    deep = rng.choice((300, 100_000))
    return json.dumps(facts)[:-1] + ', "more": ' + "[" * deep + "]" * deep + "}"


# ---------------------------------------------------------------------------------------------------- blocks


def _block(rng: random.Random) -> tuple[list[Any], bytes, dict[str, Any], dict[str, Any], bytearray]:
    """Return the values of a block, its file, header, facts, and columns."""
    values = [value for value in rng.sample(samples(), rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 2)))]
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
    with contextlib.suppress(Exception):  # its samples cannot be found
        first, middle = header["checks"]["data_offsets"][1], header["samples"]["data_offsets"][0]
        bounds = np.frombuffer(columns, "<i8", (middle - first) // 8, first).tolist()
        if row := facts["row"]:
            width = -(-row[0] // 8) * 8
            bounds = [width * number for number in range(facts["samples"] + 1)] if facts["samples"] < _MOST_SEALED else []
        pieces = (columns[middle + begin : middle + end] for begin, end in itertools.pairwise(bounds))
        checks = b"".join(xxhash.xxh3_64_intdigest(bytes(piece)).to_bytes(8, "little") for piece in pieces)
        columns[: min(first, len(checks))] = checks[:first]
    try:
        covered = bytes(columns[: header["samples"]["data_offsets"][0]])
        return embed_checksum(head, b'\\"checksum\\": \\"', covered) + bytes(columns)
    except Exception:
        return head + bytes(columns)


def _compared(found: list[Any], values: list[Any]) -> str:
    """Say whether samples are the samples that were saved."""
    try:
        return "equal" if list(map(pack_sample, found)) == list(map(pack_sample, values)) else "another"
    except Exception:  # forged values may be of any kind
        return "another"


def _read_block(values: list[Any], data: bytes) -> str:
    block = Block(BytesFile(data), "forged")
    _copy_records(block)
    for row in range(block.samples):
        block.prefetch(row)
    return _compared(block.all(), values)


def _copy_records(block: Block) -> None:
    """Copy the records of a block into a cache. Records that are copied must be read there as they are read from the block."""
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


def block(rng: random.Random) -> str:
    """A block with a different header, other facts, treedefs or offsets; with other leaves; or one that is cut."""
    values, data, header, facts, columns = _block(rng)
    way = rng.random()
    if way < 0.1:
        changed = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(rng.randrange(100))
        length = changed[:8] if rng.random() < 0.5 else (rng.choice(_INTS) % 2**64).to_bytes(8, "little")
        return _read_block(values, length + changed[8:])
    if way < 0.15:
        return _read_block(values, seal_block(header, _too_deep(facts, rng), columns))
    if way < 0.3:
        return _read_block(values, seal_block(header, facts, bytearray(_mutate_bytes(columns, rng, rng.choice((1, 3, 20))))))
    first, middle = header["checks"]["data_offsets"][1], header["samples"]["data_offsets"][0]
    facts["treedefs"] = [_as_lists(parse_treedef(text)) for text in facts["treedefs"]]
    tree = {"header": header, "facts": facts, "offsets": np.frombuffer(columns[first:middle], "<u8").tolist()}
    mutate(tree, rng)
    facts, offsets = tree.get("facts"), np.array(_as_integers(tree.get("offsets")), "<u8").tobytes()
    if isinstance(facts, dict) and isinstance(facts.get("treedefs"), list):
        facts["treedefs"] = [_as_text(each).decode("utf-8", "surrogatepass") for each in facts["treedefs"]]
    columns[first:middle] = offsets[: middle - first].ljust(middle - first, b"\0")
    header = tree.get("header")
    return _read_block(values, seal_block(header if isinstance(header, dict) else {}, facts, columns))


@functools.cache
def _prepared() -> tuple[tempfile.TemporaryDirectory[str], bytes]:
    """Return a prepared folder, and its index."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    save(OnDiskBlockDataStorage[Any, Any](folder.name, 2), 6, {"mean": 0.5}, samples().__getitem__).close()
    return folder, pathlib.Path(folder.name, "index.json").read_bytes()


def index(rng: random.Random) -> str:
    """A folder with a different index."""
    folder, data = _prepared()
    facts = json.loads(data)
    if rng.random() < 0.1:
        text = _too_deep(facts, rng)
    else:
        mutate(rng.choice((facts, facts["blocks"])), rng)
        text = json.dumps(facts | {"checksum": ZEROS})
    try:
        sealed = embed_checksum(text.encode(), b'"checksum": "')
    except ValueError:
        sealed = text.encode()
    pathlib.Path(folder.name, "index.json").write_bytes(sealed)
    with OnDiskBlockDataStorage[Any, Any](folder.name) as storage:
        rows = 0, 1, len(storage) - 1
        storage.load_dataset_info()
        return _compared([storage.load_sample(row) for row in rows], [samples()[row] for row in (0, 1, 5)])


# ---------------------------------------------------------------------------------------------------- records


def read_record(
    sample: Any, text: bytes, data: bytes, integers: list[int], codec: Any = None, copies: bool = True, **head: int
) -> str:
    """Put a record into a cache, and read it. ``head``: other numbers in its head, or a different offset."""
    with RaggedCache("2MB", 1, codec=codec) as cache:
        tail, packed = pack_integers([number % 2**64 for number in integers])
        arena = cache._store.arena
        with cache._segment.guard:
            number = max(0, arena.run_locked(lambda: arena.number_of(text), -1))
            head = {"nbytes": len(data), "number": number, "packed": packed} | head
            blob = HEAD.pack(head["nbytes"] % 2**64, head["number"] % 2**32, head["packed"] % 2**32) + data + tail
            at = arena.run_locked(lambda: arena.take(len(blob)), -1)
            if at >= 0:
                cache._segment.write(at, blob, len(blob))
            arena.offsets[0] = head.get("offset", max(0, at)) % 2**64
            cache._states[0] = 1
        return _compared([cache.get_slot(0, allow_empty_slot=False, copy=copies)], [sample])


def _record(sample: Any) -> tuple[Any, bytes, bytes, list[int]]:
    """Return the treedef of a sample, the treedef as text, the bytes of the leaves, and the integers."""
    record = EncodedSample(sample)
    return record.treedef, repr(record.treedef).encode("utf-8", "surrogatepass"), *record.pack()


def record(rng: random.Random) -> str:
    """A record with a different treedef, integers, leaves or head; or with a treedef that is not a literal, or very deep."""
    sample = rng.choice(samples())
    treedef, text, data, integers = _record(sample)
    way, options = rng.random(), {}
    if way < 0.6:
        tree = {"treedef": _as_lists(treedef), "integers": integers}
        mutate(tree, rng)
        text, integers = _as_text(tree.get("treedef", ())), _as_integers(tree.get("integers"))
    elif way < 0.7:
        changed = bytearray(text)
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randrange(3)] = rng.choice((b"(", b")", b"'", b",", b"9" * 30, b"\xff", b"None", b""))
        text = bytes(changed)
    elif way < 0.75:
        deep = rng.choice((50, 150, 5000, 200_000))
        text = b"(" * deep + b"1," + b")" * deep if rng.random() < 0.5 else b"-" * deep + b"1"
    elif way < 0.9:
        data = _mutate_bytes(data, rng, rng.choice((1, 5)))
    else:
        options = {rng.choice(("nbytes", "number", "packed", "offset")): rng.choice(_INTS)}
    return read_record(sample, text, data, integers, copies=rng.random() < 0.7, **options)


def compressed(rng: random.Random) -> str:
    """A compressed record whose payload is damaged, is something else, or expands to gigabytes."""
    sample = rng.choice(samples()), "much that is easy to compress " * 20
    _, text, data, integers = _record(sample)
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
        begin = 12 if rng.random() < 0.5 else len(packed)
        packed = _mutate_bytes(packed[:begin], rng, rng.choice((1, 4))) + packed[begin:]
    else:
        integers = [rng.choice(_INTS) if rng.random() < 0.3 else number for number in integers]
    width = pack_integers([number % 2**64 for number in integers])[1]
    return read_record(sample, text, packed, integers, codec=name, packed=width | COMPRESSED)


def compress(name: str, data: bytes) -> bytes:
    """Return bytes compressed by the codec of a name."""
    return zstandard.ZstdCompressor(level=1).compress(data) if name == "zstd" else bytes(lz4.block.compress(data))


@functools.cache
def _bomb(name: str) -> bytes:
    packed = compress(name, bytes(64 << 20))
    return packed if name == "zstd" else b"\xff\xff\xff\x7f" + packed[4:]


# ---------------------------------------------------------------------------------------------------- running

FORGERS: list[Callable[[random.Random], str]] = [*[block] * 4, index, *[record] * 4, compressed]
_HARM = """
    import subprocess.Popen os.system os.exec os.fork os.forkpty os.posix_spawn os.remove socket.connect ctypes.dlopen os.rename
    os.mkdir os.kill os.putenv pickle.find_class webbrowser.open
"""


def watch() -> list[str]:
    """Return a list in which is noted, from now on, what a case must not do: events of Python's audit hooks."""
    seen, harm = list[str](), _HARM.split()
    allowed = _prepared()[0].name, "/dev/shm", "/proc", "/sys", *zoneinfo.TZPATH

    def hook(event: str, arguments: Any) -> None:
        is_file = event == "open" and isinstance(arguments[0], str | bytes)
        if event in harm or (is_file and not os.fsdecode(arguments[0]).startswith(allowed)):
            seen.append(f"{event} {str(arguments[:1])[:80]}")

    sys.addaudithook(hook)
    return seen


def run_case(seed: int, seen: list[str]) -> str:
    """Run a case; return the result: "equal", "another", "refused", or what was wrong. ``seen``: of `watch`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen.clear()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome = FORGERS[seed % len(FORGERS)](random.Random(seed))
    except StocacheError:
        outcome = "refused"
    except BaseException as error:  # a SystemExit, too
        outcome = f"raised {type(error).__name__}: {str(error)[:120]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if seen:
        return f"did {seen[0]}"
    return f"grew by {grown >> 10} MiB ({outcome})" if grown > GROWTH_KB else outcome


def _expired(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def run_cases(begin: int, end: int) -> Iterator[str]:
    """Run the cases of these seeds in this process, with limited memory, and yield the results."""
    signal.signal(signal.SIGALRM, _expired)
    seen = watch()
    for seed in range(len(FORGERS)):  # not looked at: their imports are done now, not later
        run_case(-1 - seed, seen)
    for sample, copies in itertools.product(samples(), (True, False)):
        read_record(sample, *_record(sample)[1:], copies=copies)
        _read_block([sample], b"".join(encode([sample])[0]))
    with open("/proc/self/status") as file:
        (kilobytes,) = (int(line.split()[1]) for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, ((kilobytes << 10) + (1 << 30),) * 2)
    for seed in range(begin, end):
        yield run_case(seed, seen)


def trials(cases: int, seed: int) -> dict[str, Counter[str]]:
    """Return the numbers of results for each forger; print what is wrong."""
    _prepared(), _imported_classes(), _bomb("zstd"), _bomb("lz4")  # once for all children
    rows, at, end = collections.defaultdict[str, Counter[str]](Counter), seed, seed + cases
    while at < end:
        for outcome in in_child(run_cases, at, min(end, at + _CASES_PER_CHILD)):
            name = FORGERS[at % len(FORGERS)].__name__
            if outcome not in ("equal", "another", "refused"):
                print(f"seed {at}: {name}: {outcome}", flush=True)
                outcome = "wrong"
            rows[name].update({"cases": 1, outcome: 1})
            at += 1
    return dict(sorted(rows.items()))


@experiment(rounds=20_000, quick=500, needs="PIL")
def forged(run: Run) -> None:
    """Read forged blocks, indices and records."""
    count_table(run, trials(run.rounds, run.seed))
