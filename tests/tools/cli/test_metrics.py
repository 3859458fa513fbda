"""What named caches and loaders count, as metrics: their values, how they are served, and the dashboard over them."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from stocache import CachedDataset, DataLoader, DiskCache, SharedCache, SharedCacheDDP
from stocache.observe.recording import record
from stocache.observe.recording.record import TimingRecord
from stocache.tools import cli
from stocache.tools.cli import listing
from tests.support.records import FOLDER, SQUARES, forge, leave_loader_behind

pytest.importorskip("prometheus_client", reason="needs the extra metrics")
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from stocache.tools.cli import metrics

PAGES = Path(cli.__file__).parent
DASHBOARD = json.loads((PAGES / "grafana.json").read_text())
COUNTED = ("_total", "_bucket", "_sum", "_count")
QUANTITIES = {"wait": record.WAIT_NS, "load": record.LOAD_NS, "collate": record.COLLATE_NS, "hand_over": record.HAND_OVER_NS}
OF_CACHE = {f"{name}_total": name for name in ("hits", "misses", "fills", "races", "refused", "rejected", "damaged")} | {
    "load_seconds_total": "load_s", "read_seconds_total": "read_s", "dataset_samples": "dataset_len",
    "capacity_samples": "slots", "filled_samples": "filled", "filled_bytes": "filled_bytes", "capacity_bytes": "capacity_bytes",
}  # fmt: skip


def samples_of(text, parse=parse):
    """The samples of a text by name and labels; each must be there once."""
    found = [sample for family in parse(text) for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(values) == len(found)
    return values


def scrape():
    return samples_of(metrics.text_of())


def values(samples, metric, **labels):
    """The samples of a metric that have these labels, and maybe others."""
    return [number for (name, held), number in samples.items() if name == metric and labels.items() <= dict(held).items()]


def value(samples, metric, **labels):
    (found,) = values(samples, metric, **labels)
    return found


def buckets(samples, metric):
    """The cumulative counts of a histogram by upper bound."""
    found = {float(dict(held)["le"]): number for (name, held), number in samples.items() if name == f"{metric}_bucket"}
    return dict(sorted(found.items()))


WORKERS = [({}, 0), ({"num_workers": 2}, 12), ({"num_workers": 2, "worker_method": "thread"}, 6)]


@pytest.mark.parametrize(("workers", "least"), WORKERS, ids=str)
def test_the_metrics_are_what_the_cache_and_the_loader_say(run, workers, least):
    with CachedDataset(SQUARES, 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, **workers)
        for _ in range(2):
            assert [len(batch) for batch in loader] == [4] * 6
        samples, cache, stats = samples_of(run("metrics").stdout), dataset.cache.stats(), loader.stats()
        for metric, name in OF_CACHE.items():
            assert value(samples, f"stocache_cache_{metric}", name="squares", kind="memory") == getattr(cache, name), metric
        assert value(samples, "stocache_cache_memory_bytes") == os.stat(FOLDER / "squares").st_blocks * 512
        assert (value(samples, "stocache_cache_alive"), value(samples, "stocache_cache_processes")) == (1, 1)

        labels = {"cache": "squares", "loader": f"squares.loader-{os.getpid()}-0", "rank": "0", "pid": str(os.getpid())}
        expected = {"alive": 1, "workers": loader.num_workers, "batches_total": stats.batches, "samples_total": 48}
        assert {name: value(samples, f"stocache_loader_{name}", **labels) for name in expected} == expected
        for name in QUANTITIES:
            metric, quantity = f"stocache_loader_{name}_seconds", getattr(stats, name)
            assert value(samples, f"{metric}_count", **labels) == quantity.count
            assert math.isclose(value(samples, f"{metric}_sum", **labels), quantity.count * quantity.mean_s, rel_tol=1e-9)
        by_worker = values(samples, "stocache_loader_worker_batches_total")
        assert len(by_worker) == loader.num_workers
        assert least <= sum(by_worker) <= (12 if workers else 0)  # the loop may gather what is cached itself
        del loader


def test_words_of_a_record_are_counters_and_buckets_exact_sums_of_its_own():
    kept = TimingRecord(2, False, "c")
    durations = np.exp(np.random.default_rng(7).uniform(math.log(100), math.log(4e12), 500)).astype(int).tolist()
    for number, duration_ns in enumerate(durations):
        kept.row(number % 5).add(record.WAIT_NS, duration_ns)
    for number, word in enumerate((record.MAKE_NS, record.CPU_NS, record.QUEUED_NS)):  # without a histogram
        kept.row(1)._words[word] = (number + 1) * 10**9
    kept.main.add_look(True)
    kept.main.add_look(False)
    samples = scrape()
    names = ("make_seconds", "cpu_seconds", "queued_seconds", "gil_looks", "gil_held")
    assert [value(samples, f"stocache_loader_{name}_total") for name in names] == [1, 2, 3, 2, 1]
    assert value(samples, "stocache_loader_wait_seconds_sum") == sum(durations) / 1e9
    coarse = buckets(samples, "stocache_loader_wait_seconds")
    assert coarse.pop(math.inf) == value(samples, "stocache_loader_wait_seconds_count") == len(durations)
    assert [*coarse.values()] == [sum(duration <= bound * 1e9 for duration in durations) for bound in coarse]
    assert min(coarse) < 1e-5 < 100 < max(coarse)
    assert all(1.9 < after / before < 2.1 for before, after in itertools.pairwise(coarse))
    del kept


def test_caches_that_nobody_uses_on_disk_or_none_at_all_and_dead_loaders(run, tmp_path, clean):
    text = run("metrics").stdout
    assert text.endswith("\n# EOF\n")
    assert samples_of(text) == {("stocache_unreadable_files", frozenset()): 0}
    SharedCacheDDP(0.001, 4, (2,), name="c", persist=True).close()
    leave_loader_behind("c", rank=1)
    samples = scrape()
    assert (value(samples, "stocache_cache_alive"), value(samples, "stocache_cache_processes")) == (0, 0)
    assert (value(samples, "stocache_loader_alive", rank="1"), value(samples, "stocache_loader_wait_seconds_count")) == (0, 1)
    shutil.rmtree(FOLDER)
    with DiskCache(tmp_path / "kept", "1MB", 24):
        kept = [TimingRecord(0, False, os.path.basename(listing.find()[0].path), rank) for rank in range(2)]
        samples = scrape()
        assert value(samples, "stocache_cache_alive", kind="disk", name=str(tmp_path / "kept")) == 1
        assert [value(samples, "stocache_loader_alive", cache=str(tmp_path / "kept"), rank=rank) for rank in "01"] == [1, 1]
        del kept


def test_hostile_files_are_reported_and_hide_no_other(clean):
    forge("c", {"samples": "x"}, size=100)
    forge('c\x1b[2J\n"} 1.loader-1-0')
    forge(os.fsdecode(b"c\xff.loader-1-0"), {"loader": "c", "cache": "c", "rank": 0, "pid": 1})
    identity = {"loader": "c", "cache": '\x1b[2J"} 1\n# EOF\\', "rank": 0, "pid": 1}
    control = (b"\xff" * 8 + b"\xff" * 7 + b"\x7f") * (3 * record.TIMING_ROW_WORDS // 2)
    forge("good.loader-1-0", identity, rows=3, control=control)
    forge("c0.loader-1-0", {"loader": "c", "cache": 7, "rank": 0, "pid": 1})
    forge("c1.loader-1-0", facts={"dataset_len": 0, "capacity": 0, "rows": 10**30})
    for number in range(22):
        forge(f"d.loader-1-{number}", size=0)
    samples = scrape()
    shown = [dict(labels) for name, labels in samples if name == "stocache_unreadable_file_info"]
    assert (value(samples, "stocache_unreadable_files"), len(shown)) == (27, 20)
    for labels in shown:
        assert labels["file"].startswith((f"{FOLDER}/c", f"{FOLDER}/d"))
        assert (bool(labels["problem"]), (labels["file"] + labels["problem"]).isprintable()) == (True, True)
    for problem in ("not the name of one", "its descriptor is not a loader's", "its descriptor says 1000"):
        assert any(problem in labels["problem"] for labels in shown)
    assert samples_of(generate_latest(metrics.registry_of()).decode(), parse_prometheus)
    assert all(0 <= number < math.inf for number in samples.values())
    for name in QUANTITIES:
        coarse = list(buckets(samples, f"stocache_loader_{name}_seconds").values())
        assert (coarse, coarse[-1]) == (sorted(coarse), value(samples, f"stocache_loader_{name}_seconds_count"))
    assert value(samples, "stocache_loader_workers", cache='\\x1b[2J"} 1\\n# EOF\\') == 1


@pytest.fixture(scope="module")
def exported():
    """The labels of every name that a cache, a loader with workers and an unreadable file export."""
    forge("bad", size=0)
    with CachedDataset(SQUARES, 0.001, name="squares"):
        kept = TimingRecord(1, False, "squares")
        samples = scrape()
        del kept
    shutil.rmtree(FOLDER)
    return {name: set(dict(labels)) for name, labels in samples}


def test_every_metric_is_described_exported_and_on_the_page_of_commands(exported):
    suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
    described = {f"{metric.name}{suffix}" for metric in metrics.Collector().collect() for suffix in suffixes[metric.type]}
    assert exported.keys() == described
    rows = re.findall(r"^\| `(stocache_\w+)`", (PAGES.parent / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {name.removesuffix("_bucket") for name in described if not re.search(r"_seconds_(sum|count)$", name)}
    for metric in metrics.Collector().collect():
        assert metric.name.endswith(f"_{metric.unit}" if metric.unit else "")
        assert bool(metric.unit) == metric.name.endswith(("_seconds", "_bytes"))


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(exported):
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in (panel for panel in DASHBOARD["panels"] if panel["type"] != "row"):
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source for target in (panel, *panel["targets"]))
        for expr, legend in ((target["expr"], target["legendFormat"]) for target in panel["targets"]):
            names = set(re.findall(r"\bstocache_\w+", expr))
            assert set() < names <= exported.keys()
            grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expr) for label in group.split(",")}
            filters = re.findall(r"\{([^}]*)\}", expr)
            matched = {label for group in filters for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", group)}
            assert all(grouped | matched <= exported[name] for name in names)
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped
            assert {name for name in names if name.endswith(COUNTED)} == set(re.findall(r"rate\((stocache_\w+)", expr))
            assert ("histogram_quantile" in expr) == any(name.endswith("_bucket") for name in names) == ("le" in grouped)
    for query in (variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"):
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label in exported[metric]


def test_the_extra_is_named_where_it_is_missing_but_the_dashboard_is_printed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "stocache.tools.cli.metrics")
    monkeypatch.delattr(cli, "metrics")
    result = run("metrics", "--port", "0")
    expected = "This command needs prometheus-client: pip install 'stocache[metrics]'\n"
    assert (result.exit_code, result.stderr) == (2, expected)
    result = run("metrics", "--dashboard")
    assert (result.exit_code, json.loads(result.stdout)) == (0, DASHBOARD)


def test_the_command_serves_without_torch_until_it_is_ended():
    code = "import sys; sys.modules['torch'] = None; from stocache.tools.cli.app import app; app()"
    command, pipe = [sys.executable, "-c", code, "metrics", "--port", "0"], subprocess.PIPE
    process, opener = subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe), urllib.request.ProxyHandler({})
    with process, SharedCache(0.001, 4, (2,), name="c") as cache:
        try:
            line = process.stdout.readline()
            (url,) = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics) until Ctrl-C\n", line).groups()
            for count in (1, 2):
                cache.get_slot(1)
                with urllib.request.build_opener(opener).open(url, timeout=60) as answer:
                    samples = samples_of(answer.read().decode(), parse_prometheus)
                assert value(samples, "stocache_cache_misses_total", name="c") == count
            process.send_signal(signal.SIGTERM)  # as Ctrl-C
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")
