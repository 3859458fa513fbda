"""``python -m stocache`` is the command ``stocache``."""

from stocache.tools.cli import main

if __name__ == "__main__":
    main()
