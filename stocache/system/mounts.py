"""Read the table of mounted file systems."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc/self")


class Mount(NamedTuple):
    """A mounted file system: its device number, the directory of it that is mounted, and where; its type and options."""

    device: str
    root: str
    path: str
    kind: str
    options: list[str]


def mounts(proc: Path = PROC) -> Iterator[Mount]:
    """Yield the file systems that this process sees; nothing if /proc is hidden.

    Source: /proc/[pid]/mountinfo in proc(5).
    """
    try:
        lines = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, others = left.split(), right.split()
        yield Mount(fields[2], _unescape(fields[3]), _unescape(fields[4]), others[0], others[-1].split(","))


def _unescape(field: str) -> str:
    r"""Undo mountinfo's octal escapes (a space is written \040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def filesystem_of(device: int) -> str:
    """Return the type of the file system with a device number (``st_dev``): "ext4", "tmpfs", "nfs4"; "" if it is not known."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == wanted), "")
