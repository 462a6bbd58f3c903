"""Graph and schedules together: candidates are extracted, what they need is tuned, and they are extracted again.

The tasks of every graph that may still win are tuned in one run, so that trials go where they gain most. What the log
then says of the model's products corrects the estimates that extraction adds up; a graph that is found only then has
its own tasks tuned as well. In the end the fastest by its tasks' measured times is built and timed in turn with the
unsubstituted model, and kept only if it wins; the log keeps the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import tvm

from mlc.graph.pipeline import optimise, prepare
from mlc.graph.substitute.check import agree
from mlc.graph.substitute.choose import MARGIN, Substitutions, decision_text, digest, subject
from mlc.graph.substitute.costs import CALL_SECONDS
from mlc.graph.substitute.price import bound, compare, estimated
from mlc.graph.substitute.search import Candidate, Found, search
from mlc.graph.task import Task
from mlc.graph.tasks import extract_tasks, with_alternatives
from mlc.log.layers import Layers
from mlc.log.price import Prices
from mlc.log.record import Record
from mlc.log.store import TuningLog
from mlc.measure.measurer import Measurer
from mlc.target import Target
from mlc.tune.confirm import faster
from mlc.tune.events import Listener
from mlc.tune.options import TuneOptions
from mlc.tune.report import TuneReport
from mlc.tune.session import tune_tasks
from mlc.tune.transfer import Experience

__all__ = ["Timer", "tune_jointly"]

#: seconds of a call of each lowered module in each of several rounds, built from the records that the function gives
Timer = Callable[[Sequence[tvm.IRModule], "Callable[[str], Record | None]"], "list[list[float]]"]

#: a graph whose untuned estimate is this many times that of the model's own is not tuned
_HOPELESS = 1.15
#: part of the budget for the first extraction's graphs; what is left is for those that are found with the log's help
_FIRST = 0.8


@dataclass
class _Entrant:
    """A candidate and its module: ``tasks`` are what the model would call, ``every`` with their alternatives."""

    candidate: Candidate
    module: tvm.IRModule
    tasks: list[Task]
    every: list[Task]


@dataclass
class _Joint:
    mod: tvm.IRModule
    target: Target
    log: TuningLog
    shipped: Layers
    rules: Substitutions
    winograd: bool
    entrants: dict[str, _Entrant] = field(default_factory=dict)

    def lowered(self, found: Found, candidate: Candidate) -> _Entrant:
        key = digest(candidate.graph)
        if key not in self.entrants:
            asked = Prices(self.shipped)  # untuned, as a run without the user's log would build it
            module = found.module(candidate)
            tasks = extract_tasks(optimise(module, self.target, asked, winograd=self.winograd), self.target)
            self.entrants[key] = _Entrant(candidate, module, tasks, with_alternatives(tasks, asked.alternatives))
        return self.entrants[key]

    def promising(self, found: Found) -> list[_Entrant]:
        """The model's own graph and those that are not clearly slower untuned and could become faster."""
        own = self.lowered(found, found.candidates[0])
        kept = [own]
        for candidate in found.candidates[1:]:
            entrant = self.lowered(found, candidate)
            untuned = compare(entrant.tasks, own.tasks, None)
            least, known = bound(entrant.tasks, own.tasks, self.price)
            if untuned.ours <= _HOPELESS * untuned.theirs and (known is None or least < known):
                kept.append(entrant)
        return kept

    def price(self, task: Task) -> float | None:
        record = self.log.best(task.key) or self.shipped.best(task.key)
        return record.seconds if record is not None and record.ok else None

    def seconds(self, entrant: _Entrant) -> float:
        """The model's time by its tasks', each the fastest of its alternatives; infinite where one is unknown."""
        best: dict[str, tuple[float, int]] = {}
        for task in entrant.every:
            seconds = self.price(task)
            own = math.inf if seconds is None else seconds
            group = task.choice or task.key
            known = best.get(group, (math.inf, 0))
            best[group] = min(own, known[0]), max(task.weight, known[1])
        return sum((seconds + CALL_SECONDS) * weight for seconds, weight in best.values())


def tune_jointly(
    mod: tvm.IRModule, target: Target, log: TuningLog, options: TuneOptions, measurer: Measurer,
    rules: Substitutions, on_event: Listener | None = None, *, shipped: Layers, winograd: bool = True,
    timer: Timer | None = None,
) -> TuneReport:
    """Tune ``mod`` (as imported) and the graphs that ``rules`` make of it within the budget of ``options``.

    ``timer`` builds modules and times them in turn; without one the tasks' times decide. The report is of the graph
    that is kept; ``log`` holds which one that is.
    """
    with target.tvm:
        for step in prepare():
            mod = step(mod)
    joint = _Joint(mod, target, log, shipped, rules, winograd)
    scale: dict[str, float] = {}
    found = search(mod, rules.patterns, target.tvm, rules.options, winograd=winograd)
    entrants = joint.promising(found)
    several = len(entrants) > 1
    report = _tuned(joint, entrants, _part(options, _FIRST if several else 1.0), measurer, on_event)
    reports = [report]
    further: list[_Entrant] = []
    if several and report.reason != "interrupted":
        scale = _scale(joint, entrants[0])
        again = search(mod, rules.patterns, target.tvm, replace(rules.options, scale=tuple(sorted(scale.items()))),
                       winograd=winograd)
        further = [e for e in joint.promising(again) if e not in entrants and _may_win(joint, e, entrants)]
        left = _rest(options, reports)
        if left is not None:  # the new graphs first of all, and whoever still gains
            reports.append(_tuned(joint, [*entrants, *further], left, measurer, on_event))
        entrants += further
    winner = _fastest(joint, entrants)
    if winner.candidate in found.candidates:
        scale = {}
    if winner is not entrants[0] and not _confirmed(joint, winner, entrants[0], timer):
        winner = entrants[0]
        scale = {}
    name = subject(found.reading, target, rules.patterns)
    log.put_state(f"substitution/{name}", decision_text(digest(winner.candidate.graph), scale).encode())
    return _merged(reports, winner)


def _may_win(joint: _Joint, entrant: _Entrant, others: Sequence[_Entrant]) -> bool:
    best = _fastest(joint, others)
    least, known = bound(entrant.tasks, best.tasks, joint.price)
    return known is None or least < MARGIN * known


def _fastest(joint: _Joint, entrants: Sequence[_Entrant]) -> _Entrant:
    """By the tasks' times; the model's own, which comes first, unless another is faster."""
    return min(entrants, key=joint.seconds)


def _tuned(
    joint: _Joint, entrants: Sequence[_Entrant], options: TuneOptions, measurer: Measurer, on_event: Listener | None
) -> TuneReport:
    weights: dict[str, Task] = {}
    for entrant in entrants:
        for task in entrant.every:
            seen = weights.get(task.key)
            weights[task.key] = task if seen is None else replace(
                seen, weight=max(seen.weight, task.weight), choice=seen.choice or task.choice)
    return tune_tasks(list(weights.values()), joint.target, joint.log, options, measurer, on_event,
                      shipped=joint.shipped.best,
                      experience=Experience.of([joint.log, *joint.shipped.readers], joint.target))


def _part(options: TuneOptions, part: float) -> TuneOptions:
    trials = None if options.trials is None else max(1, round(options.trials * part))
    return replace(options, trials=trials, seconds=None if options.seconds is None else options.seconds * part)


def _rest(options: TuneOptions, reports: Sequence[TuneReport]) -> TuneOptions | None:
    """What of the budget is left; None where nothing is."""
    trials = None if options.trials is None else options.trials - sum(r.trials for r in reports)
    seconds = None if options.seconds is None else options.seconds - sum(r.seconds for r in reports)
    if (trials is not None and trials < 1) or (seconds is not None and seconds <= 1.0):
        return None
    return replace(options, trials=trials, seconds=seconds, resume=False)


def _scale(joint: _Joint, entrant: _Entrant) -> dict[str, float]:
    """How much longer than estimated the model's products take, by kind, where the log knows them."""
    times: dict[str, list[tuple[float, float]]] = {}
    for task in entrant.tasks:
        kind = "conv2d" if "conv2d" in task.name else "matmul" if "dense" in task.name or "matmul" in task.name else ""
        seconds = joint.price(task)
        if kind and seconds is not None:
            times.setdefault(kind, []).append((seconds * task.weight, estimated(task) * task.weight))
    return {
        kind: round(min(4.0, max(0.25, sum(a for a, _ in pairs) / sum(b for _, b in pairs))), 1)
        for kind, pairs in times.items()
    }


def _confirmed(joint: _Joint, winner: _Entrant, own: _Entrant, timer: Timer | None) -> bool:
    """Whether the winner computes the same, and is faster as a whole."""
    if not agree(winner.candidate.graph, own.candidate.graph):
        return False
    if timer is None:
        return joint.seconds(winner) < joint.seconds(own)

    log = Layers([joint.log, *joint.shipped.readers])
    modules = [
        optimise(entrant.module, joint.target, Prices(log), winograd=joint.winograd) for entrant in (winner, own)
    ]
    ours, theirs = timer(modules, log.best)
    return faster(ours, theirs)


def _merged(reports: Sequence[TuneReport], winner: _Entrant) -> TuneReport:
    """One report of all runs, with the tasks of the graph that is kept."""
    tasks = {task.key: task for report in reports for task in report.tasks}
    wanted = {task.key: task for task in winner.every}
    kept = tuple(
        replace(tasks[key], weight=task.weight, choice=task.choice, name=task.name)
        for key, task in wanted.items() if key in tasks
    )
    return TuneReport(
        reports[-1].reason, reports[0].session, sum(r.trials for r in reports), sum(r.seconds for r in reports),
        sum(r.measured for r in reports), kept,
    )
