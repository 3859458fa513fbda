"""Another user races for the directory of a victim's named caches: how often does it win? Needs root, to be both users.

    python -m benchmark race --seconds 60

The attacker makes a directory that all may write to in the place of the victim's, then a link, and removes it, again and
again. Two processes of the victim open and close a cache, so that its own directory comes and goes, too. The attacker wins when
a file of a cache lies in its directory: the owner may put another file there, and cut or replace it.
"""

import argparse
import contextlib
import logging
import os
import signal
import time

from stocache import SegmentError, SharedCache
from stocache.system.limits import SHM_DIR

CLAIM = "Another user cannot take the place of a named cache (needs root)."

VICTIM, ATTACKER = 54321, 54322
_PLACE = f"{SHM_DIR}/stocache-{VICTIM}"


def attack() -> None:
    """Take the place, and free it again, for ever."""
    place = _PLACE
    os.setuid(ATTACKER)
    os.umask(0)
    while True:
        with contextlib.suppress(OSError):
            os.mkdir(place, 0o777)
        with contextlib.suppress(OSError):
            os.rmdir(place)
        with contextlib.suppress(OSError):
            os.symlink("/tmp", place)
        with contextlib.suppress(OSError):
            os.unlink(place)


def suffer(seconds: float, name: str) -> dict[str, int]:
    """Open and close a cache for ``seconds``; return the results, counted."""
    os.setuid(VICTIM)
    logging.disable(logging.WARNING)
    counts = {"opened": 0, "not shared": 0, "errors": 0, "won": 0}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with SharedCache(1, 8, (4,), name=name) as cache:
                path = cache._segment.path
                counts["opened" if path else "not shared"] += 1
                if path and os.stat(os.path.dirname(path)).st_uid != VICTIM:
                    counts["won"] += 1
        except SegmentError:
            counts["errors"] += 1
        except OSError:  # it is gone when it is opened
            counts["errors"] += 1
    return counts


def main() -> None:
    """Race, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    attacker = os.fork()
    if attacker == 0:
        attack()
    victims = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            counts = ", ".join(f"{name} {count}" for name, count in suffer(seconds, f"race-{number}").items())
            print(f"victim {number}: {counts}", flush=True)
            os._exit(0)
        victims.append(pid)
    for pid in victims:
        os.waitpid(pid, 0)
    os.kill(attacker, signal.SIGKILL)
    os.waitpid(attacker, 0)
    with contextlib.suppress(OSError):
        os.rmdir(_PLACE)


if __name__ == "__main__":
    main()
