"""The code in the README files runs as pasted, and the commands and names in them exist."""

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
PACKAGE = ROOT / "stocache"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted(PACKAGE.rglob("README.md")))}
README = PAGES["README.md"]
BLOCKS = {
    f"{name}, block {number}": block
    for name, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), 1)
}
PAIRS = [tuple(BLOCKS)[begin : begin + 2] for begin in range(0, len(BLOCKS), 2)]


def test_the_example_of_a_cache_of_ones_own_caches_a_dataset():
    (block,) = [block for block in BLOCKS.values() if "class Photos" in block]
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
        photos = folder / "photos" / f"class{number % 2}"
        photos.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number, 0, 0)).save(photos / f"{number}.png")
    (folder / "example.py").write_text(block)
    environment = dict(os.environ)
    if "torchvision" in block and find_spec("torchvision") is None:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "support" / "standins"), str(ROOT)])
    command = [sys.executable, "example.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_every_example_runs_as_a_script(names, tmp_path):
    with ThreadPoolExecutor(2) as pool:  # two at a time: most of their seconds go into imports
        runs = list(pool.map(_run, (BLOCKS[name] for name in names), (tmp_path / str(number) for number in range(2))))
    for cache in listing.find():  # those that persist
        named.remove(cache.path)
    for name, done in zip(names, runs, strict=True):
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "Warning" not in done.stderr, name
        assert "restart" not in done.stdout or "read by a restart: 0" in done.stdout


def test_there_is_a_recipe_for_each():
    names = ["image folder", "two-phase transform", "Detection", "Tokenised text", "Hugging Face", "MONAI"]
    names += ["DDP", "sweep", "Warm restarts"]
    text = "".join(PAGES.values())
    assert [name for name in names if f"**{name}**" not in text] == []


def test_the_first_screen_shows_the_main_job():
    assert any("stocache bench" in line for line in README.splitlines()[:6])
    assert "CachedDataset(" in "\n".join(README.splitlines()[:20]).split("```")[1]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 300


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings_that_exist(page):
    for path, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", PAGES[page]):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if target.suffix == ".md" else []
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in anchors, f"{path}#{heading}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    from stocache.cli.app import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`stocache ([a-z]+)", PAGES[page])) <= commands
    benchmarks = set(re.findall(r"`python -m benchmark ([a-z_]+)", PAGES[page]))
    assert all((ROOT / "benchmark" / f"{name}.py").exists() for name in benchmarks)


def test_the_page_of_commands_lists_all_of_them():
    from stocache.cli.app import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"\| `stocache ([a-z]+)", PAGES["stocache/cli/README.md"])) == commands


def test_each_way_of_a_sample_has_at_most_eight_steps_whose_functions_exist():
    ways = PAGES["stocache/README.md"].split("\n### ")[1:]
    assert len(ways) == 5
    for way in ways:
        assert re.findall(r"^\d+", way, re.MULTILINE) == [str(step) for step in range(1, 9)]
        for name, path in re.findall(r"`([\w.]+)`\s+\(`([a-z_/]+\.py)`", way):
            text = (PACKAGE / path).read_text()
            assert all(re.search(rf"(?:def|class) {part}\b|^{part}\b", text, re.MULTILINE) for part in name.split(".")), name
