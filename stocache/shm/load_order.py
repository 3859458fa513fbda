"""Keep the order of loads from shared memory, on CPUs that may change it.

NOTE [ Reading in order ]
    A reader loads the state byte of a sample, and then, if it is SET, the bytes of the sample. x86 performs loads in program
    order. ARM, POWER and RISC-V may perform the second load first, although it depends on a comparison of the first: a control
    dependency orders later stores, not later loads. A reader could then find the byte set and the sample not written.

    So on these CPUs a reader releases a lock and takes it again between the two loads. A release waits for all earlier
    loads. Later loads wait for an acquire. And a release is performed before an acquire that follows it (on ARMv8, STLR and
    LDAR; section B2.3.11 of the Arm Architecture Reference Manual). No other thread knows this lock, because a contended lock
    may be taken without these instructions. The writer does the same between its stores (NOTE [ Publishing a slot ]).
"""

import platform
from _thread import allocate_lock

WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
"""Whether `order_loads` is needed on this CPU."""


def order_loads() -> None:
    """Perform all loads before this call before all loads after it; see NOTE [ Reading in order ]."""
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()
