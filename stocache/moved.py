"""Find modules under their former names, which pickles of samplers and datasets contain."""

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_PLACES = {
    "stocache.cli": "stocache.tools.cli",
    "stocache.datamodule": "stocache.integrations.lightning",
    "stocache.datasets.stored": "stocache.storage.dataset",
    "stocache.disk": "stocache.cache.disk",
    "stocache.preparation": "stocache.storage.preparation",
    "stocache.ring": "stocache.shm.ring",
    "stocache.samplers": "stocache.loader.samplers",
    "stocache.transforms": "stocache.datasets.transforms",
}
"""Modules and folders, by their former names. Documented ones stay for good."""


class MovedFinder:
    """Finds the module itself, not a second one of the same code: a class has one identity.

    It has the methods of a finder and of a loader without their base classes: `importlib.abc` imports tempfile and zipfile.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import a module by a former name; None for any other name."""
        return ModuleSpec(name, self) if _place_of(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, imported by its present name; for a folder an empty module, below which this finder is asked."""
        module = importlib.import_module(_place_of(spec.name))
        if hasattr(module, "__path__"):
            module = ModuleType(spec.name, module.__doc__)
            module.__path__ = []
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again: Python has given it the spec of the former name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state or module.__spec__


def _place_of(name: str) -> str:
    for old, new in _PLACES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return ""
