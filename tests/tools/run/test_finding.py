"""A name of a module is replaced, however the module comes to be imported."""

import importlib
import importlib.machinery
import importlib.util
import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

import pytest

from stocache.tools.run.everywhere import give_back_name, replace_name


class Legacy:
    """A loader without ``exec_module``."""

    def __init__(self, loader):
        self.load_module = loader.load_module


def lazily(name):
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name == "parts.data":
        sys.modules["parts"].data = module
    assert module.OTHER == 1


def by_a_finder(change):
    """Have a finder of the program find the package, before any other."""

    def find_spec(name, path=None, target=None):
        if not name.startswith("parts") or not (found := PathFinder.find_spec(name, path, target)):
            return None
        spec = importlib.util.spec_from_file_location(
            name, found.origin, submodule_search_locations=found.submodule_search_locations
        )
        change(spec)
        return spec

    sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(find_spec)}))


def ask(name):
    for finder in (importlib.util, PathFinder, *sys.meta_path) * 2:
        if hasattr(finder, "find_spec"):
            finder.find_spec(name, None)
    assert importlib.util.find_spec(name).loader.get_code(name)


WAYS = {
    "after": lambda: None, "before": lambda: None, "asked for before": lambda: (ask("parts"), ask("parts.data")),
    "loaded before and again": lambda: importlib.reload(importlib.import_module("parts.data")),
    "lazily": lambda: lazily("parts"), "its part lazily": lambda: lazily("parts.data"),
    "meta_path of the program": lambda: setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder]),
    "finder of the program": lambda: by_a_finder(lambda spec: None),
    "loader without exec_module": lambda: by_a_finder(lambda spec: setattr(spec, "loader", Legacy(spec.loader))),
    "run as a module": lambda: runpy.run_module("parts.data"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("OTHER = 1\n")
    (tmp_path / "parts" / "data.py").write_text("class Name:\n    pass\nOTHER = 1\n")
    for name in ("first.py", "last.py"):
        (tmp_path / "parts" / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    give_back_name("parts.data")
    for name in [name for name in sys.modules if name.startswith("parts")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ImportWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_name_is_replaced_however_its_module_is_imported(way):
    if way == "before":
        importlib.import_module("parts.data")
    replace_name("parts.data", "Name", lambda own: ("in place of", own.__name__))
    WAYS[way]()
    import parts.data
    import parts.last  # the program looks for another module
    from parts.data import Name

    assert Name == parts.data.Name == ("in place of", "Name")
    assert not hasattr(parts.data, "missing")
    parts.data.Name = 3  # a program that sets the name itself
    importlib.import_module("parts.first")
    assert parts.data.Name == 3
