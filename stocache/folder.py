"""A folder of blocks, on disk: where its files are, how they get there, and the index that says it is whole.

NOTE [ Storage folders ]
    blocks/000000.safetensors ...   the samples, ``block_size`` in each, the last one less (see NOTE [ Blocks ])
    info.safetensors                the info of the dataset as a block of one sample, where JSON cannot hold it
    index.json                      written last, when all else is there: without it the folder is not prepared
    preparing.json                  before that: what is being prepared, and how
    staging                         before that: the samples in the order in which they come, if they are to be shuffled

    Each file is written under another name, synchronised with the disk and renamed, so what has its name is whole. Whoever
    prepares locks the folder (flock): the kernel unlocks it when he dies, and the next one finds preparing.json, keeps the
    blocks that are there if he is to prepare the same, and goes on.

    index.json is one JSON object:

        checksum      16 hexadecimal digits: the XXH3-64 of the file with zeros in the place of these digits
        format        "stocache blocks"
        version       1
        samples       how many there are
        block_size    samples in each block but the last
        blocks        of each its samples, bytes and checksum
        structure     of the samples of the first block, for information
        info          of the dataset; or info_checksum, that of info.safetensors
        plan          how it was prepared
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stocache.block import Block, File, encode
from stocache.checksums import ZEROS, Buffer, seal, seal_in
from stocache.errors import DamagedError, StorageError

FORMAT, VERSION = "stocache blocks", 1
INDEX, _PREPARING, INFO, _BLOCKS, STAGING = "index.json", "preparing.json", "info.safetensors", "blocks", "staging"
_MARK = b'"checksum": "'
_OURS = re.compile(r"(index\.json|preparing\.json|info\.safetensors|blocks|staging)(\.\d+\.tmp)?")
_BLOCK = re.compile(r"(\d{6,})\.safetensors")


class Entry(NamedTuple):
    """What the index says of a block."""

    samples: int
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Index:
    """What is in a folder; see NOTE [ Storage folders ]."""

    checksum: str
    samples: int
    block_size: int
    blocks: list[Entry]
    structure: Any
    info: Any
    info_checksum: str | None
    plan: dict[str, Any]


def block_name(number: int) -> str:
    """Return the name of a block within its folder."""
    return f"{_BLOCKS}/{number:06d}.safetensors"


# ---------------------------------------------------------------------------------------------------- reading


def parse_index(text: bytes, path: str) -> Index:
    """Return the index whose file, ``path``, has this content.

    Raises:
        DamagedError: it is not as it was written.
        StorageError: it is of another version, or of no folder of ours.
    """
    try:
        facts = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise KeyError("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StorageError(
            f"{path} is no index of stocache, or damaged. Give a folder that was prepared, or prepare again."
        ) from None
    try:
        version = facts.pop("version")
        if version != VERSION:
            raise StorageError(f"{path} is of version {version!r:.20}, and this stocache reads version {VERSION}.")
        found, wanted = seal_in(text, _MARK)
        if found != wanted:
            raise ValueError(f"checksum {found}, its content gives {wanted}")
        blocks = [Entry(*entry) for entry in facts.pop("blocks")]
        index = Index(blocks=blocks, **{"info": None, "info_checksum": None} | facts)
        sizes = {entry.samples for entry in blocks[:-1]}
        if sum(entry.samples for entry in blocks) != index.samples or not sizes <= {index.block_size} or index.block_size < 1:
            raise ValueError("its blocks do not add up")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({error}). Prepare again.") from error
    return index


def open_block(path: str, name: str, entry: Entry | None, allow_pickle: bool | None) -> Block:
    """Return the block in the file ``path``, called ``name`` in errors; ``entry`` is what the index says of it.

    Raises:
        DamagedError: it is missing, damaged, or another one.
        StorageError: it cannot be read here.
    """
    try:
        block = Block(File(path).open(), name, allow_pickle)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing. Prepare again; 'stocache check DIR' lists all damage.") from None
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise DamagedError(f"{name} cannot be read: {error}.") from error
    if entry is not None and (block.checksum, block.samples) != (entry.checksum, entry.samples):
        raise DamagedError(
            f"{name} is another block than the index says (checksum {block.checksum}, expected {entry.checksum}): swapped, or "
            f"prepared anew. Prepare again; 'stocache check DIR' lists all damage."
        )
    return block


# ---------------------------------------------------------------------------------------------------- writing


class Workshop:
    """A folder in which blocks are being prepared, by one process at a time and its workers."""

    def __init__(self, path: str, allow_pickle: bool = False) -> None:
        self.path, self.allow_pickle = path, allow_pickle

    @property
    def prepared(self) -> bool:
        """Whether the folder is whole."""
        return os.path.exists(os.path.join(self.path, INDEX))

    @contextlib.contextmanager
    def locked(self, wait: bool = True) -> Iterator[None]:
        """Keep all others from preparing here.

        Raises:
            StorageError: another process prepares here, and we are not to wait for it; or the folder has files of others.
        """
        os.makedirs(self.path, exist_ok=True)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise StorageError(f"{self.path} is being prepared by another process. Wait for it, or end it.") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF):  # file systems without locks
                    raise
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # for workers too, which have it open as long as an error's traceback holds them
            os.close(fd)

    def begin(self, plan: dict[str, Any], resume: bool) -> dict[int, Entry]:
        """Begin to prepare, or go on, if so is wanted and ``plan`` is that of last time; return the blocks that are there.

        Raises:
            StorageError: the folder holds files of others, or is prepared.
        """
        there = set(os.listdir(self.path))
        strange = sorted(name for name in there if not _OURS.fullmatch(name))
        if strange or (_BLOCKS in there and not there & {_PREPARING, INDEX}):
            raise StorageError(f"{self.path} holds {(strange or [_BLOCKS])[0]!r}, which is no storage's. Give a new folder.")
        if self.prepared:
            raise StorageError(f"{self.path} is prepared already. Remove it to prepare it again, or give a new folder.")
        text = json.dumps({"format": FORMAT, "version": VERSION, "plan": plan}, indent=1).encode()
        same = resume and self._read(_PREPARING) == text
        if not same:
            shutil.rmtree(os.path.join(self.path, STAGING), ignore_errors=True)
        found = self._blocks() if same else {}
        self.keep(found)  # before the new plan is there, or they would be taken for what it says
        self.write(_PREPARING, text)
        os.makedirs(os.path.join(self.path, _BLOCKS), exist_ok=True)
        return found

    def keep(self, found: Container[int]) -> None:
        """Remove all blocks but these, and what writers that were killed have left."""
        for name in self._names():
            match = _BLOCK.fullmatch(name)
            if not (match and int(match[1]) in found):
                os.unlink(os.path.join(self.path, _BLOCKS, name))

    def _read(self, name: str) -> bytes:
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def _names(self) -> list[str]:
        """Return the names of all files among the blocks."""
        try:
            return os.listdir(os.path.join(self.path, _BLOCKS))
        except FileNotFoundError:
            return []

    def _blocks(self) -> dict[int, Entry]:
        """Return the whole blocks that are there."""
        found = {}
        for name in self._names():
            if match := _BLOCK.fullmatch(name):
                path = os.path.join(self.path, _BLOCKS, name)
                with contextlib.suppress(StorageError):
                    block = open_block(path, name, None, None)
                    found[int(match[1])] = Entry(block.samples, os.path.getsize(path), block.checksum)
        return found

    def write_block(self, number: int, samples: Sequence[Any], first: int) -> Entry:
        """Write a block, of which the first sample is number ``first`` in errors.

        Raises:
            SampleError: a sample cannot be stored.
            OSError: the disk is full, or fails.
        """
        pieces, entry = self._encoded(samples, first)
        self.write(block_name(number), *pieces)
        return entry

    def entry(self, samples: Sequence[Any], first: int) -> Entry:
        """Return what the index would say of a block of these samples."""
        return self._encoded(samples, first)[1]

    def _encoded(self, samples: Sequence[Any], first: int) -> tuple[list[Buffer], Entry]:
        pieces, checksum = encode(samples, first, self.allow_pickle)
        return pieces, Entry(len(samples), sum(map(len, pieces)), checksum)

    def finish(self, entries: list[Entry], block_size: int, info: Any, plan: dict[str, Any]) -> None:
        """Say that all blocks are there: write the index.

        Raises:
            SampleError: the info cannot be stored.
            OSError: the disk is full, or fails.
        """
        facts: dict[str, Any] = {"checksum": ZEROS, "format": FORMAT, "version": VERSION}
        facts |= {"samples": sum(entry.samples for entry in entries), "block_size": block_size, "blocks": entries, "plan": plan}
        facts["structure"] = None
        if entries:
            name = block_name(0)
            facts["structure"] = open_block(os.path.join(self.path, name), name, entries[0], None).structure
        if is_plain(info):
            facts["info"] = info
        else:
            pieces, facts["info_checksum"] = encode([info], 0, self.allow_pickle)
            self.write(INFO, *pieces)
        self.write(INDEX, seal(json.dumps(facts).encode(), _MARK))
        self.tidy()

    def tidy(self) -> None:
        """Remove what is of no use any more once the folder is whole, and what writers that were killed have left."""
        shutil.rmtree(os.path.join(self.path, STAGING), ignore_errors=True)
        for name in os.listdir(self.path):
            if name == _PREPARING or (name.endswith(".tmp") and _OURS.fullmatch(name)):
                os.unlink(os.path.join(self.path, name))

    def write(self, name: str, *pieces: Buffer) -> None:
        """Write a file whole, or not at all.

        Raises:
            OSError: the disk is full, or fails.
        """
        write_file(os.path.join(self.path, name), *pieces)


def write_file(path: str, *pieces: Buffer) -> None:
    """Write a file, in pieces, whole, or not at all; another of that name is replaced.

    Raises:
        OSError: the disk is full, or fails.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OSError(
            error.errno, f"{error.strerror}. What is whole stays, and preparing again goes on from there. Writing", path
        ) from error
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_plain(value: Any) -> bool:
    """Whether JSON gives ``value`` back as it is."""
    cls = type(value)
    if cls is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if cls is list:
        return all(map(is_plain, value))
    return value is None or cls in (str, bool, int) or (cls is float and abs(value) < float("inf"))
