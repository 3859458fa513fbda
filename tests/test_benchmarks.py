"""``python -m benchmark`` lists every benchmark with its claim, and says what a missing package is called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import __main__ as benchmark
from stocache.cli.bench import photo_like

FOLDER = Path(__file__).parents[1] / "benchmark"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
PAGE = (FOLDER / "README.md").read_text()
ROWS = re.findall(r"^\| .* \| .* \| .* \| (.*) \| [AB] \|$", PAGE, re.MULTILINE)


def test_every_module_is_listed_with_a_claim_of_one_line(capsys):
    with pytest.raises(SystemExit, match=r"^$"):
        benchmark.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(re.fullmatch(r"\w+ +[A-Z].*[.)]", line) and len(line) <= 140 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_row_on_the_page_and_notes(name):
    assert any(re.match(rf"`(sudo … )?{name}\b", row) for row in ROWS)
    assert f"python -m benchmark {name}" in (FOLDER / "notes" / f"{name}.md").read_text()
    assert f"notes/{name}.md" in PAGE


def test_the_page_is_one_page_whose_rows_name_benchmarks_and_notes_that_exist():
    assert len(PAGE.splitlines()) <= 100
    named = {re.match(r"`(?:sudo … )?(\w+)", row)[1] for row in ROWS if row.startswith("`")}
    assert named - {"pytest"} == set(NAMES)
    assert all((FOLDER / path).exists() for path in re.findall(r"\]\((notes[^)]*)\)", PAGE))


def test_a_missing_package_ends_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "is_missing", lambda module: module == "torchdata.dataloader2")
    run = "torchdata.dataloader2 cannot be imported. Run: pip install --no-deps torchdata==0.9.0"
    with pytest.raises(SystemExit, match=f"^{re.escape(run)}$"):
        benchmark.main(["reading", "speed"])
    needs = capsys.readouterr().out.splitlines()[1]
    command = 'needs: pip install -e ".[bench]" && pip install --no-deps torchdata==0.9.0 && pip install requests'
    assert needs == command


def test_only_the_experiments_that_need_a_package_ask_for_it():
    needs = benchmark.benchmarks()["reading"]
    assert "requests" in benchmark.requirements(needs, ["photos", "folder"])
    assert "requests" not in benchmark.requirements(needs, ["soak"])


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(SystemExit, match=r"^benchmark 'macro' does not exist\. Use one of advise, augment, .*, wrapping\.$"):
        benchmark.main(["macro"])


def run(*arguments, **environment):
    command = [sys.executable, "-m", "benchmark", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False, "env": os.environ | environment}
    done = subprocess.run(command, cwd=FOLDER.parent, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_benchmark_runs_by_its_name():
    printed = run("sigkill", "--trials", "3")
    assert printed.startswith("sigkill: A SIGKILL")
    assert "3 trials" in printed


@pytest.mark.parametrize(("part", "rows"), [("kills", 2), ("cuts", 1), ("flips", 3)])
def test_disk_faults_counts_each_fault(part, rows):
    printed = run("disk_faults", part, "--trials", "3")
    counts = re.findall(r"^\| [\w, .]+ \| (\d) \|.*\| 0 \|$", printed, re.MULTILINE)
    assert len(counts) == rows
    assert sum(map(int, counts)) == 3


def test_filling_measures_each_source(tmp_path):
    pytest.importorskip("datasets")
    quick = ["--samples", "600", "--photos", "8", "--repeats", "1", "--workers", "0"]
    printed = run("filling", "first-epoch", *quick, XDG_CACHE_HOME=str(tmp_path))
    for source in ("packed tensor", "memory map", "Arrow rows", "prepared tensors", "prepared bytes", "JPEG decoding"):
        assert re.search(rf"^\| {source} \| 0 \|(.*\|){{11}}$", printed, re.MULTILINE)


def test_filling_measures_each_size():
    pytest.importorskip("stocaching")
    printed = run("filling", "sizes", "--sizes", "1024", "65536", "--total-mb", "1", "--repeats", "1")
    rows = re.findall(r"^\| (\d+ KB) \| (.*?) \|(?: [\d.]+ \|){7} [\d.]+ \(.*\) \|$", printed, re.MULTILINE)
    assert rows == [("1 KB", "in sequence"), ("1 KB", "random"), ("64 KB", "in sequence"), ("64 KB", "random")]


def test_filling_measures_the_admission_of_blocks():
    printed = run("filling", "blocks", "--samples", "600", "--repeats", "1")
    rows = re.findall(r"^\| ([\w ]+) \| \d+ \|(?: [\d.]+ \|){2} [\d.]+ \(.*\) \|(?: [\d.]+ \|){2}$", printed, re.MULTILINE)
    assert rows == ["tensors", "bytes", "short texts", "detection"]


def test_filling_counts_the_kills_of_each_way():
    rows = re.findall(r"^\| ([\w ]+) \| 2 \| \d \| \d+ \| 0 \| 0 \|$", run("filling", "kill", "--kills", "2"), re.MULTILINE)
    assert rows == ["set_slots", "get_or_load_many", "blocks to slots", "blocks to records"]


def test_payloads_measures_each_kind():
    printed = run("payloads", "large", "--mib", "1", "--batches", "2", "--rounds", "1")
    rate = r"[\d,]+; [\d.]+"
    rows = re.findall(rf"^\| (\w+) \| {rate} \|.*\| {rate} \| [\d.]+ \|.*\|$", printed, re.MULTILINE)
    assert rows == ["bytes", "numpy", "torch"]


def test_repair_writes_the_damaged_blocks():
    printed = run("repair", "--samples", "2000", "--rounds", "1", "--share", "0.1")
    assert re.search(r"^2 of 2\d blocks damaged$", printed, re.MULTILINE)
    rows = re.findall(r"^\| (\w.*?) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", printed, re.MULTILINE)
    written = {name: float(megabytes) for name, _, megabytes in rows}
    assert set(written) == {"prepare", "check", "repair", "prepare again"}
    assert written["prepare"] > 20 > 5 > written["repair"] > 1


def test_payloads_measures_samples_without_tensors():
    printed = run("payloads", "samples", "--batches", "2", "--rounds", "1")
    rows = re.findall(r"^\| (.*?) \| (32|256) \|(?: [\d,]+/s; [\d,]+ \|){2} [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    assert len(rows) == len(set(rows)) == 12


def threads(part, *arguments):
    """Return the cells of each row that a part of the benchmark of threads prints, without the headings."""
    lines = [line for line in run("threads", part, *arguments).splitlines() if line.startswith("| ")]
    return [line[2:-2].split(" | ") for at, line in enumerate(lines) if "---" not in "".join(lines[at : at + 2])]


QUICK = "--repeats", "1", "--workers", "2", "--batch", "32"


def test_threads_measures_cached_batches():
    rows = threads("warm", *QUICK, "--mb", "1")
    assert [row[:3] for row in rows] == [[f"3x{size}x{size} uint8, label", "32", "2"] for size in (64, 224)]
    assert all(cell.replace(",", "").isdigit() for row in rows for cell in row[3:8])


def test_threads_measures_photographs(tmp_path):
    for number in range(4):
        photo_like(number, 32).save(tmp_path / f"{number}.jpg")
    rows = threads("photos", "--folder", str(tmp_path), "--photos", "64", *QUICK)
    names = ["threads", "processes, fork", "processes, spawn", "torch, fork", "SPDL, threads", "grain, threads"]
    assert [row[0] for row in rows[:6]] == names
    assert all(float(row[6]) > 0 for row in rows[:4])
    assert [row[-1] in ("yes", "no") for row in rows[6:]] == [True] * 4


def test_threads_measures_what_auto_chooses():
    rows = threads("gil", *QUICK, "--samples", "64")
    assert [row[0] for row in rows] == ["hold the GIL", "leave it free"]
    assert all(float(ratio) > 0 for row in rows for ratio in row[8:11])


def test_threads_measures_slow_samples():
    rows = threads("slow", *QUICK, "--samples", "96")
    names = "limit", "threads", "processes", "torch"
    assert [(row[0], row[3]) for row in rows] == [
        (kind, name) for kind in ("sleep", "busy") for _ in range(2) for name in names
    ]
    assert [40 < float(row[1][:-1]) <= 50 for row in rows] == [half for _ in range(2) for half in (False, True) for _ in names]


def test_threads_holds_batches_for_long():
    rows = threads("soak", "--batches", "500")
    assert [row[0] for row in rows] == [str(count) for count in range(50, 501, 50)]
