"""The architecture: rooms that import rooms above them, by the table on the page of the package."""

import ast
import graphlib
import re
from collections import defaultdict

import pytest
from torch.utils._device import _device_constructors

import stocache
from stocache import errors
from tests.support.house import PACKAGE, imported, modules, room_of, rooms
from tests.support.sources import tree_of

IMPORTS = {name: room.imports for room in rooms() for name in room.names if (PACKAGE / name).is_dir()}

MOST_FILES = 13


def test_the_table_names_every_room_and_each_imports_what_its_row_says_from_rows_above():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*IMPORTS}
    assert {name for room in rooms() for name in room.names} - {*IMPORTS} == {"errors", "moved", "tests", "benchmark"}
    for number, (room, row) in enumerate(IMPORTS.items()):
        assert {*row} <= {*list(IMPORTS)[:number]}
        used = {room_of(name) for path in (PACKAGE / room).rglob("*.py") for name in imported(path)}
        assert sorted(used - {room}) == row, room


def test_modules_do_not_import_in_a_circle():
    graphlib.TopologicalSorter({name: imported(path) - {name} for name, path in modules().items()}).prepare()


@pytest.mark.parametrize("room", IMPORTS)
def test_the_folders_of_a_room_import_one_way_and_have_few_files(room):
    graph = defaultdict(set)
    for name, path in modules().items():
        if room_of(name) == room and path.stem != "__init__":
            folder = name.rpartition(".")[0]
            graph[folder] |= {each.rpartition(".")[0] for each in imported(path) if room_of(each) == room} - {folder}
    graphlib.TopologicalSorter(graph).prepare()  # raises for a circle
    for folder in graph:
        assert len([*(PACKAGE / folder.replace(".", "/")).glob("[!_]*.py")]) <= MOST_FILES, folder


FACTORIES = {constructor.__name__ for constructor in _device_constructors()} - {"nested_tensor"}
AS_TORCH = {("loader/order.py", "empty"), ("reading/graph/seeds.py", "empty")}  # draw a seed where torch draws it


def test_every_tensor_says_on_which_device_and_of_which_dtype_it_is():
    for path in PACKAGE.rglob("*.py"):
        exempt = {name for file, name in AS_TORCH if path == PACKAGE / file}
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES - exempt:
                    given = {keyword.arg for keyword in node.keywords}
                    assert "device" in given, f"{path}:{node.lineno}"
                    assert given & {"dtype", "generator"} or name in ("rand", "tensor"), f"{path}:{node.lineno}"


def test_graphs_of_datapipes_are_the_business_of_the_reading_services():
    of_torch, own = r"torch\.utils\.data(?:\.| import .*\b)(?:datapipes|graph)\b", r"stocache(?:\.| import .*\b)reading\b"
    imports = re.compile(rf"^ *(?:from|import) +(?:{of_torch}|{own})", re.MULTILINE)
    for path in (path for path in PACKAGE.rglob("*.py") if "reading" not in path.relative_to(PACKAGE).parts):
        assert not imports.search(path.read_text()), path


def test_the_package_exports_a_sorted_all_that_exists_and_shares_no_name_with_a_module():
    assert len(stocache.__all__) <= 36
    assert stocache.__all__ == sorted(stocache.__all__, key=lambda name: (name.islower(), name))
    assert all(hasattr(stocache, name) for name in stocache.__all__)
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not modules & set(stocache.__all__)


def test_every_error_is_a_stocache_error_and_drawn_in_the_docstring():
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert len(classes) == 20
    for item in classes:
        assert issubclass(item, errors.StocacheError)
        assert getattr(stocache, item.__name__) is item
        assert item.__name__ in errors.__doc__
