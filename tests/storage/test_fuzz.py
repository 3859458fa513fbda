"""A few of the forged blocks, indices and records of benchmark/fuzz.py, which tries 20,000."""

from benchmark.fuzz import FORGERS, trials


def test_what_is_forged_is_read_or_refused_without_harm():
    counts, failures, _ = trials(300, 1_000_000)
    assert failures == []
    assert counts.total() == 300
    assert {name for name, _ in counts} == {forger.__name__ for forger in FORGERS}
