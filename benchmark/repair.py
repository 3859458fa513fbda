"""Repairs a prepared folder of which some blocks are damaged, beside preparing it, checking it, and preparing it anew.

    python -m benchmark repair [--samples 100000] [--share 0.01] [--rounds 5]

Samples are uint8 tensors 3x64x64, in blocks of 1 MB. In a damaged block one byte is another one. Bytes are those of system
calls of this process and its children (/proc/self/io), also through pipes, and whether or not the page cache has them. MB are a
million bytes.
"""

import argparse
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmark.support.measuring import machine
from benchmark.support.stores import Images
from stocache import prepare
from stocache.storage.inspection import find_damage

CLAIM = "A repair reads the folder once, and writes exactly the damaged blocks."
NEEDS: tuple[tuple[str, ...], ...] = ()

BLOCK_BYTES = 1_000_000


def used(action: Callable[[], object]) -> tuple[float, int, int]:
    """Return the seconds that an action takes, and the bytes that it reads and writes."""
    before, began = _counts(), time.perf_counter()
    action()
    took_s = time.perf_counter() - began
    read, written = (now - then for now, then in zip(_counts(), before, strict=True))
    return took_s, read, written


def _counts() -> tuple[int, int]:
    """Return the bytes that this process and its children that have ended have read and written."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])


def damage(folder: Path, share: float) -> int:
    """Change a byte in a share of the blocks, at least one; return how many."""
    blocks = sorted(path for path in (folder / "blocks").iterdir() if path.is_file())
    chosen = random.Random(0).sample(blocks, max(1, round(share * len(blocks))))
    for path in chosen:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    return len(chosen)


def main() -> None:
    """Print what each action takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.01, help="of the blocks that are damaged")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("stocache").setLevel(logging.WARNING)
    source = Images(options.samples)
    found: dict[str, list[tuple[float, int, int]]] = {}
    with tempfile.TemporaryDirectory(dir=Path()) as where:
        prepare(Images(1), Path(where, "one"), progress=False).close()  # imports what it needs
        for _ in range(options.rounds):
            folder = Path(where, "prepared")
            shutil.rmtree(folder, ignore_errors=True)
            run = partial(prepare, source, folder, block_bytes=BLOCK_BYTES, progress=False)
            found.setdefault("prepare", []).append(used(run))
            damaged = damage(folder, options.share)
            with run() as storage:
                blocks = len(storage.index.blocks)
                found.setdefault("check", []).append(used(partial(find_damage, storage, 0)))
                found.setdefault("repair", []).append(used(partial(run, repair=True)))
                assert not find_damage(storage, 0)
            found.setdefault("prepare again", []).append(used(partial(run, again=True)))
    print(f"{machine()}\n\n{damaged} of {blocks} blocks damaged\n")
    print("| | s | MB read | MB written |\n| --- | ---: | ---: | ---: |")
    for name, rounds in found.items():
        took_s, read, written = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {took_s:.2f} | {read / 1e6:,.1f} | {written / 1e6:,.1f} |")


if __name__ == "__main__":
    main()
