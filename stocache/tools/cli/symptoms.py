"""The sections of SYMPTOMS.md: which one a message belongs to, and what it says."""

import functools
import logging
import re
from pathlib import Path
from typing import NamedTuple

_PAGE = Path(__file__).parents[2] / "SYMPTOMS.md"


class Symptom(NamedTuple):
    """A section of the page.

    Attributes:
        code: as ``W12``; of an error, the name of its class.
        title: what is seen.
        text: cause, remedy and check.
        pattern: finds the messages that belong to it; None if none does.
    """

    code: str
    title: str
    text: str
    pattern: re.Pattern[str] | None


@functools.cache
def symptoms() -> tuple[Symptom, ...]:
    """Return the sections of the page, in order; none if it was not installed."""
    try:
        page = _PAGE.read_text(encoding="utf-8")
    except OSError:
        return ()
    return tuple(_symptom(section) for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:])


def _symptom(section: str) -> Symptom:
    heading, _, text = section.partition("\n")
    code, _, title = heading.partition(": ")
    seen = re.search(r"\*\*Seen\*\*: (.*?)\n- ", text, re.DOTALL)
    messages = re.findall(r"`([^`]+)`", " ".join(seen[1].split())) if seen and not re.match(r"S\d", code) else []
    patterns = [".*".join(map(re.escape, message.split("…"))) for message in messages]
    return Symptom(code, title, text.strip(), re.compile("|".join(patterns), re.DOTALL) if patterns else None)


def symptom_of(message: str) -> Symptom | None:
    """Return the section to which a warning, or the message of an error, belongs."""
    return next((each for each in symptoms() if each.pattern is not None and each.pattern.search(message)), None)


def say_where(record: logging.LogRecord) -> None:
    """Add to a warning the command that explains it, once: a record may pass several times."""
    message = record.getMessage()
    if "(stocache explain " not in message and (found := symptom_of(message)):
        record.msg, record.args = f"{message} (stocache explain {found.code})", ()
