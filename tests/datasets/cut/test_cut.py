"""The program of a dataset is cut where it first draws: what comes before is cached, the rest runs each time."""

import ast
import importlib
import linecache
import logging
import random
import sys
import time
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.random import thread_safe_generator
from torch.utils.data import Dataset

from stocache import CachedDataset, LimitError
from stocache.datasets.cut import surveying
from stocache.datasets.cut.division import Division, halves_of
from stocache.datasets.cut.source import source_of
from tests.support.epochs import difference_of, epochs
from tests.support.makers import codec

N = 12


class Numbers(Dataset):
    """Reads an array for each index, and counts that."""

    def __init__(self, **attributes):
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()
        vars(self).update(attributes)

    def __len__(self):
        return N

    def read(self, idx):
        self.reads += 1
        return np.arange(400.0).reshape(20, 20) + idx


def check(make, cut=True):
    """Demand that samples are those without a cache; and that they are read once if the program is cut, else each time."""
    with CachedDataset(make(), 0.1) as cached:
        read = int(cached.dataset.reads)
        assert difference_of(epochs(make(), "torch"), epochs(cached, "torch")) is None
        reads = int(cached.dataset.reads) - read
        assert reads < 2 * N or not cut, reads
        assert cached.is_left != cut
        return cached.stats().cut


class Flipped(Numbers):
    def __getitem__(self, idx):
        image = self.read(idx)
        if random.random() < 0.5:
            image = image[:, ::-1].copy()
        return torch.from_numpy(image), idx


class Returned(Numbers):
    def __getitem__(self, idx):
        return self.read(idx) * random.random(), idx


class Hoisted(Numbers):
    def __getitem__(self, idx):
        left = random.randint(0, 10)
        image = self.read(idx)
        return image[left : left + 4]


class Changed(Numbers):
    """Changes what a method got, before it is read again."""

    def __getitem__(self, idx):
        return self.masked(self.read(idx))

    def masked(self, image):
        rows = len(image)
        left = random.randint(0, 10)
        image[:, left] = 0
        mean = np.mean(image)
        return image - mean, rows


class Static(Numbers):
    @staticmethod
    def noisy(dataset, image, *more, by, **options):
        scale = np.mean(image) + more[1][0] + options["size"]
        return image + scale * random.random() * by, more

    def __getitem__(self, idx):
        return self.noisy(self, self.read(idx), idx, [idx], by=abs(-2), size=len(self))


class Named(Numbers):
    def __getitem__(self, idx):
        image = super(Named, self).read(idx)  # noqa: UP008 - as older programs are written
        return image * random.random() + Named.__private(self)

    def __private(self):
        return random.random()


class Noting(Numbers):
    """Notes in itself what it has drawn, as random transforms of MONAI do."""

    def __getitem__(self, idx):
        image = self.read(idx)
        self.number = random.random()
        return image * self.number


class Twice(Numbers):
    """Has two names of one list, and seldom changes it in place."""

    def __getitem__(self, idx):
        target = {"image": self.read(idx), "boxes": [idx, 1]}
        boxes = target["boxes"]
        if random.random() < 0.1:
            boxes[0] = -1
        return target


class Moded(Numbers):
    """Sets a mode, seldom a different one, before it reads."""

    def __getitem__(self, idx):
        self.mode.negative = random.random() < 0.1
        image = self.read_in(idx)
        return image

    def read_in(self, idx):
        return -self.read(idx) if self.mode.negative else self.read(idx)


def scaled(dataset, idx, by=lambda image: image * random.random()):
    image = dataset.read(idx)
    return by(image)


def decorated(function):
    def call(self, idx):
        return function(self, idx)

    return call


class Decorated(Numbers):
    __getitem__ = decorated(scaled)


@pytest.mark.parametrize("make", [Flipped, Returned, Hoisted, Changed, Static, Named, Noting, Twice, Decorated])
def test_what_comes_before_the_first_random_number_is_made_once(make):
    assert "cached: line" in check(make)


SOURCE = """import random
from read_numbers import Numbers

class Images(Numbers):
    def __getitem__(self, idx):
        image = self.read(idx)
        return image + random.random()
"""


def test_a_class_without_its_source_is_served_by_itself(tmp_path, monkeypatch, caplog):
    names = {"__name__": "made", "Numbers": Numbers}
    exec(SOURCE.replace("from read_numbers", "# from"), names)
    check(names["Images"], cut=False)
    assert "the source of Images.__getitem__ is not there" in caplog.text
    (tmp_path / "edited_since.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "read_numbers", sys.modules[__name__])
    module = importlib.import_module("edited_since")
    del sys.modules["edited_since"]
    (tmp_path / "edited_since.py").write_text(SOURCE.replace("image + random", "image - random"))
    check(module.Images, cut=False)
    assert "the source of Images.__getitem__ is not what was imported" in caplog.text


def test_a_class_of_a_notebook_is_cut(monkeypatch):
    source, names = SOURCE.replace("from", "# from"), {"__name__": "cell", "Numbers": Numbers}
    monkeypatch.setitem(linecache.cache, "cell", (len(source), None, source.splitlines(keepends=True), "cell"))
    for statement in ast.parse(source).body:  # IPython compiles each by itself
        exec(compile(ast.Module([statement], []), "cell", "exec"), names)
    assert "cached: line 6 of Images.__getitem__" in check(names["Images"])


class Failing(Numbers):
    def __getitem__(self, idx):
        image = self.read(idx)
        if idx == self.fails_before:
            raise ArithmeticError(f"no sample {idx}")
        factor = random.random()
        if idx == self.fails_after:
            raise LookupError(f"no factor of {idx}")
        return image * factor


def test_an_error_of_either_part_is_that_of_the_dataset():
    with CachedDataset(Failing(fails_before=4, fails_after=5), 0.1) as cached:
        for _ in range(2):
            for idx, error in ((4, ArithmeticError), (5, LookupError)):
                with pytest.raises(error, match=f"of {idx}|sample {idx}") as raised:
                    cached[idx]
                frame = traceback.extract_tb(raised.value.__traceback__)[-1]
                assert (frame.name, frame.filename) == ("__getitem__", __file__)
                assert frame.line.startswith("raise ")


class Step:
    def __call__(self, image, generator=None):
        if generator is None:
            generator = thread_safe_generator()
        image = image.sqrt()
        return image * torch.rand(1, generator=generator)


def test_what_reads_a_mode_is_not_moved_before_the_mode_is_drawn():
    check(lambda: Moded(mode=SimpleNamespace(negative=False)), cut=False)


class OfWorker(Numbers):
    """Draws from the generator of its worker, which a worker thread has, and a process has not."""

    step = Step()

    def read(self, idx):
        time.sleep(0.001)  # or a cut may save too little of a sample
        return np.arange(400.0) + idx

    def __getitem__(self, idx):
        generator = thread_safe_generator()
        info = torch.utils.data.get_worker_info()
        number = info.num_workers if info is not None else -1
        image = torch.from_numpy(self.read(idx)) * torch.rand(1, generator=thread_safe_generator())
        return self.step(image, generator) + self.step(image), idx, number


class Chosen(OfWorker):
    def __getitem__(self, idx):
        image = torch.from_numpy(self.read(idx))
        return self.step(image), idx


@pytest.mark.parametrize("loader", ["torch", "ours, 2 workers", "ours, threads"])
@pytest.mark.parametrize("make", [OfWorker, Chosen])
def test_what_belongs_to_a_worker_is_taken_from_the_worker_that_finishes_the_sample(make, loader, caplog):
    with CachedDataset(make(), 0.1) as cached:
        assert difference_of(epochs(make(), loader), epochs(cached, loader)) is None
        assert not cached.is_left
        assert cached.cache.stats().filled == N
    assert "stays uncached" not in caplog.text


class Quick(Numbers):
    def __getitem__(self, idx):
        generator = np.random.default_rng(idx)  # a cache cannot hold it, but may hold what comes later
        value = generator.random()
        return value + random.random()


def test_the_latest_place_says_why_nothing_is_cached(monkeypatch, caplog):
    monkeypatch.setattr(surveying, "seconds_of_hit", lambda state: 1.0)
    assert CachedDataset(Quick(), 0.1).is_left
    assert "what comes before that takes hardly longer than a read of the cache" in caplog.text


class Rare(Numbers):
    """Some samples, which are not probed, are larger, or draw before the cut."""

    def __getitem__(self, idx):
        image = np.tile(self.read(idx), (1 + (idx in self.large), 1)) + (random.random() if idx in self.drawn else 0)
        return image * random.random()


@pytest.mark.parametrize("which", [{"large": [4]}, {"drawn": [4]}, {"drawn": [1, 4, 7, 10]}], ids=repr)
def test_a_part_that_does_not_fit_its_slot_or_draws_is_not_cached(which, caplog):
    which = {"large": [], "drawn": []} | which
    with CachedDataset(Rare(**which), 0.1) as cached:
        assert difference_of(epochs(Rare(**which), "torch"), epochs(cached, "torch")) is None
        total = cached.stats().total
        assert total.rejected >= min(3, len(which["drawn"]))
        assert total.filled == N - 1 or not which["large"]
    assert not which["drawn"] or "random numbers are drawn to load sample" in caplog.text


OPTIONS = {
    "views, shared tables": {"copy": False, "share": True}, "narrow": {"narrow": True}, "half": {"size_limit_gib": "20KB"},
    "any size, codec, cost": {"codec": "zstd", "admission": "cost"}, "name": {"name": "cut", "fingerprint": "v1"},
    "disk": {"size_limit_gib": "20KB", "disk": "disk", "disk_limit": "1MB", "fingerprint": "v1"},
}  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_is_cut_whatever_is_cached_where(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "codec" in OPTIONS[name]:
        codec(OPTIONS[name]["codec"])
    expected = epochs(Flipped(), "torch")
    for _ in range(2 if "fingerprint" in OPTIONS[name] else 1):  # a later run finds the cache
        with CachedDataset(Flipped(), **{"size_limit_gib": 0.1} | OPTIONS[name]) as cached:
            assert cached.stats().cut
            assert difference_of(expected, epochs(cached, "torch")) is None


def test_the_user_sees_the_two_parts(caplog):
    caplog.set_level(logging.INFO)
    first = Flipped.__getitem__.__code__.co_firstlineno
    cut = f"cached: line {first + 1} of Flipped.__getitem__; run each time: lines {first + 2} to {first + 4} of"
    assert cut in check(Flipped)
    assert cut in caplog.text
    with CachedDataset(Flipped(), 0.1, split=False) as cached:
        assert cached.stats().cut == ""
        assert cached.is_left
    with CachedDataset(Hoisted(), 0.1, split="straight") as cached:
        assert cached.is_left
    with pytest.raises(LimitError, match="split='curved' is unknown"):
        CachedDataset(Hoisted(), 0.1, split="curved")


def divided(function, *arguments):
    """Return the result of a function, in one piece and in two, for each statement at the top level before which it is cut."""
    source = source_of(function)
    for statement in source.tree.body[1:]:
        halves = halves_of(source, Division(source.identity, at=statement.number))
        state = halves.first(*arguments)
        yield state["return"] if "return" in state else halves.second(*arguments, stocache_state=state)


def busy(rows, scale=2, *more, offset=1, **options):
    """Have many kinds of statements."""
    import math

    def shifted(value):
        return value + offset

    total = sum(shifted(row) for row in rows) if rows else math.inf
    pairs = [(row, shifted(row)) for row in rows]
    first, *others = pairs
    total += first[0] if total > 3 else -1
    with np.errstate(all="ignore"):
        ratio = np.divide(total, scale)
    for left, right in others:
        if left == right:
            continue
        ratio -= left
    try:
        more[0] / 0
    except (IndexError, ZeroDivisionError) as error:
        kind = type(error).__name__
    values = [ratio := ratio - 5 for _ in rows]
    text: str = f"{kind} {ratio:.2f} {math.floor(total)}"
    return {"text": text, "pairs": pairs, "values": values, **options}[options.get("key", "text")]


@pytest.mark.parametrize("arguments", [([1, 2, 3],), ([4], 3, 7), ([5, 6],)])
def test_a_function_that_is_divided_anywhere_returns_the_same(arguments):
    assert all(result == busy(*arguments) for result in divided(busy, *arguments))
