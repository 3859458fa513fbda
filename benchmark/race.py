"""Another user races for the directory of a victim's named caches: how often does it win?

The attacker makes a directory that all may write to in the place of the victim's, then a link, and removes it, again and
again. Two processes of the victim open and close a cache, so that its own directory comes and goes, too. The attacker wins when
a file of a cache lies in its directory: the owner may put a different file there, and cut or replace it.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmark.support.faults import count_table, in_child
from benchmark.support.harness import Run, experiment
from benchmark.support.processes import fork, wait
from stocache import SegmentError, SharedCache
from stocache.system.limits import SHM_DIR

CLAIM = "Another user cannot take the place of a named cache (needs root)."

VICTIM, ATTACKER = 54321, 54322
_PLACE = f"{SHM_DIR}/stocache-{VICTIM}"


def attack() -> None:
    """Take the place, and free it again, for ever."""
    os.setuid(ATTACKER)
    os.umask(0)
    while True:
        with contextlib.suppress(OSError):
            os.mkdir(_PLACE, 0o777)
        with contextlib.suppress(OSError):
            os.rmdir(_PLACE)
        with contextlib.suppress(OSError):
            os.symlink("/tmp", _PLACE)
        with contextlib.suppress(OSError):
            os.unlink(_PLACE)


def suffer(seconds: float, name: str) -> Iterator[Any]:
    """Yield when it begins; open and close a cache for ``seconds``, and yield the counts."""
    os.setuid(VICTIM)
    yield
    counts = Counter[str](opened=0, errors=0, wrong=0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with SharedCache(1, 8, (4,), name=name) as cache:
                path = cache._segment.path
                counts["opened" if path else "not shared"] += 1
                counts["wrong"] += bool(path) and os.stat(os.path.dirname(path)).st_uid != VICTIM
        except (SegmentError, OSError):  # an OSError: it is gone when it is opened
            counts["errors"] += 1
    yield counts


@experiment(rounds=60, quick=3, needs="root")
def race(run: Run) -> None:
    """Race for as many seconds as there are rounds."""
    attacker = fork(attack)
    try:
        victims = {name: in_child(suffer, run.rounds, name, patience_s=run.rounds + 60) for name in ("race-0", "race-1")}
        for victim in victims.values():
            next(victim)
        rows = {name: next(victim) for name, victim in victims.items()}
    finally:
        os.kill(attacker, signal.SIGKILL)
        wait(attacker)
    with contextlib.suppress(OSError):
        os.rmdir(_PLACE)
    count_table(run, rows)
