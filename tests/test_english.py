"""Prose is written in English, not translated into it: few marks of translation in 1,000 words, by folder."""

import re
from pathlib import Path

import pytest

from tests.support.sources import comments_of, docstrings_of

ROOT = Path(__file__).parents[1]
CEILINGS = {  # only lower these
    "docs/**/*.md": 1, "[CRS]*.md": 3, "stocache/**/*.md": 3, "stocache/**/*.py": 4, "benchmark/**/*.md": 1,
    "benchmark/**/*.py": 3, "tests/**/*.md": 1, "tests/**/*.py": 4,
}  # fmt: skip
PLACE = "says?|said|see|know|knows|shows?|names?|finds?|found|returns?|of|on|from|to|is|and|or|places?|lines?|folder|point"
AGENT = "process|user|worker|thread|rank|job|machine|program|library|host|system|container|epoch|time|day"
MARKS = re.compile(
    rf"(?<![\w-])(?:(?!(?:{PLACE}) where)\w+[,;:)]?[ ])?where\b(?! to\b)"  # for if or when; not for a place, not a question
    rf"|(?<!one )\banother\b(?! (?:\w+ )?(?:{AGENT})\b)"  # for a different
    r"|\bthose (?:that|of|which|who|whose|with|from|for|in|on|by)\b|(?<!so )\bthat of\b|\bsuch\b(?! (?:as|that)\b)"
    r"|(?:^|[.,;:] )(?:so|nor) (?:is|are|was|do|does|did|can|may|has|have|will|it is|they are|it does|they do)\b"
    r"|\bgives\b(?! (?:way|up|back)\b)|\bha(?:s|ve) [^.,;:]* of [^.,;:]* of\b|\bwhose [^.;]* whose\b"
    r"|(?:^|\. )(?-i:Of) (?:the|a|an|all|each|its|these|some|\d+)\b|\b(?:nothing|not there): "
    r"|\bas is\b|(?<!long )\bas (?:it|they) (?:is|are|was|were)\b|\bis (?:none|no(?! longer))\b",
    re.IGNORECASE,
)


def paragraphs(path: Path) -> list[str]:
    """Return the prose of a page, or the docstrings and comments of a module, without code and headings."""
    if path.suffix == ".py":
        text = "\n\n".join([*(node.value for node in docstrings_of(path)), comments_of(path)])
    else:
        code = r"```.*?```|^#[^\n]*$|\n\n(?:    [^\n]*\n)+"
        text = re.sub(code, "\n\n", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`+[^`]*`+", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)).replace("**", "")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n\s*[-*] |\||<br>", text)]


@pytest.mark.parametrize("pattern", CEILINGS)
def test_prose_has_few_marks_of_translation(pattern):
    parts = [(path, part) for path in sorted(ROOT.glob(pattern)) for part in paragraphs(path)]
    found = [(path, part, mark) for path, part in parts for mark in MARKS.finditer(part)]
    lines = [f"{path.relative_to(ROOT)}: {part[max(0, mark.start() - 40) : mark.end() + 40]}" for path, part, mark in found]
    rate = 1000 * len(found) / sum(len(part.split()) for _, part in parts)
    assert rate <= CEILINGS[pattern], f"{rate:.1f} marks in 1,000 words\n" + "\n".join(lines)
