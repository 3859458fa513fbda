"""``stocache run``: a program runs as under Python, with stocache's loader in place of torch's, and is reported at its end."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

TEXT = Path(__file__).with_name("scripts.txt").read_text()
SCRIPTS = {name: text for name, _, text in (part.partition("\n") for part in TEXT.split("\n... ")[1:])}


def python(*arguments, cwd, **environment):
    environment = os.environ | {"PYTHONFAULTHANDLER": "", "COLUMNS": "80"} | environment
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, input="a line\nanother\n",
        timeout=120, check=False, preexec_fn=restore,
    )  # fmt: skip


def outcome(result):
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a folder, with ünicode"
    folder.mkdir()
    (folder / "beside.py").write_text("NAME = __name__")
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_behaves_as_under_python(name, folder):
    script = folder / "sub" / "script.py" if name == "names" else folder / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPTS[name])
    options = ["-O"] if name == "optimised" else []
    path = os.path.relpath(script, folder)
    expected = python(*options, path, "--cache", "x y", cwd=folder)
    assert outcome(python(*options, "-m", "stocache", "run", path, "--cache", "x y", cwd=folder)) == outcome(expected)


def test_a_link_a_folder_an_archive_and_a_module_run_as_under_python(folder):
    facts = "sorted(globals()), __name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0]"
    source = f"import sys, __main__; print({facts})\n"
    package, plain = folder / "package", folder / "plain"
    package.mkdir()
    plain.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(source + "from . import other; print(other.__name__)\n")
    (package / "other.py").write_text(source)
    (plain / "__main__.py").write_text(source)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    (folder / "link.py").symlink_to(package / "other.py")
    programs = ["link.py"], ["plain"], ["archive.zip"], ["-m", "package"], ["-m", "package.other"], ["-m", "beside"]
    for program, arguments in zip(programs, (["-x"], ["--"], ["--", "-x"], ["a", "--", "b"], ["--", "--"], []), strict=True):
        expected = python(*program, *arguments, cwd=folder)
        assert expected.returncode == 0
        assert outcome(python("-m", "stocache", "run", *program, *arguments, cwd=folder)) == outcome(expected), program


@pytest.mark.parametrize("program", [["missing.py"], ["empty"], ["-m", "no.such.module"], ["-m", "empty"]])
def test_what_cannot_run_is_the_error_of_python(program, folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "__init__.py").write_text("")
    expected, found = python(*program, cwd=folder), python("-m", "stocache", "run", *program, cwd=folder)
    assert outcome(found) == outcome(expected)
    assert found.returncode


TRAIN = textwrap.dedent("""
    import sys, time
    import torch.multiprocessing
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, idx):
            time.sleep(0.002)
            return torch.full((4,), idx ** 2) + ("random" in sys.argv) * torch.rand(4), idx

    def train(workers=0, dataset=Squares):
        loader = DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
        print(DataLoader.__module__, sum(int(x.sum()) for _ in range(3) for x, _ in loader), flush=True)

    """)


@pytest.fixture
def run(folder):
    def run(program, *options, **environment):
        (folder / "train.py").write_text(program)
        return python("-m", "stocache", "run", *options, cwd=folder, **environment)

    return run


ENDS = {  # what the program does last: its status, and what the page says
    "": (0, "ended at"), "raise KeyboardInterrupt": (-signal.SIGINT, "ended at"),
    "os._exit(4)": (4, "was running at"), "os.kill(os.getpid(), 15)": (-signal.SIGTERM, "was running at"),
}  # fmt: skip
QUIET = "os._exit(4)"
FILES = "--json", "report.json", "--report", "report.html"


@pytest.mark.linux
@pytest.mark.parametrize("end", [
    pytest.param(end, marks=pytest.mark.slow if row not in (1, 2) else []) for row, end in enumerate(ENDS)
])  # fmt: skip
def test_the_report_and_a_page_to_pass_on_come_however_the_program_ends(end, run, folder):
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib draws the page")
    last = f"if __name__ == '__main__':\n    import os\n    train(2)\n    os.chdir('/')\n    {end}\n"
    options = ("--cache", "1MB", *FILES, *["--quiet"] * (end == QUIET))
    result, (status, state) = run(TRAIN + last, *options, "train.py", "<b>"), ENDS[end]
    assert (result.returncode, result.stderr == "") == (status, end == QUIET), result.stderr
    assert result.stdout.startswith("stocache.tools.run.loaders")
    assert "stocache/loader" not in result.stderr
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"<pre>train.py &lt;b&gt;\n{state} " in page
    assert page.count('src="data:image/png;base64,iVBOR') == (state == "ended at")
    assert re.search(r"cached: 24 of 24 samples, .*, hit rate \d+%", page)
    assert not re.search(r"https?://", page)  # it is whole
    if state == "ended at":
        assert ("KeyboardInterrupt\n\nstocache: " if end else "\nstocache: ") in result.stderr
        (loader,) = json.loads((folder / "report.json").read_text())
        assert loader["place"] == "train.py:14"
        assert [epoch["hits"] for epoch in loader["epochs"]][1:] == [24, 24]


def test_it_is_off_where_that_is_asked_for(run):
    source = "import logging, multiprocessing.spawn as spawn; logging.getLogger('stocache').warning(type(spawn).__name__)"
    on, off = run(source, "--cache", "auto", "train.py"), run(source, "--cache", "auto", "train.py", STOCACHE_RUN="off")
    assert (on.stderr, off.stderr) == ("\nstocache: Replaced\n", "module\n")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "count"), [("--check 10 --cache auto", 10), ("--cache auto --check", 18)])
def test_check_compares_the_batches_with_those_of_torch(run, options, count):
    result = run(TRAIN + "train()", *options.split(), "train.py", "random")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        0, f"stocache: {count} batches are equal bit for bit, with torch's loader and with stocache's."
    )  # fmt: skip


REFUSED = {"--cache much train.py": "not a size", "": "required", "--json missing/x train.py": "--json missing/x: No such file"}


@pytest.mark.parametrize("options", REFUSED)
def test_wrong_options_are_refused_before_the_program_runs(options, run):
    result = run(TRAIN + "train()", *options.split())
    assert (result.returncode, result.stdout, REFUSED[options] in result.stderr) == (2, "", True)


OWN = (
    TRAIN.replace("DataLoader, Dataset", "Dataset")
    + """
from stocache import CachedDataset, DataLoader
from tqdm import tqdm
loader = DataLoader(CachedDataset(Squares(), size_limit_gib=0.1), batch_size=4, shuffle=True, num_workers=2)
for _ in range(3):
    list(tqdm(loader, mininterval=0))
"""
)
PROGRAMS = {  # the program, and how often it says what
    "takes stocache's loader": (OWN, 1, "train.py:20: CachedDataset of 24 samples\n  3 epochs, 18 batches: "),
    "makes no loader": (TRAIN, 1, "the main process imported torch, and made no DataLoader."),
    "makes one": (f"{TRAIN}DataLoader([1])", 1, "made loaders, and iterated over none of them."),
    "closes the error stream": (f"{TRAIN}sys.stderr.close()\ntrain()", 0, "stocache"),
    "ends by os._exit": (f"{TRAIN}train()\nimport os; os._exit(0)", 1, "epoch 2: the trainer waited"),
}  # fmt: skip


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow if row > 1 else []) for row, name in enumerate(PROGRAMS)]
)
def test_a_program_is_reported_or_the_reason_why_not(program, run):
    source, count, says = PROGRAMS[program]
    result = run(source, "train.py")
    assert (result.returncode, result.stderr.count(says)) == (0, count), result.stderr
    said = [line for line in result.stderr.split("\n") if "stocache" in line]
    assert all(line.startswith("stocache") for line in said), said  # and does not follow the text of a progress bar


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_that_trains_reports_for_itself(method, run, folder):
    last = f"""
if __name__ == "__main__":
    process = torch.multiprocessing.get_context({method!r}).Process(target=train)
    process.start(), process.join()
    assert process.exitcode == 0
"""
    said = run(TRAIN + last, "--json", "report", "train.py").stderr
    assert said.count("in loops over 1 loader") == said.count("Process-1: ") == 1
    assert said.count(", epoch 2: the trainer waited") == 1  # beside the file of the report
    (report,) = folder.glob("report.*Process-1")
    assert [epoch["batches"] for epoch in json.loads(report.read_text())[0]["epochs"]] == [6, 6, 6]
    assert json.loads((folder / "report").read_text()) == []
