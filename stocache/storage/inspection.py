"""Describe the samples of a prepared folder, and find its damage."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from tqdm import tqdm

from stocache.errors import DamagedError
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


def describe_structure(node: object, name: str = "structure", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield a structure, as an index has it, as lines of two columns: an indented name, and a description."""
    text, parts = _describe(node)
    yield "  " * depth + name, text
    for inner, part in parts:
        yield from describe_structure(part, inner, depth + 1)


def _describe(node: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the description of a part of a structure, and its own parts by name."""
    if node is None:
        return "no samples", []
    kind = node["kind"]
    if kind == "in":
        cls = node["class"].removeprefix("builtins:")
        return cls.replace("NoneType", "None"), list(zip(map(repr, node["keys"]), node["children"], strict=True))
    if kind == "union":
        return "one of", [("or", child) for child in node["children"]]
    if kind in ("list", "tuple"):
        return f"{kind} of any length", [("each", node["items"])]
    if "dtype" not in node and "type" not in node:  # str, bytes, dates and so on; members of an enum, which has a class
        return {"long": "int", "pickle": "pickled"}.get(kind, node.get("class", kind)), []
    words = [node["class"], "of", node["type"]] if kind == "numbers" else [node["type"] if kind == "number" else kind]
    if "dtype" in node:
        words.append(str(node["dtype"]))
    sizes = ["?"] * node["dims"] if "dims" in node else list(map(str, node["shape"]))  # "?": the size varies
    if sizes:
        words.append("x".join(sizes))
    return " ".join(words), []
