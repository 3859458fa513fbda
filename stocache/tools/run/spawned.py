"""The main module of processes that a program under ``stocache run`` spawns: it runs the program's."""

import argparse
import json
import os
import runpy

from stocache.tools.run.everywhere import use_everywhere
from stocache.tools.run.run import SPAWNED, observe, options_of

_given = json.loads(os.environ[SPAWNED])
_line, _main = argparse.Namespace(**_given["given"]), _given["main"]
observe(use_everywhere(**options_of(_line)), _line)
if "init_main_from_name" in _main:
    _content = runpy.run_module(_main["init_main_from_name"], run_name="__mp_main__", alter_sys=True)
else:
    _content = runpy.run_path(_main["init_main_from_path"], run_name="__mp_main__")
globals().update(_content)
