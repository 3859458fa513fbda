"""A StreamLoader that is resumed reads and parses little else than the rest. More is in tests/system/test_state_contract.py."""

import itertools

import pytest
import torch

from stocache import CsvFormat, CustomFormat, StateError, StreamLoader
from tests.support.texts import FORK, N, Watch, numbers, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*suggested max number of worker")


def nth_state(loader, count):
    """The state after that many batches."""
    for _ in itertools.islice(loader, count):
        state = loader.state_dict()
    return state


def test_resuming_neither_reads_nor_parses_what_was_delivered(numbered, monkeypatch):
    watch = Watch(monkeypatch)
    with StreamLoader(numbered, 10, 20, format=CustomFormat(watch.parse)) as loader:
        state = nth_state(loader, 40)
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
        state = nth_state(loader, 17)
    with StreamLoader(numbered, 10, 20, shuffle=True, num_workers=2, read=FORK) as loader:
        loader.load_state_dict(state)
        assert [y.tolist() for _, y in loader] == whole[17:]


def test_what_fails_before_its_first_batch_is_resumed_there(numbered):
    def fail(batch):
        raise KeyError("by the user")

    with StreamLoader(numbered, 10, 20) as loader:
        state = nth_state(loader, 7)
    with StreamLoader(numbered, 10, 20, transform=fail) as loader:
        for load in (lambda: None, lambda: loader.load_state_dict(state)):
            load()
            before = loader.state_dict()
            with pytest.raises(KeyError, match="by the user"):
                next(iter(loader))
            assert loader.state_dict() == before


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_torchdatas_stateful_dataloader_resumes_it(numbered):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata's loader is torchdata's")
    with StreamLoader(numbered, 10, 20, shuffle=True, drop_last=False) as loader:
        first, second = (
            torchdata.StatefulDataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context="fork")
            for _ in range(2)
        )
        torch.manual_seed(1)
        came = []
        for _, y in first:
            came.append(y.tolist())
            if len(came) == 15:
                state = first.state_dict()
        second.load_state_dict(state)
        assert [y.tolist() for _, y in second] == came[15:]
        del first, second


def test_states_that_do_not_belong_are_refused(numbered, tmp_path):
    with StreamLoader(numbered, 10, 20) as loader:
        state = nth_state(loader, 1)
    for options in ({"seed": 1}, {"shuffle": True}, {"drop_last": False}, {"columns": [0]}, {"rank": 0, "world_size": 2}):
        with StreamLoader(numbered, 10, 20, **options) as loader:
            with pytest.raises(StateError, match="other files, or other arguments"):
                loader.load_state_dict(state)
    with StreamLoader(numbered, 10, 20) as loader:
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
    with StreamLoader(path, 100, 200) as loader:
        state = nth_state(loader, 101)
    content, at = path.read_bytes(), state["position"]["line"][1]
    path.write_bytes(content[: at - 3] + b"0\n1" + content[at:])
    with StreamLoader(path, 100, 200) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="no line begins where"):
            next(iter(loader))


def test_max_line_bytes_is_not_part_of_a_state_unless_lines_are_left_out_for_it(numbered):
    def loader_of(**options):
        return StreamLoader(numbered, 4, 8, format=CsvFormat("\t", **options))

    def state(**options):
        with loader_of(**options) as loader:
            return nth_state(loader, 1)

    assert state(max_line_bytes="1MiB") == state()
    with loader_of(max_line_bytes=10_000) as loader:
        loader.load_state_dict(state())
    with loader_of(max_line_bytes=10_000, on_error="skip") as loader, pytest.raises(StateError, match="other arguments"):
        loader.load_state_dict(state(on_error="skip"))
