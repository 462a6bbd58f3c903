"""Allocation of trials: the next batch goes to the task with the largest expected gain for the whole model per second.

    weight * seconds per call * expected relative gain / seconds of the next batch

A task that was not measured yet has the largest expected gain: its first batch contains the seeds. Its time is not
known then; it is assumed to be as far from its roofline as the tasks that were measured, in the median, or to equal the
time of a shipped schedule. A small budget thus goes to the tasks that matter, a few candidates each, while the many
small ones keep their defaults: measuring a default alone gains nothing. If a quarter of the budget suffices, every task
has its first batch before any has a second one.

Afterwards the expected gain combines the gains of the last batches with the distance to the roofline, discounted for
each batch without success; compare the gradient of Ansor's task scheduler (Zheng et al., 2020), which ignores costs.
Alternatives (tasks of which the model runs only the fastest) compete: an expected gain counts only as far as it beats
the best rival, and an alternative that cannot win any more stops. If the tasks belong to several graphs, of which the
model runs only the fastest, a gain is weighted by the probability that its graph wins; tasks that only hopeless graphs
use get nothing. If they belong to several models, a gain counts in each model that calls the task.

Choices depend on measured times, and therefore differ between runs on a real machine; for given times they are
deterministic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mlc.tuning.competition import chances

__all__ = ["Allocator", "TaskState"]

#: a batch counts as a success if it makes the task's best at least this much faster
GAIN = 0.01
#: batches without success after which a task is flat
PATIENCE = 4
#: batches in which every candidate failed after which a task is given up
FAILING = 4
#: an alternative that takes this many times as long as its best rival after two batches is given up
BEATEN = 1.25
#: and one that takes this many times as long in the end is not compared with its untuned schedule
LOST = 1.1
#: part of the roofline from which one batch without success is enough
NEAR = 0.92
#: part of the budget that the first batches of all tasks may take together
_FIRST_PART = 0.25
#: the smallest first batch: the default and rivals for it
_LEAST = 4
#: part of a task's headroom that its first batch is expected to gain; less where a tuned schedule ships
_SEEDS_GAIN, _SHIPPED_GAIN = 0.3, 0.1
#: and each later batch, until there is experience
_LATER_GAIN = 0.1
#: batches' worth of its expected gain that a task may gain in the end
_BATCHES = 3.0
#: part of the guessed time of a task that was not measured by which the guess may be too high
_UNKNOWN = 0.2
#: weight of what an alternative that was not measured would gain over its rival, were the guess of its time right
_TRUST = 0.5
#: part of the roofline that untuned schedules are taken to reach before any was measured
_TYPICAL = 0.6
#: what one trial costs before any was measured, in seconds
_TRIAL_SECONDS = 0.4


@dataclass
class TaskState:
    """What is known about one task during tuning. Seconds are per call unless named otherwise.

    States with an equal, nonempty ``choice`` are alternatives for the same calls. ``shipped`` is the time of the
    shipped schedule, on some machine of this kind.
    """

    index: int
    name: str
    weight: int
    roofline: float
    choice: str = ""
    shipped: float = math.inf
    default: float = math.inf
    best: float = math.inf
    trials: int = 0
    spent: float = 0.0  # seconds of search and measurement
    gains: list[float] = field(default_factory=list)  # relative gain of each batch, the first one left out
    batches: int = 0
    pending: int = 0  # batches under way
    flat: int = 0  # batches since the last success
    judged: int = 0  # batches when a success or the lack of one counted last
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
    """Hands out batches; :meth:`update` decides when a task stops.

    ``graphs`` gives, for each model, how often each of its graphs calls each task, by index (default: one model that
    calls each as often as its weight); a call costs ``call_seconds`` in addition.
    """

    def __init__(
        self, states: Sequence[TaskState], batch: int, trials: int | None = None, seconds: float | None = None,
        graphs: Sequence[Sequence[Mapping[int, int]]] = (), call_seconds: float = 0.0,
    ) -> None:
        self.states = list(states)
        self._call_seconds = call_seconds
        self._batch = batch
        self._graphs = graphs or [[{s.index: s.weight for s in self.states}]]
        self._several = any(len(model) > 1 for model in self._graphs)
        share = _affordable(trials, seconds) * _FIRST_PART / max(1, len(self.states))
        self._first = int(min(batch, max(_LEAST, share)))
        self._everyone = share >= _LEAST
        self._resting: dict[int, int] = {}
        self._rivals = {
            s.index: [r for r in self.states if s.choice and r.choice == s.choice and r is not s] for s in self.states
        }

    def next(self, trials: int | None = None, last: Sequence[TaskState] = ()) -> tuple[TaskState, int] | None:
        """The task to go on with and how many candidates, at most ``trials`` left; None when all have stopped. Those in
        ``last`` get their turn only when there is no other."""
        if trials is not None and trials < 1:
            return None
        calls = self._calls()
        active = [s for s in self.states if not s.stopped and calls[s.index] > 0.0 and not self._rests(s)]
        if not active:
            return None
        active = [s for s in active if not any(s is other for other in last)] or active
        new = [s for s in active
               if not s.batches and not s.pending and not math.isfinite(s.best) and not self._beaten(s)]
        typical, pace = self._typical(), self._pace()
        among = new if self._everyone and new else active
        # a batch that is proposed without the results of those under way gains the less the more of them there are
        rates = {s.index: self._rate(s, typical, pace) / (1 + s.pending) for s in among}
        state = max(among, key=lambda s: (calls[s.index] * rates[s.index], calls[s.index] * s.roofline, -s.index))
        n = self._size(state)
        return state, n if trials is None else min(n, trials)

    def gain(self, state: TaskState) -> float:
        """Expected seconds saved in one run of the model for each second of tuning."""
        return self._calls()[state.index] * self._rate(state, self._typical(), self._pace())

    def expected(self, state: TaskState) -> float:
        """Seconds of a call of a task that no trial was spent on; infinite where there is a time to go by."""
        if math.isfinite(state.best) or state.trials or math.isfinite(self._rival(state)):
            return math.inf
        return _guess(state, self._typical())

    def _calls(self) -> list[float]:
        """How often all models together call each task, each in the graph in which that weighs most by the graph's
        chance."""
        if not self._several:
            return [float(sum(graph.get(s.index, 0) for (graph,) in self._graphs)) for s in self.states]
        typical = self._typical()
        times = [s.best if math.isfinite(s.best) else _guess(s, typical) for s in self.states]
        choices, hopes = [s.choice for s in self.states], [self._hope(s, typical) for s in self.states]
        calls = [0.0] * len(self.states)
        for graphs in self._graphs:
            odds = chances(graphs, choices, times, hopes, self._call_seconds)
            for i, s in enumerate(self.states):
                calls[i] += max(odd * graph.get(s.index, 0) for odd, graph in zip(odds, graphs, strict=True))
        return calls

    def _hope(self, state: TaskState, typical: float) -> float:
        """Seconds of a call that tuning may save in the end."""
        if state.stopped:
            return 0.0
        hope = _BATCHES * self._saved(state, typical)
        known = math.isfinite(state.best) or math.isfinite(state.shipped)
        return hope if known else max(hope, _UNKNOWN * _guess(state, typical))

    def _saved(self, state: TaskState, typical: float) -> float:
        """Seconds of a call that the next batch is expected to save."""
        measured = math.isfinite(state.best)
        now = state.best if measured else _guess(state, typical)
        headroom = max(0.02, 1.0 - min(1.0, state.roofline / now))
        if state.batches or measured:
            recent = state.gains[-2:]
            trend = sum(recent) / len(recent) if recent else headroom * _LATER_GAIN
            hope = headroom * 0.3 / (1.0 + state.batches)
            relative = (0.5 * trend + 0.5 * hope) * 0.5**state.flat
        else:
            relative = headroom * (_SHIPPED_GAIN if math.isfinite(state.shipped) else _SEEDS_GAIN)
        rival = self._rival(state)
        if rival < now:
            relative = max(0.0, relative - (1.0 - rival / now))
        elif not measured and math.isfinite(rival):
            relative += _TRUST * (rival / now - 1.0)
        return now * relative

    def _rate(self, state: TaskState, typical: float, pace: float) -> float:
        """Seconds of a call that the next batch is expected to save, for each second that it takes."""
        each = state.spent / state.trials if state.trials else pace
        return self._saved(state, typical) / max(each * self._size(state), 1e-3)

    def _size(self, state: TaskState) -> int:
        """Candidates of the next batch."""
        if state.batches or math.isfinite(state.best):
            return self._batch
        # an alternative that cannot win comes last; if time is left, one trial shows that it was judged rightly
        return 1 if self._beaten(state) else self._first

    def _typical(self) -> float:
        """The part of the roofline that tasks reach, in the median of those that were measured."""
        return median([max(0.02, min(1.0, s.fraction)) for s in self.states if s.fraction > 0] or [_TYPICAL])

    def _pace(self) -> float:
        """Seconds that a trial of a new task takes."""
        return median([s.spent / s.trials for s in self.states if s.trials] or [_TRIAL_SECONDS])

    def rest(self, state: TaskState) -> None:
        """No batch of a task that has nothing to propose until more of what is under way is known."""
        self._resting[state.index] = state.batches

    def _rests(self, state: TaskState) -> bool:
        return state.pending > 0 and self._resting.get(state.index) == state.batches

    def update(
        self, state: TaskState, trials: int, best: float, seconds: float, generation: int | None = None
    ) -> str:
        """Note a batch of ``trials`` that took ``seconds`` of tuning; the reason if the task stops now, else empty.

        ``best`` is the fastest time of one call in this batch, infinite where all failed. ``generation`` is how many
        of the task's batches were known when it was proposed, left out for all: of those that were proposed with the
        same knowledge, only the first that gains nothing says that the task is flat.
        """
        before, flat = state.best, state.flat
        news = generation is None or generation >= state.judged
        state.trials += trials
        state.spent += seconds
        state.batches += 1
        state.best = min(before, best)
        if math.isfinite(before):
            relative = 1.0 - state.best / before
            state.gains.append(relative)
            state.flat = 0 if relative > GAIN else state.flat + news
        elif not math.isfinite(best):
            state.flat += news
        if state.flat != flat or not state.flat:
            state.judged = state.batches
        if state.stopped:
            return ""
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

    def lost(self, state: TaskState) -> bool:
        """Whether an alternative is so much faster, or every graph that calls it so much slower than another, that it
        does not matter how fast exactly this task is."""
        if self._rival(state) * LOST < state.best:
            return True
        return self._several and self._calls()[state.index] == 0.0

    def stop(self, state: TaskState, reason: str) -> str:
        """End a task."""
        state.stopped = reason
        return reason


def _affordable(trials: int | None, seconds: float | None) -> float:
    """Trials that the budget allows, about."""
    return min(math.inf if trials is None else trials, math.inf if seconds is None else seconds / _TRIAL_SECONDS)


def _guess(state: TaskState, typical: float) -> float:
    """The assumed time of an unmeasured task: that of its shipped schedule, else its roofline divided by the
    ``typical`` fraction."""
    return state.shipped if math.isfinite(state.shipped) else state.roofline / typical
