"""The verdict names the part that was the limit, and what would remove it; from the parts of an epoch, and of real loops."""

import re
from dataclasses import replace

import numpy as np
import pytest

from stocache.diagnosis.verdict import CacheFacts, EpochFacts, judge
from stocache.system.limits import GIB
from stocache.timing.histogram import BUCKETS
from stocache.timing.record import (
    COLLATE_NS,
    CPU_NS,
    HAND_OVER_NS,
    HELD,
    LOOKS,
    MAKE_NS,
    ROW_WORDS,
    SEEN_BUSY_NS,
    Counted,
    Row,
)
from tests.support.bottlenecks import BOTTLENECKS

CACHE = CacheFacts(
    fills=0, filled=500, dataset_len=1000, sample_bytes=2_000_000, overhead_bytes=32_000, room_bytes=8 * GIB, disk=False
)


def facts(
    load_s=(), make_s=0.0, collate_s=0.0, hand_over_s=0.0, waited_s=4.0, seconds=10.0, cpu=1.0, looks=0, held=0, **others
):
    """An epoch of 1000 samples in 50 batches, made by two workers."""
    rows = np.zeros((5, ROW_WORDS), np.int64)
    row = Row(memoryview(rows[1]).cast("B").cast("Q"))
    row.add_loads(load_s)
    for word, value_s in ((MAKE_NS, make_s), (COLLATE_NS, collate_s), (HAND_OVER_NS, hand_over_s)):
        rows[1, word] += int(1e9 * value_s)
    work_s = sum(load_s) + make_s + collate_s + hand_over_s
    rows[1, SEEN_BUSY_NS], rows[1, CPU_NS] = int(1e9 * work_s), int(1e9 * cpu * work_s)
    rows[0, LOOKS], rows[0, HELD] = looks, held
    known = {
        "counted": Counted(rows), "seconds": seconds, "waited_s": waited_s, "first_wait_s": 0.1, "batches": 50, "samples": 1000,
        "misses": len(load_s), "workers": 2, "threads": False, "starts_workers": True, "persistent": False, "outside": 0,
        "buffers": 10, "cores": 2, "cache": CACHE,
    }  # fmt: skip
    known |= others
    cache = known["cache"]
    return EpochFacts(**known | {"cache": None if cache is None else lambda: cache})


HALF = (0.03,) * 500


@pytest.mark.parametrize(
    ("epoch", "limit", "says"),
    [
        (facts(HALF), "source", "loading 500 uncached samples of 30 ms each is the limit; size_limit_gib=1.9 would remove it"),
        (facts(HALF, cache=replace(CACHE, fills=400)), "cold cache", "which filled the cache; the next epoch finds 50% of"),
        (
            facts(HALF, cache=replace(CACHE, room_bytes=int(1.5 * GIB))),
            "source",
            "all samples need 1.9 GiB; size_limit_gib=1.5, all that there is, would remove it; disk= keeps the rest",
        ),
        (
            facts(HALF, cache=replace(CACHE, room_bytes=int(1.0 * GIB), disk=True), waited_s=8.0),
            "source",
            r"size_limit_gib=1, all that there is, would cut it to 71%$",
        ),
        (facts(HALF, cache=replace(CACHE, sample_bytes=0)), "source", "the limit, and the cache takes none of them"),
        (facts(HALF, make_s=5.0, waited_s=9.99), "source", "size_limit_gib=1.9 would make the epoch 4 times as fast"),
        (facts(HALF, make_s=13.0), "source", "size_limit_gib=1.9 would cut it to 8%"),
        (facts(make_s=16.0), "transform", "transforming 1000 cached samples, 16 ms each, is the limit; do what is the same"),
        (facts(make_s=16.0, cpu=0.05), "transform", "each, is the limit; num_workers=3 would remove it"),
        (
            facts(make_s=16.0, cores=8),
            "workers",
            "2 workers are too few for batches of 320 ms each; num_workers=3 would remove",
        ),
        (facts(make_s=16.0, cores=8, seconds=80, waited_s=79), "workers", "num_workers=8 would cut it to 50%"),
        (
            facts(make_s=4.0, workers=0),
            "workers",
            "this process makes the batches itself, 80 ms each; num_workers=1 would remove",
        ),
        (
            facts(make_s=16.0, cache=None),
            "source",
            "making 1000 uncached samples of 16 ms each is the limit; CachedDataset would",
        ),
        (facts(make_s=16.0, cache=None, cores=8), "workers", "num_workers=3 would remove it"),
        (
            facts(make_s=1.0, collate_s=16.0),
            "collate",
            "collating 50 batches of 320 ms each is the limit; only cheaper batches",
        ),
        (facts(make_s=1.0, collate_s=16.0, cores=8), "collate", "num_workers=3 would remove it"),
        (facts(make_s=1.0, hand_over_s=16.0), "hand-over", "handing over 50 batches of 320 ms each is the limit"),
        (
            facts(make_s=1.0, hand_over_s=16.0, outside=45),
            "ring",
            "45 of 50 batches found the ring full, with 10 buffers for each",
        ),
        (
            facts(make_s=8.0, cpu=0.5, threads=True, looks=9, held=9),
            "GIL",
            "hold the GIL 100% of the time.*'multiprocessing' would",
        ),
        (facts(make_s=8.0, cpu=0.5, threads=True, looks=1, held=1), "GIL", "let 2 work at once"),
        (facts(make_s=8.0, cpu=0.55, threads=True), "GIL", "wait for each other's GIL, so one works at a time"),
        (
            facts(make_s=8.0, cpu=0.55, threads=True, looks=2, held=0),
            "GIL",
            "wait for each other's GIL, so one works at a time",
        ),
        (facts(make_s=8.0, cpu=0.55, threads=True, looks=2, held=0, batches=4), "transform", "each, is the limit"),
        (facts(make_s=8.0, cpu=0.55, threads=True, batches=5000), "transform", "each, is the limit"),  # waits too short to look
        (facts(make_s=8.0, cpu=0.1, threads=True, looks=1, held=1), "transform", "each, is the limit"),
        (facts(make_s=8.0, cpu=0.9, threads=True, looks=9, held=1), "transform", "each, is the limit"),
        (
            facts(make_s=0.1, first_wait_s=3.0),
            "start",
            "starting the workers took 3 s; persistent_workers=True would do it once",
        ),
        (facts(make_s=0.1, first_wait_s=3.0, persistent=True), "start", "the next epochs use the same workers"),
        (
            facts((0.001,) * 400 + (0.5,) * 8, cache=replace(CACHE, room_bytes=GIB)),
            "stalls",
            "some samples take (49|50|51)\\d ms, half of them at most 1 ms, and",
        ),
    ],
)
def test_the_largest_part_is_the_limit_unless_the_cause_lies_elsewhere(epoch, limit, says):
    verdict = judge(epoch)
    assert (verdict.limit, str(verdict)) == (limit, verdict.text)
    assert re.search(says, verdict.text), verdict.text
    assert re.match(r"the trainer waited \d+% of the time \(\d[\d.]* s of \d[\d.]* s\); ", verdict.text)
    assert "\n" not in verdict.text


@pytest.mark.parametrize(
    "epoch",
    [
        facts(make_s=16.0, waited_s=0.4),
        facts(make_s=16.0, waited_s=0.0),
        facts(make_s=0.01, waited_s=0.009, seconds=0.01),  # too short to tell
        facts(batches=0, samples=0),
        facts(seconds=0.0, waited_s=0.0),
    ],
)
def test_nothing_is_said_where_nothing_waits(epoch):
    assert judge(epoch) is None


def test_an_epoch_of_which_nothing_was_recorded_has_a_verdict_too():
    assert judge(facts(samples=0, cache=None)) is not None  # workers without shared memory record nothing
    assert judge(facts(samples=0)) is not None


@pytest.mark.parametrize("name", ["slow source", "cold cache", "slow collate"])
def test_real_loops_have_the_limit_that_they_were_made_with(name):
    with BOTTLENECKS[name].running() as loader:
        verdict = loader.stats().verdict
    assert verdict is not None
    assert verdict.limit == BOTTLENECKS[name].limit, verdict.text
    assert re.search(BOTTLENECKS[name].says, verdict.text), verdict.text


def test_counts_of_the_rows_have_room_for_all_buckets():
    assert ROW_WORDS == 16 + 4 * BUCKETS
