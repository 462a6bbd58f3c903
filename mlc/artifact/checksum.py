"""Checksums at memory bandwidth: XXH3 of every chunk of a file, on several threads.

One thread hashes faster than a file in the page cache can be copied (14 GB/s against 2 GB/s of zlib's CRC-32), so a
check costs next to nothing beyond reading the bytes. It finds damage, not malice: whoever changes a file on purpose
can write new checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from mlc.config import physical_cores

__all__ = ["CHUNK", "checksum", "read_checked", "sums"]

#: bytes that one checksum covers; they fit into a core's cache, where they are hashed right after they were read
CHUNK = 1 << 20
_THREADS = 8  # more of them wait for memory


def checksum(data: bytes | memoryview) -> int:
    """XXH3's 64 bits of some bytes."""
    return xxh3_64_intdigest(data)


def sums(pieces: Iterable[bytes | memoryview]) -> list[int]:
    """The checksum of each chunk of the concatenated pieces; the last chunk may be shorter."""
    found: list[int] = []
    state, filled = xxh3_64(), 0
    for piece in pieces:
        data = memoryview(piece)
        while data:
            part = data[: CHUNK - filled]
            state.update(part)
            filled += len(part)
            data = data[len(part) :]
            if filled == CHUNK:
                found.append(state.intdigest())
                state, filled = xxh3_64(), 0
    return [*found, state.intdigest()] if filled else found


def read_checked(file: int, start: int, into: np.ndarray, expected: Sequence[int]) -> int | None:
    """Fill ``into``, bytes, from ``start`` of an open file, and compare what arrived with ``expected``.

    Returns where in the file the first chunk begins that differs or is cut short; None where all is as it should be.
    """
    def differs(index: int) -> bool:
        part = into[index * CHUNK : (index + 1) * CHUNK]
        return not _filled(file, start + index * CHUNK, part.data) or checksum(part.data) != expected[index]

    chunks = range(-(-into.size // CHUNK))
    with ThreadPoolExecutor(min(physical_cores(), _THREADS)) as pool:
        return next((start + i * CHUNK for i, bad in enumerate(pool.map(differs, chunks)) if bad), None)


def _filled(file: int, start: int, into: memoryview) -> bool:
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], start + done)
        if not got:
            return False
        done += got
    return True
