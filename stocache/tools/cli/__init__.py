"""The command line ``stocache``."""

import sys


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    if sys.argv[1:2] == ["run"]:
        from stocache.tools.run import run

        run.main(sys.argv[2:])
    else:
        from stocache.tools.cli.app import app

        app()
