"""Commands that list and remove caches start fast: what they import does not import torch or numpy."""

from pathlib import Path

import stocache
from tests.support.processes import run_python

LIGHT = (
    "errors system.limits system.waiting shm.layout shm.registry shm.named cache.stats cache.options cache.arena cli.listing"
)


def test_listing_caches_imports_neither_torch_nor_numpy():
    program = f"""
import importlib, sys, types
package = sys.modules["stocache"] = types.ModuleType("stocache")  # in place of the package itself, which exports everything
package.__path__ = [{str(Path(stocache.__file__).parent)!r}]
for name in {LIGHT.split()}:
    importlib.import_module("stocache." + name)
    assert not sys.modules.keys() & {{"torch", "numpy"}}, name
"""
    run_python("-c", program)
