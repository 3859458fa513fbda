"""Programs as people write them give the same, bit for bit, with the one line and without.

Each runs twice, side by side: plain, and cached. The rows of a test share the process that imports their libraries.
"""

import importlib.util
import json
import os
import pickle
from pathlib import Path

import pytest

from stocache.system.describe import difference
from tests.programs.running import WARNED
from tests.support.processes import run_python

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # MONAI walks over sets of str
}  # fmt: skip
NEEDS = {
    "detection": ["PIL"], "hugging_face": ["PIL", "datasets"], "vision": ["PIL"], "lazy_files": ["PIL", "h5py", "lmdb"],
    "monai_dicts": ["monai", "nibabel"],
}  # fmt: skip
FORKED, SPAWNED = {"num_workers": 2}, {"num_workers": 2, "start_method": "spawn"}


def compare(rows, folder):
    """Demand the same results without and with the one line, and that there was a cache."""
    rows = [(program, options) for program, options in rows if all(map(importlib.util.find_spec, NEEDS[program]))]
    if not rows:
        pytest.skip("needs libraries of the extra test")
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "huggingface")}
    command = ["-m", "tests.programs.running", "rows", json.dumps(rows)]
    done = run_python(*command, timeout_s=600, cwd=folder, env=environment)
    assert WARNED not in done.stderr, done.stderr[-2000:]
    for number, row in enumerate(rows):
        plain, cached = (pickle.loads((folder / str(number) / way / "out.pickle").read_bytes()) for way in ("plain", "cached"))
        assert difference(plain["results"], cached["results"]) is None, row
        assert cached["stats"]
        for stats in cached["stats"]:
            assert stats["hits"] > stats["misses"], row  # of three epochs, two come from the cache
            assert (stats["rejected"], stats["refused"]) == (0, 0), row
        assert cached["changes"] == [None] * len(cached["changes"]), row


@pytest.mark.slow
@pytest.mark.parametrize(("program", "rows"), [
    ("detection", [{"flip": True, "permuted": True, **FORKED}]),
    ("hugging_face", [{"store": "encoded"}, FORKED, {"of": "texts", **FORKED}]),
    ("lazy_files", [*({"kind": kind} for kind in ("h5py", "zip", "memmap rows", "sqlite")), {"splits": True}]),
    ("lazy_files", [{"splits": True, "start_method": "spawn"}]),
    ("monai_dicts", [{"suffix": ".nii"}, {"augment": True, **FORKED}]),
    ("vision", [{}, SPAWNED, {"store": "encoded", **FORKED}]),
])  # fmt: skip
def test_the_one_line_changes_nothing(program, rows, tmp_path):
    compare([(program, options) for options in rows], tmp_path)


FRAMEWORKS = [
    "lightning", "accelerate", "transformers", "ignite", "keras", "torch_geometric", "torchvision", "timm", "ultralytics",
    "torch.steps",
]  # fmt: skip
UNDER_RUN = [
    *(("frameworks", {"of": of}) for of in FRAMEWORKS), ("detection", {"flip": True, **FORKED}),
    ("lazy_files", {"kind": "h5py"}), ("vision", FORKED), ("monai_dicts", FORKED), ("hugging_face", SPAWNED),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("program", "options"), UNDER_RUN, ids=str)
def test_a_program_under_stocache_run_gives_the_same_and_its_datasets_are_cached(program, options, tmp_path):
    needs = [options["of"].split(".")[0]] if program == "frameworks" else NEEDS[program]
    if not all(map(importlib.util.find_spec, needs)):
        pytest.skip(f"needs {', '.join(needs)}")
    outcomes = {}
    for way, command in {"plain": [], "run": ["-m", "stocache", "run", "--cache", "50MB", "--json", "report.json"]}.items():
        folder = tmp_path / way
        (folder / "data").mkdir(parents=True)
        arguments = ["-m", "tests.programs.running", program, "plain", "data", json.dumps(options), "out.pickle"]
        run_python(*command, *arguments, timeout_s=300, cwd=folder, env=ENVIRONMENT)
        outcomes[way] = pickle.loads((folder / "out.pickle").read_bytes())["results"]
    assert difference(outcomes["plain"], outcomes["run"]) is None
    loaders = json.loads((tmp_path / "run" / "report.json").read_text())
    hits, misses = (sum(epoch[name] or 0 for loader in loaders for epoch in loader["epochs"]) for name in ("hits", "misses"))
    state = "not cached: none of" if options.get("of") == "torch_geometric" else "cached: "  # graphs are objects
    assert hits > misses or all(loader["state"].startswith(state) for loader in loaders), loaders
