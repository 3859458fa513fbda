"""What ``stocache run`` adds to a program: at its start, for each batch with nothing cached, and over the whole program.

    python -m benchmark run start [--rounds N]
    python -m benchmark run loops [--rounds N]
    python -m benchmark run programs [--rounds N] [--seconds S] [--only PART OF A NAME]

``start``: commands and scripts, beside a bare Python and torch. ``programs``: those of tests/programs, with as many epochs as
take S seconds under Python. In each round each runs under Python, under ``stocache run`` and with ``--cache auto``. The ratios
are medians over the rounds, of the whole program to Python in the same round. *equal*: all results are, batch by batch, or
losses and weights. Below the table is the last report of each. Programs whose library is not installed are left out.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stocache
from benchmark.support.measuring import alternate

CLAIM = "Under stocache run programs start 0.1 s later, loops cost 1 % and, with --cache auto, whole programs 3 % more at most."

SCRIPTS = {"pass": "pass", "import torch": "import torch", "import DataLoader": "from torch.utils.data import DataLoader"}
NAME = "benchmark-startup"
LIGHT = {name: ["-m", "stocache", *name.split()[1:]] for name in ("stocache --help", "stocache info", "stocache ls")}
LIGHT |= {f"stocache stat {NAME}": ["-m", "stocache", "stat", NAME], "import stocache": ["-c", "import stocache"]}
WAYS = {"python": [], "run": ["-m", "stocache", "run"], "auto": ["-m", "stocache", "run", "--cache", "auto"]}
FORKED = {"num_workers": 2}
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{of: ("frameworks", {"of": of}) for of in ("lightning", "accelerate", "transformers", "ignite", "torchvision", "timm")},
    **{of: ("frameworks", {"of": of}) for of in ("ultralytics", "keras", "torch_geometric", "torch.steps")},
    "detection": ("detection", {"flip": True, **FORKED}), "vision": ("vision", FORKED),
    "Hugging Face, images": ("hugging_face", {}), "Hugging Face, texts": ("hugging_face", {"of": "texts", **FORKED}),
    "MONAI": ("monai_dicts", FORKED), "MONAI, random": ("monai_dicts", {"augment": True, **FORKED}),
    **{kind: ("lazy_files", {"kind": kind}) for kind in ("h5py", "lmdb", "zip", "sqlite", "memmap rows")},
}  # fmt: skip


class Rows(torch.utils.data.Dataset[Any]):
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


def start(options: argparse.Namespace) -> None:
    """Print how long commands and scripts take."""
    with tempfile.TemporaryDirectory() as folder, stocache.SharedCache(0.001, 16, (8,), name=NAME):
        contenders = dict(LIGHT)
        for name, code in SCRIPTS.items():
            path = Path(folder, f"{len(contenders)}.py")
            path.write_text(code)
            contenders |= {f"{way}: {name}": [*WAYS[way], str(path)] for way in ("python", "run")}
        seconds = alternate({name: partial(_run, arguments) for name, arguments in contenders.items()}, options.rounds)
    print("| | median |\n| --- | ---: |")
    for name, median in seconds.items():
        print(f"| {name} | {median:.2f} s |")


def loops(options: argparse.Namespace) -> None:
    """Print how long loops over samples that are not cached take."""
    torchs = torch.utils.data.DataLoader
    print("| loop over samples that are not cached | torch | stocache run | speed |\n| --- | ---: | ---: | ---: |")
    for shape in ((3, 64, 64), (16,)):
        for workers in (0, 2):
            given = {"batch_size": 64, "num_workers": workers, "persistent_workers": workers > 0}
            with stocache.use_everywhere():
                ours = torch.utils.data.DataLoader(Rows(shape), **given)
                loaders = {"torch": torchs(Rows(shape), **given), "run": ours}
                seconds = alternate({name: partial(_loop, loader) for name, loader in loaders.items()}, options.rounds)
            del ours, loaders
            name = f"uint8 {list(shape)}, {workers} workers"
            speed = seconds["torch"] / seconds["run"]
            print(f"| {name} | {seconds['torch']:.2f} s | {seconds['run']:.2f} s | {speed:.2f} |")


def run_program(name: str, way: str, epochs: int) -> tuple[float, bytes, str]:
    """Run a program in a folder of its own; return its seconds, its results, and what it and `stocache run` said."""
    program, options = PROGRAMS[name]
    settings = {"PROGRAM_EPOCHS": str(epochs), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").mkdir()
        command = [*WAYS[way], "-m", "tests.programs.running", program, "plain", "data", json.dumps(options), "out"]
        options = {"cwd": folder, "env": os.environ | settings, "capture_output": True, "text": True, "check": True}
        began = time.perf_counter()
        said = subprocess.run([sys.executable, *command], **options).stderr
        return time.perf_counter() - began, Path(folder, "out").read_bytes(), said


def programs(options: argparse.Namespace) -> None:
    """Print how long programs take, whether their results are equal, and what the reports say."""
    print("| program | epochs | python | run | auto | equal |\n| --- | ---: | ---: | ---: | ---: | --- |", flush=True)
    reports = ""
    for name in (name for name in PROGRAMS if options.only in name):
        try:
            (short_s, *_), (long_s, *_) = (run_program(name, "python", epochs) for epochs in (4, 44))
        except subprocess.CalledProcessError as error:
            print(f"| {name} | | left out: {error.stderr.strip().rpartition(chr(10))[2]} | | | |")
            continue
        epochs = max(4, round(4 + 40 * (options.seconds - short_s) / max(0.04, long_s - short_s)))
        ran = [{way: run_program(name, way, epochs) for way in WAYS} for _ in range(options.rounds)]
        ratios = (statistics.median(each[way][0] / each["python"][0] for each in ran) for way in ("run", "auto"))
        shown = [f"{statistics.median(each['python'][0] for each in ran):.1f} s", *map("{:.3f}".format, ratios)]
        equal = len({results for each in ran for _, results, _ in each.values()}) == 1
        print(f"| {name} | {epochs} | {' | '.join(shown)} | {'yes' if equal else 'no'} |", flush=True)
        for way in ("run", "auto"):
            said = ran[-1][way][2].rpartition("in loops over")[2]
            found = re.findall(r"^  (cached: .*|not cached: .*|epoch \d+: .*)$", said, re.MULTILINE)
            reports += f"\n{name}, {way}:\n  " + "\n  ".join(found or ["no problem"])
    print(reports)


def main() -> None:
    """Print the tables of an experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmark run")
    parser.add_argument("experiment", choices=("start", "loops", "programs"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a program under Python")
    parser.add_argument("--only", default="", help="programs whose names have this part")
    options = parser.parse_args()
    {"start": start, "loops": loops, "programs": programs}[options.experiment](options)


if __name__ == "__main__":
    main()
