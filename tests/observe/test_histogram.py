"""Percentiles from logarithmic buckets are the percentiles of the durations, within 1.6 %."""

import numpy as np
import pytest

from stocache.observe.recording.histogram import BOUNDS_S, BUCKETS, EMPTY_DISTRIBUTION, Distribution, bucket_of, count_all

rng = np.random.default_rng(0)


@pytest.mark.parametrize("seconds", [
    rng.lognormal(-8, 4, 2000), np.where(rng.random(5000) < 0.9, 0.5e-3, 10e-3), np.full(1, 0.123),
], ids=["wide, also beyond the buckets", "two values", "one value"])  # fmt: skip
def test_percentiles_are_exact_within_1_6_percent(seconds):
    durations_ns = (seconds * 1e9).astype(np.int64)
    counts, many = np.zeros((2, BUCKETS), np.int64)
    for duration_ns in durations_ns.tolist():
        counts[bucket_of(duration_ns)] += 1
    count_all(many, durations_ns)
    assert np.array_equal(counts, many)
    found = Distribution.of(counts, int(durations_ns.sum()))
    assert found.count == len(seconds)
    assert found.mean_s == pytest.approx(durations_ns.mean() / 1e9)
    exact_s = np.percentile(durations_ns.clip(256, 2**42), (50, 95, 99, 100), method="inverted_cdf") / 1e9
    assert (found.p50_s, found.p95_s, found.p99_s, found.max_s) == pytest.approx(exact_s, rel=0.016)


def test_bounds_are_those_of_the_buckets_and_the_outermost_hold_what_is_beyond():
    bounds_ns = np.rint(1e9 * BOUNDS_S).astype(int).tolist()
    assert [bucket_of(bound - 1) for bound in bounds_ns] == list(range(BUCKETS))
    assert [bucket_of(bound) for bound in bounds_ns[:-1]] == list(range(1, BUCKETS))
    assert (bucket_of(-5), bucket_of(10**30)) == (0, BUCKETS - 1)
    assert Distribution.of(np.zeros(BUCKETS, np.int64), 0) == EMPTY_DISTRIBUTION == Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
