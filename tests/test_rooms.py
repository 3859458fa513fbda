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
        for node in ast.walk(ast.parse(path.read_text())):
            library, _, name = ast.unparse(node.func).partition(".") if isinstance(node, ast.Call) else ("", "", "")
            if library == "torch" and name in FACTORIES and (str(path.relative_to(PACKAGE)), name) not in AS_TORCH:
                given = {keyword.arg for keyword in node.keywords}
                assert "device" in given, f"{path}:{node.lineno}"
                assert given & {"dtype", "generator"} or name in ("rand", "tensor"), f"{path}:{node.lineno}"


GRAPHS = re.compile(r"torch\.utils\.data\.(datapipes|graph)\b|stocache\.reading")


def test_graphs_of_datapipes_are_the_business_of_the_reading_services():
    for path in (path for path in PACKAGE.rglob("*.py") if "reading" not in path.relative_to(PACKAGE).parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".") for alias in node.names]
                assert not any(map(GRAPHS.match, names)), path


def test_the_package_exports_a_sorted_all_that_exists_and_shares_no_name_with_a_module():
    assert stocache.__all__ == sorted(stocache.__all__, key=lambda name: (name.islower(), name))
    assert all(hasattr(stocache, name) for name in stocache.__all__)
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not modules & set(stocache.__all__)


def test_every_error_is_a_stocache_error_and_drawn_in_the_docstring():
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert len(classes) == 20
    for item in classes:
        assert issubclass(item, errors.StocacheError)
        assert item.__name__ in errors.__doc__
