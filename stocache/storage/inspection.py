"""Describe the samples of a prepared folder, and find its damage."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from tqdm import tqdm

from stocache.errors import DamagedError
from stocache.samples.leaves.kinds import kind_of
from stocache.samples.record_encoder import parse_treedef
from stocache.storage.block import LIST_DAMAGE
from stocache.storage.manifest import block_name
from stocache.storage.storage import OnDiskBlockDataStorage
from stocache.system.objects import TorchLoader


def find_damage(storage: OnDiskBlockDataStorage[Any, Any], num_workers: int) -> list[str]:
    """Read all files of a storage, with a progress bar; return a line for each that is damaged or unknown.

    Raises:
        StorageError: the index cannot be read.
    """
    blocks = range(len(storage.index.blocks))  # a dataset, so that the workers of a DataLoader check them in parallel
    check = partial(_check_block, storage)
    loader: Any = TorchLoader(blocks, None, collate_fn=check, num_workers=min(num_workers, len(blocks)))  # type: ignore[arg-type]
    checks = tqdm(loader, desc=f"checking {storage.base_folder}", unit="block")
    problems = [problem for problem in (*checks, storage.check_info(), _check_skipped(storage)) if problem]
    known = {os.path.basename(block_name(number)) for number in blocks}
    folder = os.path.join(storage.base_folder, os.path.dirname(block_name(0)))
    unknown = sorted(set(os.listdir(folder)) - known) if os.path.isdir(folder) else []
    return problems + [f"{folder}/{name} is not in the index: nothing reads it. Remove it." for name in unknown]


def _check_skipped(storage: OnDiskBlockDataStorage[Any, Any]) -> str | None:
    try:
        storage.load_skipped()
    except DamagedError as error:
        return str(error)
    return None


def _check_block(storage: OnDiskBlockDataStorage[Any, Any], number: int) -> str:
    """Return the damage of a block; "" if it is intact."""
    try:
        return (storage.check(number) or "").removesuffix(f" {LIST_DAMAGE}")
    except OSError as error:  # the disk fails
        return f"{storage.base_folder}/{block_name(number)} cannot be read: {error}."


def describe_structure(structure: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the structure of samples, as an index has it, as lines of two columns: an indented name, and a description."""
    treedefs = [parse_treedef(text) for text in structure["treedefs"]]
    if not treedefs:
        yield "structure", "no samples"
    for number, treedef in enumerate(treedefs):
        sizes = iter(() if structure["integers"] is None else _shapes(treedef, structure["integers"]))
        yield from _describe(treedef, "or" if number else "structure", 0, sizes)


def _leaves(treedef: Any) -> Iterator[Any]:
    """Yield the leaves and lists of a treedef."""
    if treedef[0] == "in":
        for child in treedef[5]:
            yield from _leaves(child)
    else:
        yield treedef


def _shapes(treedef: Any, integers: list[int]) -> list[int]:
    """Return the integers of a row without the integers that say how long its streams are; none if it has lists."""
    leaves = list(_leaves(treedef))
    if any(leaf[0] == "items" for leaf in leaves):
        return []
    return integers[len({kind_of(leaf).stream for leaf in leaves} or {0}) - 1 :]


def _describe(treedef: Any, name: str, depth: int, sizes: Iterator[int]) -> Iterator[tuple[str, str]]:
    kind, *facts = treedef
    children: Iterable[tuple[str, Any]] = ()
    if kind == "in":
        text = facts[1].removeprefix("builtins:").replace("NoneType", "None")
        children = zip(map(repr, facts[2]), facts[4], strict=True)
    elif kind == "items":
        text, children = f"{facts[0]} of any length", [("each", item) for item in facts[1]]
    else:
        text = _text_of(treedef, [str(next(sizes, "?")) for _ in range(kind_of(treedef).dims)])  # "?": the size varies
    yield "  " * depth + name, text
    for key, child in children:
        yield from _describe(child, key, depth + 1, sizes)


def _text_of(leaf: Any, sizes: list[str]) -> str:
    kind, *facts = leaf
    if kind in ("tensor", "array", "scalar"):
        return " ".join([kind, str(facts[0]), *["x".join(sizes)] * bool(sizes)])
    if kind == "numbers":
        return " ".join([facts[0], "of", facts[1], *sizes])
    return str(facts[0]) if facts else {"long": "int", "pickle": "pickled"}.get(kind, kind)  # a number, a member of an enum
