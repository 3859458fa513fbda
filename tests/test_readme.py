"""The README's code runs as pasted, and its commands are the ones that exist."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_caches_a_dataset():
    namespace = {}
    exec(BLOCKS[0], namespace)
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


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(1, len(BLOCKS)))
def test_later_examples_run(block):
    exec(block, {})


def test_the_first_screen_shows_the_main_job():
    first_screen = README.splitlines()[:25]
    assert any("stocache bench" in line for line in first_screen)
    assert any("SharedCache(" in line for line in first_screen)


def test_the_table_of_floors_names_every_module():
    modules = {path.stem for path in (ROOT / "stocache").glob("*.py")} - {"__init__", "__main__"}
    floors = README[README.index("| floor | module") :]
    assert all(f"`{module}`" in floors for module in modules)
