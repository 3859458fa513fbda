"""``python -m benchmark`` lists every benchmark with its claim, and says what a missing package is called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import __main__ as benchmark

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
    with pytest.raises(SystemExit, match=r"^benchmark 'macro' does not exist\. Use one of augment, .*, wrapping\.$"):
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


def test_filling_counts_the_kills_of_each_way():
    rows = re.findall(r"^\| (\w+) \| 2 \| \d \| \d+ \| 0 \| 0 \|$", run("filling", "kill", "--kills", "2"), re.MULTILINE)
    assert rows == ["set_slots", "get_or_load_many", "blocks"]
