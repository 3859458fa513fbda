"""What named caches and loaders count, as metrics: their values, how they are served, and the dashboard over them."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import stocache
from stocache import CachedDataset, DataLoader, SharedCache
from stocache.cli import listing
from stocache.shm import registry
from stocache.system.waiting import wait_until
from stocache.timing.histogram import BOUNDS_S, BUCKETS, bucket_of
from stocache.timing.record import COLLATE_NS, CPU_NS, HAND_OVER_NS, LOAD_NS, MAKE_NS, QUEUED_NS, ROW_WORDS, WAIT_NS, Record
from tests.support.records import FOLDER, Squares, forge, leave_loader_behind

pytest.importorskip("prometheus_client", reason="needs the extra metrics")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from stocache.cli import metrics, metrics_server

PACKAGE = Path(stocache.__file__).parent
DASHBOARD = json.loads((PACKAGE / "cli" / "grafana.json").read_text())
COUNTED = ("_total", "_bucket", "_sum", "_count")
QUANTITIES = {"wait": WAIT_NS, "load": LOAD_NS, "collate": COLLATE_NS, "hand_over": HAND_OVER_NS}


def samples_of(text, parse=parse):
    """The samples of a text by name and labels; each must be there once."""
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value) for family in parse(text) for sample in family.samples
    ]
    values = {(name, labels): value for name, labels, value in found}
    assert len(values) == len(found)
    return values


def scrape():
    return samples_of(metrics.text_of())


def value(samples, metric, **labels):
    """The only sample of a metric that has these labels, and maybe others."""
    (found,) = [number for (name, held), number in samples.items() if name == metric and labels.items() <= dict(held).items()]
    return found


def buckets(samples, metric, **labels):
    """The cumulative counts of a histogram by upper bound."""
    found = {
        float(dict(held)["le"]): number
        for (name, held), number in samples.items()
        if name == f"{metric}_bucket" and labels.items() <= dict(held).items()
    }
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------- values


WORKERS = {"main": {}, "processes": {"num_workers": 2}, "threads": {"num_workers": 2, "worker_method": "thread"}}


@pytest.mark.parametrize("workers", WORKERS)
def test_the_metrics_are_what_the_cache_and_the_loader_say(run, workers):
    with CachedDataset(Squares(), 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, **WORKERS[workers])
        for _ in range(2):
            assert [len(batch) for batch in loader] == [4] * 6
        samples, cache, stats = samples_of(run("metrics").stdout), dataset.cache.stats(), loader.stats()

        assert {dict(labels)["name"] for (_, labels) in samples if dict(labels).get("kind")} == {"squares"}
        for name in ("hits", "misses", "fills", "races", "refused", "rejected", "damaged"):
            assert value(samples, f"stocache_cache_{name}_total", name="squares", kind="memory") == getattr(cache, name)
        assert value(samples, "stocache_cache_load_seconds_total") == cache.load_s > 0
        assert value(samples, "stocache_cache_read_seconds_total") == cache.read_s
        assert value(samples, "stocache_cache_dataset_samples") == cache.dataset_len == 24
        assert value(samples, "stocache_cache_capacity_samples") == cache.slots
        assert value(samples, "stocache_cache_filled_samples") == cache.filled == 24
        assert value(samples, "stocache_cache_filled_bytes") == cache.filled_bytes
        assert value(samples, "stocache_cache_capacity_bytes") == cache.capacity_bytes
        assert value(samples, "stocache_cache_memory_bytes") == os.stat(FOLDER / "squares").st_blocks * 512
        assert value(samples, "stocache_cache_alive") == 1
        assert value(samples, "stocache_cache_processes") == 1

        labels = {"cache": "squares", "loader": f"squares.loader-{os.getpid()}-0", "rank": "0", "pid": str(os.getpid())}
        assert value(samples, "stocache_loader_alive", **labels) == 1
        assert value(samples, "stocache_loader_workers", **labels) == loader.num_workers
        assert value(samples, "stocache_loader_batches_total", **labels) == stats.batches == 12
        assert value(samples, "stocache_loader_samples_total", **labels) == 48
        assert 0 < value(samples, "stocache_loader_wait_seconds_sum", **labels) <= stats.waited_s  # this with ends of epochs
        for name in QUANTITIES:
            metric, told = f"stocache_loader_{name}_seconds", getattr(stats, name)
            assert value(samples, f"{metric}_count", **labels) == told.count
            assert math.isclose(value(samples, f"{metric}_sum", **labels), told.count * told.mean_s, rel_tol=1e-9)
        by_worker = [number for (name, _), number in samples.items() if name == "stocache_loader_worker_batches_total"]
        least = {"main": 0, "processes": 12, "threads": 6}[workers]
        assert least <= sum(by_worker) <= (0 if workers == "main" else 12)  # the loop may gather what is cached itself
        assert len(by_worker) == loader.num_workers
        assert value(samples, "stocache_unreadable_files") == 0
        del loader


def test_counters_never_go_down_from_one_scrape_to_the_next():
    with CachedDataset(Squares(), 0.001, name="squares") as dataset:
        loader, before = DataLoader(dataset, batch_size=4, num_workers=1), {}
        for _ in range(4):
            for _ in loader:
                now = {
                    key: number for key, number in scrape().items() if key[0].endswith(("_total", "_bucket", "_sum", "_count"))
                }
                assert before.keys() <= now.keys()
                assert all(now[key] >= number for key, number in before.items())
                before = now
        del loader


@pytest.mark.parametrize("name", QUANTITIES)
def test_buckets_are_exact_sums_of_those_of_the_record(name):
    word, kept = QUANTITIES[name], Record(2, False, "c")
    durations = np.exp(np.random.default_rng(7).uniform(math.log(100), math.log(4e12), 500)).astype(int).tolist()
    for number, duration_ns in enumerate(durations):
        kept.row(number % 5).add(word, duration_ns)
    samples = scrape()
    coarse = buckets(samples, f"stocache_loader_{name}_seconds")
    assert list(coarse.values()) == sorted(coarse.values())
    assert list(coarse)[-1] == math.inf
    assert coarse[math.inf] == value(samples, f"stocache_loader_{name}_seconds_count") == 500
    assert value(samples, f"stocache_loader_{name}_seconds_sum") == sum(durations) / 1e9
    fine = np.searchsorted([bucket_of(duration) for duration in sorted(durations)], np.arange(BUCKETS), side="right")
    for bound, count in list(coarse.items())[:-1]:
        bucket = int(np.abs(BOUNDS_S - bound).argmin())
        assert math.isclose(BOUNDS_S[bucket], bound, rel_tol=1e-5)
        assert count == fine[bucket]
    del kept


def test_bounds_of_buckets_are_twice_as_large_each_time():
    bounds = [float(bound) for bound in metrics.BUCKET_BOUNDS]
    assert bounds[0] < 1e-5
    assert bounds[-1] > 100
    assert all(1.9 < after / before < 2.1 for before, after in itertools.pairwise(bounds))


def test_words_of_a_record_that_have_no_histogram_are_counters():
    kept = Record(1, False, "c")
    for number, word in enumerate((MAKE_NS, CPU_NS, QUEUED_NS)):
        kept.row(1)._words[word] = (number + 1) * 10**9
    kept.main.add_look(True)
    kept.main.add_look(False)
    samples = scrape()
    names = ("make_seconds", "cpu_seconds", "queued_seconds", "gil_looks", "gil_held")
    assert [value(samples, f"stocache_loader_{name}_total") for name in names] == [1, 2, 3, 2, 1]
    del kept


def test_loaders_of_several_ranks_are_told_apart_and_add_up(clean):
    ready, go, pids = os.pipe(), os.pipe(), []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(go[1])
                kept = [Record(0, False, "c", rank), Record(1, False, "c", rank)]
                kept[0].main.add(WAIT_NS, 10**9 * (rank + 1))
                kept[1].row(1).add(WAIT_NS, 10**9)
                os.write(ready[1], b"x")
                os.read(go[0], 1)
            os._exit(0)
        pids.append(pid)
    waiting = 3
    while waiting:
        waiting -= len(os.read(ready[0], waiting))
    samples = scrape()
    os.close(go[1])
    for pid in pids:
        os.waitpid(pid, 0)
    for fd in (*ready, go[0]):
        os.close(fd)
    sums = {
        tuple(dict(labels)[key] for key in ("cache", "rank", "pid", "loader")): number
        for (name, labels), number in samples.items()
        if name == "stocache_loader_wait_seconds_sum"
    }
    assert sums == {
        ("c", str(rank), str(pid), f"c.loader-{pid}-{number}"): rank + 1 if number == 0 else 1
        for rank, pid in enumerate(pids)
        for number in range(2)
    }


def test_loaders_that_were_killed_are_shown_as_dead_until_they_are_removed(run, clean):
    pid = leave_loader_behind("c", rank=1)
    samples = scrape()
    assert value(samples, "stocache_loader_alive", rank="1", pid=str(pid)) == 0
    assert value(samples, "stocache_loader_wait_seconds_count", pid=str(pid)) == 1
    assert run("rm", "--dead").exit_code == 0
    assert not [name for name, _ in scrape() if name.startswith("stocache_loader")]


def test_a_cache_that_was_killed_is_not_alive(clean):
    pid = os.fork()
    if pid == 0:
        cache = SharedCache(0.001, 4, (2,), name="c")
        assert not cache.closed
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    samples = scrape()
    assert (value(samples, "stocache_cache_alive"), value(samples, "stocache_cache_processes")) == (0, 0)


def test_a_disk_cache_and_its_loader_have_the_label_of_the_folder(tmp_path):
    with CachedDataset(Squares(), "100KB", disk=str(tmp_path / "kept"), disk_limit="10MB", name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4)
        assert len(list(loader)) == 6
        samples = scrape()
        kinds = {dict(labels)["kind"]: dict(labels)["name"] for (name, labels) in samples if name == "stocache_cache_alive"}
        assert kinds["disk"] == str(tmp_path / "kept")
        caches = {dict(labels)["cache"] for (name, labels) in samples if name == "stocache_loader_alive"}
        assert caches <= set(kinds.values())
        assert len(caches) == 1
        del loader


def test_two_caches_of_one_name_have_two_labels():
    names = metrics._Names()
    assert [names.unique("c", "memory"), names.unique("c", "disk"), names.unique("d", "memory")] == ["c", "c", "d"]
    assert [names.unique("c (3)", "memory"), names.unique("c", "memory"), names.unique("c", "memory")] == [
        "c (3)",
        "c (2)",
        "c (4)",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_users_are_a_label_where_several_are_shown(run):
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setuid(12345)
        kept = Record(0, False, "c")
        kept.main.add(WAIT_NS, 5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with SharedCache(0.001, 4, (2,), name="c"):
        kept = Record(0, False, "c")
        samples = samples_of(run("metrics", "--user", "all").stdout)
        assert value(samples, "stocache_loader_alive", user="12345") == 0
        assert value(samples, "stocache_loader_alive", user="root", cache="c") == 1
        assert value(samples, "stocache_cache_alive", user="root", name="c") == 1
        assert not any("user" in dict(labels) for _, labels in samples_of(run("metrics", "--user", "12345").stdout))
        assert not any("user" in dict(labels) for _, labels in scrape())
        del kept
    shutil.rmtree(registry.directory_of(12345))


# ---------------------------------------------------------------------------------------------------- hostile files


LARGEST = b"\xff" * 7 + b"\x7f"
HOSTILE = {
    "cut": lambda: os.truncate(forge("c.loader-1-0"), 70000),
    "empty": lambda: os.truncate(forge("c.loader-1-0"), 0),
    "wrong types": lambda: forge("c.loader-1-0", {"loader": [], "cache": {}, "rank": "x", "pid": None}),
    "rank a str": lambda: forge("c.loader-1-0", {"loader": "c", "cache": "c", "rank": '0"} 1\n', "pid": 1}),
    "huge rows": lambda: forge("c.loader-1-0", facts={"dataset_len": 0, "capacity": 0, "rows": 2**70}),
    "cache cut": lambda: os.truncate(forge("c", {"samples": "x"}), 100),
    "escapes": lambda: forge('c\x1b[2J\n"} 1.loader-1-0', {"loader": "c", "cache": "c", "rank": 0, "pid": 1}),
    "not unicode": lambda: forge(os.fsdecode(b"c\xff.loader-1-0"), {"loader": "c", "cache": "c", "rank": 0, "pid": 1}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_reported_and_hides_no_other(clean, case):
    HOSTILE[case]()
    kept = Record(0, False, "good")
    samples = scrape()
    assert value(samples, "stocache_unreadable_files") == 1
    (told,) = [dict(labels) for name, labels in samples if name == "stocache_unreadable_file_info"]
    assert told["file"].startswith(f"{FOLDER}/c")
    assert told["file"].isprintable()
    assert told["problem"].isprintable()
    assert told["problem"]
    assert value(samples, "stocache_loader_alive") == 1
    assert samples_of(prometheus_text(), parse_prometheus)
    del kept


def prometheus_text():
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry_of()).decode()


def test_forged_counts_stay_numbers(clean):
    forge("c.loader-1-0", rows=3, control=(b"\xff" * 8 + LARGEST) * (3 * ROW_WORDS // 2))
    samples = scrape()
    assert all(0 <= number < math.inf for number in samples.values())
    for name in QUANTITIES:
        coarse = list(buckets(samples, f"stocache_loader_{name}_seconds").values())
        assert coarse == sorted(coarse)
        assert coarse[-1] == value(samples, f"stocache_loader_{name}_seconds_count")
    assert value(samples, "stocache_loader_workers") == 1


def test_texts_of_a_forged_loader_are_escaped(clean):
    forge("c.loader-1-0", {"loader": "c", "cache": '\x1b[2J"} 1\n# EOF\\', "rank": 0, "pid": 1})
    (cache,) = [dict(labels)["cache"] for name, labels in scrape() if name == "stocache_loader_alive"]
    assert cache == '\\x1b[2J"} 1\\n# EOF\\'


def test_only_some_unreadable_files_are_told_in_words(clean):
    for number in range(30):
        os.truncate(forge(f"c.loader-1-{number}"), 0)
    samples = scrape()
    assert value(samples, "stocache_unreadable_files") == 30
    assert len([name for name, _ in samples if name == "stocache_unreadable_file_info"]) == 20


# ---------------------------------------------------------------------------------------------------- names


def described():
    return {name for metric in metrics.Collector().describe() for name in ALL_NAMES[metric.type](metric.name)}


ALL_NAMES = {
    "gauge": lambda name: [name],
    "counter": lambda name: [f"{name}_total"],
    "histogram": lambda name: [f"{name}_bucket", f"{name}_sum", f"{name}_count"],
    "info": lambda name: [f"{name}_info"],
}


def test_names_follow_the_conventions():
    for metric in metrics.Collector().describe():
        assert re.fullmatch(r"stocache(_[a-z]+)+", metric.name)
        assert metric.documentation.endswith(".")
        assert metric.name.endswith(f"_{metric.unit}" if metric.unit else "")
        assert bool(metric.unit) == metric.name.endswith(("_seconds", "_bytes"))
        assert metric.samples == []


@pytest.fixture(scope="module")
def exported():
    """The labels of every name that a cache and a loader with workers export."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    (FOLDER / "bad").touch(mode=0o600)
    with CachedDataset(Squares(), 0.001, name="squares") as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=1)
        assert len(list(loader)) == 6
        samples = scrape()
        del loader
    (FOLDER / "bad").unlink()
    FOLDER.rmdir()
    return {name: set(dict(labels)) for name, labels in samples}


def test_every_metric_that_is_described_is_exported(exported):
    assert exported.keys() == described()


def test_the_page_of_commands_has_a_row_for_each_metric():
    page = (PACKAGE / "cli" / "README.md").read_text()
    rows = re.findall(r"^\| `(stocache_\w+)`", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    kinds = {name.removesuffix("_bucket") for name in described() if not re.search(r"_seconds_(sum|count)$", name)}
    assert set(rows) == kinds


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions():
    return [(panel["title"], target) for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize(
    ("title", "target"), [pytest.param(*each, id=f"{each[0]}-{each[1]['refId']}") for each in expressions()]
)
def test_the_dashboard_asks_for_metrics_and_labels_that_exist(exported, title, target):
    expr = target["expr"]
    names = set(re.findall(r"\bstocache_\w+", expr))
    assert names
    assert names <= exported.keys()
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expr) for label in group.split(",")}
    matched = {label for group in re.findall(r"\{([^}]*)\}", expr) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", group)}
    for name in names:
        assert grouped | matched <= exported[name], name
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped
    counters = re.findall(r"rate\((stocache_\w+)", expr)
    assert all(name.endswith(COUNTED) for name in counters)
    assert {name for name in names if name.endswith(COUNTED)} == set(counters)
    assert ("histogram_quantile" in expr) == any(name.endswith("_bucket") for name in names) == ("le" in grouped)
    assert expr.count("(") == expr.count(")")


def test_panels_of_the_dashboard_are_apart_and_take_the_data_source_that_is_chosen():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == source
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == source for target in panel["targets"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_variables_of_the_dashboard_are_used_and_come_from_labels_that_exist(exported):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    text = json.dumps(DASHBOARD["panels"])
    for name, variable in variables.items():
        assert f"${name}" in text or f"${{{name}}}" in text
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert label in exported[metric]
            assert variable["definition"] == variable["query"]["query"]
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == variables.keys()


def test_the_dashboard_is_printed_as_it_is_shipped(run):
    result = run("metrics", "--dashboard")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == DASHBOARD


# ---------------------------------------------------------------------------------------------------- the command


def test_the_text_ends_as_openmetrics_wants_it(run):
    result = run("metrics")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n# EOF\n")
    assert samples_of(result.stdout) == {("stocache_unreadable_files", frozenset()): 0}


PROGRAM = "import sys; {before}; sys.argv = ['stocache', *sys.argv[1:]]; from stocache.cli.app import app; app()"


def run_program(before, *arguments):
    command = [sys.executable, "-c", PROGRAM.format(before=before), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_does_not_import_torch():
    result = run_program("sys.modules['torch'] = None", "metrics")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("# EOF\n")


def test_the_extra_is_named_where_it_is_missing():
    result = run_program("sys.modules['prometheus_client'] = None", "metrics", "--listen", "0")
    assert result.returncode == 2
    assert result.stderr == "This command needs prometheus-client: pip install 'stocache[metrics]'\n"
    assert json.loads(run_program("sys.modules['prometheus_client'] = None", "metrics", "--dashboard").stdout) == DASHBOARD


BAD = {
    "a port that is too large": (["--listen", "65536"], "write HOST:PORT or PORT, with a port up to 65535"),
    "a negative port": (["--listen=-1"], "write HOST:PORT or PORT"),
    "a port in words": (["--listen", "localhost:http"], "write HOST:PORT or PORT"),
    "digits of another script": (["--listen", "٩١٠٨"], "write HOST:PORT or PORT"),
    "no port": (["--listen", "127.0.0.1"], "write HOST:PORT or PORT"),
    "nothing": (["--listen", ""], "write HOST:PORT or PORT"),
    "ipv6 without brackets": (["--listen", "::1:9108"], "IPv6 as [::1]:9108"),
    "an unknown host": (["--listen", "no-such-host.invalid:0"], "there is no host 'no-such-host.invalid'"),
    "a host that cannot be": (["--listen", f"{'x' * 300}:0"], "there is no host"),
    "all interfaces": (["--listen", "0.0.0.0:0"], "others can reach 0.0.0.0"),
    "all interfaces of IPv6": (["--listen", "[::]:0"], "others can reach ::"),
    "another address": (["--listen", "192.0.2.1:0"], "others can reach 192.0.2.1, and the metrics have no password"),
    "remote without listen": (["--allow-remote"], "--allow-remote needs --listen HOST:PORT"),
    "a dashboard that listens": (["--dashboard", "--listen", "0"], "--dashboard goes alone"),
    "an unknown user": (["--user", "no-such-user"], "there is no user 'no-such-user'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_command_cannot_do_is_one_line(run, monkeypatch, case):
    getaddrinfo = socket.getaddrinfo

    def offline(host, *arguments, **options):
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return getaddrinfo(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    arguments, message = BAD[case]
    result = run("metrics", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


def test_a_name_that_leads_out_by_one_of_its_addresses_is_refused(monkeypatch):
    infos = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)), (socket.AF_INET, 1, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: infos)
    with pytest.raises(metrics_server.ListenError, match=r"others can reach 192\.0\.2\.7"):
        metrics_server.resolve("both:0", False)
    assert len(metrics_server.resolve("both:0", True)) == 2


@pytest.mark.parametrize("listen", ["9108", ":9108", "127.0.0.1:9108", "localhost:9108"])
def test_addresses_of_this_machine_are_taken(listen):
    assert {address[1] for _, address in metrics_server.resolve(listen, False)} == {9108}
    if "local" not in listen:
        assert metrics_server.resolve(listen, False) == [(socket.AF_INET, ("127.0.0.1", 9108))]


def test_ipv6_is_written_in_brackets():
    ((family, address),) = metrics_server.resolve("[::1]:9108", False)
    assert (family, address[:2]) == (socket.AF_INET6, ("::1", 9108))


def test_a_port_in_use_is_one_line_and_exit_code_1(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("metrics", "--listen", taken.getsockname()[1])
    assert result.exit_code == 1
    assert re.fullmatch(
        r"--listen \d+: Address already in use\. Choose another port, or end what uses this one\.\n", result.output
    )


def test_an_address_of_another_machine_is_one_line_and_exit_code_1(run):
    result = run("metrics", "--listen", "192.0.2.7:9108", "--allow-remote")
    assert (result.exit_code, result.output) == (1, "--listen 192.0.2.7:9108: Cannot assign requested address.\n")


# ---------------------------------------------------------------------------------------------------- over HTTP


def fetch(url, accept=None):
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


@contextlib.contextmanager
def command(*arguments):
    """A process of the command, and the URL that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stocache", "metrics", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, re.fullmatch(r"serving (http://\S+/metrics) until Ctrl-C\n", process.stdout.readline())[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(ending):
    with command("--listen", "127.0.0.1:0") as (process, url):
        with SharedCache(0.001, 4, (2,), name="c") as cache:
            cache.get_slot(1)
            text, kind = fetch(url, "application/openmetrics-text; version=1.0.0")
            assert kind.startswith("application/openmetrics-text; version=1.0.0")
            assert value(samples_of(text), "stocache_cache_misses_total", name="c") == 1
            cache.get_slot(1)
            text, kind = fetch(url)
            assert kind.startswith("text/plain")
            assert value(samples_of(text, parse_prometheus), "stocache_cache_misses_total", name="c") == 2
        assert "stocache_cache_misses_total{" not in fetch(url)[0]
        process.send_signal(ending)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_ipv6_is_served_where_there_is_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6")
    with command("--listen", "[::1]:0") as (_, url):
        assert url.startswith("http://[::1]:")
        assert fetch(url)[0].startswith("# HELP")


@pytest.fixture
def server():
    """A server of this process."""
    addresses = metrics_server.resolve("0", False)
    with metrics_server.open_server(addresses, metrics.registry_of()) as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()
        wait_until(lambda: not opened._working, 10)


def test_other_paths_lead_to_the_metrics(server):
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        fetch(server.url.replace("/metrics", "/"))
    assert caught.value.read() == b"The metrics are at /metrics.\n"
    caught.value.close()
    text, _ = fetch(f"{server.url}?name[]=stocache_unreadable_files")
    assert text.splitlines()[-1] == "stocache_unreadable_files 0.0"
    assert len(text.splitlines()) == 3


def test_a_scrape_that_fails_gets_an_answer_and_one_line(server, monkeypatch, caplog):
    def fail(uid):
        raise ValueError("\x1b[2J")

    with monkeypatch.context() as patched:
        patched.setattr(listing, "find", fail)
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            fetch(server.url)
        caught.value.close()
    assert [record.getMessage() for record in caplog.records] == ["a scrape failed: ValueError: \\x1b[2J"]
    assert fetch(server.url)


def test_many_clients_at_a_time_get_the_same(server):
    kept, texts = Record(0, False, "c"), []
    threads = [threading.Thread(target=lambda: texts.append(fetch(server.url)[0])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 16
    assert len(set(texts)) == 1
    del kept


def connect(server):
    return socket.create_connection(server.server_address[:2], timeout=30)


def test_clients_that_send_nothing_make_room_for_others(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "_MOST", 3)
    stuck = [connect(server) for _ in range(3)]
    for client in stuck:
        client.sendall(b"GET /metr")
    assert wait_until(lambda: len(server._ends) == 3, 10)
    assert fetch(server.url)
    assert stuck[0].recv(1) == b""  # it was cut off
    for client in stuck:
        client.close()


def test_clients_beyond_the_threads_are_refused(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "_MOST", 1)
    monkeypatch.setattr(server, "_working", 2)
    client = connect(server)
    assert client.recv(1) == b""
    client.close()
    monkeypatch.setattr(server, "_working", 0)
    assert fetch(server.url)


def test_a_client_that_sends_nothing_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    client = connect(server)
    assert client.recv(1) == b""
    client.close()


def test_a_connection_that_lasts_too_long_is_cut_off(server, monkeypatch):
    """Also if its client sends a byte now and then."""
    monkeypatch.setattr(metrics_server, "_LONGEST_S", 0.0)
    client = connect(server)
    assert client.recv(1) == b""
    client.close()


def test_a_client_that_goes_away_does_not_matter(server, capfd):
    for sent in (b"", b"GET", b"GET /metrics HTTP/1.0\r\n", b"\0\xff\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
        client = connect(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it closes with a reset
        client.sendall(sent)
        client.close()
    assert fetch(server.url)
    assert wait_until(lambda: not server._working, 10)
    assert capfd.readouterr() == ("", "")
