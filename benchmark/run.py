"""What ``stocache run`` adds to a program: at its start, for each batch with nothing cached, and over the whole program."""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import stocache
from benchmark.support.datasets import Made
from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import epoch_s

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


@experiment(rounds=9)
def start(run: Run) -> None:
    """Seconds of commands and scripts."""
    with tempfile.TemporaryDirectory() as folder, stocache.SharedCache(0.001, 16, (8,), name=NAME):
        contenders = dict(LIGHT)
        for name, code in SCRIPTS.items():
            path = Path(folder, f"{len(contenders)}.py")
            path.write_text(code)
            contenders |= {f"{way}: {name}": [*WAYS[way], str(path)] for way in ("python", "run")}
        took = run.turns(
            {
                name: partial(subprocess.run, [sys.executable, *arguments], check=True, capture_output=True)
                for name, arguments in contenders.items()
            }
        )
    table = run.table("", "s")
    for name in took:
        table.row(name, took.median(name))
    run.claim("the light commands take 0.3 s", max(map(took.median, LIGHT)), most=0.3)
    added = max(took.median(f"run: {name}") - took.median(f"python: {name}") for name in SCRIPTS)
    run.claim("a program starts 0.1 s later", added, most=0.1)


@experiment(rounds=9)
def loops(run: Run) -> None:
    """Seconds of loops over samples that are not cached."""
    torchs = torch.utils.data.DataLoader
    table = run.table("loop over samples that are not cached", "torch", "stocache run", "torch to run")
    for shape in ((3, 64, 64), (16,)):
        value = torch.zeros(shape, dtype=torch.uint8)
        dataset = Made(run.size(8192, 1024), lambda idx, value=value: (value, idx))  # type: ignore[misc]
        for workers in (0, 2):
            given: dict[str, Any] = {"batch_size": 64, "num_workers": workers, "persistent_workers": workers > 0}
            with stocache.use_everywhere():
                loaders = {"torch": torchs(dataset, **given), "run": torch.utils.data.DataLoader(dataset, **given)}
                took = run.turns({name: partial(epoch_s, loader) for name, loader in loaders.items()})
            del loaders
            name = f"uint8 {list(shape)}, {workers} workers"
            table.row(name, took.median("torch"), took.median("run"), took.ratio("torch", "run"))
    run.claim("loops come at 0.99 of the rate of torch", min(table.column("torch to run")), least=0.99)


class Played(NamedTuple):
    """A program that was run: its seconds, its results, and what it and `stocache run` said."""

    seconds: float
    results: Any
    said: str


def play(name: str, way: str, epochs: int) -> Played:
    """Run a program in a folder of its own."""
    program, options = PROGRAMS[name]
    settings = {"PROGRAM_EPOCHS": str(epochs), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").mkdir()
        command = [*WAYS[way], "-m", "tests.programs.running", program, "plain", "data", json.dumps(options), "out"]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=True
        )
        return Played(time.perf_counter() - began, pickle.loads(Path(folder, "out").read_bytes()), done.stderr)


@experiment(rounds=9)
def programs(run: Run) -> None:
    """Programs of tests/programs with as many epochs as take 10 s; programs whose library is not installed are left out."""
    table, reports = run.table("program", "epochs", "python, s", "run to python", "auto to python", "equal"), []
    for name in run.chosen(dict(list(PROGRAMS.items())[: run.size(None, 1)])):
        try:
            short_s, long_s = (play(name, "python", epochs).seconds for epochs in (4, 44))
        except subprocess.CalledProcessError as error:
            table.row(name, None, f"left out: {error.stderr.strip().splitlines()[-1]}")
            continue
        epochs = max(4, round(4 + 40 * (run.size(10, 2) - short_s) / max(0.04, long_s - short_s)))
        found = run.results({way: partial(play, name, way, epochs) for way in WAYS}, warm_up=0)
        took, _, _ = Figures.columns(found)
        results = [played.results for each in found.values() for played in each]
        equal = all(result == results[0] for result in results)
        table.row(name, epochs, took.median("python"), took.ratio("run", "python"), took.ratio("auto", "python"), equal)
        for way in ("run", "auto"):
            said = re.findall(r"^  (cached: .*|not cached: .*|epoch \d+: .*)$", found[way][-1].said, re.MULTILINE)
            reports.append(f"{name}, {way}: {'; '.join(said) or 'no problem'}")
    print("\n".join(reports))
    run.claim("programs take 3 % longer with --cache auto", max(table.column("auto to python"), default=0), most=1.03)
    run.claim("and print the same", all(table.column("equal")))
