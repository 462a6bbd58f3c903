"""The state of a tuning run, accumulated from its events; independent of clocks and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlc.tuning.events import (
    BatchCompiled,
    BatchMeasured,
    Event,
    Finished,
    SessionStarted,
    TaskConfirmed,
    TaskPlan,
    TaskStopped,
)
from mlc.tuning.report import TuneReport

__all__ = ["SessionView", "TaskView"]


@dataclass
class TaskView:
    """One task as the events have told it. Seconds are of one call, None while unknown; ``expected`` are those of
    arithmetic, where nothing is run."""

    plan: TaskPlan
    trials: int = 0
    best: float | None = None
    expected: float | None = None
    default: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    state: str = "waiting"

    @property
    def cost(self) -> float:
        """Seconds in one run of the model; the roofline's while nothing is known."""
        return self.plan.weight * (self.best or self.expected or self.plan.roofline_seconds)

    @property
    def fraction(self) -> float | None:
        """Part of the roofline's speed that is reached."""
        return self.plan.roofline_seconds / self.best if self.best else None

    @property
    def gain(self) -> float | None:
        """How many times faster than untuned."""
        return self.default / self.best if self.default and self.best else None


@dataclass
class SessionView:
    """The run so far: :meth:`update` with each event, then read."""

    tasks: dict[str, TaskView] = field(default_factory=dict)
    trials: int = 0
    trials_budget: int | None = None
    seconds_budget: float | None = None
    spent_trials: int = 0
    elapsed: float = 0.0
    eta: float | None = None
    latency: float | None = None
    default_latency: float | None = None
    active: str = ""
    added: int = 0  # tasks that the last run to begin brought
    graph: int = 0  # the fastest so far; 0 is the model's own
    report: TuneReport | None = None

    def update(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case SessionStarted():
                known = self.tasks  # a further run goes on with the tasks of the one before, and with others
                self.tasks = {
                    plan.key: replace(known[plan.key], plan=plan, state="waiting") if plan.key in known
                    else TaskView(plan) for plan in event.tasks
                }
                self.added = len(self.tasks.keys() - known.keys())
                self.trials_budget, self.seconds_budget = event.trials, event.seconds
                self.spent_trials = event.spent_trials
            case BatchMeasured():
                self._batch(event)
                task = self.tasks[event.task]
                task.best, task.default = event.best_seconds, event.default_seconds
                self.default_latency = event.default_latency
            case BatchCompiled():
                self._batch(event)
                self.tasks[event.task].expected = event.expected_seconds
            case TaskStopped():
                self.tasks[event.task].state = event.reason
            case TaskConfirmed():
                task = self.tasks[event.task]
                task.state = event.verdict
                task.best = event.best_seconds if event.best_seconds is not None else task.best
                task.default = event.default_seconds if event.default_seconds is not None else task.default
            case Finished():
                self.report, self.active = event.report, ""
                self.latency, self.default_latency = event.report.best_latency, event.report.default_latency
        self.graph = self._leading()

    @property
    def failures(self) -> dict[str, int]:
        """Failed candidates by reason, over all tasks."""
        total: dict[str, int] = {}
        for task in self.tasks.values():
            for reason, count in task.failures.items():
                total[reason] = total.get(reason, 0) + count
        return dict(sorted(total.items()))

    @property
    def gain(self) -> float | None:
        """How many times faster than untuned the model is by the estimate."""
        return self.default_latency / self.latency if self.default_latency and self.latency else None

    @property
    def done(self) -> float | None:
        """The part of the budget that is used, 0 to 1; None without a budget."""
        parts = []
        if self.trials_budget:
            parts.append(self.trials / self.trials_budget)
        if self.seconds_budget:
            parts.append(self.elapsed / self.seconds_budget)
        return min(1.0, max(parts)) if parts else None

    def used(self, task: TaskView) -> bool:
        """Whether the model would run this task: its fastest graph calls it, and no alternative to it is faster."""
        return self._calls(task, self.graph) > 0 and self._fastest(task)

    @property
    def graphs(self) -> int:
        """How many graphs of the model are tuned."""
        return max((len(task.plan.calls) for task in self.tasks.values()), default=0) or 1

    def _leading(self) -> int:
        """The fastest graph as far as is known."""
        if self.graphs == 1:
            return 0
        fastest = [task for task in self.tasks.values() if self._fastest(task)]
        return min(range(self.graphs), key=lambda graph: sum(self._cost(task, graph) for task in fastest))

    def _calls(self, task: TaskView, graph: int) -> int:
        return task.plan.calls[graph] if task.plan.calls else task.plan.weight

    def _cost(self, task: TaskView, graph: int) -> float:
        return task.cost / task.plan.weight * self._calls(task, graph) if task.plan.weight else 0.0

    def _fastest(self, task: TaskView) -> bool:
        choice = task.plan.choice
        rivals = [t for t in self.tasks.values() if t.plan.choice == choice] if choice else [task]
        # one that was measured goes before one that is only known by its bound
        return min(rivals, key=lambda t: (t.best is None, t.cost)) is task

    def share(self, task: TaskView) -> float:
        """The task's part of the model's time; 0 for an alternative that is not used."""
        graph = self.graph
        used = [t for t in self.tasks.values() if self._calls(t, graph) and self._fastest(t)]
        total = sum(self._cost(t, graph) for t in used)
        return self._cost(task, graph) / total if total and any(t is task for t in used) else 0.0

    def ranked(self) -> Sequence[TaskView]:
        """The tasks, the model's costliest first, then the alternatives that it does not use."""
        return sorted(self.tasks.values(), key=lambda t: (not self.used(t), -t.cost, t.plan.name))

    def _batch(self, event: BatchMeasured | BatchCompiled) -> None:
        if self.active in self.tasks and self.tasks[self.active].state == "tuning":
            self.tasks[self.active].state = ""  # has had a turn and may have another
        task = self.tasks[event.task]
        task.trials, task.state, task.failures = event.task_trials, "tuning", event.failures
        self.active, self.trials, self.latency = event.task, event.trials, event.latency
        self.elapsed, self.eta = event.elapsed, event.eta
