"""Draw the epochs of a loader or a cached dataset: into a file, in a notebook, or as text."""

import io
import math
import sys
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from stocache.observe.recording.epochs import EpochStats
from stocache.observe.verdict import LoaderEpochStats
from stocache.system.figures import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WAIT, _STEP, _HITS = "tab:red", "tab:gray", "tab:blue"
_BAR = 24  # columns of text
WAITS = "p50_s", "p95_s", "p99_s", "max_s"


def plot(source: Any, file: str | PathLike[str] | None = None) -> None:
    """Draw how long each epoch took, how much of it the loop waited for batches, and the hit rate.

    Without ``file``, the picture appears below the cell of a notebook; elsewhere it is printed as text. A `CachedDataset` knows
    neither the waits nor the end of its loop: its last epoch lasts until now.

    Args:
        source: a `DataLoader`, a `CachedDataset`, or what their ``stats()`` has returned.
        file: where to write the picture; its ending names the format: ".svg", ".png", ".pdf".

    Raises:
        TypeError: ``source`` is something else.
        ValueError: there is no epoch yet, or the format is unknown.
        ImportError: a picture needs ``pip install matplotlib``.

    Examples:
        >>> from pathlib import Path
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> for epoch in range(2):
        ...     batches = list(loader)
        >>> plot(loader, "epochs.svg")
        >>> Path("epochs.svg").read_text()[:5]
        '<?xml'
    """
    epochs = _epochs(source)
    if file is not None:
        draw(epochs).savefig(file)
    elif "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel"):
        from IPython.display import Image, display

        picture = io.BytesIO()
        draw(epochs).savefig(picture, format="png", dpi=80)
        display(Image(picture.getvalue()))  # a figure is shown only if pyplot is set up
    else:
        Console().print(tabulate(epochs))


def _epochs(source: Any) -> tuple[EpochStats | LoaderEpochStats, ...]:
    source = getattr(source, "_stocache", source)  # a subclass of a loader may have ``stats`` of its own
    stats = source.stats() if hasattr(source, "stats") else source
    epochs = getattr(stats, "epochs", None)
    if not isinstance(epochs, tuple):
        raise TypeError(
            f"plot() takes a stocache.DataLoader, a CachedDataset or their stats(), not {type(source).__name__}. Torch's "
            "loader keeps no figures: use stocache.DataLoader, or `stocache run`."
        )
    if not epochs:
        raise ValueError("there is no epoch to draw: iterate over the loader first")
    return epochs


def draw(epochs: tuple[EpochStats | LoaderEpochStats, ...]) -> "Figure":
    """Return a picture of epochs: their times, the waits for batches by percentile, and the hit rates."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    waits = [epoch for epoch in epochs if isinstance(epoch, LoaderEpochStats)]
    figure = Figure(figsize=(3.6 * (3 if waits else 2), 3.2), layout="constrained")
    times, *middle, rates = figure.subplots(1, 3 if waits else 2)
    numbers = range(1, len(epochs) + 1)
    if waits:
        waited = [epoch.waited_s for epoch in waits]
        rest = [epoch.seconds - epoch.waited_s for epoch in waits]
        times.bar(numbers, waited, color=_WAIT, label="waiting for batches")
        times.bar(numbers, rest, bottom=waited, color=_STEP, label="the rest: training steps, start and end")
        times.legend(fontsize="small")
        for name, style in (("max_s", ":"), ("p95_s", "--"), ("p50_s", "-")):
            waits_ms = [1e3 * getattr(epoch.wait, name) for epoch in waits]
            middle[0].plot(numbers, waits_ms, style, color=_WAIT, marker="o", label=name[:-2])
        middle[0].set(title="wait for a batch (ms)", yscale="log")
        middle[0].legend(fontsize="small")
    else:
        times.bar(numbers, [epoch.seconds for epoch in epochs], color=_STEP)
    times.set(title="seconds", ylim=(0, 1.3 * max(epoch.seconds for epoch in epochs)))  # with room for the legend
    shares = [math.nan if epoch.hit_rate is None else 100 * epoch.hit_rate for epoch in epochs]
    rates.plot(numbers, shares, "o-", color=_HITS)  # of a loader without a cache nothing
    rates.set(title="samples from the cache (%)", ylim=(-3, 103))
    for axes in (times, *middle, rates):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
    if verdict := getattr(epochs[-1], "verdict", None):
        figure.suptitle(str(verdict), fontsize="small", wrap=True)
    return figure


def tabulate(epochs: tuple[Any, ...], waits: Sequence[str] = ("p95_s",)) -> Table:
    """Return the same as a table of text, with some percentiles of the waits."""
    longest = max([epoch.seconds for epoch in epochs], default=0.0)
    table = Table("epoch", "time", "[red]waiting[/], the rest", "waited", *(name[:-2] for name in waits), "hit rate")
    for number, epoch in enumerate(epochs, 1):
        is_loader = isinstance(epoch, LoaderEpochStats)
        waited = [format_seconds(getattr(epoch.wait, name)) if is_loader else "" for name in waits]
        whole, red = (round(_BAR * seconds / longest) for seconds in (epoch.seconds, epoch.waited_s if is_loader else 0.0))
        rate = "" if epoch.hit_rate is None else f"{epoch.hit_rate:.1%}"
        share = f"{epoch.waited_share:.0%}" if is_loader else ""
        bar = f"[red]{'█' * red}[/]{'░' * (whole - red)}"
        table.add_row(str(number), format_seconds(epoch.seconds), bar, share, *waited, rate)
    return table
