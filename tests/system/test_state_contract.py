"""The one contract of all that has a state: whatever was delivered, a fresh object goes on with all that follows."""

import base64
import pickle
from contextlib import ExitStack

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from stocache import (
    BlockSampler,
    CachedDataset,
    DataLoader,
    LocalityDistributedSampler,
    OnDiskBlockDataStorage,
    Placement,
    StateError,
    StatefulDistributedSampler,
    StorageDataset,
    StreamLoader,
)
from stocache.reading import DataLoader2
from tests.support.edits import changed, places, through_json
from tests.support.equality import same
from tests.support.storages import save

N = 23


class Map(Dataset):
    """Map-style, with a state: how many samples it has given."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return N

    def __getitem__(self, idx):
        self.given += 1
        return torch.tensor([idx, self.given])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Numbers(IterableDataset):
    """Iterable, without a state."""

    def __iter__(self):
        return iter(range(N))


class Resumable(IterableDataset):
    """Iterable, with a state."""

    def __init__(self):
        self.at = self.epoch = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield torch.tensor([self.at, self.epoch])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def loader(dataset, batch_size=5, **options):
    return DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(3), **options)


def cached(stack, **options):
    return stack.enter_context(CachedDataset(torch.arange(N), "1MiB", probe=0, example=torch.tensor(0), **options))


def stored(folder):
    storage = OnDiskBlockDataStorage(folder / "blocks", 4)
    return StorageDataset(storage if storage.is_prepared() else save(storage, N))


def blocks(dataset=None, **options):
    return BlockSampler(range(N), 4, True, window=2, seed=1, prefetch=dataset and dataset.prefetch_blocks, **options)


def locality(dataset=range(N), **options):
    return LocalityDistributedSampler(dataset, 5, num_replicas=2, rank=1, seed=1, **options)


def stratified(stack):
    dataset = cached(stack, placement=Placement("scattered"))
    return LocalityDistributedSampler(dataset, 5, num_replicas=1, rank=0, stratify=True)


def distributed():
    return StatefulDistributedSampler(range(N), 2, 1, seed=1)


def stream(stack, folder, **options):
    path = folder / "rows.tsv"
    if not path.exists():
        path.write_text("".join(f"{n}\t{n}\t{n}\n" for n in range(4 * N)))
    return stack.enter_context(StreamLoader(path, 5, 10, drop_last=False, **options))


def graph(stack):
    loader = stack.enter_context(DataLoader2(IterableWrapper(range(N)).shuffle(buffer_size=7).batch(3)))
    loader.seed(3)
    return loader


CASES = {
    "loader": lambda stack, folder: loader(list(range(N)), shuffle=True),
    "map with a state": lambda stack, folder: loader(Map()),
    "iterable": lambda stack, folder: loader(Numbers()),
    "iterable with a state": lambda stack, folder: loader(Resumable()),
    "cached": lambda stack, folder: loader(cached(stack), shuffle=True),
    "stored": lambda stack, folder: loader(dataset := stored(folder), sampler=blocks(dataset), collate_fn=list),
    "by locality": lambda stack, folder: loader(range(N), sampler=locality()),
    "distributed": lambda stack, folder: loader(range(N), sampler=distributed()),
    "stream in a loader": lambda stack, folder: loader(stream(stack, folder, shuffle=True), None),
    "BlockSampler": lambda stack, folder: blocks(),
    "LocalityDistributedSampler": lambda stack, folder: locality(),
    "stratified": lambda stack, folder: stratified(stack),
    "StatefulDistributedSampler": lambda stack, folder: distributed(),
    "StreamLoader": lambda stack, folder: stream(stack, folder, shuffle=True, window=2),
    "buffers": lambda stack, folder: stream(stack, folder, shuffle="buffers", size_limit_gib=0.01),
    "DataLoader2": lambda stack, folder: graph(stack),
}
WITH_WORKERS = {  # each restored at a few steps
    "workers": lambda stack, folder: loader(Map(), num_workers=2, persistent_workers=True),
    "stream in workers": lambda stack, folder: loader(stream(stack, folder, shuffle=True), None, num_workers=2),
    "stream with workers": lambda stack, folder: stream(stack, folder, shuffle=True, num_workers=2),
}
CLASSES = ["loader", "BlockSampler", "LocalityDistributedSampler", "StatefulDistributedSampler", "StreamLoader", "DataLoader2"]


def elements(value):
    return list(value)


def play(value):
    """The elements of an epoch, and the states before, after each of them, and after the end."""
    states, found = [through_json(value.state_dict())], []
    for element in value:
        found.append(element)
        states.append(through_json(value.state_dict()))
    return found, [*states, through_json(value.state_dict())]


@pytest.mark.filterwarnings("ignore:neither the dataset nor its iterator")
@pytest.mark.parametrize("name", [*CASES, *WITH_WORKERS])
def test_each_state_resumes_with_all_that_follows(name, tmp_path):
    make = (CASES | WITH_WORKERS)[name]
    with ExitStack() as stack:
        value = make(stack, tmp_path)
        first, states = play(value)
        second = elements(value)
        del value
    assert len(first) > 2
    steps = range(len(states)) if name in CASES else sorted({0, 1, len(first) // 2, len(first), len(first) + 1})
    for step in steps:
        torch.manual_seed(step)  # another process is at other random numbers
        with ExitStack() as stack:
            resumed = make(stack, tmp_path)
            resumed.load_state_dict(states[step])
            if step <= len(first):
                assert resumed.state_dict()["position"] == states[step]["position"]
                assert same(elements(resumed), first[step:]), step
            assert same(elements(resumed), second), step
            del resumed


def after_two(make, folder):
    """The state after two elements."""
    with ExitStack() as stack:
        value = make(stack, folder)
        iterator = iter(value)
        next(iterator), next(iterator)
        return through_json(value.state_dict())


class Code:
    """Unpickling it runs a function."""

    ran = False

    def __reduce__(self):
        return run, ()


def run():
    Code.ran = True


BAD = (None, -1, 10**30, "", [], {}, [1], 1.5, object(), base64.b64encode(pickle.dumps(Code())).decode())


def edits(state):
    """Each place in a state, as a path of keys, except those within the states of the user's objects."""
    of_user = () if state["identity"].get("samples") is None else (("parts", "dataset"), ("parts", "workers"))
    return [path for path in places(state) if path[:2] not in of_user]


@pytest.mark.filterwarnings("ignore:neither the dataset nor its iterator")
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("map with a state", "iterable with a state")])
def test_an_edited_state_is_refused_or_resumed(name, tmp_path):
    state, refused = after_two(CASES[name], tmp_path), set()
    for path in edits(state):
        for bad in BAD:
            edited = changed(state, path, bad)
            with ExitStack() as stack:
                resumed = CASES[name](stack, tmp_path)
                try:
                    resumed.load_state_dict(edited)
                    for _ in zip(range(3), resumed, strict=False):
                        pass
                except StateError:
                    refused.add(path[0])
                del resumed
    assert refused >= {"what", "version", "identity", "position"}
    assert not Code.ran


@pytest.mark.parametrize("name", CLASSES)
def test_states_of_other_classes_and_versions_are_refused(name, tmp_path):
    state = after_two(CASES[name], tmp_path)
    assert list(state) == ["what", "version", "identity", "position", "parts"]
    for other in CLASSES:
        with ExitStack() as stack:
            value = CASES[other](stack, tmp_path)
            if other != name:
                with pytest.raises(StateError, match=r"not a state of|reads states of version"):
                    value.load_state_dict(state)
            else:
                for version in (1, 99):
                    with pytest.raises(StateError, match=f"this state has version {version}"):
                        value.load_state_dict(state | {"version": version})
                value.load_state_dict(state)
            del value
