"""The code in the README files runs as pasted, and the commands and names in them exist."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from stocache.shm import named
from stocache.tools.cli import listing
from stocache.tools.cli.app import app
from tests.support.scripts import script_runner

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "stocache"
FILES = *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted(PACKAGE.rglob("*.md"))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\n+[^\n`#]*\n*^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
EXAMPLES = {
    f"{name}, block {number}": (found[1], found[2])
    for name, text in PAGES.items()
    for number, found in enumerate(EXAMPLE.finditer(text), 1)
}
"""The programs, and what they print if the page says it."""
BLOCKS = {name: block for name, (block, _) in EXAMPLES.items()}
DEAR = re.compile("spawn|lightning|monai|transformers|keras|jax|accelerate|ultralytics|ignite|timm|lerobot")
VARIES = re.compile(r"\b\d+(\.\d+)?( ?(s|ms|µs|MB/s|GB/s|samples/s)\b|x\b)")  # times, and what follows from them
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.fixture(scope="module")
def run_script():
    with script_runner() as run:
        yield run


def is_there(module):
    """Whether a module is installed. It is not imported. A folder of tests of its name does not count."""
    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin).parent.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.linux  # each script is a fork
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * bool(DEAR.search(block))) for name, block in BLOCKS.items()]
)
def test_every_example_runs_as_a_script(name, run_script, tmp_path):
    block, path = BLOCKS[name], []
    imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import | ast.ImportFrom)]
    needs = {getattr(node, "module", node.names[0].name) for node in imports} | ({"zstandard"} if "zstd" in block else set())
    needs |= {"pyarrow"} if "StreamLoader" in block else set()
    if "photos" in block and "mkdir" not in block:
        images = pytest.importorskip("PIL.Image", reason="the example is of images")
        for number in range(4):
            photos = tmp_path / "photos" / f"class{number % 2}"
            photos.mkdir(parents=True, exist_ok=True)
            images.new("RGB", (40, 30), (number, 0, 0)).save(photos / f"{number}.png")
    for module in needs:
        if module.startswith("torchvision") and find_spec("torchvision") is None:
            path = [str(ROOT / "tests" / "support" / "standins"), str(ROOT)]
        elif not is_there(module):
            pytest.skip(f"the example needs {module}")
    status, stdout, stderr = run_script(tmp_path, block, *path)
    for cache in listing.find():  # caches that persist
        named.remove(cache.path)
    assert status == 0, stderr
    assert "Warning" not in stderr
    assert "restart" not in stdout or "read by a restart: 0" in stdout
    if (printed := EXAMPLES[name][1]) is not None:
        assert VARIES.sub("…", stdout) == VARIES.sub("…", printed)


def test_the_first_page_is_short_and_shows_the_main_job_and_there_is_a_recipe_for_each():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 180
    assert max(map(len, lines[6:24])) <= 76  # code of the first screen
    assert "CachedDataset(" in "\n".join(lines[:20]).split("```")[1]
    for name in ["image folder", "two-phase transform", "Detection", "Tokenised text", "Hugging Face", "MONAI", "DDP", "sweep"]:
        assert f"**{name}**" in "".join(PAGES.values())


@pytest.mark.parametrize("page", PAGES)
def test_links_headings_commands_and_benchmarks_exist(page):
    for path, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", PAGES[page]):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if target.suffix == ".md" else []
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in anchors, f"{path}#{heading}"
    assert set(re.findall(r"`stocache ([a-z]+)", PAGES[page])) <= COMMANDS
    assert "cli/" not in page or set(re.findall(r"\| `stocache ([a-z]+)", PAGES[page])) == COMMANDS
    benchmarks = set(re.findall(r"`python -m benchmark ([a-z_]+)", PAGES[page])) - {"all"}
    assert all((ROOT / "benchmark" / f"{name}.py").exists() for name in benchmarks)
