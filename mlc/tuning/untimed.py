"""Tuning for a GPU that is not present: candidates in the order of their analytic price, judged by the compiler's and
the disassembler's output.

Each space prices its points by arithmetic on the machine (:mod:`mlc.tuning.priced`), or at least puts its seeds in
order. That arithmetic guesses what a compiler will make of a candidate; here the guess is replaced by what it made. A
kernel that spills registers, keeps arrays on the stack, waits for each of its products, fits no multiprocessor or lacks
the instructions that its space is for is refused, and the price of the others is reckoned anew with as many blocks a
multiprocessor as their registers and shared memory allow.

A run with a number of trials shares them out, the dearest functions first; one with a time goes round the functions
until it is over, or until no candidate is left whose price is near that of the best.

What comes out was never run: its records are *untimed*, and a build takes one only where no time is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import tvm

from cost_model.roofline import Roofline, analyse
from mlc.codegen import code_generation, pipeline, prepared
from mlc.codegen.cuda import architectures, has_nvcc
from mlc.codegen.inspection import DynamicShared, Kernel, kernels
from mlc.errors import BuildError, MeasureError
from mlc.graph.task import Task
from mlc.graph.tasks import combined
from mlc.log.record import Record, untimed_of
from mlc.log.store import TuningLog
from mlc.measure.measurer import MeasureResult
from mlc.target import Target
from mlc.tuning.candidate import Candidate, TaskSpace
from mlc.tuning.events import BatchCompiled, Finished, Listener, SessionStarted, TaskPlan, TaskStopped
from mlc.tuning.journal import Journal
from mlc.tuning.options import TuneOptions
from mlc.tuning.priced import by_price
from mlc.tuning.report import TaskReport, TuneReport, finite, latency
from schedules.space import Space

__all__ = ["inspect", "need_compiler", "objection", "rank_tasks"]

#: candidates of a task that are compiled in its turn where no number of trials says how many; without any budget each
#: task has one turn
_USUAL = 4
#: a candidate whose price is so many times the best one's is not compiled: what a compiler says moves prices by less
_WORSE = 1.25


def rank_tasks(
    tasks: Sequence[Task], target: Target, log: TuningLog, options: TuneOptions, on_event: Listener | None = None
) -> TuneReport:
    """Compile the most promising candidates of each task, as many as the budget of ``options`` has, the tasks whose
    bounds are dearest first; every candidate is in ``log`` when an event tells of its batch.

    Raises what :func:`need_compiler` does.
    """
    need_compiler(target)
    return _Ranking(combined(tasks), target, log, options, on_event or (lambda _event: None)).run()


def need_compiler(target: Target) -> None:
    """Raise :class:`MeasureError` where no compiler says what becomes of a candidate."""
    if not has_nvcc():
        raise MeasureError(f"tuning for {target.name} without a GPU needs nvcc to say what becomes of candidates, but "
                           "it was not found; install the CUDA toolkit 13 or set MLC_NVCC, or tune where `nvidia-smi` "
                           "lists a GPU")


def inspect(candidate: Candidate, target: tvm.target.Target) -> list[Kernel]:
    """Compile a candidate's kernels for each of the target's architectures, and inspect the result. Raises what TVM
    raises for a candidate that it cannot lower, and :class:`mlc.errors.BuildError` if the compiler refuses it."""
    assert candidate.module is not None, "a candidate must be scheduled to be compiled"
    shared = DynamicShared()
    func = prepared(candidate.module["main"], target).with_attr("global_symbol", "main")
    sources: list[str] = []

    def keep(source: str, _archs: Sequence[str]) -> bytes:
        sources.append(source)
        return b"-"  # nothing runs it

    with code_generation(target, [shared], keep) as single:
        tvm.compile(tvm.IRModule({"main": func}), target=single, tir_pipeline=pipeline(single))
    return [each for arch in architectures(target) for each in kernels(sources[-1], arch, shared.bytes)]


def objection(found: Sequence[Kernel], space: Space) -> str:
    """Why a candidate is not worth a time, in words; empty where nothing speaks against it."""
    for each in found:
        if each.spilled_bytes:
            return f"{each.spilled_bytes} bytes of registers are spilled in {each.name}"
        if each.stack_bytes:
            return f"{each.stack_bytes} bytes of {each.name} are on the stack"
        if each.serialised:
            return f"{each.name} waits for each of its products"
        if not each.blocks:
            return (f"no block of {each.name} fits a multiprocessor: {each.threads} threads of {each.registers} "
                    f"registers, {each.shared_bytes} bytes of shared memory")
    if not space.opcodes or not any(each.instructions for each in found):  # there is no disassembler
        return ""
    lacking = {each.arch for each in found} - {
        each.arch for each in found if any(map(each.count, space.opcodes))}
    return f"there is no {' or '.join(space.opcodes)} in the machine code for {min(lacking)}" if lacking else ""


@dataclass
class _Ranked:
    """A task's space, its bound, what the log has of candidates, and what this run adds."""

    space: TaskSpace
    bound: Roofline
    known: list[Record]
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    #: why nothing more of it is compiled
    stopped: str = ""

    def __post_init__(self) -> None:
        self._untried = self._candidates()
        self.best = untimed_of(self.known)

    def add(self, record: Record) -> None:
        """Take note of a candidate; the best one is found here, since each price is compared with it."""
        self.records.append(record)
        self.best = untimed_of([*self.known, *self.records])

    @property
    def cost(self) -> float:
        """Seconds in one run of the model, at the least."""
        return self.space.task.weight * self.bound.seconds

    @property
    def expected(self) -> float:
        """Seconds of the best candidate by the latest reckoning."""
        return self.best.expected if self.best is not None else math.inf

    @property
    def failures(self) -> dict[str, int]:
        failed = sum(bool(record.failure) for record in self.records)
        return {"build": failed} if failed else {}

    def next(self, count: int) -> Iterator[Candidate]:
        """The next candidates."""
        return islice(self._untried, count)

    def _candidates(self) -> Iterator[Candidate]:
        """Those whose price is near the best one's, that can be scheduled, of which the log has nothing, and whose code
        no other has."""
        known = [record.decisions for record in self.known if record.space == self.space.space.name]
        codes = set[int]()
        for price, point in by_price(self.space):
            if price > _WORSE * max(self.expected, self.bound.seconds):
                continue
            candidate = self.space.realise(point)
            if candidate is not None and candidate.decisions not in known and candidate.code not in codes:
                codes.add(candidate.code)
                yield candidate

    def plan(self) -> TaskPlan:
        task, space = self.space.task, self.space
        return TaskPlan(task.key, task.name, task.weight, space.space.name, len(space.knobs), space.size,
                        self.bound.seconds, len(self.known), task.choice)

    def report(self) -> TaskReport:
        task = self.space.task
        return TaskReport(
            task.key, task.name, task.weight, self.space.space.name, len(self.records), self.seconds, math.inf,
            math.inf, self.bound.seconds, self.failures, self.stopped,
            "untimed" if math.isfinite(self.expected) else "unconfirmed", task.choice, self.expected,
        )


class _Ranking:
    def __init__(
        self, tasks: Sequence[Task], target: Target, log: TuningLog, options: TuneOptions, emit: Listener
    ) -> None:
        self._emit, self._options = emit, options
        self._journal = Journal(log, tasks, target, options)
        every = [_Ranked(TaskSpace(task), analyse(task.func, target.tvm),
                         [record for key in reversed(task.keys) for record in log.records(key)]) for task in tasks]
        self._tasks = sorted(every, key=lambda each: -each.cost)

    def run(self) -> TuneReport:
        """The whole run; see :func:`rank_tasks`."""
        journal = self._journal
        self._emit(SessionStarted(
            journal.session, tuple(each.plan() for each in self._tasks), journal.trials_left, journal.seconds_left,
            journal.spent_trials, journal.spent_seconds,
        ))
        try:
            reason = self._rank()
        except KeyboardInterrupt:
            reason = "interrupted"
        for each in self._tasks:
            each.stopped = each.stopped or ("untimed" if each.records else reason)
            task = each.space.task
            self._emit(TaskStopped(task.key, task.name, each.stopped, len(each.records), None))
        reports = tuple(each.report() for each in self._tasks)
        journal.finish(reason, {report.key: report.stopped for report in reports})
        report = TuneReport(reason, journal.session, journal.trials, journal.elapsed, journal.records, reports)
        self._emit(Finished(report))
        return report

    def _rank(self) -> str:
        """Give each task its turn, and others as long as the budget has something left; why that ended."""
        bounded = self._options.trials is not None or self._options.seconds is not None
        waiting = list(self._tasks)
        while waiting:
            for place, each in enumerate(waiting):
                trials = self._journal.trials_left
                if spent := self._spent():
                    return spent
                count = _USUAL if trials is None else math.ceil(trials / (len(waiting) - place))
                try:
                    self._compile(each, count)
                except Exception as error:  # a defect in a space or in TVM costs this task, not the run
                    each.stopped = f"broken: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
            waiting = [each for each in waiting if not each.stopped and bounded]
        return self._spent() or "finished"

    def _spent(self) -> str:
        """The budget of which nothing is left; empty while there is some."""
        if self._journal.seconds_left is not None and self._journal.seconds_left <= 0:
            return "seconds"
        return "trials" if self._journal.trials_left == 0 else ""

    def _compile(self, each: _Ranked, count: int) -> None:
        """A task's turn of so many candidates, or of fewer where time is over or no others are left."""
        began, before = time.monotonic(), len(each.records)
        for candidate in each.next(count):
            each.add(self._compiled(each, candidate))
            self._journal.append(each.records[-1:])
            if self._spent() == "seconds":
                break
        else:
            each.stopped = "untimed" if len(each.records) < before + count else ""
        each.seconds += time.monotonic() - began
        if len(each.records) > before:
            self._emit(self._event(each))

    def _event(self, each: _Ranked) -> BatchCompiled:
        task, journal, best = each.space.task, self._journal, each.best
        model = latency((t.space.task.choice, t.space.task.weight * t.expected) for t in self._tasks)
        return BatchCompiled(
            task.key, task.name, len(each.records), journal.trials, finite(each.expected), model, each.failures,
            journal.elapsed, journal.seconds_left, dict(best.decisions) if best is not None else {},
        )

    def _compiled(self, each: _Ranked, candidate: Candidate) -> Record:
        """The record of a candidate that was compiled and not run; one that is refused has its price too."""
        began, expected = time.monotonic(), 0.0
        func, target, space = each.space.task.func, each.space.target, each.space.space
        try:
            found = inspect(candidate, target)
            reason = objection(found, space)
            blocks = min((kernel.blocks for kernel in found), default=0)
            expected = max(space.price(func, target, candidate.decisions, blocks) or 0.0, each.bound.seconds, 1e-9)
        except BuildError as error:
            reason = str(error)
        except Exception as error:  # a defect in a space or in TVM costs this candidate, not the run
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
        result = MeasureResult((), "build" if reason else "", reason, build_seconds=time.monotonic() - began)
        record = self._journal.trial(each.space.task, candidate.space, candidate.decisions, candidate.trace, result,
                                     each.bound.flops)
        return replace(record, expected=float(f"{expected:.6e}"))
