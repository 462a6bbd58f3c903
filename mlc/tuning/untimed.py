"""Tuning for a GPU that is not there: candidates in the order of their analytic price, judged by what the compiler and
the disassembler say of them.

Each space puts its seeds in order by arithmetic on the machine. That arithmetic guesses what a compiler will make of a
candidate; here the guess is replaced by what it made. A kernel that spills registers, keeps arrays on the stack, waits
for each of its products, fits no multiprocessor or lacks the instructions that its space is for is refused, and the
price of the others is reckoned anew with as many blocks a multiprocessor as their registers and shared memory allow.

What comes out was never run: its records are *untimed*, and a build takes one only where no time is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from mlc.tuning.events import Finished, Listener, SessionStarted, TaskPlan, TaskStopped
from mlc.tuning.journal import Journal
from mlc.tuning.options import TuneOptions
from mlc.tuning.report import TaskReport, TuneReport
from schedules.space import Space

__all__ = ["inspect", "need_compiler", "objection", "rank_tasks"]

#: candidates of a task that are compiled where no budget says how many
_USUAL = 4


def rank_tasks(
    tasks: Sequence[Task], target: Target, log: TuningLog, options: TuneOptions, on_event: Listener | None = None
) -> TuneReport:
    """Compile the most promising candidates of each task, as many as the budget of ``options`` has, the tasks whose
    bounds are dearest first; every candidate is in ``log`` when an event tells of its task.

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
    """What the compiler makes of a candidate's kernels, for the least of the target's architectures.

    Raises what TVM raises for a candidate that it cannot lower, and :class:`mlc.errors.BuildError` where the compiler
    refuses it.
    """
    assert candidate.module is not None, "a candidate must be scheduled to be compiled"
    shared = DynamicShared()
    func = prepared(candidate.module["main"], target).with_attr("global_symbol", "main")
    sources: list[str] = []

    def keep(source: str, _archs: Sequence[str]) -> bytes:
        sources.append(source)
        return b"-"  # nothing runs it

    with code_generation(target, [shared], keep) as single:
        tvm.compile(tvm.IRModule({"main": func}), target=single, tir_pipeline=pipeline(single))
    return kernels(sources[-1], architectures(target)[0], shared.bytes)


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
    readable = any(each.instructions for each in found)  # there is a disassembler
    if readable and space.opcodes and not any(each.count(opcode) for each in found for opcode in space.opcodes):
        return f"there is no {' or '.join(space.opcodes)} in the machine code"
    return ""


@dataclass(frozen=True)
class _Ranked:
    """A task's space, its bound, and what the log has of candidates."""

    space: TaskSpace
    bound: Roofline
    known: list[Record]

    @property
    def cost(self) -> float:
        """Seconds in one run of the model, at the least."""
        return self.space.task.weight * self.bound.seconds

    def untried(self) -> Iterator[Candidate]:
        """The space's seeds, best first, that can be scheduled and of which the log has nothing."""
        known = [record.decisions for record in self.known if record.space == self.space.space.name]
        for candidate in map(self.space.realise, self.space.seeds()):
            if candidate is not None and candidate.decisions not in known:
                yield candidate

    def plan(self) -> TaskPlan:
        task, space = self.space.task, self.space
        return TaskPlan(task.key, task.name, task.weight, space.space.name, len(space.knobs), space.size,
                        self.bound.seconds, len(self.known), task.choice)

    def report(self, records: Sequence[Record], seconds: float, stopped: str) -> TaskReport:
        task, failed = self.space.task, sum(bool(record.failure) for record in records)
        best = untimed_of([*self.known, *records])
        return TaskReport(
            task.key, task.name, task.weight, self.space.space.name, len(records), seconds, math.inf, math.inf,
            self.bound.seconds, {"build": failed} if failed else {}, stopped,
            "untimed" if best is not None else "unconfirmed", task.choice, best.expected if best else math.inf,
        )


class _Ranking:
    def __init__(
        self, tasks: Sequence[Task], target: Target, log: TuningLog, options: TuneOptions, emit: Listener
    ) -> None:
        self._emit = emit
        self._journal = Journal(log, tasks, target, options)
        every = [_Ranked(TaskSpace(task), analyse(task.func, target.tvm),
                         [record for key in reversed(task.keys) for record in log.records(key)]) for task in tasks]
        self._tasks = sorted(every, key=lambda each: -each.cost)

    def run(self) -> TuneReport:
        """The whole run; see :func:`rank_tasks`."""
        journal, reports = self._journal, list[TaskReport]()
        self._emit(SessionStarted(
            journal.session, tuple(each.plan() for each in self._tasks), journal.trials_left, journal.seconds_left,
            journal.spent_trials, journal.spent_seconds,
        ))
        reason = "finished"
        try:
            for place, each in enumerate(self._tasks):
                reports.append(self._ranked(each, len(self._tasks) - place))
        except KeyboardInterrupt:
            reason = "interrupted"
        else:
            reason = next((r.stopped for r in reports if r.stopped in ("trials", "seconds")), reason)
        journal.finish(reason, {report.key: report.stopped for report in reports})
        report = TuneReport(reason, journal.session, journal.trials, journal.elapsed, journal.records, tuple(reports))
        self._emit(Finished(report))
        return report

    def _ranked(self, each: _Ranked, left: int) -> TaskReport:
        """Compile candidates of a task, where ``left`` with it have the rest of the budget."""
        journal, began = self._journal, time.monotonic()
        trials = journal.trials_left
        count = _USUAL if trials is None else math.ceil(trials / left)
        stopped, records = "untimed" if count else "trials", list[Record]()
        for candidate in islice(each.untried(), count):
            if journal.seconds_left is not None and journal.seconds_left <= 0:
                stopped = "seconds"
                break
            records.append(self._compiled(each, candidate))
            journal.append(records[-1:])
        task = each.space.task
        self._emit(TaskStopped(task.key, task.name, stopped, len(records), None))
        return each.report(records, time.monotonic() - began, stopped)

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
