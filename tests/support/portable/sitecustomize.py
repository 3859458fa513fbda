"""Hide from this process and its children what only Linux gives, before anything else is imported."""

import os
import sys

sys.modules |= dict.fromkeys(("fcntl", "termios", "tty"))
for name in ("posix_fallocate", "memfd_create", "posix_fadvise", "sched_getaffinity", "O_TMPFILE"):
    delattr(os, name)


def _hide_files(event: str, arguments: tuple) -> None:
    """Refuse the files of Linux to the code of stocache; psutil reads them."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/dev/shm")):
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename.startswith("<") or frame.f_code.co_filename.startswith(_STDLIB)):
            frame = frame.f_back
        if frame is not None and "/stocache/" in frame.f_code.co_filename:
            raise FileNotFoundError(2, "hidden", str(arguments[0]))


_STDLIB = os.path.dirname(os.__file__) + os.sep
_STDLIB = tuple(os.path.join(_STDLIB, name) for name in os.listdir(_STDLIB) if name != "site-packages")
sys.addaudithook(_hide_files)
sys.hidden_from_stocache = True
