"""Several tuning runs, on the graphs of one model or on several models, reported to a listener as one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from mlc.tuning.events import BatchMeasured, Event, Finished, Listener, SessionStarted, TaskConfirmed, TaskPlan
from mlc.tuning.options import TuneOptions
from mlc.tuning.report import finite, latency

__all__ = ["Rounds"]


class Rounds:
    """Passes events on: trials and seconds add up, and a model takes what its fastest graph does, several together
    the sum of that.

    :meth:`begin` says before each run how often each graph of each model calls which task, a model's own graph first;
    with one graph each, and before the first call, events pass as they are. The runs' ends are not told, see
    :meth:`finish`.
    """

    def __init__(self, listener: Listener | None, options: TuneOptions) -> None:
        self._listener, self._options = listener or (lambda _event: None), options
        self._graphs: Sequence[Sequence[Mapping[str, int]]] = ()
        self._plans: dict[str, TaskPlan] = {}
        self._best: dict[str, float] = {}
        self._default: dict[str, float] = {}
        self._task_trials: dict[str, int] = {}  # of the runs before
        self._latest: dict[str, int] = {}
        self._trials, self._elapsed = 0, 0.0
        #: what a resumed run had used before
        self.spent_trials, self.spent_seconds = 0, 0.0

    def begin(self, graphs: Sequence[Sequence[Mapping[str, int]]], trials: int, elapsed: float) -> None:
        """A run begins, after others that took ``trials`` and ``elapsed`` seconds."""
        self._graphs, self._trials, self._elapsed = graphs, trials, elapsed
        self._task_trials = dict(self._latest)

    def finish(self, event: Finished) -> None:
        """All runs are over."""
        self._listener(event)

    def __call__(self, event: Event) -> None:
        match event:
            case SessionStarted():
                self._listener(self._started(event))
            case BatchMeasured():
                self._listener(self._measured(event))
            case TaskConfirmed():
                self._note(event.task, event.best_seconds, event.default_seconds)
                self._listener(event)
            case Finished():
                return
            case _:
                self._listener(event)

    def _started(self, event: SessionStarted) -> SessionStarted:
        if not self._trials:
            self.spent_trials, self.spent_seconds = event.spent_trials, event.spent_seconds
        if not self._several:
            return event
        plans = list(event.tasks)
        if len(self._graphs) == 1:
            plans = [replace(p, calls=tuple(graph.get(p.key, 0) for graph in self._graphs[0])) for p in plans]
        self._plans = {plan.key: plan for plan in plans}
        trials, seconds = self._options.trials, self._options.seconds
        return replace(
            event, tasks=tuple(plans), trials=None if trials is None else trials - self.spent_trials,
            seconds=None if seconds is None else seconds - self.spent_seconds, spent_trials=self.spent_trials,
            spent_seconds=self.spent_seconds,
        )

    def _measured(self, event: BatchMeasured) -> BatchMeasured:
        if not self._several:
            return event
        self._note(event.task, event.best_seconds, event.default_seconds)
        self._latest[event.task] = self._task_trials.get(event.task, 0) + event.task_trials
        seconds, calls = 0.0, 0
        for graphs in self._graphs:
            times = [self._seconds(graph, self._best) for graph in graphs]
            fastest = min(range(len(times)), key=times.__getitem__)
            seconds += times[fastest]
            calls += graphs[fastest].get(event.task, 0)
        return replace(
            event, trials=self._trials + event.trials, task_trials=self._latest[event.task],
            elapsed=self._elapsed + event.elapsed, latency=finite(seconds),
            share=calls * self._best.get(event.task, 0.0) / seconds,
            default_latency=finite(sum(self._seconds(graphs[0], self._default) for graphs in self._graphs)),
        )

    @property
    def _several(self) -> bool:
        """Whether some model has several graphs."""
        return any(len(graphs) > 1 for graphs in self._graphs)

    def _note(self, task: str, best: float | None, default: float | None) -> None:
        for known, seconds in ((self._best, best), (self._default, default)):
            if seconds is not None:
                known[task] = seconds

    def _seconds(self, graph: Mapping[str, int], known: Mapping[str, float]) -> float:
        """The graph's time with what is known; of the others, as far from their bounds as those are."""
        plans = [self._plans[key] for key in graph if key in self._plans]
        reached = [plan.roofline_seconds / known[plan.key] for plan in plans if known.get(plan.key)]
        if not reached:
            return math.inf
        typical = median(reached)
        return latency(
            (plan.choice, graph[plan.key] * known.get(plan.key, plan.roofline_seconds / typical)) for plan in plans
        ) or math.inf
