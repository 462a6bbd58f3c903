"""Warm-up, repetitions and stopping rule of a timing, the same for every kind of worker.

A repeat is the mean of as many calls as take ``min_repeat_seconds``. A candidate that is clearly slower than the best
of its task after the first call, or after the first repeat, is not timed further: that holds for most candidates of a
search, and only the order of magnitude of their times matters (successive halving with one rival; Jamieson and
Talwalkar, 2016). A candidate that is so close to the best that noise decides is timed until the difference is
significant, or ``most_repeats`` are used up.

On a shared machine everything can take half as long again for seconds or minutes, and cores that slept are slow for
some milliseconds. Between the repeats of a candidate, its :class:`Pace` is measured with another candidate of the same
task on the same data: a disturbance that affects both does not change which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, stdev

__all__ = ["Pace", "Plan", "standard_error", "time_candidate"]

#: a single call may be this many times slower than the best before it is one too many
_FIRST_CALL = 2.0
#: and the first repeat
_FIRST_REPEAT = 1.15
#: this many times as slow after a repeat as before it, or the reverse, the machine has changed
_STEADY = 1.1
#: seconds of repeats after which there are ``repeats`` at most: the limit of whoever takes so long is near
_LONG = 2.0
#: standard errors between two times that are told apart
_SIGNIFICANT = 2.0
#: a relative standard error that is small enough for anything
_EXACT = 0.003


@dataclass(frozen=True)
class Plan:
    """``best`` is the time of the task's best so far in seconds, 0 while there is none.

    ``exact`` asks for as many repeats as there may be, which others have only where noise decides.

    ``cutoff`` in seconds: a first call that is slower is the only one; 0 switches that off.
    """

    repeats: int
    most_repeats: int
    min_repeat_seconds: float
    warmup_runs: int
    cutoff: float = 0.0
    best: float = 0.0
    exact: bool = False


class Pace:
    """How many times slower than usual the machine is at the moment: a baseline's mean time, measured by ``timer``,
    divided by its ``usual`` seconds per call, in readings of at least ``shortest`` seconds."""

    def __init__(self, timer: Callable[[int], float], usual: float, shortest: float) -> None:
        self._timer, self._usual = timer, usual
        self._count = max(1, math.ceil(shortest / usual))
        self()  # cores that slept are at their speed after it

    def __call__(self) -> float:
        return self._timer(self._count) / self._usual


def time_candidate(
    timer: Callable[[int], float], plan: Plan, pace: Callable[[], float] = lambda: 1.0
) -> list[float]:
    """Seconds per call, one figure for each repeat; ``timer`` returns the mean of a number of calls.

    Each is divided by the ``pace`` of the machine, the mean of those before and after it; a repeat during which the
    pace changed is used only if there is no other.
    """
    if plan.warmup_runs > 1:  # the check of its output was a run too
        timer(plan.warmup_runs - 1)
    before = pace()
    first = timer(1)
    if plan.cutoff and first > plan.cutoff:
        return [first / before]
    limit = _FIRST_CALL * plan.best * before
    if plan.best and first > limit:
        first = min(first, timer(1))  # once may be bad luck
        if first > limit:
            return [first / before]
    count, seconds = _calls(timer, first, plan)
    times: list[float] = []
    doubtful: list[float] = []
    spent = 0.0
    while True:
        after = pace()
        steady = max(before, after) <= _STEADY * min(before, after)
        (times if steady else doubtful).append(2 * seconds / (before + after))
        spent += count * seconds
        most = plan.most_repeats if spent < _LONG else plan.repeats
        if len(times) == 1 and plan.best and times[0] > _FIRST_REPEAT * plan.best:
            return times
        if len(times) + len(doubtful) >= most:
            return times or doubtful
        if len(times) >= plan.repeats and not plan.exact and not _undecided(times, plan.best):
            return times
        before, seconds = after, timer(count)


def standard_error(times: Sequence[float]) -> float:
    """The standard error of the median of normally distributed times, in seconds; infinite for a single one. Outliers
    enlarge it, to be on the safe side, since three times have no robust spread."""
    return 1.2533 * stdev(times) / math.sqrt(len(times)) if len(times) > 1 else math.inf


def _calls(timer: Callable[[int], float], first: float, plan: Plan) -> tuple[int, float]:
    """The number of calls in a repeat, and the first repeat's seconds per call."""
    shortest = plan.min_repeat_seconds
    if first >= shortest:
        return 1, first
    count = math.ceil(shortest / max(first, 1e-7))
    seconds = timer(count)
    if seconds * count < 0.8 * shortest:  # the first call was slower than the rest
        count = math.ceil(shortest / max(seconds, 1e-8))
        seconds = timer(count)
    return count, seconds


def _undecided(times: Sequence[float], best: float) -> bool:
    """Whether more repeats could decide whether this is faster than ``best``."""
    if not best:
        return False
    error, middle = standard_error(times), median(times)
    return error > _EXACT * middle and abs(middle - best) < _SIGNIFICANT * error
