"""``stocache run``: a program runs as under Python, with stocache's loader in place of torch's."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest

SCRIPTS = {
    "names": "import sys; print(__name__, __file__, __package__, __spec__, __doc__, sys.argv, sys.path[0], __builtins__)",
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--cache"); parser.add_argument("-m"); parser.add_argument("rest", nargs="*")
        print(parser.parse_args(), parser.prog)
        parser.error("no")
        """,
    "exit 3": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('a text')",
    "error": "def f():\n    return 1 / 0\nf()",
    "chained errors": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_frame.f_code.co_name)\n1 / 0",
    "at exit": "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('first')",
    "does not parse": "print(1)\nprint(2",
    "future": "from __future__ import annotations\ndef f(x: no_such_name): pass\nprint(f.__annotations__)",
    "optimised": "print(__debug__); assert False",
    "dataclass": """
        import dataclasses, pickle
        @dataclasses.dataclass
        class Point:
            x: int
        print(pickle.loads(pickle.dumps(Point(3))), Point.__module__)
        """,
    "main module": "import __main__, sys; print(__main__ is sys.modules['__main__'], __main__.__dict__ is globals())",
    "execv": """
        import os, sys
        if len(sys.argv) < 4:
            os.execv(sys.executable, [sys.executable, __file__, *"abc"])
        print(sys.argv[1:])
        """,
    "fork": "import os, sys\npid = os.fork()\nif pid == 0:\n    sys.exit(5)\nprint(os.waitpid(pid, 0)[1])",
    "spawned": """
        import multiprocessing
        class Point:
            pass
        def work(point, queue):
            import sys
            queue.put((__name__, type(point).__module__, sys.argv))
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(Point(), queue))
            process.start(); print(queue.get()); process.join(); print(process.exitcode)
        """,
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)",
    "killed": "import os, signal, sys\nsignal.signal(15, lambda *a: sys.exit(7))\nos.kill(os.getpid(), signal.SIGTERM)",
    "profiled": "import cProfile\nprofile = cProfile.Profile(); profile.runcall(sum, [1, 2])\n"
    "print([entry.code for entry in profile.getstats() if 'sum' in str(entry.code)])",
    "traced": "import sys\nseen = []\nsys.settrace(lambda frame, *a: seen.append(frame.f_code.co_name))\ndef f(): pass\nf()\n"
    "sys.settrace(None); print(seen)",
    "neighbour": "import beside; print(beside.__file__, beside.NAME)",
    "stdin": "print(input(), input())",
}  # fmt: skip


def python(*arguments, cwd, **more):
    environment = os.environ | {"PYTHONFAULTHANDLER": "", "COLUMNS": "80"} | more.pop("env", {})
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, input="a line\nanother\n",
        timeout=60, check=False, preexec_fn=restore, **more,
    )  # fmt: skip


def outcome(result):
    """The exit status and what was printed, without what the fork of a process may have printed twice."""
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
    script.write_text(textwrap.dedent(SCRIPTS[name]))
    options = ["-O"] if name == "optimised" else []
    path = os.path.relpath(script, folder)
    expected = python(*options, path, "--cache", "x y", cwd=folder)
    assert outcome(python(*options, "-m", "stocache", "run", path, "--cache", "x y", cwd=folder)) == outcome(expected)


def test_a_link_a_folder_an_archive_and_a_module_run_as_under_python(folder):
    facts = "sorted(globals()), __name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0]"
    source = f"import sys, __main__; print({facts})\n"
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(source + "from . import other; print(other.__name__)\n")
    (package / "other.py").write_text(source)
    plain = folder / "plain"
    plain.mkdir()
    (plain / "__main__.py").write_text(source)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    (folder / "link.py").symlink_to(package / "other.py")
    programs = ["link.py"], ["plain"], ["archive.zip"], ["-m", "package"], ["-m", "package.other"], ["-m", "beside"]
    for program, arguments in zip(programs, (["-x"], ["--"], ["--", "-x"], ["a", "--", "b"], ["--", "--"], []), strict=True):
        expected = python(*program, *arguments, cwd=folder)
        assert expected.returncode == 0
        assert outcome(python("-m", "stocache", "run", *program, *arguments, cwd=folder)) == outcome(expected), program


@pytest.mark.parametrize(
    "program", [["missing.py"], ["empty"], ["-m", "no_such_module"], ["-m", "empty"], ["-m", "no.such.module"]]
)  # fmt: skip
def test_what_cannot_run_is_the_error_of_python(program, folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "__init__.py").write_text("")
    expected, found = python(*program, cwd=folder), python("-m", "stocache", "run", *program, cwd=folder)
    assert outcome(found) == outcome(expected)
    assert found.returncode


TRAIN = """
    import sys
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, idx):
            time.sleep(0.001)
            return torch.full((4,), idx ** 2) + ("random" in sys.argv) * torch.rand(4), idx

    if __name__ == "__main__":
        loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2)
        print(DataLoader.__module__, sum(int(x.sum()) for _ in range(3) for x, _ in loader))
        if "fail" in sys.argv:
            raise KeyboardInterrupt
    """


@pytest.fixture
def train(folder):
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    return lambda *arguments, **more: python("-m", "stocache", "run", *arguments, cwd=folder, **more)


@pytest.mark.linux
def test_the_report_comes_at_the_end_also_after_an_interrupt(train, folder):
    result = train("--cache", "auto", "--json", "report.json", "--trace", "trace.json", "train.py", "fail")
    assert result.returncode == -signal.SIGINT
    assert result.stdout.startswith("stocache.tools.run.loaders")
    assert "KeyboardInterrupt\n\nstocache: " in result.stderr
    assert "stocache/loader" not in result.stderr
    (loader,) = json.loads((folder / "report.json").read_text())
    assert loader["place"] == "train.py:15"
    assert [epoch["hits"] for epoch in loader["epochs"]][1:] == [24, 24]
    names = [event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert names == ["wait for data"] * 18


ENDS = {
    "": (0, "ended at"), "raise ValueError": (1, "ended at"), "raise KeyboardInterrupt": (-signal.SIGINT, "ended at"),
    "sys.exit(3)": (3, "ended at"), "import os; os._exit(4)": (4, "was running at"),
    "import os; os.kill(os.getpid(), 15)": (-signal.SIGTERM, "was running at"),
}  # fmt: skip


@pytest.mark.linux
@pytest.mark.parametrize("end", [
    pytest.param(end, marks=pytest.mark.slow if row not in (2, 4) else []) for row, end in enumerate(ENDS)
])  # fmt: skip
def test_a_page_to_pass_on_is_written_however_the_program_ends(end, train, folder):
    script = folder / "train.py"
    script.write_text(
        script.read_text().replace('    if "fail"', f'    import os\n    os.chdir("/")\n    {end}\n    if "fail"')
    )
    result = train("--cache", "1MB", "--report", "report.html", "--quiet", "train.py", "<b>")
    status, state = ENDS[end]
    assert result.returncode == status, result.stderr
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"<pre>train.py &lt;b&gt;\n{state} " in page
    assert page.count('src="data:image/png;base64,iVBOR') == (state == "ended at")
    assert re.search(r"cached: 24 of 24 samples, .*, hit rate \d+%", page)
    assert ("100.0%" in page) or state == "was running at"  # the second epoch; a page is written once a second at most
    assert not re.search(r"https?://", page)  # it is whole


@pytest.mark.parametrize("option", ["--report", "--json", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(option, train):
    result = train(option, "missing/report", "train.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{option} missing/report: No such file or directory" in result.stderr


def test_a_program_without_a_problem_is_told_so_in_one_line(train, folder):
    steps = "import time\nimport torch.utils.data as data\nfor _ in data.DataLoader([1, 2, 3]):\n    time.sleep(0.05)"
    (folder / "train.py").write_text(steps)
    assert re.fullmatch(
        r"\nstocache: \d+ ms in loops over 1 loader, \d% of it waiting for data: no problem\n", train("train.py").stderr
    )


def test_it_is_silent_and_off_where_that_is_asked_for(train):
    assert train("--quiet", "train.py").stderr == ""
    off = train("--cache", "auto", "train.py", env={"STOCACHE_RUN": "off"})
    assert (off.stdout.split()[0], off.stderr) == ("torch.utils.data.dataloader", "")


@pytest.mark.slow
def test_check_compares_the_batches_with_those_of_torch(train):
    result = train("--check", "10", "--cache", "auto", "train.py", "random")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        0, "stocache: 10 batches are equal bit for bit, with torch's loader and with stocache's."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "problem"), [(["--cache", "much"], "not a size"), (["--disk", "x"], "go together"), ([], "required")]
)
def test_wrong_options_are_refused_before_the_program_runs(option, problem, train):
    result = train(*option, *(["train.py"] if option else []))
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr
