"""StreamLoader beside the article's streaming loader and the bulk parsers: rows/s, and memory.

All deliver, or could deliver, batches of 1000 rows (float32 of 6 columns, int64 labels) from buffers of 50,000 rows. Each
measurement is an interpreter of its own. Epoch 1 begins with the file's pages dropped from the page cache and with everything
imported; later epochs find the pages there. pandas, polars and pyarrow are timed twice: parsing alone, which drops the frames,
and with the tensors and batches that training needs.
"""

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.support.harness import Figures, Run, experiment
from benchmark.support.measuring import pss, settle
from benchmark.support.processes import in_interpreter
from stocache import StreamLoader
from stocache.tools.bench import drop_pages

CLAIM = "Text becomes batches 4 times as fast as in the article's loader, 20 times when cached, in flat memory."

BATCH, BUFFER = 1000, 50_000
NAMES = [str(number) for number in range(7)]
ENVIRONMENT = os.environ | {"PYTHONWARNINGS": "ignore", "POLARS_MAX_THREADS": str(len(os.sched_getaffinity(0)))}


def write_rows(path: Path, rows: int) -> None:
    """Write employees as in the article: sex, age, one of three cities, income, job."""
    rng = np.random.default_rng(0)
    cities = np.eye(3, dtype=int)
    with path.open("w") as file:
        for start in range(0, rows, 100_000):
            count = min(100_000, rows - start)
            sex, age, city = rng.integers(0, 2, count) * 2 - 1, rng.integers(18, 70, count), rng.integers(0, 3, count)
            income, job = rng.random(count), rng.integers(0, 3, count)
            file.writelines(
                f"{s}\t{a / 100:.2f}\t{c[0]}\t{c[1]}\t{c[2]}\t{i:.4f}\t{j}\n"
                for s, a, c, i, j in zip(sex, age, cities[city].tolist(), income, job, strict=True)
            )
        file.flush()
        os.fsync(file.fileno())  # only then can its pages be dropped


# ---------------------------------------------------------------------------------------------------- contenders


def batches_of(table: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Yield a table's batches as tensors."""
    x, y = torch.tensor(table[:, :6], dtype=torch.float32), torch.tensor(table[:, 6], dtype=torch.int64)
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def by_buffer(path: str, parse: Callable[[list[str]], Any]) -> Iterator[Any]:
    """Yield the batches of a file, a buffer of lines at a time."""
    with open(path) as file:
        while lines := list(itertools.islice(file, BUFFER)):
            yield from batches_of(parse(lines))


def article(lines: list[str]) -> Any:
    """Parse as in the article: one line after the other into a list, which becomes a matrix."""
    return np.array([np.fromstring(line.strip(), sep="\t") for line in lines])


def pandas(path: str) -> Iterator[Any]:
    """Yield pandas' chunks."""
    import pandas

    with pandas.read_csv(path, sep="\t", header=None, dtype=np.float64, chunksize=BUFFER) as chunks:
        yield from chunks


def polars(path: str) -> Iterator[Any]:
    """Yield polars' batches of its streaming engine."""
    import polars

    schema = dict.fromkeys(NAMES, polars.Float64)
    return polars.scan_csv(path, separator="\t", has_header=False, schema=schema).collect_batches(chunk_size=BUFFER)


def pyarrow(path: str) -> Iterator[Any]:
    """Yield pyarrow's record batches of as many bytes as a buffer has here."""
    import pyarrow
    import pyarrow.csv

    return pyarrow.csv.open_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=NAMES, block_size=23 * BUFFER),
        pyarrow.csv.ParseOptions(delimiter="\t"),
        pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(NAMES, pyarrow.float64())),
    )


def in_batches(parse: Callable[[str], Iterator[Any]], path: str) -> Iterator[Any]:
    """Yield a parser's frames as batches of tensors."""
    for frame in parse(path):
        columns = None if hasattr(frame, "to_numpy") else [column.to_numpy() for column in frame.columns]
        yield from batches_of(frame.to_numpy() if columns is None else np.stack(columns, axis=1))


def ours(path: str, **options: Any) -> Any:
    """Return a StreamLoader."""
    return StreamLoader(path, BATCH, BUFFER, drop_last=False, **options)


ARTICLE, PARSERS = "the article's loader", {"pandas": pandas, "polars": polars, "pyarrow": pyarrow}
CONTENDERS: dict[str, Callable[[str], Any]] = {
    ARTICLE: partial(by_buffer, parse=article),
    "numpy.loadtxt, by the buffer": partial(by_buffer, parse=partial(np.loadtxt, delimiter="\t")),
    **{f"{name}, parsing alone": parse for name, parse in PARSERS.items()},
    **{name: partial(in_batches, parse) for name, parse in PARSERS.items()},
    "StreamLoader": ours,
    "StreamLoader, shuffle=True": partial(ours, shuffle=True),
    'StreamLoader, shuffle="buffers"': partial(ours, shuffle="buffers"),
    "StreamLoader, all cached": partial(ours, size_limit_gib=4),
    "StreamLoader, all cached, shuffle=True": partial(ours, size_limit_gib=4, shuffle=True),
    "StreamLoader, half cached": partial(ours, size_limit_gib="32MB"),  # of 64: 32 bytes a row
}


def epoch(batches: Any) -> tuple[int, float]:
    """Return the rows of an epoch, and its seconds."""
    began, rows = time.perf_counter(), 0
    for batch in batches:
        rows += len(batch[0]) if isinstance(batch, tuple) else batch.num_rows if hasattr(batch, "num_rows") else len(batch)
    return rows, time.perf_counter() - began


def warm_up(name: str, path: str) -> None:
    """Import everything, and start the threads that libraries keep."""
    with tempfile.NamedTemporaryFile("wb") as little:
        with open(path, "rb") as file:
            little.writelines(itertools.islice(file, 2 * BUFFER))
        little.flush()
        batches = CONTENDERS[name](little.name)
        epoch(batches)
        if isinstance(batches, StreamLoader):
            batches.close()


def speeds(name: str, path: str, rows: int) -> list[float]:
    """Return rows/s of the first and of the third epoch."""
    warm_up(name, path)
    settle(1 << 29)
    drop_pages([Path(path)])
    loader, found = CONTENDERS[name](path), []
    for number in range(3):
        if number and not isinstance(loader, StreamLoader):
            loader = CONTENDERS[name](path)
        count, seconds = epoch(loader)
        assert count == rows, (name, count)
        found.append(count / seconds)
    return found


@experiment(rounds=5, needs="pyarrow pandas polars")
def speed(run: Run) -> None:
    """Rows per second of each contender."""
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder, "employees.tsv"), run.size(2_000_000, 100_000)
        write_rows(path, rows)
        measure = partial(in_interpreter, speeds, env=ENVIRONMENT)
        quick = [ARTICLE, "polars, parsing alone", "StreamLoader", "StreamLoader, all cached"]
        chosen = run.chosen(dict.fromkeys(run.size(list(CONTENDERS), quick)))
        found = run.results({name: lambda name=name: measure(name, str(path), rows) for name in chosen}, warm_up=0)
    first, _, later = Figures.columns(found)
    table = run.table("contender", "epoch", "M rows/s", "of the article's", "of the best parser")
    for when, rates in (("first", first), ("later", later)):
        best = max((name for name in found if name.endswith("alone")), key=rates.median)
        for name in found:
            table.row(name, when, rates.median(name) / 1e6, rates.ratio(name, ARTICLE), rates.ratio(name, best))
    (of_article,) = table.column("of the article's", contender="StreamLoader", epoch="first")
    (cached,) = table.column("of the article's", contender="StreamLoader, all cached", epoch="later")
    (of_best,) = table.column("of the best parser", contender="StreamLoader", epoch="first")
    run.claim("the first pass is 4 times as fast as the article's loader", of_article, least=4)
    run.claim("cached text 20 times", cached, least=20)
    run.claim("the first pass is 0.9 of the best bulk parser", of_best, least=0.9)


def footprint(name: str, path: str) -> int:
    """Return how many bytes PSS grows at most while a file is read."""
    warm_up(name, path)
    before, most, over = pss(os.getpid()), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, pss(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    epoch(CONTENDERS[name](path))
    over.set()
    watcher.join()
    return most - before


@experiment(needs="pyarrow pandas polars")
def memory(run: Run) -> None:
    """How many MB the PSS of all processes grows, by the size of a file."""
    sizes = run.size((100, 2000), (10, 40))
    names = ["StreamLoader", ARTICLE, *PARSERS, "StreamLoader, shuffle=True", "StreamLoader, half cached"]
    table = run.table("", *(f"file of {size} MB" for size in sizes))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{size}.tsv") for size in sizes]
        for path, size in zip(paths, sizes, strict=True):
            write_rows(path, size * 1_000_000 // 22)
        for name in names[: run.size(None, 2)]:
            grown = [in_interpreter(footprint, name, str(path), env=ENVIRONMENT) / 1e6 for path in paths]
            table.row(name, *grown)
    _, small, large = table.rows[0].values()
    run.claim("the MB that memory grows with the file", large - small, most=16)
