"""Samples that cannot be loaded: with on_error="skip" they are left out and listed, whatever happens meanwhile."""

import errno
import functools
import itertools
import os
from unittest import mock

import numpy as np
import pytest
import torch

from stocache import OnDiskBlockDataStorage, StorageError, WorkerError
from stocache.storage.inspection import find_damage
from stocache.storage.local import LocalStore
from stocache.storage.manifest import BlockFolderWriter
from tests.support import preparing
from tests.support.equality import same
from tests.support.pairs import pairs
from tests.support.preparing import BLOCK, Faulty, FaultyTogether, Images, N, content, labels, listed, loaded, written

SOME = [3, 5, 60, 95, 99]
BROKEN = {"first": [0], "last": [99], "some": SOME, "a whole block": range(14, 21), "the end": range(80, 100)}
BROKEN["all but one"] = [idx for idx in range(N) if idx != 41]

prepare_quietly = functools.partial(preparing.prepare_quietly, on_error="skip")
prepared = functools.partial(preparing.prepared, on_error="skip")


def dense(length, broken, seed=None):
    """The order without some samples: samples from its end fill the gaps."""
    order = list(range(length)) if seed is None else np.random.default_rng(seed).permutation(length).tolist()
    good = [idx for idx in order if idx not in broken]
    late = iter([idx for idx in order[len(good) :] if idx not in broken])
    return [next(late) if idx in broken else idx for idx in order[: len(good)]]


def stop_at_80(dataset, idx):
    if idx == 80:
        raise MemoryError("no room for photo 80")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("broken", "seed", "make"), [*pairs([*BROKEN], [None, 3], [Faulty, FaultyTogether])])
def test_the_last_samples_take_the_places_of_broken_ones_whatever_the_workers(tmp_path, broken, seed, make):
    source, workers = make(BROKEN[broken]), 2 if broken in ("some", "a whole block") else 0
    with prepare_quietly(source, tmp_path / "0", shuffle_seed=seed) as storage:
        assert labels(storage) == dense(N, source.broken, seed)
        assert all(same(storage.load_sample(idx), Images()[label]) for idx, label in enumerate(labels(storage)))
        assert [entry.samples for entry in storage.index.blocks[:-1]] == [BLOCK] * (len(storage.index.blocks) - 1)
        assert find_damage(storage, 0) == []
    assert set(os.listdir(tmp_path / "0")) == {"blocks", "index.json", "skipped.json"}
    if workers:
        assert prepared(source, tmp_path / "2", shuffle_seed=seed, num_workers=workers) == content(tmp_path / "0")


def test_samples_that_are_skipped_are_listed_with_name_and_reason(tmp_path, caplog):
    with prepare_quietly(Faulty([60, 3]), tmp_path / "out") as storage:
        skipped = storage.load_skipped()
    assert [(sample.index, sample.name, sample.reason) for sample in skipped] == [
        (idx, f"photos/{idx}.jpg", f"ValueError: photo {idx} cannot be read") for idx in (3, 60)
    ]
    assert listed(tmp_path / "out", "failed") == []
    message = f"{tmp_path}/out lacks 2 of the 100 samples of the source, which cannot be loaded: {tmp_path}/out/skipped.json"
    assert [record.getMessage() for record in caplog.records] == [f"{message} lists them. (stocache explain W17)"]
    prepare_quietly(Faulty([60, 3]), tmp_path / "out").close()  # it is prepared already, and says so again
    assert len(caplog.records) == 2


class _KilledError(BaseException):
    pass


def kill_after(changes, patched):
    """Let this process and its children change the folder so often; the next change is an error, as are all after it."""
    made = torch.zeros(1, dtype=torch.int64).share_memory_()

    def counted(change):
        def method(*arguments, **named):
            if made == changes:
                raise _KilledError
            made.add_(1)
            return change(*arguments, **named)

        return method

    for name in ("write", "remove", "make"):
        patched.setattr(LocalStore, name, counted(getattr(LocalStore, name)))


@pytest.mark.parametrize("last", [13, pytest.param(5, marks=pytest.mark.slow)])  # it is at the end, or not
def test_killed_before_any_change_of_the_folder_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, caplog, last):
    source = Faulty([2, 3, last], length=14)
    whole, killed = prepared(source, tmp_path / "whole", block_size=4), True
    for changes in itertools.count(1, 3):  # of three, the one at which the order of the last two matters
        folder = tmp_path / str(changes)
        with monkeypatch.context() as patched:
            kill_after(changes, patched)
            try:
                prepare_quietly(source, folder, block_size=4).close()
                killed = False
            except (_KilledError, WorkerError):
                pass
        assert prepared(source, folder, block_size=4) == whole, changes
        if not killed:
            break
    assert changes > 10  # blocks, of which some are written later, the lists and the plan
    assert "starting again" not in caplog.text


@pytest.mark.parametrize("make", [Faulty, FaultyTogether])
def test_samples_that_failed_are_not_loaded_again_when_it_goes_on(tmp_path, make):
    log, folder = tmp_path / "log", tmp_path / "out"
    with pytest.raises(MemoryError, match="no room for photo 80"):
        prepare_quietly(make(SOME, log, at=stop_at_80), folder)
    assert (listed(folder), listed(folder, "failed")) == ([], [3, 5, 60])
    kept = written(folder)
    loaded(log)
    prepare_quietly(make(SOME, log), folder).close()
    again = loaded(log)
    assert not {3, 5, 60} & set(again)
    assert {95, 99} <= set(again)
    assert again[4] == again[61] == 1  # once, with the samples that take the places
    assert kept.items() <= written(folder).items()
    assert content(folder) == prepared(make(SOME), tmp_path / "b")


def test_a_folder_that_lacks_samples_is_refused_unless_one_skips_or_prepares_it_again(tmp_path):
    folder = tmp_path / "out"
    before = prepared(Faulty(SOME), folder)
    with pytest.raises(StorageError, match=r"lacks 5 of 100 samples, which could not be loaded: see skipped\.json\. Accept"):
        prepare_quietly(Faulty(), folder, on_error="stop")
    assert content(folder) == before
    with prepare_quietly(Faulty(SOME[:2]), folder, again=True) as storage:
        assert listed(folder) == SOME[:2]
        assert labels(storage) == dense(N, SOME[:2])
    assert prepared(Faulty(), folder, on_error="stop", again=True) == prepared(Faulty(), tmp_path / "whole")
    assert set(os.listdir(folder)) == {"blocks", "index.json"}


def test_a_list_that_is_not_whole_is_found_and_not_used(tmp_path):
    folder, path = tmp_path / "out", tmp_path / "out" / "skipped.json"
    prepare_quietly(Faulty([1]), tmp_path / "other").close()
    before = prepared(Faulty(SOME), folder)
    text, another = path.read_text(), (tmp_path / "other" / "skipped.json").read_text()
    edited = text.replace('"index": 60', '"index": 61'), text.replace('"version": 1', '"version": 2')
    for damaged in (*edited, text[:100], "[]", another, None):
        path.write_text(damaged) if damaged is not None else path.unlink()
        with OnDiskBlockDataStorage(folder) as storage:
            [problem] = find_damage(storage, 0)
            assert problem.startswith(f"{path} is ")
            assert "--again" in problem
            assert labels(storage) == dense(N, SOME)
    assert prepared(Faulty(SOME), folder, again=True) == before


def die_at_60(dataset, idx):
    if idx == 60:
        os._exit(7)


def gone(dataset, idx):
    flag = dataset.log.with_name("flag")
    if idx == 50:
        flag.touch()
    if flag.exists():
        raise FileNotFoundError(f"{idx} is on a disk that is gone")


NONE = r"Not one of the 100 samples of the source can be loaded\. The last one: ValueError: photo"
FAULTS = {
    "none can be loaded": (lambda log: Faulty(range(N)), {}, StorageError, NONE),
    "none to estimate a size from": (lambda log: Faulty(range(N)), {"block_size": None}, StorageError, NONE),
    "the disk is gone": (lambda log: Faulty((), log, at=gone), {"num_workers": 2}, FileNotFoundError, "is gone"),
    "the disk is full": (lambda log: Faulty(), {"num_workers": 2}, OSError, "No space left"),
    "a process dies": (lambda log: Faulty(at=die_at_60), {}, WorkerError, "which loads samples, exited with code 7"),
}  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_the_fault_of_samples_stops_the_preparation_and_nothing_is_skipped(tmp_path, monkeypatch, fault):
    make, options, error, message = FAULTS[fault]
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        if fault == "the disk is full":
            patched.setattr(BlockFolderWriter, "write_encoded", full)
        with pytest.raises(error, match=message):
            prepare_quietly(make(tmp_path / "log"), tmp_path / "out", **options)
    assert not {"index.json", "skipped.json"} & set(os.listdir(tmp_path / "out"))
    assert len(prepare_quietly(Faulty(), tmp_path / "out")) == N
