"""Samples that cannot be loaded: with on_error="skip" they are left out and listed, whatever happens meanwhile."""

import errno
import itertools
import json
import mmap
import multiprocessing
import os
import random
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from stocache import DamagedError, DatasetError, LimitError, OnDiskBlockDataStorage, StorageError, WorkerError, prepare
from stocache.preparation.blocks import DatasetBlocks
from stocache.storage.inspection import find_damage
from stocache.storage.local import LocalStore
from stocache.storage.manifest import BlockFolderWriter
from tests.support.equality import same
from tests.support.preparing import Faulty, FaultyTogether, Images, N, Preparer, content, digest, loaded, written

BLOCK = 7
BROKEN = {"first": [0], "last": [99], "some": [3, 5, 60, 95, 99], "a whole block": range(14, 21), "the end": range(80, 100)}
BROKEN["all but one"] = [idx for idx in range(N) if idx != 41]
SOME = BROKEN["some"]


def prepare_quietly(source, folder, on_error="skip", **options):
    return prepare(source, folder, on_error=on_error, progress=False, **{"block_size": BLOCK} | options)


def dense(length, broken, seed=None):
    """The order without some samples: those from its end fill the gaps."""
    order = list(range(length)) if seed is None else np.random.default_rng(seed).permutation(length).tolist()
    good = [idx for idx in order if idx not in broken]
    late = iter([idx for idx in order[len(good) :] if idx not in broken])
    return [next(late) if idx in broken else idx for idx in order[: len(good)]]


def labels(storage):
    return [storage.load_sample(idx)[1] for idx in range(len(storage))]


def indices_in(folder, key="skipped"):
    return [record["index"] for record in json.loads((folder / "skipped.json").read_text()).get(key, ())]


# ---------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("make", [Faulty, FaultyTogether])
@pytest.mark.sampled(2)
def test_the_last_samples_take_the_places_of_broken_ones_whatever_the_workers(tmp_path, broken, seed, make):
    for workers in (0, 1, 2):
        options = {"num_workers": workers, "shuffle_seed": seed}
        with prepare_quietly(make(BROKEN[broken]), tmp_path / str(workers), **options) as storage:
            assert labels(storage) == dense(N, BROKEN[broken], seed)
            assert all(same(storage.load_sample(idx), Images()[label]) for idx, label in enumerate(labels(storage)))
            assert [entry.samples for entry in storage.index.blocks[:-1]] == [BLOCK] * (len(storage.index.blocks) - 1)
            assert find_damage(storage, 0) == []
    assert digest(tmp_path / "0") == digest(tmp_path / "1") == digest(tmp_path / "2")
    assert set(os.listdir(tmp_path / "0")) == {"blocks", "index.json", "skipped.json"}


def test_samples_that_are_skipped_are_listed_with_name_and_reason(tmp_path, caplog):
    with prepare_quietly(Faulty([60, 3]), tmp_path / "out") as storage:
        skipped = storage.load_skipped()
    assert [(sample.index, sample.name, sample.reason) for sample in skipped] == [
        (3, "photos/3.jpg", "ValueError: photo 3 cannot be read"),
        (60, "photos/60.jpg", "ValueError: photo 60 cannot be read"),
    ]
    assert "failed" not in json.loads((tmp_path / "out" / "skipped.json").read_text())
    message = f"{tmp_path}/out lacks 2 of the 100 samples of the source, which cannot be loaded: {tmp_path}/out/skipped.json"
    assert [record.getMessage() for record in caplog.records] == [f"{message} lists them."]
    prepare_quietly(Faulty([60, 3]), tmp_path / "out").close()  # it is prepared already, and says so again
    assert len(caplog.records) == 2


def test_a_source_that_is_whole_gives_the_same_folder_with_skip(tmp_path, caplog):
    prepare_quietly(Images(seeded=True), tmp_path / "a").close()
    prepare_quietly(Images(seeded=True), tmp_path / "b", on_error="stop").close()
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert not caplog.records


def test_random_samples_do_not_depend_on_workers_or_on_what_failed_before(tmp_path):
    for workers in (0, 2):
        prepare_quietly(Faulty(SOME, seeded=True), tmp_path / str(workers), num_workers=workers).close()
    assert digest(tmp_path / "0") == digest(tmp_path / "2")


def test_the_size_of_blocks_is_estimated_from_samples_that_can_be_loaded(tmp_path):
    for name, broken in (("a", [0, 99]), ("b", range(1, 100))):
        with prepare_quietly(Faulty(broken), tmp_path / name, block_size=None, block_bytes=500) as storage:
            assert storage.index.skipped == len(broken)
            assert storage.block_size < 50


def test_a_dataset_that_does_not_name_its_samples(tmp_path):
    class Nameless(Faulty):
        def describe_sample(self, idx):
            raise KeyError(idx)

    with prepare_quietly(Nameless([3]), tmp_path) as storage:
        assert storage.load_skipped()[0].name is None


def test_a_folder_at_a_url_goes_on_and_lists_what_it_lacks(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/a"
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(SOME), url)
    with prepare_quietly(Faulty(SOME), url) as storage:
        assert [sample.index for sample in storage.load_skipped()] == SOME
    prepare_quietly(Faulty(SOME), tmp_path / "b").close()
    assert content(tmp_path / "a") == content(tmp_path / "b")


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_only_blocks_with_other_samples_change(length, size, data):
    subsets = st.sets(st.integers(0, length - 1))
    plan = {"shuffle_seed": data.draw(st.sampled_from([None, 5])), "block_size": size, "block_bytes": 1}
    blocks = DatasetBlocks(range(length), plan, None, False, {})
    before = dense(length, (), plan["shuffle_seed"])
    for left_out in data.draw(st.lists(subsets, max_size=4)):
        now = dense(length, left_out, plan["shuffle_seed"])
        cut = [[order[at : at + size] for at in range(0, length, size)] for order in (before, now)]
        assert blocks.leave_out(left_out) == [number for number, (old, new) in enumerate(zip(*cut, strict=True)) if old != new]
        assert len(blocks) == -(-len(now) // size)
        some = data.draw(subsets)
        assert blocks.numbers_of(some) == {now.index(idx) // size for idx in some if idx in now}
        before = now


# ---------------------------------------------------------------------------------------------------- interruptions


class _KilledError(BaseException):
    pass


def kill_after(changes, patched):
    """Let this process and its children change the folder so often; the next change is an error, as are all after it."""
    made = mmap.mmap(-1, 8)

    def counted(change):
        def method(store, *arguments, **named):
            count = int.from_bytes(made[:], "little")
            if count == changes:
                raise _KilledError
            made[:] = (count + 1).to_bytes(8, "little")
            return change(store, *arguments, **named)

        return method

    for name in ("write", "remove", "make"):
        patched.setattr(LocalStore, name, counted(getattr(LocalStore, name)))


@pytest.mark.parametrize("broken", [[2, 3, 9, 27, 29], [2, 3, 9, 17, 18]], ids=["also at the end", "not at the end"])
def test_killed_before_any_change_of_the_folder_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, caplog, broken):
    source, options = Faulty(broken, length=30), {"block_size": 4}
    prepare_quietly(source, tmp_path / "whole", **options).close()
    for changes in itertools.count():
        folder, killed = tmp_path / str(changes), False
        with monkeypatch.context() as patched:
            kill_after(changes, patched)
            try:
                prepare_quietly(source, folder, **options).close()
            except (_KilledError, WorkerError):
                killed = True
        prepare_quietly(source, folder, **options).close()
        assert content(folder) == content(tmp_path / "whole"), changes
        if not killed:
            break
    assert changes > 15  # there are 8 blocks, of which some are written later, and the lists
    assert "starting again" not in caplog.text


def test_killed_while_another_preparation_takes_the_folder_the_first_one_goes_on(tmp_path, monkeypatch, caplog):
    source = Faulty([2, 3, 9, 27, 29], length=30)
    options = {"block_size": 4}
    prepare_quietly(source, tmp_path / "whole", **options).close()
    for changes in itertools.count():
        folder, killed = tmp_path / str(changes), False
        with monkeypatch.context() as patched:
            patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepare_quietly(source, folder, **options)
        with monkeypatch.context() as patched:
            patched.setattr(BlockFolderWriter, "write_encoded", lambda *arguments: 1 / 0)
            kill_after(changes, patched)
            try:
                prepare_quietly(source, folder, fingerprint="another", **options)
            except _KilledError:
                killed = True
            except ZeroDivisionError:
                pass
        prepare_quietly(source, folder, **options).close()
        assert content(folder) == content(tmp_path / "whole"), changes
        if not killed:
            break
    assert changes > 7  # blocks, the lists and the plan
    assert "starting again" not in caplog.text


def _prepare_until_killed(folder, options, delay_s):
    os.setsid()
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which would stay
    threading.Timer(delay_s, lambda: os.killpg(0, signal.SIGKILL)).start()
    while True:
        prepare_quietly(Faulty(range(0, 1000, 9), length=1000), folder, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_any_moment_it_goes_on(tmp_path, workers):
    delays, context = random.Random(workers), multiprocessing.get_context("forkserver")
    kills = 0
    for _ in range(4):
        arguments = (tmp_path / "a", {"num_workers": workers}, delays.uniform(0.02, 0.3))
        process = context.Process(target=_prepare_until_killed, args=arguments)
        process.start()
        process.join(25)
        kills += process.exitcode == -signal.SIGKILL
        process.close()
    assert kills == 4
    for folder in ("a", "b"):
        prepare_quietly(Faulty(range(0, 1000, 9), length=1000), tmp_path / folder).close()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


@pytest.mark.parametrize("options", [{}, {"block_size": None, "block_bytes": 500}], ids=["size given", "size estimated"])
def test_samples_that_failed_are_not_loaded_again_when_it_goes_on(tmp_path, monkeypatch, options):
    log, folder, broken = tmp_path / "log", tmp_path / "out", [0, *SOME]
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(broken, log), folder, **options)
    assert set(broken) <= set(loaded(log))
    prepare_quietly(Faulty(broken, log), folder, **options).close()
    assert not set(broken) & set(loaded(log))
    prepare_quietly(Faulty(broken, log), folder, **options).close()
    assert not loaded(log)


@pytest.mark.parametrize("make", [Faulty, FaultyTogether])
def test_samples_that_failed_before_the_first_pass_ended_are_not_loaded_again(tmp_path, make):
    class Stopping(make):
        def __getitem__(self, idx):
            if idx == 80:
                raise MemoryError("no room for photo 80")
            return super().__getitem__(idx)

    Stopping.__name__ = make.__name__
    log, folder = tmp_path / "log", tmp_path / "out"
    with pytest.raises(MemoryError, match="no room for photo 80"):
        prepare_quietly(Stopping(SOME, log), folder)
    assert (indices_in(folder), indices_in(folder, "failed")) == ([], [3, 5, 60])
    kept = written(folder)
    loaded(log)
    prepare_quietly(make(SOME, log), folder).close()
    again = loaded(log)
    assert not {3, 5, 60} & set(again)
    assert {95, 99} <= set(again)
    assert again[4] == again[61] == 1  # once, with the samples that take the places
    assert kept.items() <= written(folder).items()
    prepare_quietly(make(SOME), tmp_path / "b").close()
    assert digest(folder) == digest(tmp_path / "b")


def test_a_sample_that_fails_only_when_its_block_is_written_again_is_left_out_too(tmp_path):
    log = tmp_path / "log"

    class Flaky(Faulty):
        def __getitem__(self, idx):
            if idx in (1, 98) and log.exists() and f"\n{idx}\n" in f"\n{log.read_text()}":
                raise OSError("photo was there before")
            return super().__getitem__(idx)

    with prepare_quietly(Flaky([3, 99], log), tmp_path / "out") as storage:
        assert labels(storage) == dense(N, [1, 3, 98, 99])
        assert [sample.index for sample in storage.load_skipped()] == [1, 3, 98, 99]
        assert find_damage(storage, 0) == []


# ---------------------------------------------------------------------------------------------------- once more


def test_an_unfinished_folder_goes_on_with_another_on_error(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match="photo 3"):
        prepare_quietly(Faulty(SOME), folder, on_error="stop")
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(SOME), folder)
    assert indices_in(folder) == SOME
    kept = written(folder)
    with pytest.raises(ValueError, match="photo 3"):
        prepare_quietly(Faulty(SOME), folder, on_error="stop")
    assert not (folder / "skipped.json").exists()
    prepare_quietly(Faulty(), folder, on_error="stop").close()
    prepare_quietly(Faulty(), tmp_path / "whole", on_error="stop").close()
    assert content(folder) == content(tmp_path / "whole")
    same_files = {name for name in kept if kept[name] == written(folder)[name]}
    assert same_files == {f"{number:06}.safetensors" for number in range(1, 13) if number != 60 // BLOCK}


def test_a_folder_that_lacks_samples_is_refused_unless_one_skips_or_prepares_it_anew(tmp_path):
    folder = tmp_path / "out"
    prepare_quietly(Faulty(SOME), folder).close()
    before = content(folder)
    with pytest.raises(StorageError, match=r"lacks 5 of 100 samples, which could not be loaded: see skipped\.json\. Accept"):
        prepare_quietly(Faulty(), folder, on_error="stop")
    assert content(folder) == before
    with prepare_quietly(Faulty(SOME[:2]), folder, again=True) as storage:
        assert indices_in(folder) == SOME[:2]
        assert labels(storage) == dense(N, SOME[:2])
    prepare_quietly(Faulty(), folder, on_error="stop", again=True).close()
    assert set(os.listdir(folder)) == {"blocks", "index.json"}
    prepare_quietly(Faulty(), tmp_path / "whole").close()
    assert content(folder) == content(tmp_path / "whole")


@pytest.mark.parametrize("options", [{"resume": False}, {"fingerprint": "another"}, {"block_size": 9}])
def test_another_preparation_does_not_know_the_samples_that_failed(tmp_path, monkeypatch, options):
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(SOME), tmp_path)
    with prepare_quietly(Faulty(), tmp_path, **options) as storage:
        assert labels(storage) == list(range(N))
    assert not (tmp_path / "skipped.json").exists()


def test_a_dataset_that_gives_other_samples_starts_again_without_the_ones_that_failed(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(SOME), tmp_path)

    class Reversed(Faulty):
        def __getitem__(self, idx):
            return super().__getitem__(N - 1 - idx)

    Reversed.__name__ = "Faulty"
    with prepare_quietly(Reversed([40]), tmp_path) as storage:
        assert sorted(labels(storage)) == [idx for idx in range(N) if idx != 40]
        assert [sample.index for sample in storage.load_skipped()] == [59]
    assert "gives other samples than last time; starting again" in caplog.text


# ---------------------------------------------------------------------------------------------------- repairing


def damage(folder, *names):
    for name in names:
        path = folder / name
        data = bytearray(path.read_bytes())
        data[-9] ^= 0x55
        path.write_bytes(data)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("index", ["whole", "damaged"])
def test_a_folder_that_lacks_samples_is_repaired_without_loading_them(tmp_path, seed, on_error, index):
    log, folder = tmp_path / "log", tmp_path / "out"
    prepare_quietly(Faulty(SOME, log), folder, shuffle_seed=seed).close()
    before, times = content(folder), written(folder)
    names = [f"{number:06}.safetensors" for number in (0, 5, 13)]  # with a sample from the end, without one, the last
    damage(folder, *(f"blocks/{name}" for name in names))
    if index == "damaged":
        damage(folder, "index.json")
    loaded(log)
    prepare_quietly(Faulty(SOME, log), folder, on_error, shuffle_seed=seed, repair=True).close()
    assert content(folder) == before
    assert not set(SOME) & set(loaded(log))
    assert {name for name, time in written(folder).items() if times[name] != time} == set(names)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_repair_does_not_skip_a_sample_that_the_folder_has(tmp_path, on_error):
    prepare_quietly(Faulty(SOME), tmp_path).close()
    damage(tmp_path, "blocks/000005.safetensors")
    before = content(tmp_path)
    with pytest.raises(ValueError, match="photo 40"):
        prepare_quietly(Faulty([*SOME, 40]), tmp_path, on_error, repair=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("how", ["damaged", "cut", "missing", "another", "odd", "version"])
def test_a_list_that_is_not_whole_is_found_and_not_used(tmp_path, how):
    folder, path = tmp_path / "out", tmp_path / "out" / "skipped.json"
    prepare_quietly(Faulty(SOME), folder).close()
    if how == "damaged":
        path.write_text(path.read_text().replace('"index": 60', '"index": 61'))
    elif how == "cut":
        os.truncate(path, 100)
    elif how == "missing":
        path.unlink()
    elif how == "another":
        prepare_quietly(Faulty([1]), tmp_path / "other").close()
        path.write_bytes((tmp_path / "other" / "skipped.json").read_bytes())
    else:
        path.write_text("[]" if how == "odd" else path.read_text().replace('"version": 1', '"version": 2'))
    with OnDiskBlockDataStorage(folder) as storage:
        [problem] = find_damage(storage, 0)
        assert problem.startswith(f"{path} is ")
        assert "--again" in problem
        assert labels(storage) == dense(N, SOME)
    with pytest.raises(DamagedError, match=r"skipped\.json is .* Without it, the folder can be read, but not repaired"):
        prepare_quietly(Faulty(SOME), folder, repair=True)


def test_an_unfinished_folder_with_a_damaged_list_starts_again_on_demand(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_quietly(Faulty(SOME), tmp_path)
    damage(tmp_path, "skipped.json")
    with pytest.raises(DamagedError, match=r"start again if it is not prepared \(resume=False, --no-resume\)"):
        prepare_quietly(Faulty(SOME), tmp_path)
    with prepare_quietly(Faulty(SOME), tmp_path, resume=False) as storage:
        assert labels(storage) == dense(N, SOME)


# ---------------------------------------------------------------------------------------------------- other errors


@pytest.mark.parametrize("size", [None, BLOCK])
def test_a_source_of_which_no_sample_can_be_loaded_is_an_error(tmp_path, size):
    with pytest.raises(
        StorageError, match=r"Not one of the 100 samples of the source can be loaded\. The last one: ValueError: photo"
    ):
        prepare_quietly(Faulty(range(N)), tmp_path, block_size=size)
    assert not (tmp_path / "skipped.json").exists()
    with prepare_quietly(Faulty(), tmp_path, block_size=size) as storage:
        assert labels(storage) == list(range(N))


def test_a_source_of_which_no_sample_can_be_loaded_any_more_is_an_error(tmp_path):
    log = tmp_path / "log"

    class Flaky(Faulty):
        def __getitem__(self, idx):
            sample = super().__getitem__(idx)
            if log.read_text().count("\n") == 2:  # not when it is the first one to be tried, but then with its block
                raise OSError("a loose cable")
            return sample

    with pytest.raises(StorageError, match=r"out: no sample of the source can be loaded any more\."):
        prepare_quietly(Flaky((), log, length=1), tmp_path / "out")
    assert not (tmp_path / "out" / "skipped.json").exists()


def test_an_empty_dataset_has_nothing_to_skip(tmp_path):
    assert (
        len(prepare_quietly(Images(0), tmp_path / "a")) == len(prepare_quietly(Images(0), tmp_path / "b", block_size=None)) == 0
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_is_gone_stops_the_preparation_and_nothing_is_skipped(tmp_path, workers):
    flag, folder = tmp_path / "gone", tmp_path / "out"

    class Leaving(Faulty):
        def __getitem__(self, idx):
            if idx == 50:
                flag.touch()
            if flag.exists():
                raise FileNotFoundError(f"{idx} is on a disk that is gone")
            return super().__getitem__(idx)

    with pytest.raises(FileNotFoundError, match="is on a disk that is gone"):
        prepare_quietly(Leaving(), folder, num_workers=workers)
    assert not (folder / "skipped.json").exists()
    flag.unlink()
    Leaving.__getitem__ = Faulty.__getitem__
    with prepare_quietly(Leaving(), folder) as storage:
        assert labels(storage) == list(range(N))


def test_a_sample_of_a_complete_block_that_is_gone_stops_a_preparation_that_goes_on(tmp_path):
    class Stopping(Faulty):
        def __getitem__(self, idx):
            if idx == 80:
                raise MemoryError("no room")
            return super().__getitem__(idx)

    Stopping.__name__ = "Faulty"
    with pytest.raises(MemoryError, match="no room"):
        prepare_quietly(Stopping(), tmp_path)
    kept = written(tmp_path)
    with pytest.raises(
        StorageError, match=r"has cannot be loaded any more: ValueError: photo 75 .*\. Restore it, or start again"
    ):
        prepare_quietly(Faulty([75]), tmp_path)
    assert written(tmp_path) == kept


def test_a_dataset_that_becomes_shorter_is_told_and_nothing_is_skipped(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "out"

    class Shrinking(Faulty):
        def __len__(self):
            return N - 10 * (log.exists() and "\n50\n" in log.read_text())

    with pytest.raises(StorageError, match=r"the source was changed while .* was prepared: samples: 100, now 90\. Prepare"):
        prepare_quietly(Shrinking([95], log), folder)
    assert not (folder / "skipped.json").exists()
    assert not (folder / "index.json").exists()


def test_a_dataset_that_loads_in_one_process_only_is_not_taken_for_broken(tmp_path, caplog):
    home = os.getpid()

    class AtHome(Faulty):
        def __getitem__(self, idx):
            if os.getpid() != home:
                raise RuntimeError("cannot initialize CUDA in a forked process")
            return super().__getitem__(idx)

    with prepare_quietly(AtHome(SOME), tmp_path) as storage:
        assert labels(storage) == dense(N, SOME)
        assert [sample.index for sample in storage.load_skipped()] == SOME
    assert "cannot be loaded in a child process" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_stops_the_preparation_and_nothing_is_skipped(tmp_path, monkeypatch, workers):
    def write(store, name, *pieces):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(BlockFolderWriter, "write_encoded", write)
        with pytest.raises(OSError, match="No space left on device"):
            prepare_quietly(Images(), tmp_path, num_workers=workers)
    assert not (tmp_path / "skipped.json").exists()
    assert len(prepare_quietly(Images(), tmp_path)) == N


def test_a_sample_that_kills_its_process_stops_the_preparation(tmp_path):
    class Deadly(Faulty):
        def __getitem__(self, idx):
            if idx == 60:
                os._exit(7)
            return super().__getitem__(idx)

    with pytest.raises(RuntimeError, match="which loads samples, exited with code 7"):
        prepare_quietly(Deadly(SOME), tmp_path)


def test_a_sample_that_cannot_be_stored_stops_the_preparation(tmp_path):
    samples = [*range(20), threading.Lock()]
    with pytest.raises(ValueError, match="sample 20: value is a lock, which has no bytes of its own"):
        prepare_quietly(samples, tmp_path)


@pytest.mark.parametrize(
    ("source", "on_error", "error", "message"),
    [
        (Preparer(), "skip", DatasetError, "on_error='skip' is for datasets, .*: Preparer yields them, and an error ends it"),
        (Images(), "ignore", LimitError, "on_error='ignore' is unknown. Use 'stop' or 'skip'."),
    ],
)
def test_what_cannot_skip_says_so_before_anything_is_written(tmp_path, source, on_error, error, message):
    with pytest.raises(error, match=message):
        prepare_quietly(source, tmp_path / "out", on_error)
    assert not (tmp_path / "out").exists()
