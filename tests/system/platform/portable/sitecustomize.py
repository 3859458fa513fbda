"""Hide from stocache, in this process and its children, what only Linux has, and what Windows lacks of the standard library.

Python imports a module of this name when it starts. Other packages, and the tests, see the system unchanged.
"""

import builtins
import os
import sys
from types import ModuleType

MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}
NAMES = {
    "os": """
        O_ACCMODE O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC O_TMPFILE RWF_NOWAIT WNOHANG chown fchmod fchown fork
        fstatvfs getegid getgid getloadavg getuid killpg memfd_create mkfifo posix_fadvise posix_fallocate pread preadv
        pwrite pwritev readv sched_getaffinity sched_yield sendfile set_blocking setsid statvfs sync sysconf uname wait writev
    """,
    "signal": "SIGALRM SIGBUS SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGRTMIN SIGSTOP SIGUSR1 SIGUSR2 pthread_kill",
    "mmap": "MADV_DONTNEED MADV_HUGEPAGE MADV_REMOVE MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "select": "PIPE_BUF POLLIN POLLOUT epoll poll",
}


class Hiding(ModuleType):
    """A module without some of its names, and where a folder has no descriptor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.module, self.hidden = __import__(name), frozenset(NAMES[name].split())

    def __getattr__(self, name: str) -> object:
        if name in self.hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: hidden")
        found = getattr(self.module, name)
        return without_folders(found) if name in FOLDERS and self.__name__ == "os" else found


FOLDERS = {"link", "listdir", "open", "rename", "replace", "scandir", "stat", "unlink"}


def without_folders(function):
    def refuse(path=".", *arguments, **options):
        if any(name.endswith("dir_fd") and value is not None for name, value in options.items()):
            raise NotImplementedError("dir_fd unavailable on this platform")
        if isinstance(path, int) and function is not os.stat:
            raise TypeError("path should be string, bytes, os.PathLike or None, not int")
        if function is os.open and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return function(path, *arguments, **options)

    return refuse


def is_ours(globals):
    """Whether code with these globals is a module of stocache: its folder may have this name, and contain other packages."""
    return (globals.get("__name__") or "").startswith("stocache")


def hiding_import(name, globals=None, locals=None, fromlist=(), level=0):
    """Import a module as `__import__` does; stocache gets it without what is hidden."""
    if level == 0 and is_ours(globals or {}):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}: hidden", name=name)
        if name in NAMES or (name.partition(".")[0] in NAMES and not fromlist):
            return HIDING[name.partition(".")[0]]
    return import_module(name, globals, locals, fromlist, level)


def hide_files(event: str, arguments: tuple) -> None:
    """Refuse the files of Linux to stocache; psutil reads them."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/dev/shm")):
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(("<", __file__, *STDLIB)):
            frame = frame.f_back
        if frame is not None and is_ours(frame.f_globals):
            raise FileNotFoundError(2, "hidden", str(arguments[0]))


HIDING = {name: Hiding(name) for name in NAMES}
STDLIB = [entry.path for entry in os.scandir(os.path.dirname(os.__file__)) if entry.name != "site-packages"]
import_module, builtins.__import__ = builtins.__import__, hiding_import
sys.addaudithook(hide_files)
