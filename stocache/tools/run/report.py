"""Write the report of ``stocache run``: where the time of a program's loaders went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stocache.observe.verdict import SILENT, LoaderEpochStats
from stocache.system.figures import format_seconds, plural

_SHOWN = 0.01  # share of the time, from which starting and ending epochs is shown


@dataclass(frozen=True)
class LoaderLines:
    """What the report says of one loader.

    Attributes:
        place: where the program made it, as "train.py:42".
        dataset, length: the class of the dataset, and its number of samples.
        epochs: the figures of its epochs; the last one may be running.
        state: what is cached of the dataset; "" if nothing was to be.
        note: how it iterates, if not as stocache's loader.
    """

    place: str
    dataset: str
    length: int | None
    epochs: Sequence[LoaderEpochStats]
    state: str
    note: str

    @property
    def seconds(self) -> float:
        """The duration of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def waited_s(self) -> float:
        """The part of it in which the program waited for batches."""
        return sum(epoch.waited_s for epoch in self.epochs)

    @property
    def heading(self) -> str:
        """Where the program made it, and its dataset."""
        length = "" if self.length is None else f" of {plural(self.length, 'sample')}"
        return f"{self.place or 'a loader'}: {self.dataset}{length}"

    @property
    def has_no_problem(self) -> bool:
        """Whether no epoch has a verdict, and none that goes on waits for longer than one without a verdict."""
        settled = all(epoch.verdict is None and (epoch.complete or epoch.waited_share < SILENT) for epoch in self.epochs)
        return settled and bool(self.epochs) and not self.state and not self.note

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        figures = ("number", "batches", "samples", "hits", "misses", "seconds", "waited_s", "steps_s", "hit_rate", "complete")
        epochs = [_named(epoch, figures) | {"verdict": epoch.verdict and str(epoch.verdict)} for epoch in self.epochs]
        return _named(self, ("place", "dataset", "length", "seconds", "waited_s", "state", "note")) | {"epochs": epochs}

    def text(self) -> str:
        """Return the lines about this loader."""
        lines = [self.heading]
        lines += self._figures() if self.epochs else ["  none of its loops was timed"]
        lines += [f"  {line}" for line in (self.state, self.note) if line]
        judged = [(number, epoch) for number, epoch in enumerate(self.epochs, 1) if epoch.verdict is not None]
        if judged:
            number, epoch = max(judged, key=self._weight)
            lines.append(f"  epoch {number}: {epoch.verdict}")
        return "\n".join(lines)

    def _weight(self, judged: tuple[int, LoaderEpochStats]) -> tuple[float, int]:
        """Return how long all epochs with the same limit waited, and the number of this one."""
        number, limit = judged[0], judged[1].verdict and judged[1].verdict.limit
        return sum(epoch.waited_s for epoch in self.epochs if epoch.verdict and epoch.verdict.limit == limit), number

    def _figures(self) -> list[str]:
        batches, samples = (sum(getattr(epoch, name) for epoch in self.epochs) for name in ("batches", "samples"))
        last, seconds = self.epochs[-1], max(1e-9, self.seconds)
        parts = {"for steps": sum(epoch.steps_s for epoch in self.epochs), "waiting for data": self.waited_s}
        parts["starting and ending epochs"] = sum(epoch.overhead_s for epoch in self.epochs)
        named = [f"{format_seconds(part)} {name} ({part / seconds:.0%})" for name, part in parts.items()]
        shown = named if parts["starting and ending epochs"] >= _SHOWN * seconds else named[:2]
        cost = f"; one that is not in memory takes {format_seconds(last.load.mean_s)}" if last.load.count else ""
        rate = samples / seconds
        lines = [f"  {plural(len(self.epochs), 'epoch')}, {plural(batches, 'batch')}: {', '.join(shown)}"]
        if samples:  # else worker processes count for themselves
            lines.append(f"  {rate:{',.0f' if rate >= 100 else '.3g'}} samples a second{cost}")
        return lines


def _named(of: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def report_of(loaders: Sequence[LoaderLines]) -> str:
    """Return a line about all loaders, and then some about each, the one that waited longest first.

    If no loader has a problem, it is one line.
    """
    seconds, waited_s = (sum(getattr(each, name) for each in loaders) for name in ("seconds", "waited_s"))
    share, timed = waited_s / max(1e-9, seconds), plural(sum(bool(each.epochs) for each in loaders), "loader")
    head = f"stocache: {format_seconds(seconds)} in loops over {timed}, {share:.0%} of it waiting for data"
    if not any(each.epochs for each in loaders):
        head = "stocache: no loop over a loader was timed"
    elif all(each.has_no_problem for each in loaders):
        return f"{head}: no problem"
    return "\n\n".join([head, *(each.text() for each in sorted(loaders, key=lambda each: -each.waited_s))])
