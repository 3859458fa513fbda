"""The command line ``stocache``."""


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    from stocache.cli.app import main

    main()
