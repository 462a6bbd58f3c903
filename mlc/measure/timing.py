"""Warm-up, repeats, and when to stop: how often a candidate is timed, for every kind of worker.

A repeat is the mean of as many calls as take ``min_repeat_seconds``. Whoever is clearly slower than the best of its
task after the first call, or after the first repeat, gets no more: most candidates of a search are, and what matters
of them is their order of magnitude (successive halving with one rival; Jamieson and Talwalkar, 2016). Whoever is so
close to the best that noise decides is timed on, until the difference is significant or ``most_repeats`` are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, stdev

__all__ = ["Plan", "standard_error", "time_candidate"]

#: a single call may be this many times slower than the best before it is one too many
_FIRST_CALL = 2.0
#: and the first repeat
_FIRST_REPEAT = 1.15
#: standard errors between two times that are told apart
_SIGNIFICANT = 2.0
#: a relative standard error that is small enough for anything
_EXACT = 0.003


@dataclass(frozen=True)
class Plan:
    """``best`` is the time of the task's best so far in seconds, 0 while there is none.

    ``cutoff`` in seconds: a first call that is slower is the only one; 0 switches that off.
    """

    repeats: int
    most_repeats: int
    min_repeat_seconds: float
    warmup_runs: int
    cutoff: float = 0.0
    best: float = 0.0


def time_candidate(timer: Callable[[int], float], plan: Plan) -> list[float]:
    """Seconds a call, one figure for each repeat; ``timer`` gives the mean of so many calls."""
    if plan.warmup_runs > 1:  # the check of its output was a run too
        timer(plan.warmup_runs - 1)
    first = timer(1)
    if plan.cutoff and first > plan.cutoff:
        return [first]
    if plan.best and first > _FIRST_CALL * plan.best:
        first = min(first, timer(1))  # once may be bad luck
        if first > _FIRST_CALL * plan.best:
            return [first]
    count, times = _calls(timer, first, plan)
    if plan.best and times[0] > _FIRST_REPEAT * plan.best:
        return times
    while len(times) < plan.repeats or (len(times) < plan.most_repeats and _undecided(times, plan.best)):
        times.append(timer(count))
    return times


def standard_error(times: Sequence[float]) -> float:
    """Of the median of normal times, in seconds; infinite for a single one. Outliers enlarge it, to be on the safe
    side: three times have no robust spread."""
    return 1.2533 * stdev(times) / math.sqrt(len(times)) if len(times) > 1 else math.inf


def _calls(timer: Callable[[int], float], first: float, plan: Plan) -> tuple[int, list[float]]:
    """How many calls make a repeat, and the first repeat."""
    shortest = plan.min_repeat_seconds
    if first >= shortest:
        return 1, [first]
    count = math.ceil(shortest / max(first, 1e-7))
    seconds = timer(count)
    if seconds * count < 0.8 * shortest:  # the first call was slower than the rest
        count = math.ceil(shortest / max(seconds, 1e-8))
        seconds = timer(count)
    return count, [seconds]


def _undecided(times: Sequence[float], best: float) -> bool:
    """Whether more repeats could tell whether this is faster than ``best``."""
    if not best:
        return False
    error, middle = standard_error(times), median(times)
    return error > _EXACT * middle and abs(middle - best) < _SIGNIFICANT * error
