import errno
import multiprocessing
import os
import pickle

import numpy as np
import pytest

from stocache import SegmentError
from stocache.shm import layout
from stocache.shm import segment as segment_module
from stocache.shm.layout import Layout
from stocache.shm.segment import Segment
from stocache.system import limits
from stocache.system.limits import GIB, MIB, Memory
from tests.support.faults import no_shared_memory, nothing_attached


@pytest.fixture(params=["/dev/shm", "memfd"])
def segment(request, monkeypatch):
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "never")
    monkeypatch.setattr(limits, "shm_room", lambda: 0 if request.param == "memfd" else GIB)
    segment = Segment.create(100, 5 * MIB)
    assert segment.backing == request.param
    return segment


def free_lock(segment: Segment, number: int) -> bool:
    """Whether another process could take the lock; asked in a child, since locks are per process."""
    pid = os.fork()
    if pid == 0:
        with segment.guard:
            os._exit(not segment.try_lock(number))
    return os.waitpid(pid, 0)[1] == 0


def test_memory_is_taken_extent_by_extent(segment):
    def used():
        return os.fstat(segment.fd).st_blocks * 512

    before = used()
    assert before < 256 * 1024
    assert segment.reserved_bytes == 0
    with segment.guard:
        assert segment.reserve(3 * MIB, 3 * MIB + 1)
    assert used() - before == segment.reserved_bytes == segment.extent_bytes == 2 * MIB
    with segment.guard:
        assert segment.reserve(0, 5 * MIB)
    assert used() - before == segment.reserved_bytes == 5 * MIB


def test_what_is_written_is_what_the_mapping_shows(segment):
    with segment.guard:
        segment.reserve(MIB, 3 * MIB)
    segment.write(2 * MIB - 2, b"abcd", 4)
    assert bytes(segment.tensor(2 * MIB - 2, 4).tolist()) == b"abcd"
    assert segment.tensor(0, 0).shape == (0,)
    segment.control[99] = 7
    segment.clear()
    assert segment.tensor(2 * MIB - 2, 4).sum() == 0
    assert segment.control[99] == 7


@pytest.mark.parametrize("most", [1, 3, 1000, None])
def test_buffers_are_written_one_behind_the_other_however_much_the_kernel_takes_at_once(segment, most, monkeypatch):
    rest = [np.ones(2, complex), b"", bytes(range(7))] * (10 if most else 1000)
    buffers = [b"head", np.arange(60.0).reshape(3, 20), *rest, bytearray(5), b""]
    wanted, written = b"".join(buffers), os.pwritev

    def some(fd, given, at):
        assert len(given) <= os.sysconf("SC_IOV_MAX")
        return os.pwrite(fd, b"".join(given)[:most], at) if most else written(fd, given, at)

    monkeypatch.setattr(os, "pwritev", some)
    with segment.guard:
        segment.reserve(0, MIB)
    segment.write_all(5, buffers, len(wanted))
    assert bytes(segment.view(0, len(wanted) + 105)) == bytes(5) + wanted + bytes(100)


def test_memory_that_takes_no_more_bytes_is_an_error(segment, monkeypatch):
    with segment.guard:
        segment.reserve(0, 100)
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with pytest.raises(SegmentError, match="takes no more bytes"):
        segment.write_all(0, [b"abcd"], 4)


def test_a_tensor_keeps_the_memory_when_the_segment_is_gone():
    segment = Segment.create(100, 5 * MIB)
    with segment.guard:
        segment.reserve(0, 4)
    segment.write(0, b"abcd", 4)
    tensor = segment.tensor(0, 4)
    del segment
    assert bytes(tensor.tolist()) == b"abcd"


def test_no_memory_refuses_the_extent_and_gives_back_what_it_got(segment, monkeypatch, caplog):
    def full(fd, offset, length):
        os.pwrite(fd, b"x" * 4096, offset)  # as glibc may leave it behind
        raise OSError(errno.ENOSPC, "No space left on device")

    blocks = os.fstat(segment.fd).st_blocks
    with monkeypatch.context() as patched, segment.guard:
        patched.setattr(os, "posix_fallocate", full)
        assert not segment.reserve(0, 10)
        assert not segment.reserve(3 * MIB, 5 * MIB)
    assert os.fstat(segment.fd).st_blocks == blocks
    with segment.guard:
        assert not segment.reserve(0, 10)  # refused is refused, until clear()
    assert len(caplog.records) == 1
    assert "No space left on device. Samples beyond stay uncached, training goes on." in caplog.text
    segment.clear()
    with segment.guard:
        assert segment.reserve(0, 10)


def test_low_memory_refuses_before_the_kernel_has_to(segment, monkeypatch, caplog):
    monkeypatch.setattr(limits, "memory", lambda: Memory(GIB, 65 * MIB))
    with segment.guard:
        assert not segment.reserve(0, 10)
    assert "65.0 MiB of memory are available, of which 64.0 MiB stay free" in caplog.text


def test_huge_page_populating_is_only_a_wish(monkeypatch):
    """Under the policy "advise" a memfd is populated through its mapping; where the kernel cannot, fallocate does it all."""
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "advise")
    segment = Segment.create(0, 4 * MIB)
    assert segment.backing == "memfd"
    assert segment._huge
    with segment.guard:
        assert segment.reserve(0, 4 * MIB)
    monkeypatch.setattr(segment_module, "_MADV_POPULATE_WRITE", 9999)
    other = Segment.create(0, 4 * MIB)
    with other.guard:
        assert other.reserve(0, 4 * MIB)
    assert segment.reserved_bytes == other.reserved_bytes == 4 * MIB


def test_locks_exclude_other_processes_and_go_with_unlock(segment):
    with segment.guard:
        assert segment.try_lock(5)
    assert not free_lock(segment, 5)
    assert free_lock(segment, 6)
    segment.unlock(5)
    assert free_lock(segment, 5)
    assert segment.run_locked(0, 10, lambda: (free_lock(segment, 9), free_lock(segment, 10)), None) == (False, True)
    assert free_lock(segment, 0)


def test_each_process_counts_in_a_row_of_its_own(segment):
    segment.counters[0] += 1
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            segment.counters[0] += 10
            segment.counters[6] += 1
            os._exit(0)
        os.waitpid(pid, 0)
    assert segment.totals()[:7] == [31, 0, 0, 0, 0, 0, 3]
    assert segment.counters[0] == 1


def test_rows_of_ended_processes_are_taken_over(segment):
    before = len(segment_rows(segment))
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            segment.counters[0] += 1
            os._exit(0)
        os.waitpid(pid, 0)
    assert len(segment_rows(segment)) == before + 1


def segment_rows(segment):
    rows = np.frombuffer(os.pread(segment.fd, layout.EXTENTS_AT - layout.ROWS_AT, layout.ROWS_AT), np.int64)
    rows = rows.reshape(-1, layout.ROW_WORDS)
    return rows[rows.any(axis=1)]


def test_an_unpickled_copy_in_the_same_process_is_the_segment_itself(segment):
    assert pickle.loads(pickle.dumps(segment)) is segment


def attach(connection):
    segment = connection.recv()
    with segment.guard:
        segment.reserve(0, 4)
    segment.write(0, b"abcd", 4)
    segment.control[0] = 1
    connection.send(True)
    connection.recv()


@pytest.mark.slow
def test_a_running_process_attaches_through_proc(segment, start_method):
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe()
    process = context.Process(target=attach, args=(theirs,))
    process.start()
    ours.send(segment)
    assert ours.recv()
    assert bytes(segment.tensor(0, 4).tolist()) == b"abcd"
    assert segment.control[0] == 1
    ours.send(True)
    process.join()
    process.close()
    ours.close()
    theirs.close()


def test_attaching_after_the_owner_let_go_is_a_clear_error(segment):
    function, (key, handle, backing, path) = segment.__reduce__()
    with pytest.raises(SegmentError, match=r"its process has closed it"):
        function((key[0], key[1] + 1), handle, backing, path)
    with pytest.raises(SegmentError, match="The process that pickled it must be alive, on this machine"):
        function((0, 0), "/proc/self/fd/99999", backing, path)


def test_a_file_of_another_format_is_refused(segment):
    function, (key, *handle) = segment.__reduce__()
    os.pwrite(segment.fd, b"stocache\x63", 0)
    with nothing_attached(), pytest.raises(SegmentError, match="format version 99, this stocache reads version 3"):
        function(key, *handle)


def test_without_shared_memory_there_is_control_but_no_data(monkeypatch):
    no_shared_memory(monkeypatch)
    segment = Segment.create(10, 5 * MIB)
    assert (segment.backing, segment.data_bytes, len(segment.control)) == ("none", 0, 10)
    copy = pickle.loads(pickle.dumps(segment))
    assert (copy.backing, len(copy.control)) == ("none", 10)
    segment.counters[0] += 1
    assert segment.totals()[0] == 1


def test_a_segment_that_does_not_fit_its_control_goes_to_the_next_backing(monkeypatch):
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "never")
    monkeypatch.setattr(limits, "shm_room", lambda: GIB)
    real = os.posix_fallocate
    calls = []

    def full_at_first(fd, offset, length):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    assert Segment.create(10, MIB).backing == "memfd"


def test_shm_comes_first_when_it_has_the_room(monkeypatch):
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "never")
    monkeypatch.setattr(limits, "shm_room", lambda: 10 * MIB)
    assert Segment.create(0, 10 * MIB).backing == "/dev/shm"
    assert Segment.create(1, 10 * MIB).backing == "memfd"
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "within_size")
    assert Segment.create(0, 1).backing == "memfd"
    monkeypatch.setattr(limits, "open_memfd", lambda: None)
    assert Segment.create(0, 1).backing == "/dev/shm"


@pytest.mark.parametrize("data", [0, 1, 33, 65536])
def test_extents_have_2_mib_whatever_the_size_of_the_data(data):
    assert Layout.for_sizes(0, data * MIB).extent_bytes == 2 * MIB
