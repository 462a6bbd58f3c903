"""Timing with cold weights, by rotating through several copies of them.

A model reads each of its weights once a run. When it comes back to one, all the others have passed through the caches,
so that a weight of a large network comes from memory and one of a small network from a shared cache. Timed on the
same buffers again and again, they would all be found in the nearest cache: the tasks of ResNet-50 together took a
tenth less than the model. Copies of a task's weights as large together as the model's are what brings them back from
where the model finds them; more than :data:`_BEYOND` times the last cache makes no difference.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Rotation", "copies_of"]

#: copies together need not be larger than this many times the last cache: no line survives that long
_BEYOND = 2.0
#: bytes that copies may take where caches are huge; beyond them weights are timed as warm as they then are
_MOST_BYTES = 512 << 20
#: copies of very small weights
_MOST_COPIES = 1024


def copies_of(size: int, constant_bytes: int, last_level_bytes: int) -> int:
    """How many copies of ``size`` bytes of weights are as cold as in a model that has ``constant_bytes`` of them."""
    if size <= 0:
        return 1
    wanted = min(constant_bytes, int(_BEYOND * last_level_bytes), _MOST_BYTES)
    return max(1, min(math.ceil(wanted / size), _MOST_COPIES))


class Rotation:
    """Calls ``function`` on each of ``arguments`` in turn, on and on; ``synchronise`` waits for what a call has only
    begun, on a GPU."""

    def __init__(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]],
        synchronise: Callable[[], None] = lambda: None,
    ) -> None:
        self._function, self._synchronise = function, synchronise
        self._turns: Iterator[Sequence[Any]] = itertools.cycle(arguments)

    def seconds(self, count: int) -> float:
        """Mean seconds of the next ``count`` calls, with half a microsecond for each call from here."""
        function, turns = self._function, list(itertools.islice(self._turns, count))
        self._synchronise()
        start = time.perf_counter()
        for arguments in turns:
            function(*arguments)
        self._synchronise()
        return (time.perf_counter() - start) / count
