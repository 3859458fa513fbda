"""Print text that reads well on a terminal of any width. In a pipe or a file, lines are not broken."""

import shutil
import sys
import textwrap
from collections.abc import Iterable

import typer


def echo(text: str, first: str = "", rest: str = "", *, err: bool = False) -> None:
    """Print a text after ``first``. A terminal gets it broken between words, with ``rest`` before the second line and later."""
    width = terminal_width(err)
    if width is not None and text:
        lines = textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
        typer.echo("\n".join(lines), err=err)
    else:
        typer.echo(first + text, err=err)


def terminal_width(err: bool = False) -> int | None:
    """Return the columns of the terminal that shows the output, or the errors; None if it goes elsewhere."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        echo(value, f"{name:<{width}}  ", " " * (width + 2))
