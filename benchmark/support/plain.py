"""Payloads of bytes for an interpreter that can import neither numpy nor torch, as those beside the main one."""

import os
from collections.abc import Iterator


class PlainPayloads:
    """Bytes of one size, copied for each request."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.value, self.count = memoryview(os.urandom(nbytes)), count

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(self.value) for _ in range(self.count))
