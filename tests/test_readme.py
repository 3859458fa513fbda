"""The README's code runs as pasted, and its commands are the ones that exist."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from stocache.cli import listing
from stocache.shm import named

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_of_a_cache_of_ones_own_caches_a_dataset():
    (block,) = [block for block in BLOCKS if "class Photos" in block]
    namespace = {}
    exec(block, namespace)
    reads = []

    def load(path):
        reads.append(path)
        return torch.full((3, 256, 256), path, dtype=torch.uint8)

    dataset = namespace["Photos"](range(9), load)
    for _ in range(2):
        batches = list(DataLoader(dataset, batch_size=4))
    assert torch.cat(batches)[:, 0, 0, 0].tolist() == list(range(9))
    assert reads == list(range(9))
    dataset.cache.close()


def _run(block, folder):
    for number in range(4):
        (folder / "photos" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number, 0, 0)).save(folder / "photos" / f"class{number % 2}" / f"{number}.png")
    (folder / "example.py").write_text(block)
    command = [sys.executable, "example.py"]
    environment = dict(os.environ)
    if "torchvision" in block and find_spec("torchvision") is None:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "support" / "standins"), str(ROOT)])
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("begin", range(0, len(BLOCKS), 4))
def test_every_example_runs_as_a_script(begin, tmp_path):
    with ThreadPoolExecutor(2) as pool:  # they take seconds each, most of them to import
        runs = list(pool.map(_run, BLOCKS[begin : begin + 4], (tmp_path / str(number) for number in range(4))))
    for cache in listing.find():  # what persists
        named.remove(cache.path)
    for done in runs:
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        assert "restart" not in done.stdout or "read by a restart: 0" in done.stdout


def test_there_is_a_recipe_for_each():
    recipes = README[README.index("## Recipes") : README.index("## The cache itself")]
    names = ["image folder", "two-phase transform", "Detection", "Tokenised text", "Hugging Face", "MONAI"]
    names += ["DDP", "sweep", "Warm restarts"]
    assert all(f"**{name}**" in recipes for name in names)


def test_the_first_screen_shows_the_main_job():
    first_screen = README.splitlines()[:25]
    assert any("stocache bench" in line for line in first_screen)
    assert any("CachedDataset(" in line for line in first_screen)


def test_the_table_of_floors_names_every_module():
    modules = {path.stem for path in (ROOT / "stocache").glob("*.py")} - {"__init__", "__main__"}
    floors = README[README.index("| floor | module") :]
    assert all(f"`{module}`" in floors for module in modules)
