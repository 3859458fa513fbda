"""The model of an epoch, beside what can be computed by hand; and the choice among settings."""

import math

import pytest

from stocache.loader.choice.choice import candidates, limits_gib, rank, worker_counts
from stocache.loader.choice.model import (
    UNCACHED,
    BatchCosts,
    Costs,
    Forecast,
    Setting,
    WayCosts,
    cached_share,
    predict,
    simulate,
)
from stocache.system.figures import round_digits
from stocache.system.limits import GIB, MIB

FREE = BatchCosts(0.0, 0.0)


def costs_of(samples=100, cores=2, loads_s=(0.01,), uncached=FREE, codec=None, **more):
    """Costs of a dataset whose batches are free unless given."""
    ways = {
        UNCACHED: WayCosts({0: uncached, 1: uncached}),
        None: WayCosts({0: FREE, 1: FREE}, sample_bytes=1000.0, extra_bytes=1.0, fill_s=0.0),
    }
    if codec is not None:
        ways["lz4"] = WayCosts({0: codec, 1: codec}, sample_bytes=500.0, extra_bytes=9.0, fill_s=0.001)
    return Costs(samples=samples, cores=cores, loads_s=loads_s, ways=ways, **more)


def seconds(costs, step_s=0.0, limit=0, workers=0, batch=10):
    return predict(costs, Setting(limit, workers, None, batch), step_s).epoch_s


@pytest.mark.parametrize(("cpu_s", "wait_s", "main_s", "step_s", "workers", "cores", "ends"), [
    ([1] * 5, 0, 0, 0, 1, 4, [1, 2, 3, 4, 5]),  # one batch after another
    ([1] * 6, 0, 0, 0, 2, 2, [1, 1, 2, 2, 3, 3]),
    ([1] * 8, 0, 0, 0, 4, 2, [2, 2, 2, 2, 4, 4, 4, 4]),  # more workers than CPUs are not faster
    ([0] * 8, 1, 0, 0, 4, 1, [1, 1, 1, 1, 2, 2, 2, 2]),  # what waits needs no CPU
    ([1] * 5, 0, 0, 3, 1, 2, [4, 7, 10, 13, 16]),  # a long step hides the batches
    ([1] * 3, 0, 1, 0, 1, 1, [3, 5, 6]),  # the main process needs a CPU, too
    ([10, 1, 1, 1], 0, 0, 0, 2, 2, [10, 10, 11, 11]),  # a slow batch delays those behind it
    ([1] * 20, 0, 0, 5, 1, 1, [1 + 5 * number for number in range(1, 21)]),  # a worker stops if no batch is taken
])  # fmt: skip
def test_an_epoch_is_played_batch_by_batch(cpu_s, wait_s, main_s, step_s, workers, cores, ends):
    count = len(cpu_s)
    assert simulate(cpu_s, [wait_s] * count, [main_s] * count, step_s, workers, cores) == pytest.approx(ends)


def test_the_seconds_of_an_epoch_are_those_of_its_parts():
    assert seconds(costs_of(uncached=BatchCosts(0.001, 0.005)), 0.1) == pytest.approx(100 * 0.011 + 10 * 0.105)
    for samples in (1000, 100_000):
        assert seconds(costs_of(samples), workers=2) == pytest.approx(samples * 0.01 / 2, rel=0.01)
    assert seconds(costs_of(1), workers=2, batch=256) == pytest.approx(0.01)
    uneven = costs_of(1000, loads_s=(0.001, 0.001, 0.001, 0.1))
    assert seconds(uneven) == pytest.approx(1000 * 0.103 / 4)
    assert len({seconds(uneven, workers=3, limit=300_000) for _ in range(3)}) == 1
    times = [seconds(costs_of(1000), limit=int(share * 1000 * 1001)) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert times == pytest.approx([10, 7.5, 5, 2.5, 0], rel=0.01, abs=1e-9)
    costs = costs_of(1000, busy_ratio=1.5)
    assert [costs.contention(workers) for workers in (1, 2, 8)] == [1, 1.5, 1.5]
    assert seconds(costs, workers=2) == pytest.approx(1000 * 0.015 / 2)
    assert predict(costs_of(), Setting(0, 1, None, 10)).wait_share == 1
    assert predict(costs_of(), Setting(0, 2, None, 10), step_s=1.0).wait_share == pytest.approx(0.1 / 10.1, rel=0.1)


def test_the_first_epoch_loads_all_and_fills_and_the_cached_share_counts_what_the_cache_takes_besides():
    costs = costs_of(100, codec=FREE, cold_ratio=2.0, worker_start_s=0.5)
    forecast = predict(costs, Setting(100 * 509, 1, "lz4", 10))
    assert forecast.first_epoch_s == pytest.approx(100 * (0.02 + 0.001) + 0.5)
    assert forecast.epoch_s == pytest.approx(0, abs=1e-9)
    cases = ((100 * 1001, None, 1), (100 + 50_000, None, 0.5), (99, None, 0), (900 + 25_000, "lz4", 0.5), (GIB, "zstd", 0))
    assert all(cached_share(costs, limit, codec) == share for limit, codec, share in cases)


def test_costs_between_measured_numbers_of_workers_are_in_proportion():
    way = WayCosts({0: FREE, 2: BatchCosts(1.0, 2.0), 4: BatchCosts(2.0, 4.0)})
    assert [way.at(workers) for workers in (1, 2, 3, 64)] == [BatchCosts(part, 2 * part) for part in (1.0, 1.0, 1.5, 2.0)]


def test_of_equally_fast_settings_the_cheaper_comes_first():
    def forecast(workers, epoch_s, codec=None):
        return Forecast(Setting(1, workers, codec, 32), 1.0, epoch_s, epoch_s, 0.0, 1)

    fast, cheap, dear, slow = forecast(4, 1.0), forecast(1, 1.015), forecast(0, 1.0, "lz4"), forecast(0, 1.5)
    assert rank([fast, slow, dear, cheap], 5) == [cheap, fast, dear, slow]
    assert rank([fast, slow], 1) == [fast]


def test_limits_hold_all_samples_or_what_the_machine_gives_in_three_digits():
    costs = costs_of(10**6)
    assert all(limit * GIB <= 100 * MIB for limit in limits_gib(costs, None, 100 * MIB))
    assert limits_gib(costs, None, 0) == limits_gib(costs, "zstd", GIB) == []  # no room; not measured
    for samples in (1, 100, 1000, 10**4, 10**6):
        costs = costs_of(samples)
        shares = [cached_share(costs, int(limit * GIB), None) for limit in limits_gib(costs, None, 100 * GIB)]
        assert shares[-1] == 1
        assert all(share < 1 for share in shares[:-1])
    for gib in (0.000123456, 0.0999, 0.1, 1.0, 123.456, 1000):
        assert gib * 0.99 <= round_digits(gib, 3, up=False) <= gib <= round_digits(gib, 3, up=True) <= gib * 1.01
        assert float(f"{round_digits(gib, 3, up=True):.3g}") == round_digits(gib, 3, up=True)


def test_no_candidate_has_more_workers_than_processors_or_more_memory_than_there_is():
    assert [worker_counts(costs_of(cores=cores, cpu_share=0.1)) for cores in (1, 2, 6)] == [[0, 1], [0, 1, 2], [0, 1, 2, 4, 6]]
    costs = costs_of(10**6, codec=FREE)
    settings = candidates(costs, (32, 64), 100 * MIB)
    assert {setting.codec for setting in settings} == {None, "lz4"}
    assert max(setting.limit_bytes for setting in settings) <= 100 * MIB
    assert {setting.batch_size for setting in settings} == {32, 64}
    assert {setting.workers for setting in settings} == {0, 1, 2}
    assert all(math.isfinite(predict(costs, each).epoch_s) for each in settings[:40])
