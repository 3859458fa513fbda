"""What ``stocache run`` adds to a program: seconds at its start, and time for each batch with nothing cached.

python -m benchmark run [--rounds N]
"""

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import stocache
from benchmark.support.measuring import alternate

CLAIM = "A program starts at most 0.1 s later under stocache run, and its loops cost less than 1 % more."

SCRIPTS = {"pass": "pass", "import torch": "import torch", "import DataLoader": "from torch.utils.data import DataLoader"}


class Rows(Dataset[Any]):
    """Samples that cost next to nothing: (uint8 of `shape`, int)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.row = torch.zeros(shape, dtype=torch.uint8)

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        return self.row, idx


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def _loop(loader: Any) -> None:
    for _batch in loader:
        pass


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmark run")
    parser.add_argument("--rounds", type=int, default=9)
    rounds, torchs = parser.parse_args().rounds, torch.utils.data.DataLoader
    print("| program | python | stocache run | added |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for name, code in SCRIPTS.items():
            path = Path(folder, "script.py")
            path.write_text(code)
            ways = {"python": [str(path)], "run": ["-m", "stocache", "run", str(path)]}
            seconds = alternate({way: partial(_run, arguments) for way, arguments in ways.items()}, rounds)
            python, run = seconds["python"], seconds["run"]
            print(f"| `{name}` | {python:.2f} s | {run:.2f} s | {run - python:.2f} s |")
    print("\n| loop over samples that are not cached | torch | stocache run | speed |\n| --- | ---: | ---: | ---: |")
    for shape in ((3, 64, 64), (16,)):
        for workers in (0, 2):
            options = {"batch_size": 64, "num_workers": workers, "persistent_workers": workers > 0}
            with stocache.use_everywhere():
                ours = torch.utils.data.DataLoader(Rows(shape), **options)
                loaders = {"torch": torchs(Rows(shape), **options), "run": ours}
                seconds = alternate({name: partial(_loop, loader) for name, loader in loaders.items()}, rounds)
            del ours, loaders
            name = f"uint8 {list(shape)}, {workers} workers"
            speed = seconds["torch"] / seconds["run"]
            print(f"| {name} | {seconds['torch']:.2f} s | {seconds['run']:.2f} s | {speed:.2f} |")


if __name__ == "__main__":
    main()
