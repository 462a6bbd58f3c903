"""Transfer: the best schedules of other tasks, tried on a task without records of its own.

A schedule of another function does not fit, but the decisions behind it often do: tasks of one search space differ in
their sizes, and what suited a size suits those near it. Decisions are looked up by the space and the names of its
knobs, ordered by how far the tasks are apart, and rounded to values that the knobs of this task have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from mlc.log.record import Record
from mlc.log.store import LogReader
from mlc.target import Target
from mlc.tuning.candidate import Point, TaskSpace
from schedules.space import Knob

__all__ = ["Experience"]

#: what another name counts as, in factors of two between the tasks' sizes: another window, another epilogue
_OTHER_NAME = 1.0
#: and a decision that the knobs of this task do not have, for each factor of two to the nearest that they have
_ROUNDED = 0.5


class Experience:
    """The best records of many tasks; of a task's several ones, all count."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._known: defaultdict[tuple[str, frozenset[str]], list[Record]] = defaultdict(list)
        for record in records:
            if record.ok:
                self._known[record.space, frozenset(record.decisions)].append(record)

    @staticmethod
    def of(readers: Iterable[LogReader], target: Target) -> Experience:
        """The experience that logs hold for ``target``."""
        place = f"-{target.canonical}-"
        return Experience(
            record for reader in readers for summary in reader.tasks()
            if place in summary.task_key and (record := reader.best(summary.task_key)) is not None
        )

    def points(self, space: TaskSpace, flops: float) -> Iterator[Point]:
        """Distinct points of ``space`` for a task of ``flops`` operations, those of the nearest tasks first.

        Records of the task itself are left out: they are no guess.
        """
        found = self._known.get((space.space.name, frozenset(knob.name for knob in space.knobs)), [])
        own = {key.partition("-")[0] for key in space.task.keys}
        placed: list[tuple[float, Point]] = []
        for record in found:
            if record.task_key.partition("-")[0] in own:
                continue
            point, moved = _rounded(space.knobs, record.decisions)
            apart = abs(math.log2(max(flops, 1.0) / max(record.flops, 1.0)))
            other = 0.0 if record.task_name == space.task.name else _OTHER_NAME
            placed.append((apart + other + _ROUNDED * moved, point))
        yield from dict.fromkeys(point for _, point in sorted(placed))


def _rounded(knobs: Iterable[Knob], decisions: Mapping[str, int]) -> tuple[Point, float]:
    """The nearest point, and by how many factors of two its values are away from ``decisions``, all added up."""
    values, moved = [], 0.0
    for knob in knobs:
        wanted = decisions[knob.name]
        distance = {value: abs(math.log2((1 + abs(value)) / (1 + abs(wanted)))) for value in knob.values}
        nearest = min(knob.values, key=lambda value: (distance[value], value))
        values.append(nearest)
        moved += distance[nearest]
    return tuple(values), moved
