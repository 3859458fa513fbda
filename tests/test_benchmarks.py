"""``python -m benchmark`` lists every benchmark with its claim, runs some, and says what is missing."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from benchmark import __main__ as benchmark
from benchmark.support import harness
from tests.support.processes import run_python

FOLDER = Path(__file__).parents[1] / "benchmark"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
PAGE = (FOLDER / "README.md").read_text()
ROWS = re.findall(r"^\| .* \| .* \| .* \| (.*) \| [ABH] \|$", PAGE, re.MULTILINE)


def test_every_module_is_listed_with_a_claim_of_one_line(capsys):
    with pytest.raises(SystemExit, match=r"^$"):
        benchmark.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(re.fullmatch(r"\w+ +[A-Z].*[.)]", line) and len(line) <= 140 for line in lines)


def test_the_page_is_one_page_with_a_row_and_notes_for_each():
    assert len(PAGE.splitlines()) <= 100
    named = {re.match(r"`(?:sudo … )?(\w+)", row)[1] for row in ROWS if row.startswith("`")}
    assert named - {"pytest", "mkdocs"} == set(NAMES)
    notes = {path.name: path.read_text() for path in (FOLDER / "notes").glob("*.md")}
    assert [name for name in notes if f"(notes/{name})" not in PAGE] == []
    for name in NAMES:
        assert any(re.search(rf"python -m benchmark {name}\b", text) for text in notes.values()), name
    assert all((FOLDER / path).exists() for path in re.findall(r"\]\((notes[^)]*)\)", PAGE))


def test_a_missing_package_or_experiment_ends_with_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(harness, "is_missing", lambda module: module == "torchdata.dataloader2")
    monkeypatch.setattr(benchmark.logging, "disable", str)  # the benchmark switches the log of its process off
    run = "torchdata.dataloader2 cannot be imported. Run: pip install --no-deps torchdata==0.9.0"
    with pytest.raises(SystemExit, match=r"^False$"):  # it is not a failure
        benchmark.main(["reading", "speed"])
    assert f"\nnot on this machine: reading speed: {run}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^benchmark 'macro' does not exist\. Use one of advise, audit, .*, wrapping\.$"):
        benchmark.main(["macro"])
    with pytest.raises(SystemExit, match=r"^reading has no experiment 'spead'\. Use some of speed, photos\.$"):
        benchmark.main(["reading", "spead"])


def test_contenders_take_turns_and_claims_ask_the_table(capsys):
    run, order = harness.Run(rounds=3), []
    took = run.turns({"a": lambda: order.append("a"), "b": lambda: order.append("b") or 2.0}, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert took["b"] == [2.0] * 3
    table = run.table("who", "seconds")
    table.row("b", took.median("b"))
    table.row("c", None)
    run.claim("b takes 2 s", max(table.column("seconds", who="b")), most=2)
    run.claim("b takes 3 s", max(table.column("seconds")), least=3)
    assert run.failed
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == ["| who | seconds |", "| --- | ---: |", "| b | 2.00 |", "| c |  |"]
    assert lines[6::2] == ["holds: b takes 2 s: 2.00 (at most 2)", "does not hold: b takes 3 s: 2.00 (at least 3)"]


@pytest.mark.parametrize(("work", "status"), [(lambda: os._exit(3), 3), (lambda: time.sleep(60), -signal.SIGALRM)])
def test_an_experiment_ends_with_its_process_or_when_its_time_is_over(work, status):
    assert benchmark.in_process(work, 1) == status


@pytest.mark.slow
def test_a_benchmark_runs_by_its_name_and_prints_a_table():
    printed = run_python("-m", "benchmark", "sigkill", "--rounds", "3", cwd=FOLDER.parent, timeout_s=200).stdout
    assert len(re.findall(r"^\| [\w, ]+ \| 3 \|.*\| 0 \|$", printed, re.MULTILINE)) == 6
