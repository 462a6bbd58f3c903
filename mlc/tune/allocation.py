"""Which task gets the next trials: the one whose expected gain for the whole model is largest per second spent.

Two phases. First every task gets a small batch, in the order of its share of the model's roofline, so that a budget
of any size leaves the fewest and smallest tasks untried. Then, batch by batch, the task with the largest

    weight * best seconds * expected relative gain / seconds of one batch

is next. The expected gain mixes what the last batches gained with the distance to the roofline, discounted for each
batch without success; compare the gradient of Ansor's task scheduler (Zheng et al., 2020), which knows no cost.
Alternatives (tasks of which the model runs the fastest only) compete: an expected gain counts as far as it gets ahead
of the best rival, and one that cannot win any more stops.

Choices depend on measured times, hence differ between runs on a real machine; given the times they are fixed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Allocator", "TaskState"]

#: a batch counts as a success if it makes the task's best at least this much faster
GAIN = 0.01
#: batches without success after which a task is flat
PATIENCE = 4
#: batches in which every candidate failed after which a task is given up
FAILING = 4
#: an alternative that takes this many times as long as its best rival after two batches is given up
BEATEN = 1.25
#: part of the roofline from which one batch without success is enough
NEAR = 0.92
#: trials per task that a first batch may cost on average: a quarter of the budget goes to looking around
_FIRST_PART = 0.25
#: what one trial costs before any was measured, in seconds
_TRIAL_SECONDS = 0.4


@dataclass
class TaskState:
    """What is known about one task while it is tuned. Seconds are of one call unless named otherwise.

    States with an equal ``choice`` that is not empty are alternatives for the same calls.
    """

    index: int
    name: str
    weight: int
    roofline: float
    choice: str = ""
    default: float = math.inf
    best: float = math.inf
    trials: int = 0
    spent: float = 0.0  # seconds of search and measurement
    gains: list[float] = field(default_factory=list)  # relative gain of each batch, the first one left out
    batches: int = 0
    flat: int = 0  # batches since the last success
    failures: Counter[str] = field(default_factory=Counter)
    stopped: str = ""

    @property
    def cost(self) -> float:
        """Seconds that this task's time costs the model in one run; the roofline while nothing is measured."""
        return self.weight * (self.best if math.isfinite(self.best) else self.roofline)

    @property
    def fraction(self) -> float:
        """Part of the roofline's speed that is reached."""
        return self.roofline / self.best if math.isfinite(self.best) and self.best > 0 else 0.0


class Allocator:
    """Hands out batches; :meth:`update` decides when a task stops."""

    def __init__(
        self, states: Sequence[TaskState], batch: int, trials: int | None = None, seconds: float | None = None
    ) -> None:
        self.states = list(states)
        self._batch = batch
        self._first = self._first_batch(trials, seconds)
        self._rivals = {
            s.index: [r for r in self.states if s.choice and r.choice == s.choice and r is not s] for s in self.states
        }
        order = sorted(self.states, key=lambda s: (-s.weight * s.roofline, s.index))
        self._queue = [s for s in order if not math.isfinite(s.best)]

    def _first_batch(self, trials: int | None, seconds: float | None) -> int:
        affordable = min(
            math.inf if trials is None else trials, math.inf if seconds is None else seconds / _TRIAL_SECONDS
        )
        share = affordable * _FIRST_PART / max(1, len(self.states))
        return int(max(1, min(self._batch, share)))

    def next(self, trials: int | None = None) -> tuple[TaskState, int] | None:
        """The task to go on with and how many candidates, at most ``trials`` left; None when all have stopped."""
        if trials is not None and trials < 1:
            return None
        state, n = None, self._batch
        while self._queue and state is None:
            first = self._queue.pop(0)
            if not first.stopped:  # a time of every alternative is needed to tell which is the fastest
                state, n = first, 1 if self._beaten(first) else self._first
        if state is None:
            active = [s for s in self.states if not s.stopped]
            if not active:
                return None
            state = max(active, key=lambda s: (self.gain(s), -s.index))
        return state, n if trials is None else min(n, trials)

    def gain(self, state: TaskState) -> float:
        """Expected seconds saved in one run of the model for each second of tuning."""
        headroom = max(0.02, 1.0 - min(1.0, state.fraction))
        recent = state.gains[-2:]
        trend = sum(recent) / len(recent) if recent else headroom * 0.5
        hope = headroom * 0.3 / (1.0 + state.batches)
        relative = (0.5 * trend + 0.5 * hope) * 0.5**state.flat
        rival = self._rival(state)
        if math.isfinite(state.best) and rival < state.best:
            relative = max(0.0, relative - (1.0 - rival / state.best))
        per_batch = state.spent / state.batches if state.batches else _TRIAL_SECONDS * self._batch
        return state.cost * relative / max(per_batch, 1e-3)

    def update(self, state: TaskState, trials: int, best: float, seconds: float) -> str:
        """Note a batch of ``trials`` that took ``seconds`` of tuning; the reason if the task stops now, else empty.

        ``best`` is the fastest time of one call in this batch, infinite where all failed.
        """
        before = state.best
        state.trials += trials
        state.spent += seconds
        state.batches += 1
        state.best = min(before, best)
        if math.isfinite(before):
            relative = 1.0 - state.best / before
            state.gains.append(relative)
            state.flat = 0 if relative > GAIN else state.flat + 1
        elif not math.isfinite(best):
            state.flat += 1
        if not math.isfinite(state.best):
            return self.stop(state, "failing") if state.flat >= FAILING else ""
        if self._beaten(state):
            return self.stop(state, "beaten")
        if state.fraction >= NEAR and state.flat >= 1:
            return self.stop(state, "roofline")
        return self.stop(state, "flat") if state.flat >= PATIENCE else ""

    def _rival(self, state: TaskState) -> float:
        """The best time of the task's alternatives, infinite without one."""
        return min((rival.best for rival in self._rivals[state.index]), default=math.inf)

    def _beaten(self, state: TaskState) -> bool:
        """Whether a rival is faster than this task can become."""
        rival = self._rival(state)
        return rival < state.roofline or (state.batches > 1 and rival * BEATEN < state.best)

    def stop(self, state: TaskState, reason: str) -> str:
        """End a task."""
        state.stopped = reason
        return reason
