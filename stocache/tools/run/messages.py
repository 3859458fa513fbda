"""What ``stocache run`` writes to the error stream: lines of its own, in the words of its options."""

import contextlib
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stocache.tools.run.use import LoaderName, Use

if TYPE_CHECKING:
    from stocache.observe.verdict import LoaderEpochStats

_FIRST = 2  # lines about a loader that are printed in any case
_CHANGE = 0.25  # of the share of waiting, from which a line is printed again

_OPTIONS = (
    (r"size_limit_gib=[\d.]+(, all that fits,)?", "a larger --cache"),
    (r"disk= keeps", "--disk and --disk-limit keep"),
    (r"worker_method='(\w+)'", r"--worker-method \1"),
    (r"; move random steps to transform=.*| Load first and draw random numbers later.*?(?= \(stocache|$)", ""),
)
"""Advice about stocache's own classes, and what stands for it if the program does not use them."""


def say(text: str) -> None:
    """Print a line to the error stream."""
    sys.stderr.write(f"{text}\n")


def say_apart(text: str) -> None:
    """Print a line to the error stream, after an empty one: a progress bar leaves the cursor behind its text.

    On a terminal tqdm moves its bars below the line. Nothing is printed if the stream is closed. It is the stream that the
    program has from Python, except on a terminal, because there a library may draw on the one that it has put in its place.
    """
    with contextlib.suppress(Exception):  # whatever streams raise that the program has made, or closed
        streams: Any = sys.__stderr__, sys.__stdout__
        stream, bars, tqdm = streams[0], contextlib.nullcontext(), sys.modules.get("tqdm")
        if stream.isatty():
            stream = sys.stderr
            if tqdm is not None and streams[1].isatty():  # else tqdm would draw a bar on that again into a file
                bars = tqdm.tqdm.external_write_mode(stream, nolock=True)
        with bars:
            stream.write(f"\n{text}\n")


def as_options(text: str) -> str:
    """Return advice for a user of ``stocache run``."""
    for ours, option in _OPTIONS:
        text = re.sub(ours, option, text)
    return text


def keep_log_apart(use: Use, quiet: bool) -> None:
    """Keep the log of this package out of the program's: print warnings, or nothing if ``quiet``. Note them in ``use``.

    It takes a filter, because programs replace the handlers of all loggers that exist.
    """

    def shown(record: logging.LogRecord) -> bool:
        text = as_options(record.getMessage())
        if record.levelno >= logging.WARNING or "='auto' chooses" in text:  # a setting that was measured
            use.tried.append(text)
        if record.levelno >= logging.WARNING and not quiet:
            say_apart(f"stocache: {text}")
        return False

    log = logging.getLogger("stocache")
    log.setLevel(logging.INFO)
    log.addFilter(shown)


def epoch_lines(use: Use) -> Callable[[LoaderName, "LoaderEpochStats"], None]:
    """Return what prints the verdicts of epochs: the first of a loader, and the ones that differ from all printed before."""
    epochs = Counter[LoaderName]()
    printed = defaultdict[LoaderName, list[tuple[str, float]]](list)

    def note(loader: LoaderName, epoch: "LoaderEpochStats") -> None:
        epochs[loader] += 1
        verdict, said = epoch.verdict, printed[loader]
        if verdict is None or use.rank:
            return
        known = any(limit == verdict.limit and abs(share - verdict.share) < _CHANGE for limit, share in said)
        if len(said) < _FIRST or not known:
            said.append((verdict.limit, verdict.share))
            say_apart(f"stocache: {loader[0]}, epoch {epochs[loader]}: {verdict}")

    return note
