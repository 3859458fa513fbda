"""A StreamLoader resumes after any batch: it delivers the rest, reading and parsing little else."""

import itertools
import json

import pytest
import torch

from stocache import CsvFormat, CustomFormat, StateError, StreamLoader
from tests.support.texts import FORK, N, Watch, numbers, rows

RESUMED = [
    {},
    {"shuffle": True, "size_limit_gib": 0.1},
    {"shuffle": "buffers", "window": 2, "drop_last": False},
    {"shuffle": True, "num_workers": 2, "read": FORK, "window": 3},
]


@pytest.mark.parametrize("options", RESUMED, ids=["in order", "cached", "buffers", "workers"])
def test_resumed_after_any_batch_it_delivers_the_rest_and_the_next_epoch(tmp_path, options):
    path = tmp_path / "rows.tsv"
    path.write_bytes(rows(0, 107))
    with StreamLoader(path, 10, 20, **options) as loader:
        epochs = [[y.tolist() for _, y in loader] for _ in range(3)]
        loader.set_epoch(1)
        states = [loader.state_dict()]
        states += [loader.state_dict() for _ in loader]
        states.append(loader.state_dict())
    assert len(states) == len(epochs[1]) + 2
    every = 1 if "num_workers" not in options else 3
    for delivered, state in list(enumerate(states))[::every]:
        state = json.loads(json.dumps(state))
        with StreamLoader(path, 10, 20, **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            if delivered <= len(epochs[1]):
                assert [y.tolist() for _, y in loader] == epochs[1][delivered:]
            assert [y.tolist() for _, y in loader] == epochs[2]


def test_resuming_neither_reads_nor_parses_what_was_delivered(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        for _ in itertools.islice(loader, 40):
            state = loader.state_dict()
    watch.rows = 0
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        loader.load_state_dict(state)
        watch.bytes = 0
        assert torch.cat(list(loader)).flatten().tolist() == list(range(400, 420))
        assert len(loader) == 42
    assert watch.rows <= 40
    assert watch.bytes < len(rows()) / 3


def test_another_number_of_workers_goes_on_where_one_stood(numbered):
    with StreamLoader(numbered, 10, 20, shuffle=True) as loader:
        whole = [y.tolist() for _, y in loader]
        loader.set_epoch(0)
        for _ in itertools.islice(loader, 17):
            state = loader.state_dict()
    with StreamLoader(numbered, 10, 20, shuffle=True, num_workers=2, read=FORK) as loader:
        loader.load_state_dict(state)
        assert [y.tolist() for _, y in loader] == whole[17:]


def test_what_fails_before_its_first_batch_is_resumed_there(numbered):
    def fail(batch):
        raise KeyError("by the user")

    with StreamLoader(numbered, 10, 20) as loader:
        states = [loader.state_dict() for _ in itertools.islice(loader, 7)]
    for state in (None, states[-1]):
        with StreamLoader(numbered, 10, 20, transform=fail) as loader:
            if state is not None:
                loader.load_state_dict(state)
            before = loader.state_dict()
            with pytest.raises(KeyError, match="by the user"):
                next(iter(loader))
            assert loader.state_dict() == before


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_torchdatas_stateful_dataloader_resumes_it(numbered):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False) as loader:

        def make():
            return StatefulDataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")

        torch.manual_seed(1)
        first = make()
        came = []
        for _, y in first:
            came.append(y.tolist())
            if len(came) == 15:
                state = first.state_dict()
        second = make()
        second.load_state_dict(state)
        assert [y.tolist() for _, y in second] == came[15:]
        del first, second


def test_states_that_do_not_belong(numbered, tmp_path):
    with StreamLoader(numbered, 10, 20) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for options in ({"seed": 1}, {"shuffle": True}, {"drop_last": False}, {"columns": [0]}, {"rank": 0, "world_size": 2}):
        with StreamLoader(numbered, 10, 20, **options) as loader:
            with pytest.raises(StateError, match="other files, or other arguments"):
                loader.load_state_dict(state)
    with StreamLoader(numbered, 10, 20) as loader:
        for wrong in (None, {}, {"version": 2}):
            with pytest.raises(StateError, match="is not a state of a StreamLoader"):
                loader.load_state_dict(wrong)
        with pytest.raises(StateError, match="reads states of version 2, and this state has version 1"):
            loader.load_state_dict({"version": 1, "identity": "", "epoch": 0, "key": None, "window": None, "batch": 0})
        loader.load_state_dict(state)
        numbered.write_bytes(rows(1, N))
        with pytest.raises(StateError, match="have changed since the state was taken"):
            list(loader)
    copied = tmp_path / "copied.tsv"
    copied.write_bytes(rows())
    with StreamLoader(copied, 10, 20) as loader:  # elsewhere, and at another time
        loader.load_state_dict(state)
        assert numbers(loader) == list(range(10, 420))


def test_a_state_that_would_begin_inside_a_line_is_refused(tmp_path):
    path = tmp_path / "long.tsv"
    path.write_bytes(rows(0, 20_000))
    with StreamLoader(path, 10, 20) as loader:
        state = [loader.state_dict() for _ in itertools.islice(loader, 1001)][-1]
    content, at = path.read_bytes(), state["position"]["line"][1]
    path.write_bytes(content[: at - 3] + b"0\n1" + content[at:])
    with StreamLoader(path, 10, 20) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="no line begins where"):
            next(iter(loader))


def test_max_line_bytes_is_not_part_of_a_state_unless_lines_are_left_out_for_it(numbered):
    def state(**options):
        with StreamLoader(numbered, 4, 8, format=CsvFormat("\t", **options)) as loader:
            next(iter(loader))
            return loader.state_dict()

    assert state(max_line_bytes="1MiB") == state()
    with StreamLoader(numbered, 4, 8, format=CsvFormat("\t", max_line_bytes=10_000)) as loader:
        loader.load_state_dict(state())
    with (
        StreamLoader(numbered, 4, 8, format=CsvFormat("\t", max_line_bytes=10_000, on_error="skip")) as loader,
        pytest.raises(StateError, match="other arguments"),
    ):
        loader.load_state_dict(state(on_error="skip"))
