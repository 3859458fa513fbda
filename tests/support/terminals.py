"""What terminals of a given width show."""

import os
import pty
import re
import signal
import subprocess
import sys

from rich.console import Console


def shown(view, width):
    """The lines of a rich view."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def in_terminal(width, *arguments, until=None, meanwhile=lambda: None):
    """The lines of a command in a pseudo-terminal; it is interrupted as soon as the output matches ``until``.

    ``meanwhile`` is called before each piece of output is read.
    """
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": str(width), "LINES": "30", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "stocache", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | terminal)
    os.close(theirs)
    text, interrupted = "", False
    while True:
        meanwhile()
        try:
            text += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if until and not interrupted and re.search(until, text):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(ours)
    assert process.wait(60) == 0, text[-2000:]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", text).replace("\r", "").splitlines()
