"""The one contract of all that has a state: whatever was delivered, a fresh object goes on with all that follows."""

import base64
import functools
import itertools
import pickle
from contextlib import ExitStack

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import stocache
from stocache import BlockSampler, CachedDataset, DataLoader, Placement, StorageDataset, StreamLoader
from stocache.errors import StateError
from stocache.reading import DataLoader2
from tests.support.edits import changed, places, through_json
from tests.support.equality import same

N = 23


def loader(dataset, batch_size=5, **options):
    return DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(3), **options)


def cached(stack, **options):
    return stack.enter_context(CachedDataset(torch.arange(N), "1MiB", probe=0, example=torch.tensor(0), **options))


def stored(folder):
    samples = [{"numbers": torch.full((3,), idx), "text": "ab" * idx} for idx in range(N)]
    return StorageDataset(stocache.prepare(samples, folder / "blocks", block_size=4, progress=False))


def blocks(dataset=None):
    return BlockSampler(range(N), 4, True, window=2, seed=1, prefetch=dataset and dataset.prefetch_blocks)


def locality(dataset=range(N), **options):
    return stocache.LocalityDistributedSampler(dataset, 5, **{"num_replicas": 2, "rank": 1, "seed": 1} | options)


def stream(stack, folder, **options):
    pytest.importorskip("pyarrow", reason="comes with the extra text")
    path = folder / "rows.tsv"
    if not path.exists():
        path.write_text("".join(f"{n}\t{n}\t{n}\n" for n in range(2 * N)))
    return stack.enter_context(StreamLoader(path, 5, 10, drop_last=False, **options))


def graph(stack):
    loader = stack.enter_context(DataLoader2(IterableWrapper(range(N)).shuffle(buffer_size=7).batch(3)))
    loader.seed(3)
    return loader


DISTRIBUTED = functools.partial(stocache.StatefulDistributedSampler, range(N), 2, 1, seed=1)
STRATA = {"num_replicas": 1, "rank": 0, "stratify": True}
CASES = {  # other datasets in a loader: tests/loader/test_loader_states.py
    "loader": lambda stack, folder: loader(list(range(N)), shuffle=True),
    "cached": lambda stack, folder: loader(cached(stack), shuffle=True),
    "stored": lambda stack, folder: loader(dataset := stored(folder), sampler=blocks(dataset), collate_fn=list),
    "stream in a loader": lambda stack, folder: loader(stream(stack, folder, shuffle=True), None),
    "BlockSampler": lambda stack, folder: blocks(),
    "LocalityDistributedSampler": lambda stack, folder: locality(),
    "stratified": lambda stack, folder: locality(cached(stack, placement=Placement("scattered")), **STRATA),
    "StatefulDistributedSampler": lambda stack, folder: DISTRIBUTED(),
    "StreamLoader": lambda stack, folder: stream(stack, folder, shuffle=True, window=2),
    "buffers": lambda stack, folder: stream(stack, folder, shuffle="buffers", size_limit_gib=0.01),
    "DataLoader2": lambda stack, folder: graph(stack),
}
WITH_WORKERS = {  # each restored at a few steps
    "stream in workers": lambda stack, folder: loader(stream(stack, folder, shuffle=True), None, num_workers=2),
}
EDITED = [name for name in CASES if name not in ("cached", "stored")]


def play(value):
    """The elements of an epoch, and the states before, after each of them, and after the end."""
    states, found = [through_json(value.state_dict())], []
    for element in value:
        found.append(element)
        states.append(through_json(value.state_dict()))
    return found, [*states, through_json(value.state_dict())]


@pytest.mark.linux
@pytest.mark.parametrize("name", [*CASES, *WITH_WORKERS])
def test_each_state_resumes_with_all_that_follows(name, tmp_path):
    make = (CASES | WITH_WORKERS)[name]
    with ExitStack() as stack:
        value = make(stack, tmp_path)
        first, states = play(value)
        second = list(value)
        del value
    assert len(first) > 2
    for step in range(len(states)) if name in CASES else (1, len(first) // 2, len(first) + 1):
        torch.manual_seed(step)  # another process is at other random numbers
        with ExitStack() as stack:
            resumed = make(stack, tmp_path)
            resumed.load_state_dict(states[step])
            if step <= len(first):
                assert resumed.state_dict()["position"] == states[step]["position"]
                assert same(list(resumed), first[step:]), step
            assert same(list(resumed), second), step
            del resumed


class Code:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a state was unpickled",)


BAD = (None, 0, -1, 10**30, [], {}, [1], 1.5, object(), base64.b64encode(pickle.dumps(Code())).decode())


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_state_is_refused_or_resumed(name, tmp_path):
    with ExitStack() as stack:
        value = CASES[name](stack, tmp_path)
        list(itertools.islice(iterator := iter(value), 2))
        state, refused = through_json(value.state_dict()), set()
        del value, iterator
    assert list(state) == ["what", "version", "identity", "position", "parts"]
    of_user = () if state["identity"].get("samples") is None else (("parts", "dataset"), ("parts", "workers"))
    edits = [changed(state, path, bad) for path in places(state) if path[:2] not in of_user for bad in BAD]
    stack = ExitStack()
    resumed = CASES[name](stack, tmp_path)
    for edited in edits:
        try:
            resumed.load_state_dict(edited)
            list(itertools.islice(resumed, 3))
            stack.close()
            resumed = CASES[name](stack, tmp_path)
        except StateError:
            refused |= {field for field in state if edited.get(field) != state[field]}
    del resumed
    stack.close()
    assert refused >= {"what", "version", "identity", "position"}
