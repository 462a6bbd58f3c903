"""Joint optimisation of graph and schedules: graphs are extracted, their tasks are tuned, and graphs are extracted
again with the measured prices.

The tasks of every graph that may still win are tuned in one run, so that trials go where they gain most. What the log
then says of the model's products corrects the estimates that extraction adds up; a graph that is found only then has
its own tasks tuned as well. In the end the fastest by its tasks' measured times is built and timed in turn with the
unsubstituted model, and kept only if it wins; the log keeps the decision.

Several models may share a run: a task that many have is tuned once for all, and trials go where all together gain most.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import tvm

from mlc.graph.pipeline import lower, prepare
from mlc.graph.products import product_of
from mlc.graph.substitute.check import agree
from mlc.graph.substitute.choose import MARGIN, Substitutions, digest, failed, find, subject
from mlc.graph.substitute.price import bound, call_seconds, compare, estimated
from mlc.graph.substitute.read import Reading, read
from mlc.graph.substitute.search import Candidate, Found
from mlc.graph.task import Task
from mlc.log.decision import GraphDecision
from mlc.log.layers import Layers
from mlc.log.price import Prices
from mlc.log.record import ELSEWHERE, Record
from mlc.log.store import TuningLog
from mlc.measure.measurer import Measurer
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target
from mlc.tuning.confirm import faster
from mlc.tuning.early_abort import HopelessRun
from mlc.tuning.events import Finished, Listener
from mlc.tuning.options import TuneOptions
from mlc.tuning.report import GraphReport, TaskReport, TuneReport
from mlc.tuning.rounds import Rounds
from mlc.tuning.session import tune_tasks
from mlc.tuning.transfer import Experience

__all__ = ["JointTuning", "Timer", "TunedModel"]

#: seconds of a call of each lowered module in each of several rounds, built from the records that the function gives
Timer = Callable[[Sequence[tvm.IRModule], "Callable[[Task], Record | None]"], "list[list[float]]"]

#: a graph whose untuned estimate is this many times that of the model's own is not tuned
_HOPELESS = 1.15
#: part of the budget for the first extraction's graphs; what is left is for those that are found with the log's help
_FIRST = 0.8
#: work that each of the two searches may do in a budget of a second: what a slow core does in a quarter of it
_SEARCH = 0.25 * 100_000
#: seconds of building one function for the last comparison, and the part of the budget that is kept back for it at most
_BUILD_SECONDS, _RESERVED = 0.2, 0.2


@dataclass
class _Entrant:
    """A graph and its module: ``tasks`` are what the model would call, ``every`` with their alternatives. The model's
    own graph has no ``candidate``."""

    candidate: Candidate | None
    module: tvm.IRModule
    tasks: list[Task]
    every: list[Task]

    @property
    def calls(self) -> dict[str, int]:
        """How often each task would be called, were it the fastest of its alternatives."""
        found: dict[str, int] = {}
        for task in self.every:
            found[task.key] = found.get(task.key, 0) + task.weight
        return found


@dataclass
class _Joint:
    mod: tvm.IRModule
    target: Target
    log: TuningLog
    shipped: Layers
    rules: Substitutions | None
    options: CompileOptions
    entrants: dict[str, _Entrant] = field(default_factory=dict)
    #: whether a search had less time than one for a compile has, and used it up
    cut: bool = False

    def entrant(self, candidate: Candidate | None, module: tvm.IRModule) -> _Entrant:
        """A graph lowered as a run without the user's log would build it."""
        lowered = lower(module, self.target, Prices(self.shipped), self.options)
        return _Entrant(candidate, module, lowered.tasks, lowered.with_alternatives())

    def promising(self, found: Found, own: _Entrant) -> list[_Entrant]:
        """The graphs besides the model's own that are not clearly slower untuned and could become faster."""
        kept = []
        for candidate in found.candidates[1:]:
            key = digest(candidate.graph)
            if key not in self.entrants:
                self.entrants[key] = self.entrant(candidate, found.module(candidate))
            entrant = self.entrants[key]
            untuned = compare(entrant.tasks, own.tasks, None)
            least, known = bound(entrant.tasks, own.tasks, self.price)
            if untuned.ours <= _HOPELESS * untuned.theirs and (known is None or least < known):
                kept.append(entrant)
        return kept

    def found(self, reading: Reading, seconds: float | None, scale: Mapping[str, float] | None = None) -> Found:
        """A search that leaves most of ``seconds`` for tuning, whatever else the machine does: it is bounded by work.
        Most take a few seconds and are not cut short."""
        assert self.rules is not None
        whole = replace(self.rules.options, scale=tuple(sorted((scale or {}).items())))
        options = whole if seconds is None else replace(whole, work=min(whole.work, _SEARCH * seconds))
        found = find(self.mod, self.target, replace(self.rules, options=options), None, self.options,
                     reading=reading)
        self.cut |= found.late or (
            options.work < whole.work and any(report.reason == "work" for report in found.reports))
        return found

    def price(self, task: Task) -> float | None:
        record = self.log.best(*task.keys) or self.shipped.best(*task.keys)
        return record.seconds if record is not None and record.ok and record.machine != ELSEWHERE else None

    def seconds(self, entrants: Sequence[_Entrant]) -> list[float]:
        """Each graph's time by its tasks', each the fastest of its alternatives. What nobody has measured is as much
        slower than estimated as what was."""
        tasks = {task.key: task for entrant in entrants for task in entrant.every}
        known = {key: seconds for key, task in tasks.items() if (seconds := self.price(task)) is not None}
        ratios = [seconds / estimated(tasks[key]) for key, seconds in known.items()]
        usual = median(ratios) if ratios else 1.0
        times = {key: known[key] if key in known else usual * estimated(task) for key, task in tasks.items()}
        return [_sum(entrant, times) for entrant in entrants]

    def fastest(self, entrants: Sequence[_Entrant]) -> _Entrant:
        """The fastest graph by its tasks' times; the model's own, which comes first, unless another is faster."""
        times = self.seconds(entrants)
        return entrants[min(range(len(entrants)), key=times.__getitem__)]


def _sum(entrant: _Entrant, times: Mapping[str, float]) -> float:
    best: dict[str, tuple[float, int]] = {}
    for task in entrant.every:
        group, time = task.choice or task.key, times[task.key] + call_seconds(task)
        seconds, weight = best.get(group, (time, 0))
        best[group] = min(time, seconds), max(task.weight, weight)
    return sum(seconds * weight for seconds, weight in best.values())


@dataclass(frozen=True)
class TunedModel:
    """A model (``mod``, as imported) that a run tunes, and the rules that may make other graphs of it.

    Without ``rules`` the model's own graph is tuned alone, and nothing is decided. ``timer`` builds modules and times
    them in turn; without one the tasks' times decide. A second that one run of the model saves is worth ``priority``
    seconds that one run of a model of priority 1 saves.
    """

    mod: tvm.IRModule
    rules: Substitutions | None = None
    options: CompileOptions = DEFAULT_OPTIONS
    timer: Timer | None = None
    priority: int = 1


class _Part:
    """One model's part in a run: its graphs, and which of them is kept."""

    def __init__(self, model: TunedModel, target: Target, log: TuningLog, shipped: Layers) -> None:
        mod = model.mod
        with target.tvm:
            for step in prepare(target):
                mod = step(mod)
        self.joint = _Joint(mod, target, log, shipped, model.rules, model.options)
        self.priority, self.timer = model.priority, model.timer
        self.own = self.joint.entrant(None, mod)
        self.entrants = [self.own]
        self._reading: Reading | None = None
        self._further: list[_Entrant] = []  # of the entrants those that the second search has found
        self._scale: dict[str, float] = {}

    @property
    def several(self) -> bool:
        """Whether there are other graphs than the model's own."""
        return len(self.entrants) > 1

    def search(self, seconds: float | None) -> None:
        """Find the graphs that are to be tuned from the beginning."""
        if self.joint.rules is None:
            return
        try:
            self._reading = read(self.joint.mod["main"])
            self.entrants += self.joint.promising(self.joint.found(self._reading, seconds), self.own)
        except Exception as error:
            failed(error)

    def search_again(self, seconds: float | None) -> None:
        """Find more with what the log knows by now of the model's products."""
        joint = self.joint
        if not self.several or self._reading is None:
            return
        self._scale = _scale(joint, self.own)
        try:
            # with the same estimates the search would find the same
            again = [] if all(factor == 1.0 for factor in self._scale.values()) else joint.promising(
                joint.found(self._reading, seconds, self._scale), self.own)
        except Exception as error:
            failed(error)
            again = []
        self._further = [e for e in again if e not in self.entrants and _may_win(joint, e, self.entrants)]
        self.entrants += self._further

    def tasks(self) -> dict[str, Task]:
        """The tasks of all graphs by their keys, each as often as the graph calls it that does most."""
        found: dict[str, Task] = {}
        for task in (task for entrant in self.entrants for task in entrant.every):
            seen = found.get(task.key)
            found[task.key] = task if seen is None else replace(
                seen, weight=max(seen.weight, task.weight), choice=seen.choice or task.choice)
        return found

    def calls(self) -> list[dict[str, int]]:
        """How often a call of a task counts, for each graph."""
        return [{key: n * self.priority for key, n in entrant.calls.items()} for entrant in self.entrants]

    def kept(self, interrupted: bool) -> tuple[_Entrant, GraphReport | None]:
        """The graph that is kept, which the log has from now on unless the run was interrupted."""
        if self._reading is None:
            return self.own, None
        if not self.several:
            if not interrupted:
                self._decide(self.own, {})
            return self.own, GraphReport(0, False)
        winner, others = self.joint.fastest(self.entrants), len(self.entrants) - 1
        if interrupted:
            return winner, GraphReport(others, winner is not self.own)
        own_seconds = seconds = None
        if winner is not self.own:
            won, own_seconds, seconds = self._confirmed(winner)
            winner = winner if won else self.own
        self._decide(winner, self._scale if winner in self._further else {}, own_seconds, seconds)
        return winner, GraphReport(others, winner is not self.own, own_seconds, seconds)

    def built(self) -> int:
        """Functions that must be built to time the best graph in turn with the model's own."""
        if self.timer is None or not self.several:
            return 0
        return len(self.own.tasks) + max(len(entrant.tasks) for entrant in self.entrants)

    def _confirmed(self, winner: _Entrant) -> tuple[bool, float | None, float | None]:
        """Whether the winner computes the same and is faster as a whole, and the seconds of the own graph and of it."""
        joint = self.joint
        try:
            assert winner.candidate is not None
            if not agree(winner.candidate.graph, read(joint.mod["main"]).graph.live()):
                raise AssertionError(f"a graph must compute what the model does, but one made by "
                                     f"{', '.join(winner.candidate.rules)} does not")
            if self.timer is None:
                own, ours = joint.seconds([self.own, winner])
                return ours < MARGIN * own, None, None
            log = Layers([joint.log, *joint.shipped.readers])
            modules = [lower(entrant.module, joint.target, Prices(log), joint.options).module
                       for entrant in (winner, self.own)]
            ours_, theirs = self.timer(modules, lambda task: log.best(*task.keys))
            return faster(ours_, theirs), median(theirs), median(ours_)
        except Exception as error:
            failed(error)
            return False, None, None

    def _decide(
        self, winner: _Entrant, scale: Mapping[str, float], own_seconds: float | None = None,
        seconds: float | None = None,
    ) -> None:
        joint, rules, reading = self.joint, self.joint.rules, self._reading
        assert rules is not None and reading is not None
        if winner is self.own and joint.cut:
            return  # a compile, which has more time to search, may find what this run did not
        try:
            name = subject(reading, joint.target, rules.patterns, joint.options)
            graph = reading.graph.live() if winner.candidate is None else winner.candidate.graph
            decision = GraphDecision(name, digest(graph), scale, own_seconds, seconds, time.time())
        except Exception as error:
            failed(error)
            return
        joint.log.put_decisions([decision])


class JointTuning:
    """A run on models and on the graphs that rules make of them, within one budget.

    Making one lowers each model's own graph and raises what goes wrong there; what goes wrong with other graphs is a
    warning, and the model's own is tuned alone.
    """

    def __init__(
        self, models: Sequence[TunedModel], target: Target, log: TuningLog, options: TuneOptions, measurer: Measurer,
        on_event: Listener | None = None, *, shipped: Layers,
    ) -> None:
        self._target, self._log, self._shipped = target, log, shipped
        self._options, self._measurer = options, measurer
        self._rounds, self._reports = Rounds(on_event, options), list[TuneReport]()
        self._parts = [_Part(model, target, log, shipped) for model in models]

    def run(self) -> list[TuneReport]:
        """Tune and decide. A report of each model, of the graph that is kept; trials and seconds in it are those of the
        whole run."""
        self._began = time.monotonic()  # lowering the models is no part of the budget
        parts, each = self._parts, self._options.seconds
        each = None if each is None else each / len(parts)
        for part in parts:
            part.search(each)
        several = any(part.several for part in parts)
        self._tune(self._budget(_FIRST if several and not self._options.resume else 1.0))
        if several and not self._interrupted:
            for part in parts:
                part.search_again(each)
            left = self._budget(1.0, self._reserve())
            if left is not None:  # the new graphs first of all, and whoever still gains
                try:
                    self._tune(left)
                except HopelessRun as error:  # candidates did work before: what fails is new in these graphs
                    warnings.warn(f"graphs that were found with the log's help stay untuned: {error}", stacklevel=2)
        kept = [part.kept(self._interrupted) for part in parts]
        reports = [self._report(winner, graph) for winner, graph in kept]
        self._rounds.finish(Finished(self._together(reports)))
        return reports

    @property
    def _interrupted(self) -> bool:
        return bool(self._reports) and self._reports[-1].reason == "interrupted"

    def _budget(self, part: float, reserved: float = 0.0) -> TuneOptions | None:
        """The remainder of a part of the budget; None if it is used up."""
        trials, seconds = self._options.trials, self._options.seconds
        if trials is not None:
            spent = self._rounds.spent_trials + sum(report.trials for report in self._reports)
            trials = max(1 if not self._reports else 0, round(part * trials) - spent)
        if seconds is not None:
            spent_seconds = self._rounds.spent_seconds + (time.monotonic() - self._began)
            seconds = max(1.0 if not self._reports else 0.0, part * seconds - spent_seconds - reserved)
        if (trials is not None and trials < 1) or (seconds is not None and seconds < 1.0):
            return None
        return replace(self._options, trials=trials, seconds=seconds, resume=self._options.resume and not self._reports)

    def _reserve(self) -> float:
        """Seconds for building the best graphs and the models' own and timing them in turn."""
        if self._options.seconds is None:
            return 0.0
        return min(_BUILD_SECONDS * sum(part.built() for part in self._parts), _RESERVED * self._options.seconds)

    def _tune(self, options: TuneOptions | None) -> None:
        assert options is not None
        tasks = dict[str, Task]()
        for part in self._parts:
            for key, task in part.tasks().items():
                seen, weight = tasks.get(key), task.weight * part.priority
                tasks[key] = task.with_weight(weight) if seen is None else replace(
                    seen, weight=seen.weight + weight, choice=seen.choice or task.choice)
        spent = sum(report.trials for report in self._reports)
        elapsed = time.monotonic() - self._began if any(part.several for part in self._parts) else 0.0
        graphs = [part.calls() for part in self._parts]
        self._rounds.begin(graphs, spent, elapsed)
        self._reports.append(tune_tasks(
            list(tasks.values()), self._target, self._log, options, self._measurer, self._rounds,
            shipped=lambda task: self._shipped.best(*task.keys),
            experience=Experience.of([self._log, *self._shipped.readers], self._target), graphs=graphs,
        ))

    def _report(self, winner: _Entrant, graph: GraphReport | None) -> TuneReport:
        """One report of all rounds, with the tasks of the graph that is kept."""
        reports = self._reports
        tasks: dict[str, TaskReport] = {}
        for each in (task for report in reports for task in report.tasks):
            tasks[each.key] = _both(tasks[each.key], each) if each.key in tasks else each
        wanted = {task.key: task for task in winner.every}
        kept = tuple(
            replace(tasks[key], weight=task.weight, choice=task.choice, name=task.name)
            for key, task in wanted.items() if key in tasks
        )
        seconds = time.monotonic() - self._began if len(reports) > 1 else reports[0].seconds
        return TuneReport(
            reports[-1].reason, reports[0].session, sum(r.trials for r in reports), seconds,
            sum(r.measured for r in reports), kept, graph,
        )

    def _together(self, reports: Sequence[TuneReport]) -> TuneReport:
        """All models as one that runs each as often as its priority says."""
        if len(reports) == 1:
            return reports[0]
        tasks: dict[str, TaskReport] = {}
        for part, report in zip(self._parts, reports, strict=True):
            for task in report.tasks:
                seen, weight = tasks.get(task.key), task.weight * part.priority
                tasks[task.key] = replace(task, weight=weight + (0 if seen is None else seen.weight))
        return replace(reports[0], tasks=tuple(tasks.values()), graph=None)


def _both(first: TaskReport, second: TaskReport) -> TaskReport:
    """A task in two runs, of which the second goes on where the first ended."""
    failures = {reason: first.failures.get(reason, 0) + second.failures.get(reason, 0)
                for reason in sorted({*first.failures, *second.failures})}
    return replace(
        second, trials=first.trials + second.trials, seconds=first.seconds + second.seconds, failures=failures,
        stopped=second.stopped or first.stopped,
        verdict=second.verdict if second.trials or second.verdict != "unconfirmed" else first.verdict,
    )


def _may_win(joint: _Joint, entrant: _Entrant, others: Sequence[_Entrant]) -> bool:
    best = joint.fastest(others)
    least, known = bound(entrant.tasks, best.tasks, joint.price)
    return known is None or least < MARGIN * known


def _scale(joint: _Joint, entrant: _Entrant) -> dict[str, float]:
    """How much longer than estimated the model's products take, by kind, where the log knows them."""
    times: dict[str, list[tuple[float, float]]] = {}
    for task in entrant.tasks:
        product, seconds = product_of(task.func), joint.price(task)
        if product is not None and seconds is not None:
            times.setdefault(product, []).append((seconds * task.weight, estimated(task) * task.weight))
    return {
        product: round(min(4.0, max(0.25, sum(a for a, _ in pairs) / sum(b for _, b in pairs))), 1)
        for product, pairs in times.items()
    }
