"""The one harness of the benchmarks: experiments, turns, tables and claims.

A benchmark is a module of the folder `benchmark` with a CLAIM of one sentence, and experiments. An experiment is its
contenders, its table and what it claims:

    @experiment(rounds=9, quick=1, needs="stocaching")
    def hits(run: Run) -> None:
        '''Time a hit.'''
        took = run.turns({"ours": ..., "stocaching": ...}, calls=1000)
        table = run.table("call", "µs", "of stocaching's")
        for name in took:
            table.row(name, 1e6 * took.median(name), took.ratio(name, "stocaching"))
        run.claim("a hit takes at most stocaching's time", took.ratio("ours", "stocaching"), most=1)
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------- experiments


class Experiment(NamedTuple):
    """A measurement of a benchmark. Its name is the name of its function."""

    function: "Callable[[Run], None]"
    rounds: int
    quick: int
    needs: str

    @property
    def text(self) -> str:
        """What it does, in a line."""
        return str(self.function.__doc__).splitlines()[0]


EXPERIMENTS: dict[str, dict[str, Experiment]] = {}
"""By the name of the module, and their own."""


def experiment(
    *, rounds: int = 1, quick: int = 1, needs: str = ""
) -> "Callable[[Callable[[Run], None]], Callable[[Run], None]]":
    """Register a function as an experiment of its module.

    Args:
        rounds: how many rounds, trials or batches it has by default.
        quick: the same with ``--quick``.
        needs: modules that it imports while it runs, "root" or "gpu", with spaces between. Optional peers are no need.
    """

    def register(function: "Callable[[Run], None]") -> "Callable[[Run], None]":
        found = EXPERIMENTS.setdefault(function.__module__, {})
        found[function.__name__.replace("_", "-")] = Experiment(function, rounds, quick, needs)
        return function

    return register


class NotHereError(Exception):
    """This machine lacks what an experiment needs."""


PIP = {  # if a module is not installed by its own name
    "cv2": "opencv-python-headless", "dataloader_rs": "dataloader-rs", "PIL": "pillow", "streaming": "mosaicml-streaming",
    "stocaching": "--no-deps stocaching==0.2.1", "torchdata": "--no-deps torchdata==0.9.0",
}  # fmt: skip


def pip_install(module: str) -> str:
    """Return what is to be done about a module that is missing."""
    package = module.partition(".")[0]
    return f"{module} cannot be imported. Run: pip install {PIP.get(package, package)}"


def is_missing(module: str) -> bool:
    """Whether a module, or a package that it is in, is not installed."""
    try:
        return find_spec(module) is None
    except ImportError:
        return True


def check_needs(needs: str) -> None:
    """Raise NotHereError unless this machine has what an experiment needs."""
    for need in needs.split():
        if need == "root":
            if os.geteuid():
                raise NotHereError("needs root")
        elif need == "gpu":
            import torch

            if not torch.cuda.is_available():
                raise NotHereError("needs a GPU")
        elif is_missing(need):
            raise NotHereError(pip_install(need))


# ---------------------------------------------------------------------------------------------------- figures


class Figures(dict[str, list[float]]):
    """The figures of contenders, one for each round: seconds of a call, or what a contender returned."""

    @classmethod
    def columns(cls, results: dict[str, list[Any]]) -> list["Figures"]:
        """Return the figures of results of `Run.results` that are tuples: one of these for each place of a tuple."""
        width = len(next(iter(results.values()))[0])
        return [cls({name: [each[at] for each in found] for name, found in results.items()}) for at in range(width)]

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self[name])

    def ratios(self, name: str, peer: str) -> list[float]:
        """Return the figure of one contender to the figure of a different one, in each round."""
        return [mine / other for mine, other in zip(self[name], self[peer], strict=True)]

    def ratio(self, name: str, peer: str) -> float:
        """Return the median of `ratios`."""
        return statistics.median(self.ratios(name, peer))

    def spread(self, name: str, peer: str) -> "Spread":
        """Return the same, shown with the least and the most."""
        return Spread.of(self.ratios(name, peer))


class Spread(float):
    """The median of some values, which is shown with the least and the most of them."""

    shown: str

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the median of some values."""
        found = cls(statistics.median(values))
        found.shown = f"{found:.2f} ({min(values):.2f} to {max(values):.2f})"
        return found


def cell(value: object) -> str:
    """Return a value as it is shown in a table: figures have three digits."""
    if isinstance(value, Spread):
        return value.shown
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        digits = next((digits for digits, least in enumerate((100, 10, 0.1)) if abs(value) >= least), None)
        return f"{value:.2g}" if digits is None else f"{value:,.{digits}f}"
    return "" if value is None else str(value)


class Table:
    """A table in Markdown, printed row by row as they come."""

    def __init__(self, *titles: str) -> None:
        print()
        self.titles, self.rows = titles, list[dict[str, Any]]()
        for cells in (titles, ("---", *("---:" for _ in titles[1:]))):
            print(f"| {' | '.join(cells)} |")

    def row(self, *cells: object) -> None:
        """Print a row."""
        self.rows.append(dict(zip(self.titles, cells, strict=False)))
        print(f"| {' | '.join(map(cell, cells))} |", flush=True)

    def column(self, title: str, **where: object) -> list[Any]:
        """Return what a column has in all rows; of those rows only whose other columns have the values given."""
        rows = (row for row in self.rows if all(row.get(other) == value for other, value in where.items()))
        return [row[title] for row in rows if row.get(title) is not None]


# ---------------------------------------------------------------------------------------------------- a run


@dataclass
class Run:
    """A run of an experiment.

    Attributes:
        rounds: how many rounds, trials or batches.
        quick: whether it is only to be seen that all works; figures are rough then.
        folder: a folder that the experiment reads: photographs, or a tree to compare with.
        only: the part of a name that `chosen` cases have.
        seed: of the first trial.
    """

    rounds: int = 1
    quick: bool = False
    folder: Path | None = None
    only: str = ""
    seed: int = 0
    failed: bool = False

    def size(self, full: T, quick: T) -> T:
        """Return one of two sizes."""
        return quick if self.quick else full

    def chosen(self, cases: dict[str, T]) -> dict[str, T]:
        """Return the cases that ``--only`` names, by default all."""
        return {name: case for name, case in cases.items() if self.only in name}

    def seeds(self) -> Iterable[int]:
        """Return the seeds of as many trials as there are rounds, with a progress bar."""
        from tqdm import tqdm

        return tqdm(range(self.seed, self.seed + self.rounds), unit="trial", mininterval=1)

    def photos(self, count: int) -> list[Path]:
        """Return the photographs of ``--folder``; by default generated ones."""
        from stocache.tools.bench import find_jpegs, photo_folder

        return find_jpegs(self.folder or photo_folder(self.size(count, 160)))

    def results(self, contenders: dict[str, Callable[[], T]], warm_up: int = 1) -> dict[str, list[T]]:
        """Return what each contender returns in each round. They take turns, each round begins with the next one of them.

        Args:
            contenders: by name.
            warm_up: rounds that go first and are not counted.
        """
        names, found = list(contenders), {name: list[T]() for name in contenders}
        warm_up = min(warm_up, 1) if self.quick else warm_up
        for number in range(warm_up + self.rounds):
            at = number % len(names)
            for name in names[at:] + names[:at]:
                result = contenders[name]()
                if number >= warm_up:
                    found[name].append(result)
        return found

    def turns(self, contenders: dict[str, Callable[[], object]], calls: float = 1, warm_up: int = 1) -> Figures:
        """Return the figures of contenders that take turns, as in `results`.

        Args:
            contenders: by name. The figure of a contender is the float that it returns, otherwise the seconds that it takes.
            calls: what its seconds are divided by.
            warm_up: rounds that go first and are not counted.
        """

        def figure(contender: Callable[[], object]) -> float:
            began = time.perf_counter()
            found = contender()
            return found if isinstance(found, float) else (time.perf_counter() - began) / calls

        return Figures(self.results({name: lambda call=call: figure(call) for name, call in contenders.items()}, warm_up))

    def table(self, *titles: str) -> Table:
        """Begin a table."""
        return Table(*titles)

    def claim(self, text: str, figure: Any, *, most: float | None = None, least: float | None = None) -> None:
        """Print whether a claim holds on this machine.

        Args:
            text: what is claimed.
            figure: what was found. Without a bound: whether it holds.
            most: the largest figure with which it holds.
            least: the smallest one.
        """
        holds, shown = bool(figure), ""
        if most is not None:
            holds, shown = figure <= most, f": {cell(figure)} (at most {cell(most)})"
        if least is not None:
            holds, shown = figure >= least, f": {cell(figure)} (at least {cell(least)})"
        print(f"\n{HOLDS if holds else FAILS}: {text}{shown}", flush=True)
        self.failed |= not holds


HOLDS, FAILS, NOT_HERE, BROKEN = "holds", "does not hold", "not on this machine", "failed"
RESULT = re.compile(rf"^({HOLDS}|{FAILS}|{NOT_HERE}|{BROKEN}): (.*)$")
"""A line that says what became of a claim."""


def machine() -> str:
    """Return a line that describes this machine and the versions in use."""
    import numpy as np
    import psutil
    import torch

    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = model[1] if model else platform.machine()
    memory_gib = psutil.virtual_memory().total / 1024**3
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    return f"{os.cpu_count()} cores ({processor}), {memory_gib:.0f} GiB, Linux {platform.release()}; {versions}"
