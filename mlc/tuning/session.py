"""The tuning loop: ask, measure, record, tell, until the budget or the tasks are exhausted.

If this machine's CPU measures, a batch is measured before the next one is proposed. With a GPU or a fleet, as many
batches are in flight as keep every device busy, several of one task if necessary: no point is proposed twice, the
allocation of trials takes batches in flight into account, and results that arrive together are committed together. In
the end the winners are confirmed (:mod:`mlc.tuning.winners`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cost_model.gbt import RankingModel
from cost_model.model import CostModel, Sample
from mlc.errors import MlcError
from mlc.graph.substitute.price import call_seconds
from mlc.graph.task import Task
from mlc.graph.tasks import combined
from mlc.log.record import Record, best_of
from mlc.log.store import TuningLog
from mlc.measure.dispatch import Dispatcher
from mlc.measure.local_executor import LocalExecutor
from mlc.measure.measurer import MeasureOptions, Measurer, MeasureResult
from mlc.target import Target
from mlc.tuning.allocation import Allocator
from mlc.tuning.candidate import Candidate
from mlc.tuning.early_abort import FirstResults, HopelessRun
from mlc.tuning.events import BatchMeasured, Event, Finished, Listener, SessionStarted, TaskPlan, TaskStopped
from mlc.tuning.journal import Journal
from mlc.tuning.learn import pretrained
from mlc.tuning.options import TuneOptions
from mlc.tuning.report import TaskReport, TuneReport, finite, first_of_choices, latency
from mlc.tuning.search import Search
from mlc.tuning.transfer import Experience
from mlc.tuning.winners import confirm_winners

__all__ = ["EXPLORE", "tune_tasks"]

#: the cost of confirming a task's winner, in trials: if most code is already built (measured: 2.3), and if it must be
#: built again, since another worker may have it
_COMPARISON, _COMPARISON_ANEW = 2.5, 5.0
#: largest fraction of the time budget that is reserved for the confirmation
_RESERVED = 0.25
#: largest fraction of the run that training of the cost model may take while other batches wait
_TRAINING = 0.1
#: exploration: standard deviations of the pre-trained model that are added to a candidate's score
EXPLORE = 0.25


def tune_tasks(
    tasks: Sequence[Task],
    target: Target,
    log: TuningLog,
    options: TuneOptions,
    measurer: Measurer,
    on_event: Listener | None = None,
    model: CostModel | None = None,
    shipped: Callable[[Task], Record | None] | None = None,
    experience: Experience | None = None,
    graphs: Sequence[Sequence[Mapping[str, int]]] = (),
) -> TuneReport:
    """Tune ``tasks`` within the budget of ``options``; a measurement is in ``log`` before an event reports it.

    ``model`` ranks candidates (default: a :class:`RankingModel` on top of the pre-trained model that ships for the
    target, with what the log has stored of it). ``shipped`` returns the record that ships with mlc for a task: it is
    measured first, and a winner must beat it. Searches start from what ``experience`` found best for other tasks.
    ``graphs`` gives, for each of several models, and for each of its graphs, how often it calls each task, by key
    (default: one model with one graph, which calls each task as often as its weight). The budget goes to the tasks that
    may still be part of the fastest graph of a model.

    A keyboard interrupt ends the run with the results so far; a single candidate never ends it. Raises what the log or
    the measurer raise if they cannot continue, and :class:`HopelessRun` with the likely cause if the first candidates
    of several tasks all fail in the same way; their records are in the log.
    """
    if model is None:
        model = RankingModel(seed=options.seed, pretrained=pretrained(target)[0], explore=EXPLORE)
    return _Run(tasks, target, log, options, measurer, on_event or _ignore, model, shipped or (lambda _task: None),
                experience, graphs).run()


def _ignore(event: Event) -> None:
    """The listener for callers that only want the report."""


@dataclass
class _Turn:
    """Candidates of one task, the first ``asked`` of which are in flight; the others follow unless all of these fail.

    ``since`` is the time at which they were proposed, ``generation`` the number of the task's batches that were known
    then.
    """

    search: Search
    candidates: list[Candidate]
    since: float
    generation: int
    known: dict[int, MeasureResult] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    asked: int = 0  # of the candidates
    seen: int = 0  # of those that were asked for, before the last part of them
    trials: int = 0

    @property
    def done(self) -> bool:
        return len(self.known) == self.asked

    @property
    def results(self) -> list[MeasureResult]:
        return [self.known[index] for index in sorted(self.known)]


class _Run:
    def __init__(
        self, tasks: Sequence[Task], target: Target, log: TuningLog, options: TuneOptions, measurer: Measurer,
        emit: Listener, model: CostModel, shipped: Callable[[Task], Record | None], experience: Experience | None,
        graphs: Sequence[Sequence[Mapping[str, int]]],
    ) -> None:
        self._shipped, self._experience, self._graphs = shipped, experience, graphs
        self._options, self._emit, self._model = options, emit, model
        self._measurer = measurer if isinstance(measurer, Dispatcher) else Dispatcher(
            LocalExecutor(measurer), MeasureOptions(target.threads))
        self._alone = self._measurer.executor.wanted == 1
        self._paired = self._alone and target.kind == "llvm"  # a GPU has no other user
        self._tasks = combined(tasks)
        self._journal = Journal(log, self._tasks, target, options)
        self._searches: list[Search] = []
        self._allocator: Allocator | None = None
        self._broken: list[TaskReport] = []
        self._batches = 0
        self._first = FirstResults(target, len(self._tasks))
        self._put_off: dict[int, list[Candidate]] = {}
        self._turns: list[_Turn] = []
        self._learned: list[Sample] = []
        self._trained = 0.0  # seconds

    def run(self) -> TuneReport:
        """The whole run; see :func:`tune_tasks`."""
        try:
            self._prepare()
            reason = self._search()
            if not self._first.hopeless:
                confirm_winners(self._searches, self._journal, self._measurer, self._options.confirm_rounds,
                                self._lost, self._emit)
        except KeyboardInterrupt:
            reason = "interrupted"
        self._journal.store_model(self._model, always=True)
        self._journal.finish(reason, {s.task.key: s.state.stopped for s in self._searches if s.state.stopped})
        report = TuneReport(
            reason, self._journal.session, self._journal.trials, self._journal.elapsed, self._journal.records,
            tuple(s.report(self._expected(s)) for s in self._searches) + tuple(self._broken),
        )
        self._emit(Finished(report))
        if self._first.hopeless:
            raise HopelessRun(self._first.diagnosis())
        return report

    def _prepare(self) -> None:
        self._journal.load_model(self._model)
        plans = []
        left = self._journal.trials_left
        budget = None if left is None else left // max(1, len(self._tasks))
        for task in self._tasks:
            records, earlier = self._recalled(task)
            try:
                search = Search(
                    task, len(self._searches), self._model, self._options.strategy, self._options.seed, records,
                    earlier, self._shipped(task), budget, self._experience,
                )
            except Exception as error:  # a space that fails on one function must not cost the other tasks their turn
                self._broken.append(_broken(task, error))
                continue
            self._searches.append(search)
            plans.append(TaskPlan(
                task.key, task.name, task.weight, search.space.space.name, len(search.space.knobs),
                search.space.size, search.state.roofline, search.known, task.choice,
            ))
        journal = self._journal
        self._emit(SessionStarted(
            journal.session, tuple(plans), journal.trials_left, journal.seconds_left, journal.spent_trials,
            journal.spent_seconds,
        ))
        for report in self._broken:
            self._emit(TaskStopped(report.key, report.name, report.stopped, 0, None))

    def _recalled(self, task: Task) -> tuple[list[Record], Record | None]:
        """The log's records of a task, and the one to compile it with. On a fleet, only records of its machine class,
        since times of different classes are not comparable."""
        found = (record for key in reversed(task.keys) for record in self._journal.log.records(key))
        records = [record for record in found if not record.expected]  # was never run
        machine = self._measurer.executor.machine
        if not machine:
            return records, self._journal.log.best(*task.keys)
        own = [record for record in records if record.machine == machine]
        return own, best_of(own)

    def _search(self) -> str:
        """Measure batches until a budget is used up; returns the reason for ending."""
        journal = self._journal
        allocator = self._allocator = Allocator(
            [s.state for s in self._searches], self._options.batch, journal.trials_left, journal.seconds_left,
            self._by_index(), max((call_seconds(s.task) for s in self._searches), default=0.0),
        )
        try:
            while True:
                reason = self._begin_batches(allocator)
                if not self._turns:
                    self._train(at_once=True)
                    return reason
                self._measurer.advance()
                self._take(allocator)
        except BaseException:
            self._record()  # what is known when an interrupt comes
            raise

    def _begin_batches(self, allocator: Allocator) -> str:
        """Begin as many batches as keep every device busy; returns the reason if there are none to come after these."""
        while not self._turns or (self._measurer.hungry and not (self._alone and self._first.open)):
            trials, seconds = self._journal.trials_left, self._journal.seconds_left
            if trials is not None:
                trials -= sum(turn.asked - turn.trials for turn in self._turns)
                if trials < 1:
                    return "trials"
            if seconds is not None and seconds <= self._reserve():
                return "seconds"
            if self._first.hopeless:
                return "failing"
            seen = [s.state for s in self._searches if self._first.seen(s.task.key)] if self._first.open else []
            chosen = allocator.next(trials, seen)
            if chosen is None:
                return "finished"
            self._ask(self._searches[chosen[0].index], chosen[1], allocator)
        return ""

    def _by_index(self) -> list[list[dict[int, int]]]:
        """The graphs' calls by the indices of the searches; empty if a task is broken, since its graph would appear too
        cheap."""
        places = {search.task.key: search.state.index for search in self._searches}
        return [] if self._broken else [
            [{places[key]: n for key, n in graph.items()} for graph in model] for model in self._graphs
        ]

    def _reserve(self) -> float:
        """Seconds to reserve for the confirmation of the winners."""
        if not self._options.confirm_rounds or self._options.seconds is None:
            return 0.0
        each = self._journal.elapsed / max(1, self._journal.trials)
        compared = [s for s in self._searches if s.open and not self._lost(s)]
        trials = _COMPARISON if self._alone else _COMPARISON_ANEW
        wanted = each * trials * (len(compared) + sum(bool(s.task.choice) for s in compared) / 2)
        return min(wanted, self._options.seconds * _RESERVED)

    def _ask(self, search: Search, n: int, allocator: Allocator) -> None:
        """Begin a batch of a task, or stop the task if it has nothing to propose."""
        turn = _Turn(search, [], time.monotonic(), search.state.batches)
        try:
            turn.candidates = self._put_off.pop(search.state.index, [])[:n] or search.ask(n)
        except MlcError:
            raise
        except Exception as error:
            self._stop(search, allocator.stop(search.state, _reason(error)))
            return
        if turn.candidates:
            search.state.pending += 1
            self._turns.append(turn)
            # on a fleet nobody waits for the first results: where all fail, a few more have failed
            count = len(turn.candidates)
            self._measure(turn, self._first.count(count) if self._alone else count)
        elif not search.state.pending:
            self._stop(search, allocator.stop(search.state, "exhausted"))
        else:  # what is under way may breed new candidates
            allocator.rest(search.state)

    def _measure(self, turn: _Turn, count: int) -> None:
        """Submit the next ``count`` candidates of a turn: only the first few as long as no candidate has worked."""
        first = turn.asked
        turn.asked += count
        requests = [turn.search.request(c.trace, self._paired) for c in turn.candidates[first : turn.asked]]

        def measured(index: int, result: MeasureResult) -> None:
            turn.known[first + index] = result

        self._measurer.begin(requests, measured)

    def _take(self, allocator: Allocator) -> None:
        """Record the results that have arrived, and learn from batches that are complete."""
        self._record()
        for turn in [turn for turn in self._turns if turn.done]:
            self._first.note(turn.search.task.key, [r for i, r in turn.known.items() if i >= turn.seen])
            turn.seen = turn.asked
            if turn.asked < len(turn.candidates):
                if not self._first.open:
                    self._measure(turn, len(turn.candidates) - turn.asked)
                    continue
                self._put_off[turn.search.state.index] = turn.candidates[turn.asked :]
            self._turns.remove(turn)
            self._finish(turn, allocator)

    def _finish(self, turn: _Turn, allocator: Allocator) -> None:
        search, results = turn.search, turn.results
        search.state.pending -= 1
        problem = self._learn(search, turn.candidates[: turn.asked], results)
        self._journal.store_model(self._model)
        best = min((median(r.times) for r in results if r.times and not r.failure), default=math.inf)
        seconds = time.monotonic() - turn.since
        if not self._alone:  # the wait for a device, and what others did meanwhile, are no costs of this task
            seconds = sum(result.build_seconds + result.run_seconds for result in results)
        reason = allocator.update(search.state, turn.trials, best, seconds, turn.generation)
        if problem:
            reason = allocator.stop(search.state, problem)
        self._batches += 1
        self._announce(search)
        if reason:
            self._stop(search, reason)

    def _record(self) -> None:
        """Record new results; candidates that lowered to known code were not run, and do not count as trials."""
        records = []
        for turn in self._turns:
            search = turn.search
            for index in sorted(turn.known.keys() - turn.recorded):
                turn.recorded.add(index)
                candidate, result = turn.candidates[index], turn.known[index]
                default = search.space.default
                if search.is_new(result) or (default is not None and candidate.point == default.point):
                    records.append(self._journal.trial(
                        search.task, candidate.space, candidate.decisions, candidate.trace, result,
                        search.roofline.flops,
                    ))
                    search.note(records[-1])
                    turn.trials += 1
        if records:
            self._journal.append(records)

    def _learn(self, search: Search, candidates: Sequence[Candidate], results: Sequence[MeasureResult]) -> str:
        """Tell the search what was measured; returns the error if that failed, which ends this task only."""
        try:
            self._learned += search.learn(candidates, results)
            self._train(at_once=self._alone)
        except MlcError:
            raise
        except Exception as error:
            return _reason(error)
        return ""

    def _train(self, *, at_once: bool) -> None:
        """Train the cost model on new samples, unless training has already taken a large part of the run."""
        if self._learned and (at_once or self._trained <= _TRAINING * self._journal.elapsed):
            start = time.monotonic()
            learned, self._learned = self._learned, []
            self._model.fit(learned)
            self._trained += time.monotonic() - start

    def _expected(self, search: Search) -> float:
        return math.inf if self._allocator is None else self._allocator.expected(search.state)

    def _lost(self, search: Search) -> bool:
        return self._allocator is not None and self._allocator.lost(search.state)

    def _stop(self, search: Search, reason: str) -> None:
        state = search.state
        self._emit(TaskStopped(search.task.key, search.task.name, reason, state.trials, finite(state.best)))

    def _announce(self, search: Search) -> None:
        state, best = search.state, search.best
        states, guess = [s.state for s in self._searches], [self._expected(s) for s in self._searches]
        self._emit(BatchMeasured(
            task=search.task.key, name=search.task.name, batch=self._batches, task_trials=state.trials,
            trials=self._journal.trials, best_seconds=finite(state.best), default_seconds=finite(state.default),
            roofline_fraction=state.fraction, share=state.cost / (latency((s.choice, s.cost) for s in states) or 1.0),
            latency=latency((s.choice, s.weight * min(s.best, guess[s.index])) for s in states),
            default_latency=latency(
                (s.choice, s.weight * min(s.default, guess[s.index])) for s in first_of_choices(states)
            ),
            failures=dict(sorted(state.failures.items())), elapsed=self._journal.elapsed, eta=self._eta(),
            best_decisions=dict(best.decisions) if best else {},
        ))

    def _eta(self) -> float | None:
        """Seconds until the first of the two budgets is used up."""
        journal = self._journal
        ends = [] if journal.seconds_left is None else [journal.seconds_left]
        if journal.trials_left is not None and journal.trials:
            ends.append(journal.trials_left * journal.elapsed / journal.trials)
        return min(ends, default=None)


def _reason(error: Exception) -> str:
    return f"broken: {type(error).__name__}: {error}".splitlines()[0]


def _broken(task: Task, error: Exception) -> TaskReport:
    return TaskReport(
        task.key, task.name, task.weight, "", 0, 0.0, math.inf, math.inf, math.inf, {}, _reason(error), "unconfirmed",
        task.choice,
    )
