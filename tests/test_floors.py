"""The architecture: a module imports only from floors below its own."""

import ast
import re
from pathlib import Path

import pytest

import stocache

PACKAGE = Path(stocache.__file__).parent
FLOORS = [
    {"waiting", "ordering"}
    | {"errors", "limits", "placement", "kinds", "containers", "structure", "stats", "indices", "compression", "records"}
    | {"readers", "resolve", "callables"}
    | {"packing", "randomness", "forks", "loans", "pinned", "pool", "private", "checksums", "columnar", "rows", "remote"}
    | {"transforms", "indexing", "huggingface", "children", "probing"}
    | {"known_transforms", "pipelines", "twins", "routes", "encoded", "splitting", "cutting"}
    | {"textfiles", "lines", "engines", "parsing", "schema", "ranks", "permutation"},
    {"layout", "directory", "segment", "named"},
    {"opening", "columns", "arena", "admission", "protocol", "cache", "ragged", "gathering", "ring"}
    | {"block", "places", "folder", "writing", "storage", "stored", "sampler", "sharing", "locality"},
    {
        "epochs",
        "blockwise",
        "dataset",
        "orders",
        "collation",
        "worker_group",
        "loader",
        "buffers",
        "windows",
        "stream",
        "reading",
    }
    | {"cluster", "prepare"},
    {"__init__"},
    {"bench", "listing", "doctor", "top", "sources", "datamodule", "cli", "__main__"},
]
WITHIN = {(module, "errors") for module in FLOORS[0]}
WITHIN |= {("structure", "containers"), ("records", "containers"), ("records", "structure")}
WITHIN |= {(module, "kinds") for module in ("containers", "structure", "records", "readers", "columnar", "rows")}
WITHIN |= {
    ("readers", "containers"),
    ("readers", "records"),
    ("readers", "structure"),
    ("dataset", "epochs"),
    ("dataset", "blockwise"),
}
WITHIN |= {(module, "resolve") for module in ("kinds", "containers", "records", "readers", "columnar", "rows")}
WITHIN |= {("indexing", "containers"), ("indexing", "records"), ("children", "randomness")}
WITHIN |= {("probing", below) for below in ("children", "indices", "randomness", "readers", "records")}
WITHIN |= {("transforms", "containers"), ("pipelines", "known_transforms"), ("twins", "known_transforms")}
WITHIN |= {("huggingface", "pipelines"), ("routes", "pipelines"), ("routes", "twins")}
WITHIN |= {("encoded", below) for below in ("limits", "pipelines", "twins")}
WITHIN |= {("splitting", below) for below in ("encoded", "huggingface", "pipelines", "routes", "transforms", "twins")}
WITHIN |= {
    ("cutting", below)
    for below in (
        "children",
        "encoded",
        "huggingface",
        "indices",
        "known_transforms",
        "limits",
        "pipelines",
        "randomness",
        "records",
    )
}
WITHIN |= {("cutting", below) for below in ("routes", "splitting", "transforms", "twins")}
WITHIN |= {("locality", below) for below in ("cache", "sampler", "sharing")}
WITHIN |= {
    ("placement", "checksums"),
    ("placement", "ranks"),
    ("rows", "columnar"),
    ("remote", "checksums"),
    ("remote", "limits"),
    ("remote", "waiting"),
}
WITHIN |= {(module, below) for module in ("columnar", "rows") for below in ("containers", "records", "structure")}
WITHIN |= {
    ("places", "block"),
    ("folder", "block"),
    ("folder", "places"),
    ("storage", "block"),
    ("storage", "folder"),
    ("storage", "places"),
    ("storage", "writing"),
    ("writing", "folder"),
    ("writing", "places"),
    ("stored", "storage"),
    ("prepare", "epochs"),
    ("prepare", "cluster"),
}
WITHIN |= {("storage", "writing"), ("writing", "folder")}
WITHIN |= {("directory", "layout"), ("segment", "layout"), ("segment", "directory")}
WITHIN |= {("named", "layout"), ("named", "directory"), ("named", "segment")}
WITHIN |= {("protocol", "opening"), ("cache", "columns"), ("cache", "opening"), ("cache", "protocol")}
WITHIN |= {("ragged", below) for below in ("opening", "arena", "admission", "protocol")}
WITHIN |= {
    ("textfiles", "checksums"),
    ("textfiles", "remote"),
    ("lines", "textfiles"),
    ("parsing", "containers"),
    ("parsing", "engines"),
}
WITHIN |= {
    ("schema", "callables"),
    ("pipelines", "callables"),
    ("callables", "checksums"),
    ("schema", "lines"),
    ("schema", "parsing"),
    ("schema", "engines"),
    ("windows", "buffers"),
}
WITHIN |= {("stream", below) for below in ("buffers", "windows", "collation", "epochs", "loader")}
WITHIN |= {
    ("pool", "loans"),
    ("private", "loans"),
    ("gathering", "cache"),
    ("loader", "dataset"),
    ("loader", "orders"),
    ("loader", "worker_group"),
    ("worker_group", "orders"),
    ("loader", "collation"),
}
WITHIN |= {("orders", "dataset"), ("reading", "collation"), ("reading", "loader")}
WITHIN |= {("__main__", "cli"), ("cli", "bench"), ("cli", "listing"), ("cli", "doctor"), ("cli", "top")}
WITHIN |= {("doctor", "listing"), ("top", "listing"), ("cli", "sources"), ("sources", "bench")}


def floor_of(module: str) -> int:
    return next(number for number, modules in enumerate(FLOORS) if module in modules)


# Within the package reading, a module imports from those before it
READING = ["graph", "seeds", "pipes", "feeding", "sharding", "caching", "replay", "replica"]
READING += ["streams", "workers", "engine", "parts", "interfaces", "services", "loader"]


def module_of(path: Path) -> str:
    return path.stem if path.parent == PACKAGE else path.parent.name


def imports(path: Path) -> set[str]:
    """Modules of stocache that a file imports, anywhere in it; a package is one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "stocache":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stocache."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("stocache.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_module_imports_only_from_floors_below(path):
    module = module_of(path)
    for target in imports(path) - ({"reading"} if module == "reading" else set()):
        below = floor_of(target) < floor_of(module)
        assert below or (module, target) in WITHIN, f"{module} imports {target}"


@pytest.mark.parametrize("number", range(len(READING)), ids=READING)
def test_a_module_of_reading_imports_only_from_those_before_it(number):
    tree = ast.parse((PACKAGE / "reading" / f"{READING[number]}.py").read_text())
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    within = {name.removeprefix("stocache.reading.") for name in named if name.startswith("stocache.reading")}
    assert within <= set(READING[:number])


def test_every_module_of_reading_is_in_the_table():
    assert {path.stem for path in (PACKAGE / "reading").glob("*.py")} == {*READING, "__init__"}


def test_datapipes_are_imported_by_the_reading_services_only():
    for path in PACKAGE.glob("*.py"):
        assert not re.search("datapipes|IterDataPipe|stocache.reading", path.read_text()), path


def test_face_exports_a_sorted_all_that_exists():
    assert stocache.__all__ == sorted(stocache.__all__, key=lambda name: (name.islower(), name))
    assert all(hasattr(stocache, name) for name in stocache.__all__)


def test_every_error_is_a_stocache_error_and_drawn_in_the_docstring():
    from stocache import errors

    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert len(classes) == 18
    for item in classes:
        assert issubclass(item, errors.StocacheError)
        assert item.__name__ in errors.__doc__
