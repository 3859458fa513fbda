"""What the system offers: memory that processes share, locks that end with a process, CPUs, files.

Linux offers all of it, in `linux`. On other systems (`portable`) a cache is memory of one process, which its threads share.
Nothing else in the package asks which system it is: this is the only place that chooses.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING or hasattr(os, "O_TMPFILE"):
    from stocache.system.platform import linux as here
else:
    from stocache.system.platform import portable as here

__all__ = ["here"]
