"""Run scripts, each in a fork of one process that has imported torch and stocache: to import them takes seconds."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SERVER = """
import json, os, runpy, signal, sys, warnings
from stocache import *
from stocache import reading
while line := sys.stdin.readline():
    folder, path = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(100)  # which ends it
    warnings.filterwarnings("ignore", "This DataLoader will create")  # of more workers than cores
    os.chdir(folder)
    for number, file in enumerate((os.devnull, "stdout", "stderr")):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.modules["pydicom"] = None  # beside it, MONAI warns of a decoder that is not installed
    sys.path[:1] = [folder, *path]
    runpy.run_path(f"{folder}/example.py", run_name="__main__")
    break
"""


@contextlib.contextmanager
def script_runner(**variables):
    """Yield a function that runs a script in a folder, as example.py. It returns the status, and what was printed.

    ``variables``: of the environment of all scripts. ``path``: folders in which one script finds modules.
    """
    command, environment = [sys.executable, "-c", _SERVER], os.environ | variables
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT, env=environment) as server:

        def run(folder, script, *path):
            (folder / "example.py").write_text(script)
            print(json.dumps([str(folder), path]), file=server.stdin, flush=True)
            return int(server.stdout.readline()), *((folder / name).read_text() for name in ("stdout", "stderr"))

        yield run
        server.stdin.close()
