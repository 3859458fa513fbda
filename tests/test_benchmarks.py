"""``python -m benchmark`` lists every benchmark with its claim, and says what a missing package is called."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmark import __main__ as benchmark
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


def test_a_missing_package_ends_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "is_missing", lambda module: module == "torchdata.dataloader2")
    run = "torchdata.dataloader2 cannot be imported. Run: pip install --no-deps torchdata==0.9.0"
    with pytest.raises(SystemExit, match=f"^{re.escape(run)}$"):
        benchmark.main(["reading", "speed"])
    needs = capsys.readouterr().out.splitlines()[1]
    command = 'needs: pip install -e ".[bench]" && pip install --no-deps torchdata==0.9.0 && pip install requests'
    assert needs == command
    assert "requests" not in benchmark.requirements(benchmark.benchmarks()["reading"], ["soak"])
    with pytest.raises(SystemExit, match=r"^benchmark 'macro' does not exist\. Use one of advise, audit, .*, wrapping\.$"):
        benchmark.main(["macro"])


SMALL = [  # arguments; what each row of the table looks like; the number of rows
    ("sigkill --trials 3", r"^sigkill: A SIGKILL|3 trials", 2),
    ("disk_faults kills --trials 3", r"^\| [\w, .]+ \| \d \|.*\| 0 \|$", 2),
    ("filling kill --kills 1", r"^\| [\w ]+ \| 1 \| \d \| \d+ \| 0 \| 0 \|$", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "row", "count"), SMALL)
def test_a_benchmark_runs_by_its_name_and_prints_a_table(arguments, row, count):
    name = arguments.split()[0]
    for module in benchmark.requirements(benchmark.benchmarks()[name], arguments.split()):
        if find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"the benchmark {name} needs {module}")
    printed = run_python("-m", "benchmark", *arguments.split(), cwd=FOLDER.parent, timeout_s=200).stdout
    assert len(re.findall(row, printed, re.MULTILINE)) == count
