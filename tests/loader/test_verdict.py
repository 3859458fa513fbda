"""The verdict names the part that was the limit, and what would remove it; from the parts of an epoch."""

import re
from dataclasses import replace

import numpy as np
import pytest

from stocache.observe.recording import record
from stocache.observe.verdict import CacheFacts, EpochFacts, LoaderEpochStats, judge
from stocache.system.limits import GIB

CACHE = CacheFacts(0, 500, 1000, sample_bytes=2_000_000, room_bytes=8 * GIB, disk=False)
room = lambda gib, **more: replace(CACHE, room_bytes=int(gib * GIB), **more)


def facts(
    load_s=(), make_s=0.0, collate_s=0.0, hand_over_s=0.0, waited_s=4.0, seconds=10.0, cpu=1.0, looks=0, held=0, **others
):
    """An epoch of 1000 samples in 50 batches, made by two workers."""
    rows = np.zeros((5, record.TIMING_ROW_WORDS), np.int64)
    row = record.TimingRow(memoryview(rows[1]).cast("B").cast("Q"))
    row.add_loads(load_s)
    for word, value_s in ((record.MAKE_NS, make_s), (record.COLLATE_NS, collate_s), (record.HAND_OVER_NS, hand_over_s)):
        rows[1, word] += int(1e9 * value_s)
    work_s = sum(load_s) + make_s + collate_s + hand_over_s
    rows[1, record.SEEN_BUSY_NS], rows[1, record.CPU_NS] = int(1e9 * work_s), int(1e9 * cpu * work_s)
    rows[0, record.LOOKS], rows[0, record.HELD] = looks, held
    counted = record.Counted(rows)
    figures = {name: others.pop(name) for name in ("batches", "samples", "outside") if name in others}
    figures = {"batches": 50, "samples": 1000, "load": counted.distribution(record.LOAD_NS)} | figures
    known = {"workers": 2, "threads": False, "starts_workers": True, "persistent": False, "buffers": 10, "cores": 2} | others
    cache = known.pop("cache", CACHE)
    known |= {"counted": counted, "cache": None if cache is None else lambda: cache}
    steps_s = seconds - waited_s if (steps_s := known.pop("steps_s", None)) is None else steps_s
    stats = LoaderEpochStats(0, seconds=seconds, waited_s=waited_s, steps_s=steps_s, **figures)
    return stats, EpochFacts(**{"first_wait_s": 0.1} | known)


threads = lambda cpu=0.5, looks=0, held=0, **others: facts(make_s=8.0, cpu=cpu, threads=True, looks=looks, held=held, **others)
HALF = (0.03,) * 500
UNEVEN = (0.001,) * 400 + (0.5,) * 8


@pytest.mark.linux
@pytest.mark.parametrize(("epoch", "limit", "says"), [
    (facts(HALF), "source", "loading 500 uncached samples of 30 ms each is the limit; size_limit_gib=1.9 would remove it"),
    (facts(HALF, cache=replace(CACHE, fills=400)), "cold cache", "which filled the cache; the next epoch finds 50% of"),
    (facts(HALF, cache=room(1.5)), "source",
     "all samples need 1.9 GiB; size_limit_gib=1.5, all that fits, would remove it; disk= keeps the rest"),
    (facts(HALF, cache=replace(CACHE, sample_bytes=0)), "source", "the limit, and the cache takes none of them"),
    (facts(HALF, make_s=13.0), "source", "size_limit_gib=1.9 would cut it to 8%"),
    (facts((0.01,) * 900, cache=replace(CACHE, filled=1000)), "source", "loaded to compare them with the cache$"),
    (facts(make_s=16.0), "transform", "transforming 1000 cached samples, 16 ms each, is the limit; only cheaper transforms"),
    (facts(make_s=16.0, cpu=0.05), "transform", "each, is the limit; num_workers=3 would remove it"),
    (facts(make_s=16.0, cores=8), "workers", "2 workers are too few for batches of 320 ms each; num_workers=3 would"),
    (facts(make_s=4.0, workers=0), "workers", "makes the batches itself, 80 ms each; num_workers=1 would remove"),
    (facts(make_s=16.0, cache=None), "source", "1000 samples of 16 ms each is the limit; stocache.advise.dataset. measures"),
    (facts(make_s=0.02, cache=None), "source", "1000 samples of 20 µs each is the limit$"),  # a hit costs as much
    (facts(make_s=1.0, collate_s=16.0), "collate", "collating 50 batches of 320 ms each is the limit; only cheaper"),
    (facts(make_s=1.0, hand_over_s=16.0), "hand-over", "handing over 50 batches of 320 ms each is the limit"),
    (facts(hand_over_s=16.0, outside=45), "ring", "45 of 50 batches found the ring full, with 10 buffers for each"),
    (threads(looks=9, held=9), "GIL", "hold the GIL 100% of the time.*'multiprocessing' would"),
    (threads(0.55), "GIL", "wait for the GIL, so one works at a time"),
    (threads(0.55, batches=5000), "transform", "each, is the limit"),  # waits too short to look
    (threads(0.9, looks=9, held=1), "transform", "each, is the limit"),
    (facts(make_s=0.1, first_wait_s=3.0), "start", "took 3 s; persistent_workers=True would do it once"),
    (facts(make_s=0.1, first_wait_s=3.0, waited_s=3.0, steps_s=1.0), "start", "took 9 s; without workers .* would take 1.1 s"),
    (facts(make_s=3.0, hand_over_s=6.0), "hand-over", "thread' hands over nothing"),
    (facts(make_s=0.1, first_wait_s=7.0, waited_s=7.0, persistent=True), "start", "the next epochs use the same workers"),
    (facts(UNEVEN, cache=room(1)), "stalls", r"some samples take (49|50|51)\d ms, half of them at most 1(.0\d)? ms, and"),
])  # fmt: skip
def test_the_largest_part_is_the_limit_unless_the_cause_lies_elsewhere(epoch, limit, says):
    verdict = judge(*epoch)
    assert (verdict.limit, str(verdict)) == (limit, verdict.text)
    assert re.search(says, verdict.text), verdict.text
    assert re.match(r"the trainer waited \d+% of the time \(\d[\d.]* m?s of \d[\d.]* s\); .*\Z", verdict.text)


@pytest.mark.parametrize("epoch", [
    facts(make_s=0.016, workers=0, waited_s=0.016, seconds=0.02, batches=4),  # shorter than the start of a worker
    facts(make_s=8.0, workers=0, waited_s=8.0, cpu_s=20.0),  # the steps keep all CPUs busy
    facts(make_s=16.0, cores=2, waited_s=9.0),  # as many workers as CPUs
    facts(make_s=16.0, workers=10, cores=4, waited_s=9.0, cpu=0.4),  # they mostly wait, and keep the CPUs busy
    facts(make_s=16.0, workers=1, cores=2, waited_s=9.0, steps_s=0.5, first_wait_s=8.0),  # workers start for long
])  # fmt: skip
@pytest.mark.parametrize("cache", [None, CACHE])
def test_workers_are_suggested_only_if_they_are_sure_to_help(epoch, cache):
    stats, known = epoch
    found = str(judge(stats, replace(known, cache=None if cache is None else lambda: cache)))
    assert not re.search(r"num_workers=[1-9]", found), found


def test_nothing_is_said_where_nothing_waits():
    too_short = facts(make_s=0.01, waited_s=0.009, seconds=0.01)  # to tell
    for epoch in (facts(make_s=16.0, waited_s=0.4), too_short, facts(batches=0, samples=0), facts(seconds=0.0, waited_s=0.0)):
        assert judge(*epoch) is None
    for cache in (None, CACHE):  # workers without shared memory record nothing
        assert judge(*facts(samples=0, cache=cache)) is not None
