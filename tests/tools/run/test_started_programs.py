"""Programs under ``stocache run`` that ask for torch, change the import system, start processes, or end in odd ways."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

TRAIN = textwrap.dedent("""
    import torch.multiprocessing
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, idx):
            import time
            time.sleep(0.01)
            return idx

    class Nested(Slow):
        def __getitem__(self, idx):
            return len(list(DataLoader(Slow())))  # in a worker

    loader = DataLoader(Slow(), batch_size=4)

    def train(loader):
        assert DataLoader.__module__ == "stocache.tools.run.loaders"
        for _ in range(2):
            list(loader)
        print("trained", flush=True)
    """)
FORKS = textwrap.dedent("""
    import os, sys
    class Finder:
        def find_spec(self, name, *_):
            if name == "torch.utils.data":
                sys.meta_path.remove(self)
                if os.fork():
                    os.wait()
    sys.meta_path.insert(0, Finder())
    """)
IN_PROCESS = textwrap.dedent("""
    if __name__ == "__main__":
        process = torch.multiprocessing.get_context({method!r}).Process(target=train, args=(loader,))
        process.start(), process.join()
        assert process.exitcode == 0
    """)
CLOSED = "import logging, sys\nlog = open('log', 'w'); logging.basicConfig(level=20, stream=log); log.close(); "
PROGRAMS = {  # and how often they say what
    "asks for torch": (
        "import importlib.util; importlib.util.find_spec('torch')" + TRAIN + "train(loader)", 1, "2 epochs, 4 batches",
    ),
    "forks in a finder": (FORKS + TRAIN + "train(loader)", 2, "2 epochs, 4 batches"),
    "makes no loader": ("import torch; print('trained')", 1, "the main process imported torch, and made no DataLoader."),
    "makes one": (TRAIN + "print('trained')", 1, "made loaders, and iterated over none of them."),
    "has torch's": (
        "from torch.utils.data import dataloader\nLoader = vars(dataloader)['DataLoader']; print('trained')",
        1, "made no DataLoader of stocache's; those of torch are in __main__.",
    ),
    "logs to a closed stream": (CLOSED + TRAIN + "train(loader)", 0, "Logging error"),
    "closes the error stream": (CLOSED + TRAIN + "sys.stderr.close(); train(loader)", 0, "stocache"),
    "ends by os._exit": (TRAIN + "import os; train(loader); os._exit(0)", 1, "epoch 2: the trainer waited"),
    "iterates in workers": (TRAIN + "train(DataLoader(Nested(), num_workers=2))", 1, "in loops over 1 loader"),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    def run(source, *options):
        (tmp_path / "train.py").write_text(source)
        command = [sys.executable, "-m", "stocache", "run", *options, "train.py"]
        result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
        assert (result.returncode, {*result.stdout.split()}) == (0, {"trained"}), result.stderr
        return result.stderr

    return run


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow if row else []) for row, name in enumerate(PROGRAMS)]
)
def test_a_program_is_reported_or_the_reason_why_not(program, run):
    source, count, says = PROGRAMS[program]
    assert run(source).count(says) == count


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_that_trains_reports_for_itself(method, run, tmp_path):
    said = run(TRAIN + IN_PROCESS.format(method=method), "--json", "report")
    assert said.count("in loops over 1 loader") == said.count("Process-1: ") == 1
    assert said.count(", epoch 2: the trainer waited") == 1  # beside that of the report
    (report,) = tmp_path.glob("report.*Process-1")
    assert [epoch["batches"] for epoch in json.loads(report.read_text())[0]["epochs"]] == [2, 2]
    assert json.loads((tmp_path / "report").read_text()) == []
