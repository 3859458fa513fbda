"""StreamLoader beside the article's streaming loader and the bulk parsers: rows/s, and memory.

    python -m benchmark stream speed [--rows 2000000] [--rounds 5]   # batches/s of 7 columns of text
    python -m benchmark stream memory [--megabytes 100 2000]         # PSS while a file is read, by its size
    python -m benchmark stream engines [--rows 2000000]              # parsers, by the number of threads

All deliver, or could deliver, batches of 1000 rows (float32 of 6 columns, int64 labels) from buffers of 50,000 rows. Each
measurement is a process of its own; contenders take turns, and figures are medians. Epoch 1 begins with the file's pages
dropped from the page cache and with everything imported; later epochs find the pages there. pandas, polars and pyarrow are
timed twice: parsing alone, which drops the frames, and with the tensors and batches that training needs.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.support.measuring import pss, settle
from stocache import StreamLoader
from stocache.tools.bench import drop_pages

CLAIM = "Text becomes batches 4 times as fast as in the article's loader, 20 times when cached, in flat memory."
NEEDS = (("pyarrow", '-e ".[text]"'), ("pandas", "pandas"), ("polars", "polars"))

BATCH, BUFFER, COLUMNS = 1000, 50_000, 7
NAMES = [str(number) for number in range(COLUMNS)]


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


def article(path: str) -> Iterator[Any]:
    """The article's way: one line after the other into a list, which becomes a matrix and tensors when the buffer is full."""
    with open(path) as file:
        while lines := list(itertools.islice(file, BUFFER)):
            yield from batches_of(np.array([np.fromstring(line.strip(), sep="\t") for line in lines]))


def loadtxt(path: str) -> Iterator[Any]:
    """numpy, a buffer at a time."""
    with open(path) as file:
        while lines := list(itertools.islice(file, BUFFER)):
            yield from batches_of(np.loadtxt(lines, delimiter="\t"))


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


def in_batches(parse: Callable[[str], Iterator[Any]]) -> Callable[[str], Iterator[Any]]:
    """Return a parser whose frames become batches of tensors."""

    def deliver(path: str) -> Iterator[Any]:
        for frame in parse(path):
            if hasattr(frame, "to_numpy"):
                table = frame.to_numpy()
            else:
                table = np.stack([column.to_numpy() for column in frame.columns], axis=1)
            yield from batches_of(table)

    return deliver


def ours(**options: Any) -> Callable[[str], Any]:
    """Return a maker of a StreamLoader."""
    return lambda path: StreamLoader(path, BATCH, BUFFER, drop_last=False, **options)


CONTENDERS: dict[str, Callable[[str], Any]] = {
    "the article's loader": article,
    "numpy.loadtxt, by the buffer": loadtxt,
    "pandas chunks, parsing alone": pandas,
    "polars collect_batches, parsing alone": polars,
    "pyarrow open_csv, parsing alone": pyarrow,
    "pandas chunks": in_batches(pandas),
    "polars collect_batches": in_batches(polars),
    "pyarrow open_csv": in_batches(pyarrow),
    "StreamLoader": ours(),
    "StreamLoader, shuffle=True": ours(shuffle=True),
    'StreamLoader, shuffle="buffers"': ours(shuffle="buffers"),
    "StreamLoader, all cached": ours(size_limit_gib=4),
    "StreamLoader, all cached, shuffle=True": ours(size_limit_gib=4, shuffle=True),
    "StreamLoader, half cached": ours(size_limit_gib="32MB"),  # of 64: 32 bytes a row
}
PARSING_ALONE = [name for name in CONTENDERS if "alone" in name]


def epoch(batches: Any) -> tuple[int, float]:
    """Return the rows of an epoch, and its seconds."""
    began, rows = time.perf_counter(), 0
    for batch in batches:
        rows += len(batch[0]) if isinstance(batch, tuple) else batch.num_rows if hasattr(batch, "num_rows") else len(batch)
    return rows, time.perf_counter() - began


def measure(name: str, path: str, epochs: int) -> dict[str, Any]:
    """Return rows/s of each epoch."""
    make = CONTENDERS[name]
    warm_up(make, path)
    settle(1 << 29)
    drop_pages([Path(path)])
    loader = make(path) if name.startswith("StreamLoader") else None
    speeds = []
    for _ in range(epochs):
        rows, seconds = epoch(make(path) if loader is None else loader)
        speeds.append(rows / seconds)
    if loader is not None:
        loader.close()
    return {"rows": rows, "speeds": speeds}


def warm_up(make: Callable[[str], Any], path: str) -> None:
    """Import everything, and start the threads that libraries keep."""
    with tempfile.NamedTemporaryFile("wb") as little:
        with open(path, "rb") as file:
            little.writelines(itertools.islice(file, 2 * BUFFER))
        little.flush()
        batches = make(little.name)
        epoch(batches)
        if isinstance(batches, StreamLoader):
            batches.close()


def alone(*arguments: str) -> Any:
    """Run a part of this in a process of its own, and return its result."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmark.stream", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------- speed


def speed(rows: int, rounds: int, folder: Path) -> None:
    """Print rows/s of each contender, and how it compares."""
    path = folder / "employees.tsv"
    write_rows(path, rows)
    found: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS:
            epochs = 3 if name.startswith("StreamLoader") else 2
            result = alone("one", name, str(path), "--epochs", str(epochs))
            assert result["rows"] == rows, (name, result)
            found[name].append(result["speeds"])
    first = {name: statistics.median(speeds[0] for speeds in runs) for name, runs in found.items()}
    later = {name: statistics.median(speeds[-1] for speeds in runs) for name, runs in found.items()}
    names = {"epoch 1": first, "last epoch": later}
    for when, medians in names.items():
        best = max(PARSING_ALONE, key=lambda name: medians[name])
        print(f"{when}: the best bulk parser is {best}")
    print(f"\n{rows} rows of {COLUMNS} columns, {path.stat().st_size / 1e6:.0f} MB; medians of {rounds}\n")
    print("| | epoch 1, M rows/s | of the article's | of the best bulk parser | later epoch | of the article's | of the best |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in CONTENDERS:
        cells = []
        for medians in names.values():
            best = max(medians[parser] for parser in PARSING_ALONE)
            cells += [f"{medians[name] / 1e6:.2f}", f"{medians[name] / medians['the article' + chr(39) + 's loader']:.1f}"]
            cells += [f"{medians[name] / best:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


# ---------------------------------------------------------------------------------------------------- memory


def footprint(name: str, path: str) -> dict[str, Any]:
    """Return how much PSS grows at most while a file is read."""
    make = CONTENDERS[name]
    warm_up(make, path)
    before, peak, over = pss(os.getpid()), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, pss(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    batches = make(path)
    rows, seconds = epoch(batches)
    over.set()
    watcher.join()
    if isinstance(batches, StreamLoader):
        batches.close()
    return {"grows": peak - before, "rows": rows, "seconds": seconds}


def memory(megabytes: list[int], folder: Path) -> None:
    """Print how much memory each contender takes for files of several sizes."""
    paths = []
    for size in megabytes:
        path = folder / f"{size}.tsv"
        write_rows(path, size * 1_000_000 // 22)
        paths.append(path)
    names = ["the article's loader", "pandas chunks", "polars collect_batches", "pyarrow open_csv", "StreamLoader"]
    names += ["StreamLoader, shuffle=True", "StreamLoader, half cached"]
    print("| PSS grows by at most, MB | " + " | ".join(f"file of {size} MB" for size in megabytes) + " |")
    print("| --- | " + " | ".join("---:" for _ in megabytes) + " |")
    for name in names:
        grown = [alone("footprint", name, str(path))["grows"] / 1e6 for path in paths]
        print(f"| {name} | {' | '.join(f'{grows:.0f}' for grows in grown)} |", flush=True)


# ---------------------------------------------------------------------------------------------------- engines


def engines(rows: int, rounds: int, folder: Path) -> None:
    """Print rows/s of parsers, given buffers of text, by the number of threads."""
    import io

    import pandas
    import polars

    from stocache.text.parsers import Delimited, Target

    path = folder / "employees.tsv"
    write_rows(path, rows)
    target = Target(tuple(range(6)), (6,), True, np.dtype("f4"), np.dtype("i8"), False)
    with path.open("rb") as file:
        texts = [b"".join(lines) for lines in iter(lambda: list(itertools.islice(file, BUFFER)), [])]

    def split(table: np.ndarray[Any, Any]) -> Any:
        return table[:, :6].astype(np.float32), table[:, 6].astype(np.int64)

    bulk = Delimited(target, COLUMNS, delimiter="\t").bulk
    parsers: dict[str, Callable[[bytes], Any]] = {
        "pyarrow": lambda text: bulk(text, BUFFER),
        "pandas": lambda text: split(
            pandas.read_csv(io.BytesIO(text), sep="\t", header=None, dtype=np.float64, float_precision="round_trip").to_numpy()
        ),
        "polars": lambda text: split(
            polars.read_csv(text, separator="\t", has_header=False, schema=dict.fromkeys(NAMES, polars.Float64)).to_numpy()
        ),
        "numpy.loadtxt": lambda text: split(np.loadtxt(text.decode().splitlines(), delimiter="\t", ndmin=2)),
    }
    threads = (1, 2, 4)
    found: dict[tuple[str, int], list[float]] = {(name, count): [] for name in parsers for count in threads}
    for _ in range(rounds):
        for (name, count), speeds in found.items():
            with ThreadPoolExecutor(count) as executor:
                began = time.perf_counter()
                parsed = sum(len(y) for _, y in executor.map(parsers[name], texts))
                speeds.append(parsed / (time.perf_counter() - began))
    print("| M rows/s, to float32 and int64 | " + " | ".join(f"{count} threads" for count in threads) + " |")
    print("| --- | " + " | ".join("---:" for _ in threads) + " |")
    for name in parsers:
        print(f"| {name} | {' | '.join(f'{statistics.median(found[name, count]) / 1e6:.1f}' for count in threads)} |")


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory", "engines", "one", "footprint"])
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 2000])
    parser.add_argument("--workdir", type=Path, default=None, help="where the files are written; by default a temporary folder")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(measure(given.name, given.path, given.epochs)))
    elif given.what == "footprint":
        print(json.dumps(footprint(given.name, given.path)))
    else:
        with tempfile.TemporaryDirectory(dir=given.workdir) as folder:
            if given.what == "speed":
                speed(given.rows, given.rounds, Path(folder))
            elif given.what == "memory":
                memory(given.megabytes, Path(folder))
            else:
                engines(given.rows, given.rounds, Path(folder))


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", str(len(os.sched_getaffinity(0))))
    main()
