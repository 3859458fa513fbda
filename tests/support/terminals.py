"""What terminals of a given width show."""

import os
import pty
import re
import subprocess
import sys

from rich.console import Console


def shown(view, width):
    """The lines of a rich view."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def in_terminal(width, *arguments, until=None):
    """The output of a command in a pseudo-terminal; ``q`` is typed as soon as it matches ``until``."""
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": str(width), "LINES": "30", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "stocache", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | terminal)
    os.close(theirs)
    text, typed = b"", False
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        text += piece
        if until and not typed and re.search(until, text.decode(errors="replace")):
            os.write(ours, b"q")
            typed = True
    os.close(ours)
    process.wait(20)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", text.decode(errors="replace")).replace("\r", "").splitlines()
