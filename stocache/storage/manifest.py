"""The files of a prepared folder: their names, the index that says they are complete, and how they are written.

NOTE [ Storage folders ]
    blocks/000000.safetensors ...   the samples, ``block_size`` in each; the last block may have fewer (see NOTE [ Blocks ])
    info.safetensors                the dataset's info as a block of one sample, if JSON cannot hold it
    index.json                      written last; a folder without it is not prepared
    skipped.json                    the samples that could not be loaded, if any; see NOTE [ Skipped samples ]
    preparing.json                  until then: the plan of the preparation
    staging                         until then: the samples in their first order, if they are to be shuffled

    Each file is written under a temporary name, synchronised with the disk and renamed. So a file that has its final name is
    complete. The process that prepares locks the folder (flock). If it dies, the kernel unlocks the folder. The next process
    finds preparing.json. If it prepares the same data in the same way, it keeps the complete blocks and continues.

    At a URL each file is written in one operation, and nothing is locked. Some file systems may keep a part of a file; its
    checksum then shows that. index.json is small, and it is the last file.

    index.json is one JSON object:

        checksum      16 hexadecimal digits: the XXH3-64 of the file with zeros in place of these digits
        format        "stocache blocks"
        version       2
        samples       number of samples
        block_size    samples in each block but the last
        blocks        number of samples, number of bytes and checksum of each block
        structure     of the first block, for information: its treedefs, the first 16 of them, and the integers of rows
        info          info of the dataset; or info_checksum, the checksum of info.safetensors
        plan          how it was prepared
"""

import contextlib
import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stocache.errors import DamagedError, StorageError
from stocache.samples.leaves.type_lookup import check_size
from stocache.storage.block import LIST_DAMAGE, PREPARE_AGAIN, Block, encode, version_error
from stocache.storage.files import ByteSource
from stocache.storage.local import Folder, open_file
from stocache.storage.skipped import SKIPPED
from stocache.system.hashing import ZEROS, BytesLike, embed_checksum, read_checksum
from stocache.system.limits import EXHAUSTED

FORMAT, INDEX_VERSION = "stocache blocks", 2
INDEX, _PREPARING, INFO, _BLOCKS, STAGING = "index.json", "preparing.json", "info.safetensors", "blocks", "staging"
_MARK = b'"checksum": "'
_MOST_TREEDEFS = 16  # in the index
_OURS = re.compile(r"(index\.json|skipped\.json|preparing\.json|info\.safetensors|blocks|staging)(\.\d+\.tmp)?")
_BLOCK = re.compile(r"(\d{6,})\.safetensors")


class Entry(NamedTuple):
    """A block in the index: its number of samples, its bytes and its checksum."""

    samples: int
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Index:
    """The content of index.json; see NOTE [ Storage folders ]."""

    checksum: str
    samples: int
    block_size: int
    blocks: list[Entry]
    structure: Any
    info: Any
    info_checksum: str | None
    plan: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(entry.nbytes for entry in self.blocks)

    @property
    def skipped(self) -> int:
        """Number of samples of the source that could not be loaded."""
        planned = self.plan.get("samples")
        return planned - self.samples if type(planned) is int else 0


def block_name(number: int) -> str:
    """Return the path of a block within its folder."""
    return f"{_BLOCKS}/{number:06d}.safetensors"


def parse_index(text: bytes, path: str) -> Index:
    """Return the index in the content of the file ``path``.

    Raises:
        DamagedError: the content has changed since it was written.
        StorageError: the file is not an index of stocache, or has a different version.
    """
    try:
        facts = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise KeyError("format")
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedError(f"{path} is damaged: it is not JSON. {PREPARE_AGAIN}") from error
    except (KeyError, TypeError, AttributeError):
        raise StorageError(f"{path} is not an index of stocache. Give a folder that was prepared.") from None
    try:
        version = facts.pop("version")
        if version != INDEX_VERSION:
            raise StorageError(f"{path} {version_error(version, INDEX_VERSION)}")
        read_checksum(text, _MARK)
        blocks = [_entry_of(entry) for entry in facts.pop("blocks")]
        index = Index(blocks=blocks, **{"info": None, "info_checksum": None} | facts)
        check_size(index.samples), check_size(index.block_size)
        if type(index.plan) is not dict or type(index.info_checksum) not in (str, type(None)):
            raise ValueError("its plan or info_checksum has the wrong type")
        sizes = {entry.samples for entry in blocks[:-1]}
        if sum(entry.samples for entry in blocks) != index.samples or not sizes <= {index.block_size} or index.block_size < 1:
            raise ValueError("its blocks do not add up")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({error}). {PREPARE_AGAIN}") from error
    return index


def _entry_of(entry: Any) -> Entry:
    """Return a block's entry. Raises ValueError if a file of this size cannot hold its samples."""
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
    *,
    open_source: Callable[[str], ByteSource] = open_file,
) -> Block:
    """Open the block in the file ``path``.

    Args:
        path: the file.
        name: its name in errors.
        entry: its entry in the index, which the block must match; None to skip that check.
        allow_pickle: as for `Block`.
        open_source: opens the file.

    Raises:
        DamagedError: the file is missing or damaged, or holds a different block.
        StorageError: it cannot be read here.
    """
    try:
        block = Block(open_source(path), name, allow_pickle)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing. {LIST_DAMAGE}") from None
    except OSError as error:
        if isinstance(error, StorageError) or error.errno in EXHAUSTED:
            raise
        raise DamagedError(f"{name} cannot be read: {error}.") from error
    if entry is not None and (block.checksum, block.samples, block.nbytes) != (
        entry.checksum, entry.samples, entry.nbytes or block.nbytes
    ):  # fmt: skip
        raise DamagedError(
            f"{name} is not the block in the index (checksum {block.checksum}, expected {entry.checksum}): it was swapped, or "
            f"prepared again. {LIST_DAMAGE}"
        )
    return block


class BlockFolderWriter:
    """Writes the files of a prepared folder. One process at a time uses it, with its workers."""

    def __init__(self, folder: Folder, allow_pickle: bool = False) -> None:
        self.folder, self.path, self.allow_pickle = folder, folder.path, allow_pickle

    @property
    def prepared(self) -> bool:
        """Whether the folder is complete."""
        return self.folder.exists(INDEX)

    def begin(self, plan: dict[str, Any], resume: bool) -> dict[int, Entry]:
        """Begin a preparation, or continue one, and return the complete blocks by number.

        An earlier preparation is continued if ``resume`` is True and its plan was the same; otherwise its blocks are removed.

        Raises:
            StorageError: the folder is prepared, or holds other files.
        """
        there = set(self.folder.names())
        strange = sorted(name for name in there if not _OURS.fullmatch(name))
        if strange or (_BLOCKS in there and not there & {_PREPARING, INDEX}):
            name = (strange or [_BLOCKS])[0]
            raise StorageError(f"{self.path} holds {name!r}, which stocache did not write. Give a new folder.")
        if self.prepared:
            raise StorageError(f"{self.path} is prepared already. Remove it to prepare it again, or give a new folder.")
        text = _preparing(plan)
        same = resume and _PREPARING in there and self.folder.read(_PREPARING) == text
        if not same:
            self.folder.remove(STAGING, folder=True)
        found = self._complete_blocks() if same else {}
        self.remove_blocks_except(found)  # before the new plan is written, or they would seem to be of that plan
        if not same:
            self.folder.remove(SKIPPED)  # after the blocks, whose order depends on it
        self.folder.write(_PREPARING, text)
        self.folder.make(_BLOCKS)
        return found

    def reopen(self) -> None:
        """Turn a prepared folder into one whose preparation, with a different plan, was interrupted."""
        self.folder.write(_PREPARING, _preparing({}))
        self.folder.remove(INDEX)

    def remove_block(self, number: int) -> None:
        """Remove a block."""
        self.folder.remove(block_name(number))

    def remove_blocks_except(self, wanted: Container[int]) -> set[int]:
        """Remove all other blocks, and temporary files of killed writers; return the numbers of the blocks that stay."""
        kept = set()
        for name in self.folder.names(_BLOCKS):
            match = _BLOCK.fullmatch(name)
            if match and int(match[1]) in wanted:
                kept.add(int(match[1]))
            else:
                self.folder.remove(f"{_BLOCKS}/{name}")
        return kept

    def _complete_blocks(self) -> dict[int, Entry]:
        """Return the complete blocks in the folder by number."""
        found = {}
        for name in self.folder.names(_BLOCKS):
            if match := _BLOCK.fullmatch(name):
                with contextlib.suppress(DamagedError):
                    block = self._open_to_check(f"{_BLOCKS}/{name}", None)
                    found[int(match[1])] = Entry(block.samples, block.nbytes, block.checksum)
        return found

    def _open_to_check(self, name: str, entry: Entry | None) -> Block:
        return open_block(name, f"{self.path}/{name}", entry, open_source=self.folder.open)

    def write_block(self, number: int, samples: Sequence[object], first: int) -> tuple[int, Entry]:
        """Write a block, and return its number and entry. Its first sample is number ``first`` in errors.

        Raises:
            SampleError: a sample cannot be stored.
            OSError: the disk is full, or fails.
        """
        return self.write_encoded(number, *self.encode_block(samples, first))

    def write_encoded(self, number: int, pieces: Sequence[BytesLike], entry: Entry) -> tuple[int, Entry]:
        """Write a block that `encode_block` returned, and return its number and entry.

        Raises:
            OSError: the disk is full, or fails.
        """
        self.folder.write(block_name(number), *pieces)
        return number, entry

    def encode_block(self, samples: Sequence[object], first: int) -> tuple[list[BytesLike], Entry]:
        """Return the file of a block, in pieces, and its entry in the index. Raises SampleError: a sample cannot be stored."""
        pieces, checksum = encode(samples, first, self.allow_pickle)
        return pieces, Entry(len(samples), sum(map(len, pieces)), checksum)

    def finish(self, entries: list[Entry], block_size: int, info: object, plan: dict[str, Any]) -> None:
        """Write the info and the index, once all blocks are written.

        Raises:
            SampleError: the info cannot be stored.
            StorageError: a block is missing.
            OSError: the disk is full, or fails.
        """
        self._check_blocks(len(entries))
        facts: dict[str, Any] = {"checksum": ZEROS, "format": FORMAT, "version": INDEX_VERSION}
        facts |= {"samples": sum(entry.samples for entry in entries), "block_size": block_size, "blocks": entries, "plan": plan}
        facts["structure"] = {"treedefs": [], "integers": None}
        if entries:
            block = self._open_to_check(block_name(0), entries[0])
            facts["structure"] = {"treedefs": block.treedefs[:_MOST_TREEDEFS], "integers": block.row and block.row[1]}
        if is_plain(info):
            facts["info"] = info
        else:
            pieces, facts["info_checksum"] = encode([info], 0, self.allow_pickle)
            self.folder.write(INFO, *pieces)
        self.folder.write(INDEX, embed_checksum(json.dumps(facts).encode(), _MARK))
        self.clean_up()

    def _check_blocks(self, count: int) -> None:
        """Remove blocks beyond the first ``count``; raise StorageError if one of these is missing."""
        kept = self.remove_blocks_except(range(count))
        for name in (block_name(number) for number in range(count) if number not in kept):
            if not self.folder.exists(name):  # the listing of a network file system may lag behind
                raise StorageError(
                    f"{self.path}: {name} is missing although a worker wrote it: the workers do not see the same folder. "
                    f"Give a folder that all workers see."
                )

    def clean_up(self) -> None:
        """Remove files that a complete folder does not need, and temporary files of killed writers."""
        for name in self.folder.names():
            if name in (_PREPARING, STAGING) or (name.endswith(".tmp") and _OURS.fullmatch(name)):
                self.folder.remove(name, folder=name == STAGING)


def _preparing(plan: dict[str, Any]) -> bytes:
    """Return the content of preparing.json."""
    return json.dumps({"format": FORMAT, "version": INDEX_VERSION, "plan": plan}, indent=1).encode()


def is_plain(value: Any) -> bool:
    """Return whether ``value`` comes back from JSON unchanged."""
    cls = type(value)
    if cls is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if cls is list:
        return all(map(is_plain, value))
    return value is None or cls in (str, bool, int) or (cls is float and abs(value) < float("inf"))
