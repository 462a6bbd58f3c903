"""The state of one task during tuning: its space, its strategy, its share of the budget, and its records."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from cost_model.model import CostModel, Sample, sample
from cost_model.roofline import Roofline, analyse
from mlc.graph.task import Task
from mlc.log.record import Record, Verdict
from mlc.measure.machine import machine_id
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.tuning import strategy as strategies
from mlc.tuning.allocation import TaskState
from mlc.tuning.candidate import Candidate, TaskSpace
from mlc.tuning.learn import cold_of
from mlc.tuning.report import Outcome, TaskReport
from mlc.tuning.transfer import Experience

__all__ = ["Search"]

#: points of other tasks that a search begins with
_HINTS = 6
#: records of a task whose features are computed anew when the stored model does not know them
_REPLAYED = 128


class Search:
    """One task during a tuning run.

    ``records`` are the task's records in the log when the run begins, ``earlier`` the one that a build would use,
    ``shipped`` the record that a build would use without a log, ``budget`` the number of trials that the task can
    expect, if that is bounded. ``experience`` is that with other tasks.

    Raises whatever a defective space raises for this function; the run then skips the task.
    """

    def __init__(
        self, task: Task, index: int, model: CostModel, strategy: str, seed: int, records: Sequence[Record],
        earlier: Record | None, shipped: Record | None = None, budget: int | None = None,
        experience: Experience | None = None,
    ) -> None:
        self.task = task
        self.roofline: Roofline = analyse(task.func, task.target.tvm, task.constants, task.constant_bytes)
        self.state = TaskState(index, task.name, task.weight, max(self.roofline.seconds, 1e-9), task.choice)
        if shipped is not None and shipped.ok:
            self.state.shipped = shipped.seconds
        self.earlier = earlier
        self.final: Record | None = None
        self.verdict: Outcome = "unconfirmed"
        self.space = TaskSpace(task, shipped=shipped)
        if experience is not None:
            self.space.hints = tuple(islice(experience.points(self.space, self.roofline.flops), _HINTS))
        self.known = len(records)
        self.default: Record | None = None
        self._request = MeasureRequest.of(task, "")
        self._machine = machine_id()  # reads files
        self._model = model
        self._successes: list[Record] = []
        self._codes: set[str] = set()  # lowered code that was measured
        # a run that starts from other records must not draw the same candidates again
        rng = random.Random(f"{seed}/{task.key}/{len(records)}")
        self.strategy = strategies.create(strategy, self.space, rng, self._score, budget)
        self._recall(records)

    def ask(self, n: int) -> list[Candidate]:
        """The strategy's next candidates."""
        return self.strategy.ask(n)

    def request(self, trace: str, paired: bool = False) -> MeasureRequest:
        """The measurement request for a trace of this task; ``paired`` with the time of its default, since the time on
        another machine says nothing about the speed of this one."""
        best, default = self.state.best, self.space.default
        usual = self.state.default if self.default is not None and self.default.machine == self._machine else math.inf
        return replace(
            self._request, trace=trace, best=best if math.isfinite(best) else 0.0,
            baseline=default.trace if paired and default is not None else "",
            baseline_seconds=usual if paired and math.isfinite(usual) else 0.0,
        )

    def learn(self, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> list[Sample]:
        """Tell the strategy the results; returns the samples that the cost model may learn from."""
        self.strategy.tell(candidates, results)
        return self._samples(candidates, [_median(r) for r in results])

    def is_new(self, result: MeasureResult) -> bool:
        """Whether no earlier candidate lowered to the same code, so that the result is new information."""
        return not result.code_hash or result.code_hash not in self._codes

    def note(self, record: Record) -> None:
        """Take a record of this task into account."""
        self._codes.add(record.code)
        if record.failure:
            self.state.failures[record.failure] += 1
        if not record.ok:
            return
        self._successes.append(record)
        default = self.space.default
        if default is not None and record.decisions == default.decisions:
            self.default = record
            self.state.default = record.seconds

    @property
    def best(self) -> Record | None:
        """The record to use: the confirmed one, else the fastest known."""
        return self.final or min(self._successes, key=lambda r: r.seconds, default=None)

    def finalists(self, count: int) -> list[Record]:
        """The ``count`` fastest candidates, the default, and the earlier best: distinct decisions, fastest first."""
        rivals: list[Record] = []
        for record in sorted(self._successes, key=lambda r: r.seconds):
            if len(rivals) < count and not _among(record, rivals):
                rivals.append(record)
        known = [r for r in (self.default, self.earlier) if r is not None]
        for record in known:
            if not _among(record, rivals):
                rivals.append(record)
        return rivals

    @property
    def open(self) -> bool:
        """Whether a confirmation could change what is used, because the fastest record is not confirmed yet."""
        fastest = self.best
        if fastest is None or (self.default is not None and fastest.decisions == self.default.decisions):
            return self.earlier is not None and fastest is not None and fastest.decisions != self.earlier.decisions
        confirmed = self.earlier is not None and self.earlier.verdict is Verdict.KEPT
        return not (confirmed and self.earlier is not None and fastest.decisions == self.earlier.decisions)

    def report(self, expected: float = math.inf) -> TaskReport:
        """The task's line in the run's report; ``expected`` is its estimated time if it had no trial."""
        best, state = self.best, self.state
        return TaskReport(
            key=self.task.key, name=self.task.name, weight=self.task.weight, space=self.space.space.name,
            trials=state.trials, seconds=state.spent, default_seconds=state.default,
            best_seconds=best.seconds if best else math.inf, roofline_seconds=state.roofline,
            failures=dict(sorted(state.failures.items())), stopped=state.stopped, verdict=self.verdict,
            choice=self.task.choice, expected_seconds=expected,
        )

    def _score(self, candidates: Sequence[Candidate]) -> np.ndarray:
        modules = [c.module for c in candidates if c.module is not None]
        assert len(modules) == len(candidates), "only scheduled candidates can be scored"
        of_space = [self.space.features_of(c) for c in candidates]
        return self._model.score(self.task.func, self.task.target.tvm, modules, cold_of(self.task), of_space)

    def _samples(self, candidates: Sequence[Candidate], seconds: Sequence[float]) -> list[Sample]:
        target = self.task.target.tvm
        return [
            sample(self.task.key, c.module, target, s, cold_of(self.task), self.space.features_of(c))
            for c, s in zip(candidates, seconds, strict=True) if c.module is not None
        ]

    def _recall(self, records: Sequence[Record]) -> None:
        """Tell the strategy the log's records, and the cost model those that it has not stored."""
        recalled = [(r, c) for r in records if (c := self.space.recall(r)) is not None]
        results = [
            MeasureResult(r.times, r.failure, r.detail, code_hash=r.code) for r, _ in recalled
        ]
        self.strategy.tell([c for _, c in recalled], results)
        for record, _ in recalled:
            self.note(record)
        self.state.failures.clear()  # the report counts this run's
        best = self.best
        self.state.best = best.seconds if best else math.inf
        missing = len(recalled) - self._model.known(self.task.key)
        if missing <= 0:
            return
        newest = recalled[-min(missing, _REPLAYED) :]
        replayed = [(r, self.space.realise(c.point)) for r, c in newest]
        usable = [(r, c) for r, c in replayed if c is not None]
        self._model.fit(self._samples([c for _, c in usable], [r.seconds for r, _ in usable]))


def _among(record: Record, others: Sequence[Record]) -> bool:
    return any(record.decisions == other.decisions and record.space == other.space for other in others)


def _median(result: MeasureResult) -> float:
    if result.failure or not result.times:
        return math.inf
    return float(np.median(result.times))
