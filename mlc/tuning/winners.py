"""The end of a tuning run: each winner is timed interleaved with its baseline, and so are alternatives that are close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlc.log.record import Record, Verdict
from mlc.measure.dispatch import Batch, Dispatcher
from mlc.measure.measurer import MeasureRequest, MeasureResult
from mlc.tuning.confirm import as_alone, choose
from mlc.tuning.events import Listener, TaskConfirmed
from mlc.tuning.journal import Journal
from mlc.tuning.report import finite
from mlc.tuning.search import Search

__all__ = ["confirm_winners"]

#: rivals beside the default and the earlier best in the last comparison
_FINALISTS = 2
#: alternatives within this factor of the fastest are timed in turn: at different moments the machine is not the same
_CLOSE = 1.3


def confirm_winners(
    searches: Sequence[Search], journal: Journal, measurer: Dispatcher, rounds: int, lost: Callable[[Search], bool],
    emit: Listener,
) -> None:
    """Time each winner in turn with its default and its earlier best in ``rounds`` rounds, until the journal's seconds
    are used up. Tasks that are ``lost``, since alternatives to them are faster, are left out. No rounds, no comparison.
    """
    if rounds:
        _Confirmation(searches, journal, measurer, rounds, lost, emit).confirm()


@dataclass(frozen=True)
class _Comparison:
    """Candidates to be timed in turn, and what is to be made of their times."""

    requests: list[MeasureRequest]
    judge: Callable[[Sequence[MeasureResult]], None]


@dataclass(frozen=True)
class _Confirmation:
    searches: Sequence[Search]
    journal: Journal
    measurer: Dispatcher
    rounds: int
    lost: Callable[[Search], bool]
    emit: Listener

    def confirm(self) -> None:
        """All comparisons, the largest saving first."""
        for search in self.searches:
            if not search.open and search.best is not None:
                search.verdict = "default" if _same(search.best, search.default) else "earlier"
        ranked = sorted((s for s in self.searches if s.open), key=lambda s: (self.lost(s), -_saving(s)))
        # asked again: its rivals may have been compared by now
        self._compare_all(self._rivals(search) for search in ranked if not self.lost(search))
        self._compare_all(self._alternatives(group) for group in self._close_alternatives())

    def _compare_all(self, comparisons: Iterable[_Comparison]) -> None:
        """Time the rivals of each comparison in turn, as many comparisons at once as there are devices for, until the
        seconds are used up."""
        waiting, under_way = iter(comparisons), list[tuple[Batch, _Comparison]]()
        more = True
        while more or under_way:
            while more and (not under_way or self.measurer.hungry):
                left = self.journal.seconds_left
                comparison = None if left is not None and left <= 0 else next(waiting, None)
                more = comparison is not None
                if comparison is not None:
                    batch = self.measurer.begin_comparison(comparison.requests, self.rounds)
                    under_way.append((batch, comparison))
            if under_way:
                self.measurer.advance()
            for entry in [entry for entry in under_way if entry[0].done]:
                under_way.remove(entry)
                entry[1].judge(entry[0].results)

    def _close_alternatives(self) -> list[list[Search]]:
        """Alternatives that this run tuned and that are so close that times of different moments do not tell which is
        the fastest."""
        groups: dict[str, list[Search]] = {}
        for search in self.searches:
            if search.task.choice and search.best is not None:
                groups.setdefault(search.task.choice, []).append(search)
        found = []
        for group in groups.values():
            least = min(search.state.best for search in group)
            close = [search for search in group if search.state.best <= _CLOSE * least]
            if len(close) > 1 and any(search.state.trials for search in close) and not all(map(self.lost, close)):
                found.append(close)
        return found

    def _alternatives(self, alternatives: Sequence[Search]) -> _Comparison:
        """Alternatives in turn: from then on the log has times of them that can be compared."""
        records = [search.best for search in alternatives if search.best is not None]
        requests = [search.request(record.trace) for search, record in zip(alternatives, records, strict=True)]

        def judge(results: Sequence[MeasureResult]) -> None:
            scaled = as_alone(results, [record.seconds for record in records])
            again = {
                search.task.key: self.journal.again(record, result, Verdict.KEPT)
                for search, record, result in zip(alternatives, records, scaled, strict=True) if not result.failure
            }
            self.journal.append(again.values())
            for search in alternatives:
                if search.task.key in again:
                    search.final = again[search.task.key]
                    search.state.best = search.final.seconds

        return _Comparison(requests, judge)

    def _rivals(self, search: Search) -> _Comparison:
        """A task's winner in turn with its default and its earlier best."""
        rivals = search.finalists(_FINALISTS)
        return _Comparison([search.request(r.trace) for r in rivals],
                           lambda results: self._judge(search, rivals, results))

    def _judge(self, search: Search, rivals: Sequence[Record], results: Sequence[MeasureResult]) -> None:
        choice = choose(results, _place(search.default, rivals), _place(search.earlier, rivals))
        results = as_alone(results, [self.journal.undisturbed(record) for record in rivals])
        if choice.index is None:
            return
        again = [
            self.journal.again(record, result, Verdict.KEPT if i == choice.index else Verdict.REJECTED)
            for i, (record, result) in enumerate(zip(rivals, results, strict=True))
        ]
        # the one that is kept comes last: whatever is read later than all others is the decision
        again.append(again.pop(choice.index))
        self.journal.append(again)
        search.final, search.verdict = again[-1], choice.verdict
        search.state.best = search.final.seconds
        default = next((r for r in again if search.default is not None and _same(r, search.default)), None)
        if default is not None and default.ok:
            search.state.default = default.seconds
        self.emit(TaskConfirmed(
            search.task.key, search.task.name, choice.verdict, finite(search.state.default), search.final.seconds
        ))


def _saving(search: Search) -> float:
    best = search.best
    if best is None or not math.isfinite(search.state.default):
        return 0.0
    return search.task.weight * (search.state.default - best.seconds)


def _same(a: Record, b: Record | None) -> bool:
    return b is not None and a.decisions == b.decisions and a.space == b.space


def _place(record: Record | None, among: Sequence[Record]) -> int | None:
    return next((i for i, other in enumerate(among) if _same(other, record)), None)
