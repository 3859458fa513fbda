"""stocache: cache any PyTorch dataset in shared memory, one copy per machine."""

import logging
import sys

import lazy_loader

from stocache import moved

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # __init__.pyi lists the names
_UNLISTED = {"errors", "loader"}  # modules
_UNLISTED |= {"SlotState", "DataStorage", "InMemoryDataStorage"}  # parts
_UNLISTED |= {"SharedCacheDDP", "get_shm_size"}  # names of stocaching
__all__ = [name for name in __all__ if not (name in _UNLISTED or name.endswith("Error"))]


def _say_where(record: logging.LogRecord) -> bool:
    """Add to a warning the place where it is explained."""
    if record.levelno == logging.WARNING:
        from stocache.tools.cli.symptoms import say_where  # here: most programs warn of nothing

        say_where(record)
    return True


logging.getLogger("stocache").addFilter(_say_where)
sys.meta_path.append(moved.MovedFinder())  # the last one, asked for what no other has found
