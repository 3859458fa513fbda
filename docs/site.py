"""Hooks of MkDocs: the pages that lie beside the code are the site's source, notebooks become pages with their outputs, and the
reference names all public objects.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

import stocache

ROOT = Path(__file__).parents[1]
ICON = "docs/icon.svg"
PAGES = "*.md", "docs/**/*.md", "stocache/**/*.md", "tests/README.md", "tests/programs/README.md", "benchmark/**/*.md"
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")

FIRST = "CachedDataset", "DataLoader"  # of their groups
GROUPS = {  # by the folder in which a name is defined
    "Caching": ("cache", "datasets", "shm"),
    "Loading": ("loader", "text", "reading"),
    "Preparing": ("storage",),
    "Measuring": ("observe", "tools", "integrations"),
    "Machine": ("system",),
    "Errors": ("errors",),
}


def on_config(config: Any) -> None:
    """Put all pages of a folder where the navigation has `*`."""
    for entry in config.nav:
        for title, pattern in entry.items():
            if "*" in pattern:
                folder = ROOT / os.path.dirname(pattern)
                pages = {path.with_suffix(".md").name for path in folder.iterdir() if path.suffix in (".md", ".ipynb")}
                names = sorted(pages, key=lambda name: (name != "README.md", name))
                entry[title] = [f"{folder.relative_to(ROOT)}/{name}" for name in names]


def on_files(files: Files, config: object) -> Files:
    """Put each page of the repository at its own path, and beside the pages the files to which they link."""
    pages = sorted({path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)})
    assets = [file for file in files if not Path(file.abs_src_path).is_relative_to(ROOT / "docs")]  # of the theme
    linked = {target for page in pages for target in _targets(page) if (ROOT / target).is_file()} | {ICON}
    added = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in [*pages, *sorted(linked - {*pages})]]
    made = {"docs/reference.md": _reference(), "llms.txt": _of_the_site((ROOT / "llms.txt").read_text())}
    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        made |= _notebook(path)
    added = [file for file in added if file.src_uri not in made]
    return Files([*assets, *added, *(File.generated(config, path, content=content) for path, content in made.items())])


def on_page_markdown(markdown: str, page: Any, config: object, files: Files) -> str:
    """Let links to folders lead to their pages, and links to notebooks to the pages made of them."""
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]  # its column would be empty
    folder = os.path.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, match[1]))
        if (ROOT / target / "README.md").is_file():
            return f"]({match[1].rstrip('/')}/README.md{match[2] or ''})"
        return match[0].replace(".ipynb", ".md")

    return _LINK.sub(link, markdown)


def _targets(page: str) -> set[str]:
    """Return the paths in the repository to which a page links."""
    text = (ROOT / page).read_text()
    return {os.path.normpath(os.path.join(os.path.dirname(page), found)) for found, _ in _LINK.findall(text)}


def _notebook(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and the pictures in it, by their paths on the site."""
    body, resources = MarkdownExporter().from_filename(str(path))
    page = path.relative_to(ROOT).with_suffix(".md")
    pictures = {f"{page.parent}/{page.stem}_{name}": data for name, data in resources["outputs"].items()}
    for name in resources["outputs"]:
        body = body.replace(f"]({name})", f"]({page.stem}_{name})")
    return {str(page): body, **pictures}


def _of_the_site(text: str) -> str:
    """Return a text whose links lead to the pages of the site in place of their sources."""
    return text.replace("README.md)", "index.html)").replace(".md)", ".html)")


def _reference() -> str:
    """Return the page of all public names, each where `GROUPS` has the folder that defines it."""
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, module in sorted(_public().items(), key=lambda item: item[0] not in FIRST):
        folder = module.removeprefix("stocache.")
        group = max(GROUPS, key=lambda group: max(len(each) if folder.startswith(each) else 0 for each in GROUPS[group]))
        sections[group].append(f"::: {module}.{name}\n")
    text = "\n".join(f"## {group}\n\n" + "\n".join(names) for group, names in sections.items() if names)
    return f"# Reference\n\nAll of these are names of `stocache` itself: `from stocache import CachedDataset`.\n\n{text}"


def _public() -> dict[str, str]:
    """Return the modules that define the public names, and all errors."""
    names = [*stocache.__all__, *(name for name in dir(stocache.errors) if name.endswith("Error"))]
    found = {}
    for name in names:
        value = getattr(stocache, name, None) or getattr(stocache.errors, name)
        if not (value.__doc__ or "").strip():
            raise LookupError(f"{name} is public, and has no docstring")
        found[name] = value.__module__
    return found
