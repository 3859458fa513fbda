"""What ``stocache run`` says: on a line of its own, in the words of its options, and nowhere in the log of the program."""

import io
import os
import re
import sys
from dataclasses import replace

import pytest

from stocache.observe.verdict import LoaderEpochStats, Verdict
from stocache.tools.run.messages import as_options, epoch_lines, say_apart
from stocache.tools.run.report import LoaderLines, report_of
from stocache.tools.run.use import ProgramOptions, Use
from tests.support.processes import run_python

PROGRAM = """
import logging, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Random(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, idx):
        return torch.rand(4)

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
for name in logging.root.manager.loggerDict:  # as recipes do that lead all logs to one place
    log = logging.getLogger(name)
    log.propagate, log.handlers = True, []
sys.stderr = sys.stdout
loader = DataLoader(Random(), batch_size=4, shuffle=True)
torch.manual_seed(0)
for epoch in range(3):
    print(sum(float(x.sum()) for x in loader))
    logging.info("epoch %d", epoch)
"""


def run(tmp_path, *command):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return run_python(*command, "program.py", cwd=tmp_path, env=environment, timeout_s=120)


def test_the_log_of_the_program_and_its_output_are_as_under_python(tmp_path):
    expected, found = run(tmp_path), run(tmp_path, "-m", "stocache", "run", "--cache", "1MB")
    assert found.stdout == expected.stdout
    assert "\nstocache: random numbers are drawn to load sample 0 of Random, in line " in found.stderr
    assert "itself. (stocache explain W05)\n" in found.stderr
    assert not re.search(r"[0-9a-f]{16}|transform=|on_change|CachedDataset", found.stderr)  # digests, and advice for others


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
    lines, train, val = epoch_lines(Use(ProgramOptions())), ("a.py:1", "Images", 9), ("b.py:1", "Images", 3)
    first = [("source", 0.5), (None, 0.0), ("source", 0.6), ("source", 0.7), ("collate", 0.5)]
    for limit, share in [*first, *[("source", 0.5)] * 9, ("source", 0.99)]:
        lines(train, epoch_of(limit, share))
        lines(val, epoch_of("source", 0.1))
    said = re.findall(r"stocache: (.*?): (.*)", stream.getvalue().replace(".py:1, epoch", ""))
    train_lines = [("a 1", "source 0.5"), ("a 3", "source 0.6"), ("a 5", "collate 0.5"), ("a 15", "source 0.99")]
    assert sorted(said) == sorted([*train_lines, ("b 1", "source 0.1"), ("b 2", "source 0.1")])


def test_the_report_divides_the_time_and_has_the_verdict_that_cost_most():
    def lines_of(*epochs):
        return LoaderLines("a.py:1", "Images", 9, epochs, "", "")

    first, second, start = (epoch_of(*each, steps_s=3.0) for each in (("source", 0.5), ("source", 0.6), ("start", 0.7)))
    text = lines_of(first, second, replace(start, steps_s=1.0)).text()
    assert "7 s for steps (23%), 18 s waiting for data (60%), 5 s starting and ending epochs (17%)" in text
    assert text.endswith("  epoch 2: source 0.6")
    assert "5 s for steps (50%), 5 s waiting for data (50%)\n" in lines_of(replace(first, steps_s=5.0)).text()
    calm = report_of([lines_of(epoch_of(None, 0.01))])
    assert calm == "stocache: 10 s in loops over 1 loader, 1% of it waiting for data: no problem"
