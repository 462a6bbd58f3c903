"""Confirms a winner: it is timed interleaved with the default and the earlier best, and must be significantly faster.

A search takes the minimum of many noisy times, so its winner is partly luck. Timed in turn, what disturbs the
machine disturbs all rivals alike, and only the differences within a round are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from mlc.measure.measurer import MeasureResult
from mlc.tuning.report import Outcome

__all__ = ["CONFIDENCE", "MIN_GAIN", "Choice", "as_alone", "choose", "faster"]

#: a winner must be at least this much faster, in the median over the rounds
MIN_GAIN = 0.01
#: largest probability of as many rounds won by two equally fast programs
CONFIDENCE = 0.05


@dataclass(frozen=True)
class Choice:
    """``index`` of the rival to keep, None where not even the default ran; ``verdict`` as in ``TaskReport``."""

    index: int | None
    verdict: Outcome


def faster(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether ``a`` beats ``b``, times of the same rounds: by the sign test, and by more than :data:`MIN_GAIN`."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    if not pairs:
        return False
    wins = sum(x < y for x, y in pairs)
    chance = sum(math.comb(len(pairs), k) for k in range(wins, len(pairs) + 1)) / 2 ** len(pairs)
    return chance <= CONFIDENCE and median(x / y for x, y in pairs) < 1.0 - MIN_GAIN


def choose(results: Sequence[MeasureResult], default: int | None, earlier: int | None) -> Choice:
    """Decide between rivals that were timed in turn; ``default`` and ``earlier`` are their places, if present.

    The default stays unless someone beats it, and the earlier best stays unless someone beats that as well.
    Where the default itself does not run, the fastest is taken.
    """
    ran = [i for i, r in enumerate(results) if r.times and not r.failure]
    if not ran:
        return Choice(None, "default")
    by_speed = sorted(ran, key=lambda i: (median(results[i].times), i))
    verdict: Outcome
    incumbent, verdict = (default, "default") if default in ran else (by_speed[0], "tuned")
    if earlier in ran and earlier != default:
        assert earlier is not None and incumbent is not None
        if default not in ran or faster(results[earlier].times, results[incumbent].times):
            incumbent, verdict = earlier, "earlier"
    assert incumbent is not None
    for i in by_speed:
        if i in (incumbent, default):
            continue
        if faster(results[i].times, results[incumbent].times):
            return Choice(i, "earlier" if i == earlier else "tuned")
    return Choice(incumbent, verdict)


def as_alone(results: Sequence[MeasureResult], alone: Sequence[float | None]) -> list[MeasureResult]:
    """The results of a comparison as the rivals would have been timed by themselves: ``alone`` are the seconds that
    they took then, None where that is not known.

    A comparison says who is faster, whatever the machine does meanwhile; where it was slow, all times are too long, and
    would lose against those of functions that were never compared. All are scaled alike, and only down.
    """
    ratios = [
        seconds / median(result.times)
        for result, seconds in zip(results, alone, strict=True) if seconds and result.times and not result.failure
    ]
    factor = min(1.0, median(ratios)) if ratios else 1.0
    return [replace(result, times=tuple(factor * t for t in result.times)) for result in results]
