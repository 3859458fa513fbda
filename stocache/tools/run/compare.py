"""``stocache run --check``: run a program twice, with torch's loader and with stocache's, and compare the batches."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from stocache.tools.run.everywhere import Everywhere
from stocache.tools.run.messages import say

CHECK = "STOCACHE_CHECK"  # for the two runs: "with" or "without", the number of batches, and the file for their digests


def compare(steps: int, arguments: list[str]) -> int:
    """Run the program of ``stocache run`` twice, up to ``steps`` batches, and print whether they are equal. Return a status."""
    import subprocess
    import tempfile
    from pathlib import Path

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("without", "with"):
            path = Path(folder, mode)
            environment = os.environ | {CHECK: f"{mode}:{steps}:{path}", "PYTHONHASHSEED": "0"}
            command = [sys.executable, "-m", "stocache", "run", *arguments]
            status = subprocess.run(command, env=environment, check=False).returncode
            if not path.exists():
                say(f"stocache: the run {mode} stocache made no batches (exit status {status}).")
                return status or 1
            runs.append(path.read_text().splitlines())
    theirs, ours = runs
    if theirs == ours:
        say(f"stocache: {len(ours)} batches are equal bit for bit, with torch's loader and with stocache's.")
        return 0
    number = next((row for row, pair in enumerate(zip(theirs, ours, strict=False)) if len(set(pair)) > 1), min(map(len, runs)))
    say(
        f"stocache: batch {number} differs between the run with torch's loader ({len(theirs)} batches) and with stocache's "
        f"({len(ours)}). Two runs of the program itself may differ, too: seed it."
    )
    return 1


def record(everywhere: Everywhere, given: str) -> None:
    """Write digests of the batches of this run to a file, and end the program after some, as `compare` asks for."""
    mode, steps, path = given.split(":", 2)
    everywhere.without, left, pid = mode == "without", [int(steps)], os.getpid()

    def compared(number: int, batches: Iterator[object]) -> Iterator[Any]:
        import zlib

        from stocache.system.describe import describe

        for batch in batches:
            if os.getpid() == pid:
                digest = zlib.crc32(repr(describe(batch, strides=False)).encode(errors="replace"))
                with open(path, "a") as file:
                    file.write(f"loader {number} {digest:08x}\n")
                left[0] -= 1
            yield batch
            if left[0] <= 0:
                sys.exit()

    everywhere.compared = compared


def seed() -> None:
    """Seed the global random generators, so that two runs of a program that does not are equal."""
    import random

    import numpy as np
    import torch

    for begin in (random.seed, np.random.seed, torch.manual_seed):
        begin(0)
