"""Write the report of ``stocache run``: where the time of a program's loaders went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stocache.observe.verdict import LoaderEpochStats
from stocache.system.figures import format_seconds, plural


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

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        figures = ("number", "batches", "samples", "hits", "misses", "seconds", "waited_s", "hit_rate", "complete")
        epochs = [_named(epoch, figures) | {"verdict": epoch.verdict and str(epoch.verdict)} for epoch in self.epochs]
        return _named(self, ("place", "dataset", "length", "seconds", "waited_s", "state", "note")) | {"epochs": epochs}

    def text(self) -> str:
        """Return the lines about this loader."""
        length = "" if self.length is None else f" of {plural(self.length, 'sample')}"
        lines = [f"{self.place or 'a loader'}: {self.dataset}{length}"]
        lines += self._figures() if self.epochs else ["  none of its loops was timed"]
        lines += [f"  {line}" for line in (self.state, self.note) if line]
        verdict = next((epoch.verdict for epoch in reversed(self.epochs) if epoch.verdict is not None), None)
        if verdict is not None:
            text = str(verdict)
            lines.append(f"  {text if self.state else text.replace('CachedDataset makes', '--cache auto makes')}")
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        batches, samples = (sum(getattr(epoch, name) for epoch in self.epochs) for name in ("batches", "samples"))
        last, seconds = self.epochs[-1], max(1e-9, self.seconds)
        share = self.waited_s / seconds
        cost = f"; one that is not in memory takes {format_seconds(last.load.mean_s)}" if last.load.count else ""
        rate = samples / seconds
        lines = [
            f"  {plural(len(self.epochs), 'epoch')}, {plural(batches, 'batch')}: {format_seconds(seconds - self.waited_s)} "
            f"for steps ({1 - share:.0%}), {format_seconds(self.waited_s)} waiting for data ({share:.0%})",
        ]
        if samples:  # else worker processes count for themselves
            lines.append(f"  {rate:{',.0f' if rate >= 100 else '.3g'}} samples a second{cost}")
        return lines


def _named(of: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def report_of(loaders: Sequence[LoaderLines]) -> str:
    """Return a line about all loaders, and then some about each, the one that waited longest first."""
    seconds, waited_s = (sum(getattr(each, name) for each in loaders) for name in ("seconds", "waited_s"))
    share = waited_s / max(1e-9, seconds)
    timed = sum(bool(each.epochs) for each in loaders)
    over = plural(timed, "loader")
    head = f"stocache: {format_seconds(seconds)} in loops over {over}, {share:.0%} of it waiting for data"
    if not timed:
        head = "stocache: no loop over a loader was timed"
    return "\n\n".join([head, *(each.text() for each in sorted(loaders, key=lambda each: -each.waited_s))])
