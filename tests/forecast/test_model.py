"""The model of an epoch, beside what can be computed by hand."""

import math

import pytest

from stocache.forecast.choice import candidates, limits_gib, rank, round_down, round_up, worker_counts
from stocache.forecast.costs import UNCACHED, BatchCosts, Costs, WayCosts
from stocache.forecast.model import Forecast, Setting, cached_share, play, predict
from stocache.system.limits import GIB, MIB

FREE = BatchCosts(0.0, 0.0)


def costs_of(samples=100, cores=2, loads_s=(0.01,), cached=FREE, uncached=FREE, codec=None, **more):
    """Costs of a dataset whose batches are free unless told."""
    ways = {
        UNCACHED: WayCosts({0: uncached, 1: uncached}),
        None: WayCosts({0: cached, 1: cached}, sample_bytes=1000.0, extra_bytes=1.0, fill_s=0.0),
    }
    if codec is not None:
        ways["lz4"] = WayCosts({0: codec, 1: codec}, sample_bytes=500.0, extra_bytes=9.0, fill_s=0.001)
    return Costs(samples=samples, cores=cores, loads_s=loads_s, ways=ways, **more)


def seconds(costs, step_s=0.0, *, limit=0, workers=0, codec=None, batch=10):
    return predict(costs, Setting(limit, workers, codec, batch), step_s).epoch_s


def test_one_worker_makes_one_batch_after_another():
    assert play([1.0] * 5, [0.0] * 5, [0.0] * 5, 0.0, 1, 4) == pytest.approx([1, 2, 3, 4, 5])


def test_two_workers_on_two_processors_make_two_batches_at_a_time():
    assert play([1.0] * 6, [0.0] * 6, [0.0] * 6, 0.0, 2, 2) == pytest.approx([1, 1, 2, 2, 3, 3])


def test_more_workers_than_processors_are_not_faster():
    assert play([1.0] * 8, [0.0] * 8, [0.0] * 8, 0.0, 4, 2)[-1] == pytest.approx(4)


def test_workers_that_wait_need_no_processor():
    assert play([0.0] * 8, [1.0] * 8, [0.0] * 8, 0.0, 4, 1)[-1] == pytest.approx(2)


def test_a_step_longer_than_a_batch_hides_the_batches():
    ends = play([1.0] * 5, [0.0] * 5, [0.0] * 5, 3.0, 1, 2)
    assert ends[-1] == pytest.approx(1 + 5 * 3)


def test_the_main_process_needs_a_processor_too():
    assert play([1.0] * 100, [0.0] * 100, [1.0] * 100, 0.0, 1, 1)[-1] == pytest.approx(200, rel=0.01)


def test_a_slow_batch_delays_those_behind_it():
    ends = play([10.0, 1.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4, 0.0, 2, 2)
    assert min(ends) == pytest.approx(10)


def test_a_worker_stops_when_its_batches_are_not_taken():
    ends = play([1.0] * 20, [0.0] * 20, [0.0] * 20, 5.0, 1, 1, prefetch_factor=2)
    assert ends == pytest.approx([1 + 5 * number for number in range(1, 21)])


def test_without_workers_an_epoch_is_the_sum_of_its_parts():
    costs = costs_of(uncached=BatchCosts(0.001, 0.005))
    assert seconds(costs, 0.1) == pytest.approx(100 * (0.01 + 0.001) + 10 * (0.005 + 0.1))


@pytest.mark.parametrize("samples", [1000, 100_000])
def test_an_epoch_grows_with_the_samples(samples):
    assert seconds(costs_of(samples), workers=2) == pytest.approx(samples * 0.01 / 2, rel=0.01)


def test_time_falls_in_a_straight_line_with_the_cached_share():
    costs = costs_of(1000)
    times = [seconds(costs, limit=int(share * 1000 * 1001)) for share in (0, 0.25, 0.5, 0.75)]
    assert times == pytest.approx([10, 7.5, 5, 2.5], rel=0.01)
    assert seconds(costs, limit=1000 * 1001) == pytest.approx(0, abs=1e-9)


def test_the_loads_of_an_epoch_have_the_mean_of_those_that_were_measured():
    costs = costs_of(1000, loads_s=(0.001, 0.001, 0.001, 0.1))
    assert seconds(costs) == pytest.approx(1000 * 0.103 / 4)


def test_a_prediction_is_the_same_each_time():
    costs = costs_of(1000, loads_s=(0.001, 0.002, 0.1))
    assert len({seconds(costs, workers=3, limit=300_000) for _ in range(3)}) == 1


def test_contention_counts_from_the_second_worker_on():
    costs = costs_of(1000, busy_ratio=1.5)
    assert costs.contention(1) == 1
    assert costs.contention(2) == costs.contention(8) == 1.5
    assert seconds(costs, workers=2) == pytest.approx(1000 * 0.015 / 2)


def test_the_first_epoch_loads_all_and_fills():
    costs = costs_of(100, codec=FREE, cold_ratio=2.0, worker_start_s=0.5)
    forecast = predict(costs, Setting(100 * 509, 1, "lz4", 10))
    assert forecast.first_epoch_s == pytest.approx(100 * (0.02 + 0.001) + 0.5)
    assert forecast.epoch_s == pytest.approx(0, abs=1e-9)


def test_the_share_that_is_cached_counts_what_the_cache_takes_besides():
    costs = costs_of(100, codec=FREE)
    assert cached_share(costs, 100 * 1001, None) == 1
    assert cached_share(costs, 100 + 50_000, None) == 0.5
    assert cached_share(costs, 99, None) == 0
    assert cached_share(costs, 900 + 25_000, "lz4") == 0.5


def test_the_share_of_waiting_lies_between_0_and_1():
    costs = costs_of(100)
    assert predict(costs, Setting(0, 1, None, 10)).wait_share == 1
    bound = predict(costs, Setting(0, 2, None, 10), step_s=1.0)
    assert bound.wait_share == pytest.approx(0.1 / 10.1, rel=0.1)


def test_a_dataset_of_one_sample_has_an_epoch():
    assert seconds(costs_of(1), workers=2, batch=256) == pytest.approx(0.01)


def test_costs_between_measured_numbers_of_workers_are_in_proportion():
    way = WayCosts({0: FREE, 2: BatchCosts(1.0, 2.0), 4: BatchCosts(2.0, 4.0)})
    assert way.at(3) == BatchCosts(1.5, 3.0)
    assert way.at(1) == way.at(2) == BatchCosts(1.0, 2.0)
    assert way.at(64) == BatchCosts(2.0, 4.0)


def test_of_equally_fast_settings_the_cheaper_comes_first():
    def forecast(workers, epoch_s, codec=None, memory=1):
        return Forecast(Setting(1, workers, codec, 32), 1.0, epoch_s, epoch_s, 0.0, memory)

    fast, cheap, dear, slow = forecast(4, 1.0), forecast(1, 1.015), forecast(0, 1.0, "lz4"), forecast(0, 1.5)
    assert rank([fast, slow, dear, cheap], 5) == [cheap, fast, dear, slow]
    assert rank([fast, slow], 1) == [fast]


def test_limits_hold_all_samples_or_what_the_machine_gives():
    costs = costs_of(10**6)
    assert limits_gib(costs, None, 100 * GIB)[-1] * GIB >= 10**6 * 1001
    assert all(limit * GIB <= 100 * MIB for limit in limits_gib(costs, None, 100 * MIB))
    assert limits_gib(costs, None, 0) == []
    assert limits_gib(costs, "zstd", GIB) == []  # not measured


def test_one_limit_holds_all_samples_however_small_they_are():
    for samples in (1, 100, 1000, 10**4, 10**6):
        costs = costs_of(samples)
        shares = [cached_share(costs, int(limit * GIB), None) for limit in limits_gib(costs, None, 100 * GIB)]
        assert shares[-1] == 1
        assert all(share < 1 for share in shares[:-1])


@pytest.mark.parametrize("gib", [0.000123456, 0.0999, 0.1, 1.0, 123.456, 1000])
def test_limits_are_rounded_to_three_digits(gib):
    assert gib <= round_up(gib) <= gib * 1.01
    assert gib * 0.99 <= round_down(gib) <= gib
    assert float(f"{round_up(gib):.3g}") == round_up(gib)


def test_waiting_loads_are_worth_more_workers_than_processors():
    assert worker_counts(costs_of(cores=6)) == [0, 1, 2, 4, 6]
    assert worker_counts(costs_of(cores=2, cpu_share=0.1)) == [0, 1, 2, 4, 8]


def test_no_candidate_needs_more_memory_than_there_is():
    settings = candidates(costs_of(10**6, codec=FREE), (32, 64), 100 * MIB)
    assert {setting.codec for setting in settings} == {None, "lz4"}
    assert max(setting.limit_bytes for setting in settings) <= 100 * MIB
    assert {setting.batch_size for setting in settings} == {32, 64}
    assert all(math.isfinite(predict(costs_of(10**6, codec=FREE), each).epoch_s) for each in settings[:40])
