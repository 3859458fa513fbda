"""Preparation: the same bytes whatever the workers and the interruptions."""

import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from stocache import DatasetError, LimitError, OnDiskBlockDataStorage, SampleError, StorageError
from stocache.storage.manifest import block_name
from stocache.system.generators import Kept
from tests.support import preparing
from tests.support.equality import same
from tests.support.pairs import pairs
from tests.support.preparing import BLOCK, Faulty, Images, N, Preparer, content, labels, names, prepared, rewritten, written
from tests.support.processes import in_child

quietly = preparing.prepare_quietly


class Reusing(Preparer):
    """It uses the memory of its samples again."""

    def prepare_data(self):
        for sample in super().prepare_data():
            yield sample
            sample[0].zero_()


@pytest.mark.parametrize(
    ("make", "seed"), [(preparing.FaultyTogether, 3), (lambda: Images(seeded=True), None), (Reusing, None), (Reusing, 3)]
)
def test_samples_come_in_order_or_shuffled_and_bytes_do_not_depend_on_workers(tmp_path, make, seed):
    with quietly(make(), tmp_path / "0", shuffle_seed=seed) as storage:
        if not getattr(make(), "seeded", False):
            assert labels(storage) == (list(range(N)) if seed is None else np.random.default_rng(seed).permutation(N).tolist())
            assert all(same(storage.load_sample(idx), Images()[label]) for idx, label in enumerate(labels(storage)))
    alone = content(tmp_path / "0")
    assert prepared(make(), tmp_path / "2", shuffle_seed=seed, num_workers=2) == alone
    assert {name for name in alone if "block" not in name} == {"index.json"}


@pytest.mark.parametrize(("length", "seed", "make"), [*pairs([0, 1, BLOCK, BLOCK + 1], [None, 3], [Images, Preparer])])
def test_any_number_of_samples_and_info_is_the_preparers_or_given(tmp_path, length, seed, make):
    with quietly(make(length), tmp_path, shuffle_seed=seed, info={"classes": ["x"]}) as storage:
        assert sorted(labels(storage)) == list(range(length))
        assert storage.load_dataset_info() == ({"yielded": length} if make is Preparer else {"classes": ["x"]})


def test_random_numbers_go_on_as_without_preparing(tmp_path):
    draw = lambda: (torch.rand(()), random.random(), np.random.rand())
    with Kept():
        wanted = draw()
    quietly(Images(9, seeded=True), tmp_path).close()
    assert draw() == wanted


def test_preparing_again_does_nothing_and_in_another_way_is_an_error(tmp_path):
    before = prepared(Images(), tmp_path, fingerprint="v1")
    times = written(tmp_path)
    with quietly(Images(), tmp_path, fingerprint="v1", num_workers=2) as storage:
        assert len(storage) == N
    for change in ({"block_size": 8}, {"shuffle_seed": 1}, {"fingerprint": "v2"}, {"block_size": None}, {"source": Images(9)}):
        with pytest.raises(StorageError, match="is prepared in another way"):
            quietly(folder=tmp_path, **{"source": Images(), "fingerprint": "v1"} | change)
    assert (content(tmp_path), written(tmp_path)) == (before, times)


@pytest.fixture
def interrupted(tmp_path):
    """The folder of a preparer that was interrupted at sample 60; as many blocks are whole."""
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        quietly(Preparer(stop_at=60), tmp_path / "a")
    assert set(written(tmp_path / "a")) == names(*range(60 // BLOCK))
    assert not OnDiskBlockDataStorage(tmp_path / "a").is_prepared()
    return tmp_path / "a"


@pytest.mark.parametrize("at", ["", "file://"])
def test_an_interrupted_preparer_goes_on_and_what_is_damaged_is_written_again(interrupted, tmp_path, at):
    pytest.importorskip("fsspec", reason="it opens URLs")
    kept = written(interrupted)
    os.truncate(interrupted / block_name(3), 50)
    os.truncate(interrupted / block_name(4), 0)
    (interrupted / block_name(99)).write_bytes(b"of another one")
    quietly(Preparer(), f"{at}{interrupted}").close()
    assert content(interrupted) == prepared(Preparer(), tmp_path / "b")
    assert rewritten(interrupted, kept) & kept.keys() == names(3, 4)


@pytest.mark.parametrize("other", [Preparer(offset=1), Preparer(length=20)], ids=["other samples", "fewer samples"])
def test_a_preparer_that_yields_other_samples_starts_again(interrupted, caplog, other):
    with quietly(other, interrupted) as storage:
        assert labels(storage) == [idx + other.offset for idx in range(other.length)]
    assert "returns other samples than last time; starting again" in caplog.text
    assert len(written(interrupted)) == -(-other.length // BLOCK)


@pytest.mark.parametrize("change", [{"resume": False}, {"block_size": 9}, {"fingerprint": "other"}])
def test_blocks_of_another_preparation_are_not_used(interrupted, tmp_path, change):
    kept = written(interrupted)
    assert prepared(Preparer(), interrupted, **change) == prepared(Preparer(), tmp_path / "b", **change)
    assert rewritten(interrupted, kept) == set(written(interrupted))


def test_what_killed_writers_left_is_removed(interrupted):
    for name in ("index.json.12.tmp", "preparing.json.12.tmp", "info.safetensors.12.tmp", "blocks/000009.safetensors.12.tmp"):
        (interrupted / name).write_bytes(b"half")
    quietly(Preparer(), interrupted).close()
    assert not list(interrupted.rglob("*.tmp"))
    (interrupted / "preparing.json").write_text("left by one who was killed at the very end")
    quietly(Preparer(), interrupted).close()
    assert sorted(os.listdir(interrupted)) == ["blocks", "index.json"]


def _prepare_until_killed(source, folder, options, delay_s):
    os.setsid()
    threading.Timer(delay_s, lambda: os.killpg(0, signal.SIGKILL)).start()
    while True:
        quietly(source, folder, **options)


@pytest.mark.parametrize(("make", "options"), [
    (lambda: Faulty(range(0, 500, 9), length=500), {"num_workers": 2, "on_error": "skip"}),
    pytest.param(lambda: Preparer(500), {"num_workers": 2}, marks=pytest.mark.slow),
    pytest.param(lambda: Preparer(500), {"shuffle_seed": 5}, marks=pytest.mark.slow),
], ids=["dataset", "preparer", "preparer that is shuffled"])  # fmt: skip
def test_killed_at_any_moment_it_goes_on_and_never_looks_prepared_too_early(tmp_path, make, options):
    delays = random.Random(0)
    for _ in range(4):
        killed = in_child(_prepare_until_killed, make(), tmp_path / "a", options, delays.uniform(0.01, 0.15))
        assert killed == signal.SIGKILL
        with OnDiskBlockDataStorage(tmp_path / "a") as storage:
            if storage.is_prepared():
                assert [number for number in range(len(storage.index.blocks)) if storage.check(number)] == []
    assert prepared(make(), tmp_path / "a", **options) == prepared(make(), tmp_path / "b", **options | {"num_workers": 0})


def _prepare(number, folder):
    with quietly(Images(), folder) as storage:
        assert len(storage) == N


@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_processes_that_prepare_one_folder_wait_for_the_one_that_does(tmp_path, run_processes):
    run_processes(3, _prepare, tmp_path / "a")
    assert content(tmp_path / "a") == prepared(Images(), tmp_path / "other")


def test_progress_goes_to_stderr_and_can_be_switched_off(tmp_path, capsys):
    quietly(Images(), tmp_path / "a", progress=True).close()
    assert f"{N}/{N}" in capsys.readouterr().err
    quietly(Images(), tmp_path / "b").close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("source", "options", "error", "message"), [
    (Images(), {"block_size": 0}, LimitError, "block_size=0"),
    (iter([1, 2]), {}, DatasetError, "prepare takes a DataPreparer or a map-style dataset"),
    (Preparer(), {"on_error": "skip"}, DatasetError, "on_error is for datasets, .*: Preparer yields them, and an error"),
    (Images(), {"on_error": "ignore"}, LimitError, "on_error='ignore' is unknown. Use 'stop' or 'skip', a Retry or a Skip."),
    (Images(), {"engine": "spark"}, LimitError, r"engine='spark' is unknown\. Use 'local' or 'ray'\."),
    (Images(), {"address": "auto"}, LimitError, r"address='auto' names a Ray cluster.* Use engine='ray'\."),
])  # fmt: skip
def test_wrong_input_is_an_error_before_anything_is_written(tmp_path, source, options, error, message):
    with pytest.raises(error, match=message):
        quietly(source, tmp_path / "a", **options)
    assert not content(tmp_path)


LOCK = "sample 20: value is a lock, which has no bytes of its own"


@pytest.mark.parametrize(("source", "options", "error", "message"), [
    (Faulty([60]), {"num_workers": 2}, ValueError, "photo 60 cannot\nbe read"),
    (preparing.Locks(20), {"num_workers": 2}, SampleError, LOCK),
    ([*range(20), threading.Lock()], {"on_error": "skip"}, SampleError, LOCK),
])  # fmt: skip
def test_a_sample_that_cannot_be_loaded_or_stored_is_named_and_ends_the_preparation(tmp_path, source, options, error, message):
    with pytest.raises(error, match=message):
        quietly(source, tmp_path, **options)
    assert not OnDiskBlockDataStorage(tmp_path).is_prepared()
