"""Programs that use a DataLoader in unusual ways, with torch's loader and with ours, each in a child process."""

import collections
import copy
import functools
import inspect
import io
import itertools
import pickle
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

import stocache
from benchmark.support.faults import DIES, STALLS, in_child
from benchmark.support.harness import Run, experiment

CLAIM = "Programs get the batches of torch's DataLoader from ours, whatever their datasets hold and samples are."
TORCH, OURS, WORKERS = torch_data.DataLoader, stocache.DataLoader, {"num_workers": 2}
COLUMNS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{"reference": (TORCH, {}), "torch": (TORCH, WORKERS), "0 workers": (OURS, {}), "processes": (OURS, WORKERS)},
    **{name: (OURS, WORKERS | {"worker_method": method}) for name, method in (("threads", "thread"), ("auto", "auto"))},
}


class Samples:
    """Samples that a function makes of an index and of an object."""

    def __init__(self, make: Any, held: Any = None) -> None:
        self.make, self.held = make, held

    def __len__(self) -> int:
        return 16

    def __getitem__(self, idx: Any) -> Any:
        return self.make(idx, self.held)


NUMBERS = Samples(lambda idx, _: idx)


class Scratch:
    """An object that one thread at a time may use."""

    def use(self, idx: int) -> int:
        """Return the index."""
        self.idx = idx
        time.sleep(0.002)
        return self.idx


Closes = type("Closes", (Samples,), {"__del__": lambda self: self.held.close()})
Slot, Str, Tuple = type("Slot", (), {"__slots__": ("held",)}), type("Str", (str,), {}), type("Tuple", (tuple,), {})


def _plain(value: Any) -> str:
    """Describe a value wholly, with the types of its parts."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(_plain(key), _plain(each)) for key, each in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_plain(each) for each in value]}"
    if hasattr(value, "getexif"):
        return f"{type(value).__name__}{value.tobytes()!r}{sorted((str(key), str(each)) for key, each in value.info.items())}"
    return f"{type(value).__name__}{value!r}{vars(value) if isinstance(value, str) and hasattr(value, '__dict__') else ''}"


def _run(loader: Any, epochs: int = 2) -> str:
    return _plain([list(loader) for _ in range(epochs)])


def _holds(make: Callable[[], Any], read: Any = lambda idx, held: held(idx), kind: Any = Samples) -> Any:
    return lambda load: _run(load(kind(read, make()), 4))


def _in_slot() -> Any:
    slot = Slot()
    slot.held = Scratch()
    return lambda idx: slot.held.use(idx)


def _bare_except(load: Any) -> str:
    def make(idx: int, _: Any) -> int:
        try:
            time.sleep(0.05)
        except:  # noqa: E722
            return -1
        return idx

    return _plain(next(iter(load(Samples(make), 4))))


def _swapped(load: Any) -> str:
    torch_data.DataLoader = torch_data.dataloader.DataLoader = load.func
    loader = load(NUMBERS, 4)
    return _run(loader) + str(isinstance(loader, torch_data.DataLoader))


def _polars(load: Any) -> str:
    pl = import_module("polars")
    frame = pl.DataFrame({"x": range(100_000)})
    frame.group_by(pl.col("x") % 7).agg(pl.col("x").sum())
    return _run(load(Samples(lambda idx, frame: frame.select(pl.col("x").sort_by("x").sum()).item() + idx, frame), 4), 1)


def _with_length(length: Callable[[Any], int]) -> Any:
    return lambda load: _run(load(NUMBERS, 4, sampler=type("Order", (list,), {"__len__": length})(range(16))))


def _rebuilt(load: Any) -> str:
    loader = load(NUMBERS, 4)
    names = {*inspect.signature(type(loader)).parameters} - {"shuffle", "sampler", "drop_last", "batch_sampler"}
    return _run(type(loader)(**{name: value for name, value in vars(loader).items() if name in names}))


def _copied(load: Any, how: Callable[[Any], Any]) -> str:
    loader = load(list(range(16)), 4)
    iterator = iter(loader)
    return _plain([next(iterator), list(how(loader)), list(iterator)])


def _image(idx: int, kind: str) -> Any:
    module, file = import_module("PIL.Image"), io.BytesIO()
    text = import_module("PIL.PngImagePlugin").PngInfo()
    text.add_itxt("Title", f"é{idx}", "fr", "Titre")
    module.new("L", (4, 4), idx).save(file, kind, **({"pnginfo": text} if kind == "png" else {"dpi": (72.5, 300)}))
    return module.open(file)


def _subclasses(idx: int) -> Any:
    text = Str(f"text {idx}")
    text.note = idx
    return text, Tuple((idx, "a"))


def _cached(make: Callable[[int], Any]) -> Any:
    def program(load: Any) -> str:
        dataset: Any = Samples(lambda idx, _: make(idx))
        return _run(
            load(stocache.CachedDataset(dataset, 0.01) if load.func is stocache.DataLoader else dataset, 4, collate_fn=list)
        )

    return program


PROGRAMS: dict[str, Callable[[Any], str]] = {
    "shared object: namedtuple": _holds(lambda: collections.namedtuple("Pair", "held")(Scratch()).held.use),
    "shared object: partial": _holds(lambda: functools.partial(Scratch.use, Scratch())),
    "shared object: closure": _holds(lambda: (lambda held: lambda idx: held.use(idx))(Scratch())),
    "shared object: deque": _holds(lambda: collections.deque([Scratch()]), lambda idx, held: held[0].use(idx)),
    "shared object: slot": _holds(_in_slot),
    "open file": _holds(
        functools.partial(open, __file__, "rb"), lambda idx, file: (file.seek(idx), time.sleep(0.002), file.read(1))[2]
    ),
    "open sqlite": _holds(lambda: sqlite3.connect(":memory:"), lambda idx, base: base.execute("select ?", (idx,)).fetchone()),
    "open lmdb": _holds(lambda: import_module("lmdb").open(mkdtemp()), lambda idx, base: base.begin().stat()["entries"] + idx),
    "open h5py": _holds(
        lambda: import_module("h5py").File(f"{mkdtemp()}/x", "w").create_dataset("x", data=range(16)), lambda idx, x: x[idx]
    ),
    "generator": _holds(lambda: (number for number in itertools.count()), lambda idx, numbers: idx + 0 * next(numbers)),
    "dataset with __del__": _holds(lambda: io.BytesIO(b"abc"), lambda idx, held: len(held.getvalue()) + idx, Closes),
    "torch.set_default_device": lambda load: (
        torch.set_default_device("meta") or _run(load(Samples(lambda idx, _: torch.full((2,), idx, device="cpu")), 4))
    ),
    "bare except, left early": _bare_except,
    "loader swapped in torch": _swapped,
    "polars before the fork": _polars,
    "made and consumed in two threads": lambda load: _plain(ThreadPoolExecutor().submit(list, iter(load(NUMBERS, 4))).result()),
    "__len__ of the sampler: too long": _with_length(lambda order: 99),
    "__len__ of the sampler: too short": _with_length(lambda order: 3),
    "__len__ of the sampler: raises": _with_length(lambda order: 1 // 0),
    "indices: tuple": lambda load: _run(load(Samples(lambda idx, _: repr(idx)), 2, sampler=[(1, 2), (3, 4)])),
    "indices: str": lambda load: _run(load(Samples(lambda idx, _: repr(idx)), 2, sampler=["a", "b"])),
    "collate_fn draws": lambda load: _run(
        load(NUMBERS, 4, generator=torch.Generator().manual_seed(1), collate_fn=lambda batch: torch.rand(len(batch)).tolist())
    ),
    "collate_fn counts": lambda load: _run(
        load(NUMBERS, 16, collate_fn=functools.partial(lambda count, batch: (next(count), batch), itertools.count())), 1
    ),
    "rebuilt from its __dict__": _rebuilt,
    "pickled in use": lambda load: _copied(load, lambda loader: pickle.loads(pickle.dumps(loader))),
    "deep-copied in use": lambda load: _copied(load, copy.deepcopy),
    "PNG with iTXt": _cached(lambda idx: _image(idx, "png")),
    "TIFF with resolution": _cached(lambda idx: _image(idx, "tiff")),
    "masked array": _cached(lambda idx: np.ma.masked_equal(np.arange(4), idx % 4)),
    "TensorDict": _cached(lambda idx: import_module("tensordict").TensorDict({"x": torch.full((2,), idx)}, [2])),
    "scipy CSR": _cached(lambda idx: import_module("scipy.sparse").csr_matrix(np.eye(3) * idx)),
    "pandas row": _cached(lambda idx: import_module("pandas").DataFrame({"x": range(16), "y": "a"}).iloc[idx]),
    "subclasses of str and tuple": _cached(_subclasses),
    "BatchEncoding": _cached(lambda idx: import_module("transformers").BatchEncoding({"input_ids": [idx, 1, 2]})),
}


def attempt(name: str, column: str) -> Iterator[str]:
    """Yield what a program returns or raises."""
    kind, options = COLUMNS[column]
    try:
        yield PROGRAMS[name](functools.partial(kind, **options))
    except Exception as error:
        yield f"raises {type(error).__name__}"


@experiment()
def programs(run: Run) -> None:
    """Compare the batches of two epochs with the batches of torch's loader without workers."""
    table, equal = run.table("program", *list(COLUMNS)[1:]), list[bool]()
    for name in list(run.chosen(PROGRAMS))[:: run.size(1, 7)]:
        reference, *others = (list(in_child(attempt, name, column))[-1] for column in COLUMNS)
        if reference == "raises ModuleNotFoundError":
            table.row(name, *("not installed" for _ in others))
            continue
        words = {said: said for said in others if said.startswith("raises") or said in (DIES, STALLS)}
        words |= {others[0]: "as torch", reference: "equal"} if others[0] not in words else {reference: "equal"}
        row = [words.get(said, "differs") for said in others]
        table.row(name, *row)
        equal.append({"equal", "as torch"} >= {*row})
    run.claim("the share of programs that get torch's batches", sum(equal) / len(equal), least=0.94)
