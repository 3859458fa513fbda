"""Percentiles from logarithmic buckets are those of the durations, within 1.6 %."""

import numpy as np
import pytest

from stocache.timing.histogram import BOUNDS_S, BUCKETS, Distribution, bucket_of, count_all


def counted(durations_ns):
    counts = np.zeros(BUCKETS, np.int64)
    for duration_ns in durations_ns:
        counts[bucket_of(int(duration_ns))] += 1
    return counts


@pytest.mark.parametrize("draw", ["lognormal", "pareto", "two values", "one value", "uniform"])
def test_percentiles_are_exact_within_1_6_percent(draw):
    rng = np.random.default_rng(0)
    seconds = {
        "lognormal": rng.lognormal(-7, 2, 5000),
        "pareto": 1e-5 * (1 + rng.pareto(1.1, 5000)),
        "two values": np.where(rng.random(5000) < 0.9, 0.5e-3, 10e-3),
        "one value": np.full(1, 0.123),
        "uniform": rng.uniform(1e-6, 1e-3, 5000),
    }[draw]
    durations_ns = (seconds * 1e9).astype(np.int64)
    found = Distribution.of(counted(durations_ns), int(durations_ns.sum()))
    assert found.count == len(seconds)
    assert found.mean_s == pytest.approx(durations_ns.mean() / 1e9)
    for share, value in ((50, found.p50_s), (95, found.p95_s), (99, found.p99_s), (100, found.max_s)):
        assert value == pytest.approx(np.percentile(durations_ns, share, method="inverted_cdf") / 1e9, rel=0.016)


def test_many_durations_are_counted_as_one_by_one():
    durations_s = np.random.default_rng(1).lognormal(-8, 4, 2000)
    many = np.zeros(BUCKETS, np.int64)
    count_all(many, durations_s * 1e9)
    assert np.array_equal(many, counted(int(1e9 * duration_s) for duration_s in durations_s))


@pytest.mark.parametrize(
    ("duration_ns", "bucket"),
    [(0, 0), (-5, 0), (256, 0), (2**42 - 1, BUCKETS - 1), (10**15, BUCKETS - 1), (10**30, BUCKETS - 1)],
)
def test_what_is_too_short_or_too_long_is_in_the_outermost_buckets(duration_ns, bucket):
    assert bucket_of(duration_ns) == bucket


def test_bounds_are_those_of_the_buckets():
    bounds_ns = np.rint(1e9 * BOUNDS_S).astype(int).tolist()
    assert [bucket_of(bound - 1) for bound in bounds_ns] == list(range(BUCKETS))
    assert [bucket_of(bound) for bound in bounds_ns[:-1]] == list(range(1, BUCKETS))


def test_nothing_counted_is_a_distribution_of_zeros():
    assert Distribution.of(np.zeros(BUCKETS, np.int64), 0) == Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
