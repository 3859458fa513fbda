"""The architecture: a table on the page of the package says from which other folders each folder imports."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import stocache
from stocache import errors

PACKAGE = Path(stocache.__file__).parent
ROWS = re.findall(r"^\| \[?`([a-z/]+)`.*\| ([^|]*) ?\|$", (PACKAGE / "README.md").read_text(), re.MULTILINE)
IMPORTS = {folder: row.replace(",", "").split() for folder, row in ROWS}
"""The table on the page of the package, without errors: from the ground up, so that each folder's row names only rows above."""

MOST_FILES = 13


def folder_of(module: str) -> str:
    """The folder of a dotted name below stocache; "" for the modules that lie in the package itself."""
    parts = module.split(".")
    while parts and "/".join(parts) not in IMPORTS:
        parts.pop()
    return "/".join(parts)


@functools.cache
def imported(path: Path) -> set[str]:
    """The dotted names below stocache that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stocache":
            module = (node.module or "").removeprefix("stocache").lstrip(".")
            found |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("stocache.") for alias in node.names if alias.name.startswith("stocache.")}
    return {name for name in found if name.split(".")[0] != "errors"}


def test_the_table_names_every_folder_and_each_imports_what_its_row_says_from_rows_above():
    assert {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")} == {*IMPORTS, "."}
    for number, (folder, row) in enumerate(IMPORTS.items()):
        assert {*row} <= {*list(IMPORTS)[:number]}
        folders = {folder_of(name) for path in (PACKAGE / folder).glob("*.py") for name in imported(path)}
        assert folders - {folder} == {*row}, folder  # nothing from the package itself


@pytest.mark.parametrize("folder", [*IMPORTS, "."])
def test_a_folder_has_few_files_which_do_not_import_in_a_circle(folder):
    files = {path.stem: path for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"}
    assert len(files) <= MOST_FILES
    prefix = folder.replace("/", ".") + "."
    graph = {}
    for stem, path in files.items():
        within = (name.removeprefix(prefix).split(".")[0] for name in imported(path) if name.startswith(prefix))
        graph[stem] = {name for name in within if name in files}
    graphlib.TopologicalSorter(graph).prepare()  # raises for a circle


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


def test_graphs_of_datapipes_are_the_business_of_the_reading_services():
    for path in PACKAGE.rglob("*.py"):
        if "reading" not in path.relative_to(PACKAGE).parts:
            assert not re.search(r"torch.utils.data.(datapipes|graph)|stocache.reading", path.read_text()), path


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
