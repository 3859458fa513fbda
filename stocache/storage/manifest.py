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

    At a URL each file is put there in one go, and nothing is locked. What was put in part, where the file system lets that
    happen, is found out by its checksums; index.json is small, and the last.

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
import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stocache.errors import DamagedError, StorageError
from stocache.samples.type_lookup import check_size
from stocache.storage.block import Block, ByteSource, encode
from stocache.storage.local import Folder, open_file
from stocache.system.hashing import ZEROS, BytesLike, embed_checksum, read_checksum

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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise StorageError(
            f"{path} is no index of stocache, or damaged. Give a folder that was prepared, or prepare again."
        ) from None
    try:
        version = facts.pop("version")
        if version != VERSION:
            raise StorageError(f"{path} is of version {version!r:.20}, and this stocache reads version {VERSION}.")
        found, wanted = read_checksum(text, _MARK)
        if found != wanted:
            raise ValueError(f"checksum {found}, its content gives {wanted}")
        blocks = [_entry_of(entry) for entry in facts.pop("blocks")]
        index = Index(blocks=blocks, **{"info": None, "info_checksum": None} | facts)
        check_size(index.samples), check_size(index.block_size)
        if type(index.plan) is not dict or type(index.info_checksum) not in (str, type(None)):
            raise ValueError("its facts are not what they should be")
        sizes = {entry.samples for entry in blocks[:-1]}
        if sum(entry.samples for entry in blocks) != index.samples or not sizes <= {index.block_size} or index.block_size < 1:
            raise ValueError("its blocks do not add up")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({error}). Prepare again.") from error
    return index


def _entry_of(entry: Any) -> Entry:
    """Return what the index says of a block. Raises ValueError where its file could not hold as many samples."""
    samples, nbytes, checksum = entry
    if type(checksum) is not str or _LEAST_BYTES * check_size(samples) > check_size(nbytes):
        raise ValueError(f"a block of {nbytes} bytes cannot hold {samples} samples")
    return Entry(samples, nbytes, checksum)


_LEAST_BYTES = 8  # of a sample in a block: its checksum


def open_block(
    path: str,
    name: str,
    entry: Entry | None,
    allow_pickle: bool = False,
    opened: Callable[[str], ByteSource] = open_file,
    *,
    decode: bool = True,
) -> Block:
    """Return the block in the file ``path``, called ``name`` in errors; ``entry`` is what the index says of it.

    Raises:
        DamagedError: it is missing, damaged, or another one.
        StorageError: it cannot be read here.
    """
    try:
        block = Block(opened(path), name, allow_pickle, decode=decode)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing. Prepare again; 'stocache check DIR' lists all damage.") from None
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise DamagedError(f"{name} cannot be read: {error}.") from error
    if entry is not None and (block.checksum, block.samples, block.nbytes) != (
        entry.checksum, entry.samples, entry.nbytes or block.nbytes
    ):  # fmt: skip
        raise DamagedError(
            f"{name} is another block than the index says (checksum {block.checksum}, expected {entry.checksum}): swapped, or "
            f"prepared anew. Prepare again; 'stocache check DIR' lists all damage."
        )
    return block


# ---------------------------------------------------------------------------------------------------- writing


class BlockFolderWriter:
    """A folder in which blocks are being prepared, by one process at a time and its workers."""

    def __init__(self, folder: Folder, allow_pickle: bool = False) -> None:
        self.folder, self.path, self.allow_pickle = folder, folder.path, allow_pickle

    @property
    def prepared(self) -> bool:
        """Whether the folder is whole."""
        return self.folder.exists(INDEX)

    def begin(self, plan: dict[str, Any], resume: bool) -> dict[int, Entry]:
        """Begin to prepare, or go on, if so is wanted and ``plan`` is that of last time; return the blocks that are there.

        Raises:
            StorageError: the folder holds files of others, or is prepared.
        """
        there = set(self.folder.names())
        strange = sorted(name for name in there if not _OURS.fullmatch(name))
        if strange or (_BLOCKS in there and not there & {_PREPARING, INDEX}):
            raise StorageError(f"{self.path} holds {(strange or [_BLOCKS])[0]!r}, which is no storage's. Give a new folder.")
        if self.prepared:
            raise StorageError(f"{self.path} is prepared already. Remove it to prepare it again, or give a new folder.")
        text = json.dumps({"format": FORMAT, "version": VERSION, "plan": plan}, indent=1).encode()
        same = resume and _PREPARING in there and self.folder.read(_PREPARING) == text
        if not same:
            self.folder.remove(STAGING, folder=True)
        found = self._blocks() if same else {}
        self.keep(found)  # before the new plan is there, or they would be taken for what it says
        self.folder.write(_PREPARING, text)
        self.folder.make(_BLOCKS)
        return found

    def keep(self, wanted: Container[int]) -> set[int]:
        """Remove all blocks but these, and what writers that were killed have left; return the numbers of what stays."""
        kept = set()
        for name in self.folder.names(_BLOCKS):
            match = _BLOCK.fullmatch(name)
            if match and int(match[1]) in wanted:
                kept.add(int(match[1]))
            else:
                self.folder.remove(f"{_BLOCKS}/{name}")
        return kept

    def _blocks(self) -> dict[int, Entry]:
        """Return the whole blocks that are there."""
        found = {}
        for name in self.folder.names(_BLOCKS):
            if match := _BLOCK.fullmatch(name):
                with contextlib.suppress(DamagedError):
                    block = self._block(f"{_BLOCKS}/{name}", None)
                    found[int(match[1])] = Entry(block.samples, block.nbytes, block.checksum)
        return found

    def _block(self, name: str, entry: Entry | None) -> Block:
        return open_block(name, f"{self.path}/{name}", entry, False, self.folder.open, decode=False)

    def write_block(self, number: int, samples: Sequence[Any], first: int) -> Entry:
        """Write a block, of which the first sample is number ``first`` in errors.

        Raises:
            SampleError: a sample cannot be stored.
            OSError: the disk is full, or fails.
        """
        return self.write_encoded(number, *self.encoded(samples, first))

    def write_encoded(self, number: int, pieces: Sequence[BytesLike], entry: Entry) -> Entry:
        """Write a block as `encoded` returns it. Raises OSError: the disk is full, or fails."""
        self.folder.write(block_name(number), *pieces)
        return entry

    def encoded(self, samples: Sequence[Any], first: int) -> tuple[list[BytesLike], Entry]:
        """Return the file of a block of these samples, in pieces, and what the index is to say of it. Raises SampleError."""
        pieces, checksum = encode(samples, first, self.allow_pickle)
        return pieces, Entry(len(samples), sum(map(len, pieces)), checksum)

    def finish(self, entries: list[Entry], block_size: int, info: Any, plan: dict[str, Any]) -> None:
        """Say that all blocks are there: write the index.

        Raises:
            SampleError: the info cannot be stored.
            StorageError: a block is not there.
            OSError: the disk is full, or fails.
        """
        self._settle(len(entries))
        facts: dict[str, Any] = {"checksum": ZEROS, "format": FORMAT, "version": VERSION}
        facts |= {"samples": sum(entry.samples for entry in entries), "block_size": block_size, "blocks": entries, "plan": plan}
        facts["structure"] = None
        if entries:
            facts["structure"] = self._block(block_name(0), entries[0]).structure
        if is_plain(info):
            facts["info"] = info
        else:
            pieces, facts["info_checksum"] = encode([info], 0, self.allow_pickle)
            self.folder.write(INFO, *pieces)
        self.folder.write(INDEX, embed_checksum(json.dumps(facts).encode(), _MARK))
        self.tidy()

    def _settle(self, count: int) -> None:
        """See to it that so many blocks are there, and nothing else among them."""
        kept = self.keep(range(count))
        for name in (block_name(number) for number in range(count) if number not in kept):
            if not self.folder.exists(name):  # or the list is behind, as a network's may be
                raise StorageError(
                    f"{self.path} lacks {name}, which a worker has written: to him that was another folder. Give one that all "
                    f"workers see."
                )

    def tidy(self) -> None:
        """Remove what is of no use any more once the folder is whole, and what writers that were killed have left."""
        for name in self.folder.names():
            if name in (_PREPARING, STAGING) or (name.endswith(".tmp") and _OURS.fullmatch(name)):
                self.folder.remove(name, folder=name == STAGING)


def is_plain(value: Any) -> bool:
    """Whether JSON gives ``value`` back as it is."""
    cls = type(value)
    if cls is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if cls is list:
        return all(map(is_plain, value))
    return value is None or cls in (str, bool, int) or (cls is float and abs(value) < float("inf"))
