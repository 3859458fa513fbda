"""Hooks of MkDocs: the pages that lie beside the code are the site's source, and the reference names all public objects."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

import stocache

ROOT = Path(__file__).parents[1]
PAGES = "*.md", "docs/*.md", "stocache/**/*.md", "tests/README.md", "tests/programs/README.md", "benchmark/**/*.md"
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")

GROUPS = {  # by the folder in which a name is defined
    "Caching": ("cache", "datasets", "disk", "transforms", "shm"),
    "Loading": ("loader", "samplers", "text", "reading"),
    "Preparing": ("preparation", "storage", "datasets.stored"),
    "Measuring": ("observe", "integrations"),
    "Machine": ("system", "compat", "datamodule"),
    "Errors": ("errors",),
}


def on_files(files: Files, config: object) -> Files:
    """Put each page of the repository at its own path, and beside the pages the files to which they link."""
    pages = sorted({path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)})
    assets = [file for file in files if not file.src_uri.endswith((".md", ".py"))]  # of the theme; the pages come anew
    linked = {target for page in pages for target in _targets(page) if (ROOT / target).is_file()} - {*pages}
    added = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in [*pages, *sorted(linked)]]
    reference = File.generated(config, "docs/reference.md", content=_reference())
    return Files([*assets, *added, reference])


def on_page_markdown(markdown: str, page: object, config: object, files: Files) -> str:
    """Let links to folders lead to their pages."""
    folder = os.path.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, match[1]))
        if (ROOT / target / "README.md").is_file():
            return f"]({match[1].rstrip('/')}/README.md{match[2] or ''})"
        return match[0]

    return _LINK.sub(link, markdown)


def _targets(page: str) -> set[str]:
    """Return the paths in the repository to which a page links."""
    text = (ROOT / page).read_text()
    return {os.path.normpath(os.path.join(os.path.dirname(page), found)) for found, _ in _LINK.findall(text)}


def _reference() -> str:
    """Return the page of all public names, each where `GROUPS` has the folder that defines it."""
    sections: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, module in _public().items():
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
