"""The guides are whole: each has a program, what it prints, and what to watch out for; lists of pages name all of them.

That the programs run and print this is the claim of `test_readme.py`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = sorted(path for folder in ("frameworks", "data") for path in (DOCS / folder).glob("*.md") if path.stem != "README")
BEFORE_AND_AFTER = sorted(path for path in (DOCS / "coming_from").glob("*.md") if path.stem != "README")
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_a_program_of_20_to_40_lines_its_output_and_what_to_watch_out_for(page):
    text = page.read_text()
    program, *_ = PROGRAM.findall(text)
    assert 20 <= len(program.splitlines()) <= 40
    assert "stocache" in program
    assert text.count("```python") <= text.count("```text")
    assert 2 <= len(re.findall(r"^- \*\*", text.partition("Watch out for:")[2], re.MULTILINE)) <= 6


@pytest.mark.parametrize("page", BEFORE_AND_AFTER, ids=lambda page: page.stem)
def test_a_migration_has_the_program_before_and_after_what_changes_and_figures(page):
    text = page.read_text()
    heads = re.findall(r"^## (After|.*)", text, re.MULTILINE)  # there may be several ways after
    assert [*dict.fromkeys(heads)] == ["Before", "After", "What changes", "What does not", "Figures"]
    before, after = (PROGRAM.search(text.partition(f"\n## {part}")[2])[1] for part in ("Before", "After"))
    assert "stocache" in after
    assert "import stocache" not in before


@pytest.mark.parametrize("folder", ["frameworks", "data", "coming_from", "notebooks"])
def test_the_page_of_a_folder_names_all_its_pages(folder):
    pages = {path.name for path in (DOCS / folder).iterdir() if path.suffix in (".md", ".ipynb")} - {"README.md"}
    assert {*re.findall(r"\]\((\w+\.\w+)\)", (DOCS / folder / "README.md").read_text())} == pages


def test_the_list_for_agents_names_all_pages_of_the_site_and_they_exist():
    named = set(re.findall(r"\]\(([^)]*)\)", (ROOT / "llms.txt").read_text()))
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].replace("*", "README")
    assert named >= set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) - {"docs/reference.md"}
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_skill_quotes_verdicts_as_they_are():
    skill = (DOCS / "skills" / "stocache" / "SKILL.md").read_text()
    verdicts = (ROOT / "stocache" / "observe" / "verdict.py").read_text()
    quoted = re.findall(r'^\| (".*") \|', skill, re.MULTILINE)
    parts = [part for row in quoted for text in re.findall(r'"([^"]+)"', row) for part in text.split("…")]
    assert len(parts) > 10
    assert [part for part in parts if part.strip() not in verdicts] == []
