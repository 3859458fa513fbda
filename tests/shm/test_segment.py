"""Segments of shared memory, and the claims of many samples at once: who has them, and that they end with their process."""

import errno
import os

import numpy as np
import pytest

from stocache import SegmentError, SharedCache
from stocache.shm import extents, layout
from stocache.shm.segment import Segment
from stocache.system import limits
from stocache.system.limits import GIB, MIB
from tests.support.faults import nothing_attached
from tests.support.processes import in_child


@pytest.fixture(params=["/dev/shm", "memfd"])
def segment(request, monkeypatch):
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "never")
    monkeypatch.setattr(limits, "shm_room", lambda: 0 if request.param == "memfd" else GIB)
    segment = Segment.create(100, 5 * MIB)
    assert segment.backing == request.param
    return segment


def reserve(segment, start, stop):
    with segment.guard:
        return segment.extents.reserve(start, stop)


@pytest.mark.parametrize("most", [3, None])
def test_buffers_are_written_one_behind_the_other_however_much_the_kernel_takes_at_once(segment, most, monkeypatch):
    rest = [np.ones(2, complex), b"", bytes(range(7))] * (10 if most else 1000)
    buffers = [b"head", np.arange(60.0).reshape(3, 20), *rest, bytearray(5), b""]
    wanted, written = b"".join(buffers), os.pwritev

    def some(fd, given, at):
        assert len(given) <= os.sysconf("SC_IOV_MAX")
        return os.pwrite(fd, b"".join(given)[:most], at) if most else written(fd, given, at)

    monkeypatch.setattr(os, "pwritev", some)
    reserve(segment, 0, MIB)
    segment.write_all(5, buffers, len(wanted))
    assert bytes(segment.view(0, len(wanted) + 105)) == bytes(5) + wanted + bytes(100)
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with pytest.raises(SegmentError, match="takes no more bytes"):
        segment.write_all(0, [b"abcd"], 4)


def test_no_memory_refuses_the_extent_and_gives_back_what_it_got(segment, monkeypatch, caplog):
    def full(fd, offset, length):
        os.pwrite(fd, b"x" * 4096, offset)  # as glibc may leave it behind
        raise OSError(errno.ENOSPC, "No space left on device")

    blocks = os.fstat(segment.fd).st_blocks
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert not reserve(segment, 0, 10)
        assert not reserve(segment, 3 * MIB, 5 * MIB)
    assert os.fstat(segment.fd).st_blocks == blocks
    assert not reserve(segment, 0, 10)  # refused is refused, until clear()
    (record,) = caplog.records
    assert "No space left on device. Samples beyond stay uncached, training goes on." in record.message
    segment.extents.clear()
    assert reserve(segment, 0, 10)


def test_huge_page_populating_is_only_a_wish(monkeypatch):
    """Under the policy "advise" a memfd is populated through its mapping; if the kernel cannot, fallocate does it all."""
    monkeypatch.setattr(limits, "memfd_huge_policy", lambda: "advise")
    segment = Segment.create(0, 4 * MIB)
    assert (segment.backing, segment._huge) == ("memfd", True)
    assert reserve(segment, 0, 4 * MIB)
    monkeypatch.setattr(extents, "_MADV_POPULATE_WRITE", 9999)
    other = Segment.create(0, 4 * MIB)
    assert reserve(other, 0, 4 * MIB)
    assert segment.extents.reserved_bytes == other.extents.reserved_bytes == 4 * MIB


def test_each_process_counts_in_a_row_of_its_own_and_takes_over_that_of_an_ended_one(segment):
    def count():
        segment.counters[0] += 10
        segment.counters[6] += 1

    segment.counters[0] += 1
    for _ in range(3):
        assert in_child(count) == 0
    assert segment.totals()[:7] == [31, 0, 0, 0, 0, 0, 3]
    assert segment.counters[0] == 1
    rows = np.frombuffer(os.pread(segment.fd, layout.EXTENTS_AT - layout.COUNTERS_AT, layout.COUNTERS_AT), np.int64)
    assert rows.reshape(-1, layout.COUNTER_WORDS).any(axis=1).sum() == 2


def test_attaching_to_what_is_gone_or_of_another_format_is_a_clear_error(segment):
    function, (key, *handle) = segment.__reduce__()
    assert function(key, *handle) is segment
    with pytest.raises(SegmentError, match=r"its process has closed it"):
        function((key[0], key[1] + 1), *handle)
    with pytest.raises(SegmentError, match="The process that pickled it must be alive, on this machine"):
        function((0, 0), "/proc/self/fd/99999", *handle[1:])
    os.pwrite(segment.fd, b"stocache\x63", 0)
    with nothing_attached(), pytest.raises(SegmentError, match="format version 99, this stocache reads version 4"):
        function(key, *handle)


def test_a_forked_child_has_not_the_claims_of_its_parent_and_respects_them():
    def check():
        assert not claims.run_unwritten(lambda: None)
        claims.to_write(np.array([3, 4, 5]), taken := set())
        assert taken == {5}
        claims._words[[3, 4]] = 0  # as when the parent has written them
        claims.end_writing(taken)
        assert claims.run_unwritten(lambda: None)

    with SharedCache(1, 50, (4,)) as cache:
        claims = cache._claims
        claims.to_write(np.array([3, 4]), set())
        assert in_child(check) == 0
