"""The time until a light command has answered, and until ``import stocache`` has returned; beside a bare Python and torch.

python -m benchmark startup [--rounds N]
"""

import argparse
import subprocess
import sys
from functools import partial

from benchmark.support.measuring import alternate
from stocache import SharedCache

CLAIM = "The light commands (--help, info, ls, stat, rm) and import stocache start without torch, in at most 0.3 s."

NAME = "benchmark-startup"
_COMMAND = ["-m", "stocache"]
CONTENDERS = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import stocache": ["-c", "import stocache"],
    "stocache --help": [*_COMMAND, "--help"],
    "stocache info": [*_COMMAND, "info"],
    "stocache ls": [*_COMMAND, "ls"],
    f"stocache stat {NAME}": [*_COMMAND, "stat", NAME],
    "stocache rm": [*_COMMAND, "rm", f"{NAME}-that-does-not-exist"],
}


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], capture_output=True, check="rm" not in arguments)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmark startup")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds

    with SharedCache(0.001, 16, (8,), name=NAME):
        seconds = alternate({name: partial(_run, arguments) for name, arguments in CONTENDERS.items()}, rounds)
    print("| | median |\n| --- | ---: |")
    for name, median in seconds.items():
        print(f"| {name} | {median:.2f} s |")


if __name__ == "__main__":
    main()
