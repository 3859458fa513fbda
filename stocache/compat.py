"""Names that other projects and articles have given to what stocache does."""

from stocache.cache.shared import SharedCache
from stocache.system.limits import GIB, shm_total


class SharedCacheDDP(SharedCache):
    """A `SharedCache` for DDP: one copy for all ranks of this job on this machine; with a ``name``, for other jobs, too.

        cache = SharedCacheDDP(32, len(dataset), (3, 224, 224))

    Every rank makes it with the same arguments, at the same place of the program. The ranks may be started by torchrun,
    `torch.multiprocessing.spawn` or by hand, and need no process group. A `SharedCache` does the same; this name says so.
    Source: announced as a plan by the article on stocaching (C. Jones).
    """


def get_shm_size() -> int:
    """Return the size of /dev/shm in whole GiB, rounded down.

    Change it for now with ``mount -o remount,size=128G /dev/shm``; in Docker with ``--shm-size=128g``.
    Source: the API of stocaching 0.2 (C. Jones, MIT).
    """
    return shm_total() // GIB
