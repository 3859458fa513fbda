"""Compute checksums (XXH3-64), and embed a checksum in the text that it protects.

XXH3 hashes 12 KB in 0.3 µs, a tenth of the time of CRC-32, so every sample can be checked each time it is read.
"""

from typing import TypeAlias

import xxhash

BytesLike: TypeAlias = bytes | memoryview

ZEROS = "0" * 16
"""Stands in the place of a checksum (16 hexadecimal digits) while the checksum is computed."""


def embed_checksum(text: bytes, mark: bytes, *more: BytesLike) -> bytes:
    """Return ``text`` with a checksum in the place of the `ZEROS` that follow the first ``mark``.

    The checksum covers ``text`` as it was, followed by ``more``.
    """
    at = text.index(mark) + len(mark)
    return text[:at] + checksum(text, *more).encode() + text[at + len(ZEROS) :]


def read_checksum(text: bytes, mark: bytes, *more: BytesLike) -> tuple[str, str]:
    """Return the checksum that `embed_checksum` has put into ``text``, and the checksum that it should be.

    Raises:
        ValueError: ``text`` does not hold a checksum.
    """
    at = text.index(mark) + len(mark)
    found = text[at : at + len(ZEROS)].decode("ascii")
    return found, checksum(text[:at] + ZEROS.encode() + text[at + len(ZEROS) :], *more)


def checksum(*parts: BytesLike) -> str:
    """Return the XXH3-64 of all ``parts``, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
