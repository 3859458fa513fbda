"""The order of loads from shared memory, on processors that do not keep it.

NOTE [ Reading in order ]
    A reader loads the state byte of a sample, and then, if it is SET, the bytes of the sample. x86 performs loads in the order
    of the program. ARM, POWER and RISC-V may perform the second one first: that it depends on a comparison of the first
    (a control dependency) orders stores after it, not loads. Then a reader could find the byte set and the sample not there.

    So on these processors a reader lets a lock go and takes it again between the two. To release is to let all loads before
    it be performed first; to acquire is to let none after it be performed before; and a release is performed before an acquire
    that follows it (on ARMv8, STLR and LDAR; section B2.3.11 of the Arm Architecture Reference Manual). The lock is one that
    nobody else has, for a lock that is contended may be taken without these instructions. The writer does the same between
    its stores (NOTE [ Publishing a slot ]).
"""

import platform
from _thread import allocate_lock

WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
"""Whether `order_loads` is needed on this processor."""


def order_loads() -> None:
    """Have every load before this call performed before every load after it; see NOTE [ Reading in order ]."""
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()
