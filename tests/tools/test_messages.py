"""What ``stocache run`` says: on a line of its own, in the words of its options, and nowhere in the log of the program."""

import io
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from stocache.observe.verdict import LoaderEpochStats, Verdict
from stocache.tools.run import messages
from stocache.tools.run.messages import as_options, epoch_lines, say_apart
from stocache.tools.run.report import LoaderLines
from stocache.tools.run.use import ProgramOptions, Use

PROGRAM = """
    import logging, sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Random(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, idx):
            return torch.rand(4)

    BEGIN
    loader = DataLoader(Random(), batch_size=4, shuffle=True)
    torch.manual_seed(0)
    for epoch in range(3):
        print(sum(float(x.sum()) for x in loader))
        logging.info("epoch %d", epoch)
    """
LOGS = {
    "output": """
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
for name in logging.root.manager.loggerDict:  # as recipes do that lead all logs to one place
    log = logging.getLogger(name)
    log.propagate, log.handlers = True, []
sys.stderr = sys.stdout
""",
    "closed": "sys.stderr.close()",
}


def run(tmp_path, program, *options):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, *(["-m", "stocache", "run", *options] if options else []), "program.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True)


@pytest.mark.parametrize("log", ["output", pytest.param("closed", marks=pytest.mark.slow)])
def test_the_log_of_the_program_and_its_output_are_as_under_python(log, tmp_path):
    program = textwrap.dedent(PROGRAM).replace("BEGIN", LOGS[log])
    expected, found = run(tmp_path, program), run(tmp_path, program, "--cache", "1MB")
    assert found.stdout == expected.stdout
    if log == "closed":
        assert found.stderr == b""
        return
    assert b"\nstocache: random numbers are drawn to load sample 0 of Random, in line " in found.stderr
    assert b"itself. (stocache explain W05)\n" in found.stderr
    assert not re.search(rb"[0-9a-f]{16}", found.stderr)  # digests
    quiet = run(tmp_path, program, "--cache", "1MB", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (expected.stdout, expected.stderr)
    assert not re.search(rb"transform=|on_change|CachedDataset", found.stderr)


def test_a_line_does_not_follow_the_text_of_a_progress_bar(tmp_path):
    pytest.importorskip("tqdm")
    begin = "from tqdm import tqdm\nimport time\nRandom.__getitem__ = lambda self, idx: time.sleep(0.002) or torch.rand(4)"
    program = textwrap.dedent(PROGRAM).replace("BEGIN", begin).replace("in loader", "in tqdm(loader, mininterval=0)")
    lines = run(tmp_path, program, "--cache", "1MB").stderr.decode().split("\n")
    said = [line for line in lines if "stocache: " in line]
    assert len(said) >= 3  # two epochs, and the report
    assert all(line.startswith("stocache: ") for line in said)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_the_bars_of_tqdm_are_drawn_again_below(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    stream = Terminal()
    for name in ("__stderr__", "__stdout__", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    with tqdm.tqdm(total=3, file=stream, ncols=40) as bar:
        bar.update(1)
        say_apart("stocache: a line")
    before, after = stream.getvalue().split("\nstocache: a line\n")
    assert re.search(r"\r +\r\Z", before)  # cleared
    assert after.startswith("\r")
    assert "1/3" in after


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), io.StringIO()])
def test_a_stream_that_cannot_be_written_to_is_no_error(stream, monkeypatch, capsys):
    if stream is not None:
        stream.close = getattr(stream, "close", None)
    monkeypatch.setattr(sys, "__stderr__", stream)
    if isinstance(stream, io.StringIO):
        stream.close()
    say_apart("a line")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("says", "expected"), [
    ("a; size_limit_gib=1.9 would remove it", "a; a larger --cache would remove it"),
    ("size_limit_gib=1.5, all that fits, would cut it to 71%; disk= keeps the rest on a local disk",
     "a larger --cache would cut it to 71%; --disk and --disk-limit keep the rest on a local disk"),
    ("a; worker_method='multiprocessing' would", "a; --worker-method multiprocessing would"),
    ("a; num_workers=3 would remove it", "a; num_workers=3 would remove it"),
])  # fmt: skip
def test_advice_names_options_of_the_command(says, expected):
    assert as_options(says) == expected


def epoch_of(limit, share, **figures):
    verdict = None if limit is None else Verdict(limit, share, f"{limit} {share}")
    return LoaderEpochStats(0, seconds=10.0, waited_s=10 * share, verdict=verdict, complete=True, **figures)


def test_an_epoch_is_printed_if_it_differs_from_those_that_were(monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", stream := io.StringIO())
    lines, train, val = epoch_lines(Use(ProgramOptions())), ("a.py:1", "Images", 9), ("a.py:1", "Images", 3)
    for limit, share in [("source", 0.5), (None, 0.0), ("source", 0.6), ("source", 0.7), ("collate", 0.5)] + [
        ("source", 0.5)
    ] * 9:
        lines(train, epoch_of(limit, share))
        lines(val, epoch_of("source", 0.1))
    lines(train, epoch_of("source", 0.99))
    said = [line for line in stream.getvalue().splitlines() if line]
    assert [line for line in said if "0.1" not in line] == [
        f"stocache: a.py:1, epoch {number}: {text}"
        for number, text in ((1, "source 0.5"), (3, "source 0.6"), (5, "collate 0.5"), (15, "source 0.99"))
    ]
    assert sum("0.1" in line for line in said) == messages._FIRST


def test_the_report_divides_the_time_and_has_the_verdict_that_cost_most():
    epochs = [epoch_of("source", 0.5, steps_s=3.0), epoch_of("source", 0.6, steps_s=3.0), epoch_of("start", 0.7, steps_s=1.0)]
    text = LoaderLines("a.py:1", "Images", 9, epochs, "", "").text()
    assert "7 s for steps (23%), 18 s waiting for data (60%), 5 s starting and ending epochs (17%)" in text
    assert text.endswith("  epoch 2: source 0.6")
    whole = LoaderLines("a.py:1", "Images", 9, [epoch_of("source", 0.5, steps_s=5.0)], "", "").text()
    assert "5 s for steps (50%), 5 s waiting for data (50%)\n" in whole
