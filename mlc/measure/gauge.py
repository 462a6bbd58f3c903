"""Detects when the machine is slowed down (throttling, other load): a fixed computation, timed on every thread.

On a shared machine (a virtual one, or a busy desktop) everything can take twice as long for seconds at a time, because
a core is taken away or its other hardware thread is busy. Repeats of one candidate fall into the same phase and agree
with each other. The time of a fixed computation reveals this, independent of the candidate: it is compared with the
fastest of its recent times, so that a machine that stays slow becomes the new reference. If most moments are disturbed,
waiting for a better one only wastes time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import numpy as np

__all__ = ["DISTURBED", "LANES", "ROUNDS", "Gauge", "arrays", "clock_of", "undisturbed"]

Result = TypeVar("Result")

#: this many times slower than the machine can be is too slow to count
DISTURBED = 1.2
#: times that are remembered, a few tens of seconds of them
_REMEMBERED = 200
#: readings at once, of which the median counts
_READINGS = 3
#: seconds of work after which cores that slept are at their speed
_WAKING = 0.012
#: calls of a reading, and their multiplications and additions for each thread: some 60 microseconds together
_CALLS, ROUNDS, LANES = 8, 6_000, 128
#: attempts to find a quiet moment for one candidate, and the seconds between two
_ATTEMPTS, _PAUSE = 3, 0.15
#: first attempts that are looked back at, and the part of them that may be disturbed for another one to be made
_LOOKED_AT, _RARE = 16, 0.5


class Gauge:
    """Measures the machine's current speed. ``clock`` returns the seconds of one reading; :meth:`wake` works for
    ``waking`` seconds, measured by ``now``."""

    def __init__(
        self, clock: Callable[[], float], waking: float = _WAKING, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock, self._waking, self._now = clock, waking, now
        self._past: deque[float] = deque(maxlen=_REMEMBERED)
        #: whether the last first attempts were disturbed
        self.disturbed: deque[bool] = deque(maxlen=_LOOKED_AT)

    @property
    def rarely(self) -> bool:
        """Whether disturbances are rare."""
        return sum(self.disturbed) <= max(_RARE * len(self.disturbed), 1)

    def wake(self) -> None:
        """Work until sleeping cores have reached their clock rate, so that a reading only shows the load of others."""
        until = self._now() + self._waking
        while self._now() < until:
            self._clock()

    def slowness(self) -> float:
        """How many times slower than its recent best the machine is, at least 1."""
        reading = median(self._clock() for _ in range(_READINGS))
        self._past.append(reading)
        return reading / min(self._past)


def undisturbed(
    measure: Callable[[], Result], gauge: Gauge,
    worth_it: Callable[[Result, float], bool] = lambda _result, _slowness: True,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Result, float]:
    """The result of ``measure()`` at a quiet moment, or the least disturbed of a few attempts, and the slowness then.

    ``worth_it`` is asked, with a disturbed result and the slowness, whether another attempt could matter.
    """
    best: tuple[Result, float] | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            pause(_PAUSE)
        gauge.wake()
        before = gauge.slowness()
        result = measure()
        slowness = max(before, gauge.slowness())
        if best is None or slowness < best[1]:
            best = result, slowness
        if not attempt:
            gauge.disturbed.append(slowness >= DISTURBED)
        if slowness < DISTURBED or not gauge.rarely or not worth_it(result, slowness):
            break
    assert best is not None
    return best


def arrays(threads: int) -> list[np.ndarray]:
    """The operands of the computation: ``[threads, LANES]``, ``[ROUNDS]``, and space for the sums of each lane."""
    rng = np.random.default_rng(0)
    return [rng.random((threads, LANES), "float32"), rng.random((ROUNDS,), "float32"),
            np.zeros((threads, LANES), "float32")]


def clock_of(function: Callable[[], Any]) -> Callable[[], float]:
    """The clock of a gauge, in seconds per reading; ``function`` does the computation once."""

    def seconds() -> float:
        function()  # threads that sleep must wake first
        started = time.perf_counter()
        for _ in range(_CALLS):
            function()
        return time.perf_counter() - started

    return seconds
