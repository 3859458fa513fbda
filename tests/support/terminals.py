"""What terminals of a given width show."""

from rich.console import Console


def shown(view, width):
    """The lines of a rich view."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]
