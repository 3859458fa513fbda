"""What the commands refuse is said in one line that names the reason, with an exit code. The rows are in refusals.txt."""

import re
import shlex
from pathlib import Path

import pytest

from stocache import prepare

ROWS = re.findall(r"^(?!#)(.+) => (\d) => (.+)$", Path(__file__).with_name("refusals.txt").read_text(), re.MULTILINE)
ASIDE = re.compile(r"^Usage|^Try|it/s|at most \d+ s|/s\]|\?, | 0%")  # a hint of typer, and progress bars
NEEDS = {"bench": ["PIL", "matplotlib"], "metrics": ["prometheus_client"]}


@pytest.fixture
def folder(modules, tmp_path):
    for name in ("empty", "other", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "notes \x1b[1m").touch()
    (tmp_path / "file").touch()
    prepare([1, 2, 3], tmp_path / "prepared", progress=False)
    for number in range(10):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(bytes([number]) * 100)


@pytest.mark.linux
@pytest.mark.leaves_descriptors
@pytest.mark.parametrize("command", dict.fromkeys(row[0].split()[0] for row in ROWS))
def test_a_refusal_is_one_line_with_the_reason_and_changes_nothing(command, run, folder, tmp_path):
    for module in NEEDS.get(command, ()):
        pytest.importorskip(module)
    before = sorted(tmp_path.rglob("*"))
    for arguments, code, message in (row for row in ROWS if row[0].split()[0] == command):
        result = run(*shlex.split(arguments))
        assert (result.exit_code, message in " ".join(result.output.split())) == (int(code), True), (arguments, result.output)
        said = [line for line in result.stderr.splitlines() if line and not ASIDE.search(line)]
        assert (result.stdout, len(said)) == ("", 1) or command in ("bench", "check"), (arguments, said)
        assert "Traceback" not in result.output
        assert "(dataset.py, line" not in result.output  # where the command called the function
        assert sorted(tmp_path.rglob("*")) == before or command in ("bench", "advise")  # their modules are compiled
