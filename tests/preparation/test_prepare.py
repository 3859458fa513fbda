"""Preparation: the same bytes whatever the workers and the interruptions."""

import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from stocache import DatasetError, LimitError, OnDiskBlockDataStorage, StorageDataset, StorageError, prepare
from stocache.storage.manifest import block_name
from tests.support.equality import same
from tests.support.preparing import Batched, Broken, Images, N, Preparer, content, digest, written


@pytest.mark.parametrize("source", [Images(), Batched(), Images(seeded=True), Preparer()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_content_does_not_depend_on_the_number_of_workers(tmp_path, source, shuffle_seed):
    for workers in (0, 1, 2):
        if isinstance(source, Preparer):
            source.yielded = 0
        options = {"num_workers": workers, "block_size": 7, "shuffle_seed": shuffle_seed, "progress": False}
        prepare(source, tmp_path / str(workers), **options).close()
    assert digest(tmp_path / "0") == digest(tmp_path / "1") == digest(tmp_path / "2")
    assert {name for name in content(tmp_path / "0") if "block" not in name} == {"index.json"}


def test_samples_come_in_order_or_shuffled(tmp_path):
    for source in (Images(), Preparer()):
        folder = tmp_path / type(source).__name__
        with prepare(source, folder / "ordered", block_size=7, progress=False) as ordered:
            assert [ordered.load_sample(idx)[1] for idx in range(N)] == list(range(N))
        with prepare(source, folder / "shuffled", block_size=7, shuffle_seed=1, progress=False) as shuffled:
            labels = [shuffled.load_sample(idx)[1] for idx in range(N)]
            assert sorted(labels) == list(range(N)) != labels
            assert all(same(shuffled.load_sample(idx), Images()[label]) for idx, label in enumerate(labels))


def test_info_is_the_preparers_or_given(tmp_path):
    assert prepare(Preparer(), tmp_path / "a", progress=False).load_dataset_info() == {"yielded": N}
    assert prepare(Preparer(), tmp_path / "b", shuffle_seed=1, progress=False).load_dataset_info() == {"yielded": N}
    assert prepare(Images(), tmp_path / "c", info={"classes": ["x"]}, progress=False).load_dataset_info() == {"classes": ["x"]}


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_any_number_of_samples(tmp_path, length, shuffle_seed):
    for source in (Images(length), Preparer(length)):
        storage = prepare(source, tmp_path / type(source).__name__, block_size=7, shuffle_seed=shuffle_seed, progress=False)
        assert len(storage) == length
        assert sorted(storage.load_sample(idx)[1] for idx in range(length)) == list(range(length))
        storage.close()


def test_random_numbers_go_on_as_without_preparing(tmp_path):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    wanted = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    prepare(Images(seeded=True), tmp_path, progress=False).close()
    assert (torch.rand(()), random.random(), np.random.rand()) == wanted


def test_preparing_again_does_nothing_and_in_another_way_is_an_error(tmp_path):
    options = {"block_size": 7, "progress": False, "fingerprint": "v1"}
    prepare(Images(), tmp_path, **options).close()
    before = content(tmp_path)
    with prepare(Images(), tmp_path, **options, num_workers=2) as storage:
        assert len(storage) == N
    for change in ({"block_size": 8}, {"shuffle_seed": 1}, {"fingerprint": "v2"}, {"block_size": None}):
        with pytest.raises(StorageError, match="is prepared in another way"):
            prepare(Images(), tmp_path, **options | change)
    with pytest.raises(StorageError, match="is prepared in another way"):
        prepare(Images(N - 1), tmp_path, **options)
    assert content(tmp_path) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_passes_through_and_preparing_goes_on_later(tmp_path, workers):
    flag = tmp_path / "flag"
    flag.touch()
    options = {"block_size": 7, "progress": False, "num_workers": workers}
    with pytest.raises(ValueError, match="photo 60 cannot be read"):
        prepare(Broken(flag), tmp_path / "a", **options)
    assert not OnDiskBlockDataStorage(tmp_path / "a").is_prepared()
    kept = written(tmp_path / "a")
    assert kept
    flag.unlink()
    prepare(Broken(flag), tmp_path / "a", **options).close()
    prepare(Broken(flag), tmp_path / "b", **options).close()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    again = written(tmp_path / "a")
    assert kept.items() <= again.items()  # they were not written again


def test_a_preparer_that_was_interrupted_goes_on_at_the_last_whole_block(tmp_path):
    options = {"block_size": 7, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), tmp_path / "a", **options)
    kept = written(tmp_path / "a")
    assert len(kept) == 8
    prepare(Preparer(), tmp_path / "a", **options).close()
    prepare(Preparer(), tmp_path / "b", **options).close()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert kept.items() <= written(tmp_path / "a").items()


@pytest.mark.parametrize("other", [Preparer(offset=1), Preparer(length=20)], ids=["other samples", "fewer samples"])
def test_a_preparer_that_yields_other_samples_starts_again(tmp_path, caplog, other):
    options = {"block_size": 7, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), tmp_path / "a", **options)
    with prepare(other, tmp_path / "a", **options) as storage:
        labels = [storage.load_sample(idx)[1] for idx in range(len(storage))]
    assert labels == [idx + other.offset for idx in range(other.length)]
    assert "gives other samples than last time; starting again" in caplog.text
    assert len(list((tmp_path / "a" / "blocks").iterdir())) == -(-other.length // 7)


def test_a_dataset_that_gives_other_samples_starts_again(tmp_path, caplog):
    flag = tmp_path / "flag"
    flag.touch()
    options = {"block_size": 7, "progress": False}
    with pytest.raises(ValueError, match="photo 60"):
        prepare(Broken(flag), tmp_path / "a", **options)
    Path(tmp_path, "a", "preparing.json").write_text(
        Path(tmp_path, "a", "preparing.json").read_text().replace("Broken", "Moved")
    )

    class Moved(Images):
        def __getitem__(self, idx):
            return super().__getitem__(N - 1 - idx)

    with prepare(Moved(), tmp_path / "a", **options) as storage:
        assert [storage.load_sample(idx)[1] for idx in range(N)] == list(range(N))[::-1]
    assert "gives other samples than last time; starting again" in caplog.text


@pytest.mark.parametrize("change", [{"resume": False}, {"block_size": 9}, {"fingerprint": "other"}])
def test_blocks_of_another_preparation_are_not_used(tmp_path, change):
    options = {"block_size": 7, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), tmp_path / "a", **options)
    kept = written(tmp_path / "a")
    prepare(Preparer(), tmp_path / "a", **options | change).close()
    prepare(Preparer(), tmp_path / "b", **options | change).close()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert not kept.items() & written(tmp_path / "a").items()


def test_a_damaged_block_of_an_interrupted_preparation_is_written_again(tmp_path):
    options = {"block_size": 7, "progress": False}
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), tmp_path / "a", **options)
    os.truncate(tmp_path / "a" / block_name(3), 50)
    prepare(Preparer(), tmp_path / "a", **options).close()
    with OnDiskBlockDataStorage(tmp_path / "a") as storage:
        assert [storage.check(number) for number in range(15)] == [None] * 15


def _prepare_until_killed(folder, kind, options, delay_s):
    os.setsid()
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which would stay
    threading.Timer(delay_s, lambda: os.killpg(0, signal.SIGKILL)).start()
    while True:
        prepare(Images(1000) if kind == "dataset" else Preparer(1000), folder, **options)


@pytest.mark.parametrize(("kind", "workers", "seed"), [("dataset", 0, None), ("preparer", 2, None), ("preparer", 0, 5)])
@pytest.mark.sampled(3)
def test_killed_at_any_moment_it_goes_on_and_never_looks_prepared_too_early(tmp_path, kind, workers, seed):
    delays, context = random.Random(0), multiprocessing.get_context("forkserver")
    options = {"num_workers": workers, "shuffle_seed": seed, "block_size": 10, "progress": False}
    folder, kills = tmp_path / "a", 0
    for _ in range(4):
        arguments = (folder, kind, options, delays.uniform(0.01, 0.15))
        process = context.Process(target=_prepare_until_killed, args=arguments)
        process.start()
        process.join(25)
        kills += process.exitcode == -signal.SIGKILL
        process.close()
        storage = OnDiskBlockDataStorage(folder)
        if storage.is_prepared():
            break
    assert kills
    source = Images(1000) if kind == "dataset" else Preparer(1000)
    with prepare(source, folder, **options | {"num_workers": 0}) as storage:
        assert sorted(storage.load_sample(idx)[1] for idx in range(1000)) == list(range(1000))
        assert [number for number in range(100) if storage.check(number)] == []
    source = Images(1000) if kind == "dataset" else Preparer(1000)
    prepare(source, tmp_path / "b", **options | {"num_workers": 0}).close()
    assert digest(folder) == digest(tmp_path / "b")


def test_what_killed_writers_left_is_removed(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="by the user"):
        prepare(Preparer(stop_at=60), tmp_path, block_size=7, progress=False)
    for name in ("index.json.12.tmp", "preparing.json.12.tmp", "info.safetensors.12.tmp", "blocks/000009.safetensors.12.tmp"):
        (tmp_path / name).write_bytes(b"half")
    prepare(Preparer(), tmp_path, block_size=7, progress=False).close()
    assert not list(tmp_path.rglob("*.tmp"))
    (tmp_path / "preparing.json").write_text("left by one who was killed at the very end")
    prepare(Preparer(), tmp_path, block_size=7, progress=False).close()
    assert sorted(os.listdir(tmp_path)) == ["blocks", "index.json"]


def _prepare(number, folder):
    with prepare(Images(), folder, block_size=7, progress=False) as storage:
        assert len(storage) == N


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_processes_that_prepare_one_folder_wait_for_the_one_that_does(tmp_path, run_processes):
    run_processes(4, _prepare, tmp_path)
    prepare(Images(), tmp_path / "other", block_size=7, progress=False).close()
    alone = content(tmp_path / "other")
    assert {name: data for name, data in content(tmp_path).items() if "other" not in name} == alone


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_of_any_start_method(tmp_path, method):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        with prepare(Images(), tmp_path, num_workers=2, block_size=7, progress=False) as storage:
            assert [storage.load_sample(idx)[1] for idx in range(N)] == list(range(N))
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_progress_goes_to_stderr_and_can_be_switched_off(tmp_path, capsys):
    prepare(Images(), tmp_path / "a", block_size=7).close()
    assert f"{N}/{N}" in capsys.readouterr().err
    prepare(Images(), tmp_path / "b", block_size=7, progress=False).close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (Images(), {"block_size": 0}, LimitError, "block_size=0"),
        (Images(), {"block_bytes": "x"}, LimitError, "x"),
        (iter([1, 2]), {}, DatasetError, "prepare takes a DataPreparer or a map-style dataset"),
        (None, {}, DatasetError, "prepare takes a DataPreparer or a map-style dataset"),
    ],
)
def test_wrong_input_is_an_error_before_anything_is_written(tmp_path, source, options, error, message):
    with pytest.raises(error, match=message):
        prepare(source, tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_a_prepared_dataset_can_be_prepared_again_in_another_way(tmp_path):
    with prepare(Images(), tmp_path / "a", block_size=7, progress=False) as first:
        with prepare(StorageDataset(first), tmp_path / "b", block_size=20, num_workers=2, progress=False) as second:
            assert all(same(second.load_sample(idx), Images()[idx]) for idx in range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_preparer_may_use_its_memory_again(tmp_path, workers):
    class Reusing(Preparer):
        def prepare_data(self):
            buffer = np.zeros(3)
            for idx in range(N):
                buffer += 1
                yield buffer, idx

    with prepare(Reusing(), tmp_path, num_workers=workers, block_size=7, progress=False) as storage:
        assert [storage.load_sample(idx)[0][0] for idx in range(N)] == list(range(1, N + 1))


def test_threads_of_a_preparer_pass_their_errors_on(tmp_path):
    class Bad(Preparer):
        def prepare_data(self):
            yield from super().prepare_data()
            yield threading.Lock()

    with pytest.raises(ValueError, match="sample 100: value is a lock, which has no bytes of its own"):
        prepare(Bad(), tmp_path, num_workers=2, block_size=7, progress=False)
    assert not OnDiskBlockDataStorage(tmp_path).is_prepared()
