"""The guides are whole: each has a program, what it prints, and what to watch out for; lists of pages name all of them.

That the programs run and print this is the claim of `test_readme.py`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
KINDS = {  # of pages: what each has
    "frameworks": r"Watch out for:\n\n- \*\*", "data": r"Watch out for:\n\n- \*\*",
    "coming_from": r"## Before.*## After.*## What changes.*## What does not.*## Figures",
}  # fmt: skip


@pytest.mark.parametrize("folder", KINDS)
def test_a_guide_has_a_program_what_it_prints_or_replaces_and_what_to_watch_out_for(folder):
    for page in (page for page in (DOCS / folder).glob("*.md") if page.stem != "README"):
        text = page.read_text()
        assert re.search(KINDS[folder], text, re.DOTALL), page
        assert "stocache" in PROGRAM.findall(text)[-1], page
        assert "```text" in text or folder == "coming_from", page


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
