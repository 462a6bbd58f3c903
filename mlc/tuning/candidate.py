"""Candidates of a task: a point of its space, the schedule that it gives, and earlier records of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product, zip_longest
from math import prod

import tvm
import tvm_ffi
from tvm import s_tir

from cost_model.features import SpaceFeatures
from mlc.graph.task import Task
from mlc.log.record import Record
from mlc.log.shipped import schedule_of
from schedules import registry
from schedules.space import InvalidDecision, Knob, Space, schedule_with
from schedules.trace import trace_json

__all__ = ["Candidate", "Point", "TaskSpace"]

#: the values of the space's knobs, in the order of the knobs
Point = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to schedule ``task``. ``schedule`` is None for a candidate that is only known from the log."""

    task: Task
    space: str
    decisions: Mapping[str, int]
    point: Point
    schedule: s_tir.Schedule | None = None
    recorded: str = ""

    @property
    def module(self) -> tvm.IRModule | None:
        """The scheduled function, which a cost model reads."""
        return None if self.schedule is None else self.schedule.mod

    @cached_property
    def trace(self) -> str:
        """The trace as JSON text."""
        return self.recorded if self.schedule is None else trace_json(self.schedule)

    @cached_property
    def code(self) -> int:
        """Equal for candidates whose scheduled functions are equal, however they came about."""
        return int(tvm_ffi.structural_hash(self.module, map_free_vars=True)) if self.schedule is not None else 0


class TaskSpace:
    """The points of a task's space, and how to realise one as a candidate. Failures are counted, not raised.

    ``shipped`` is the record that ships with mlc for the task; ``hints`` are points that may be good, best first.
    """

    def __init__(self, task: Task, space: Space | None = None, shipped: Record | None = None) -> None:
        self.task = task
        self._shipped = shipped
        self.hints: tuple[Point, ...] = ()
        self.target = task.target.tvm
        self.space = space or registry.find(task.func, self.target)
        self.knobs: tuple[Knob, ...] = tuple(self.space.knobs(task.func, self.target))
        self.invalid: Counter[str] = Counter()
        self._indices = [{value: i for i, value in enumerate(knob.values)} for knob in self.knobs]

    @cached_property
    def size(self) -> int:
        """How many points there are, valid or not."""
        return prod(len(knob.values) for knob in self.knobs)

    def seeds(self) -> Iterator[Point]:
        """The space's own seeds, best first."""
        for decisions in self.space.seeds(self.task.func, self.target):
            point = self.point(decisions)
            if point is not None:
                yield point

    def starts(self) -> list[Point]:
        """The points that a search starts from: seeds and hints alternately, each best first."""
        turns = zip_longest(self.seeds(), self.hints)
        return list(dict.fromkeys(point for turn in turns for point in turn if point is not None))

    @cached_property
    def default(self) -> Candidate | None:
        """The candidate that a build without a log of one's own uses: the shipped one, else the first feasible seed."""
        return self._adopted() or next((c for c in map(self.realise, self.seeds()) if c is not None), None)

    def _adopted(self) -> Candidate | None:
        """The shipped record as a candidate, if it belongs to this space and fits this machine."""
        found = self.recall(self._shipped) if self._shipped is not None else None
        if found is None or self._shipped is None:
            return None
        try:
            return replace(found, schedule=schedule_of(self.task, self._shipped))
        except InvalidDecision:
            return None

    def points(self) -> Iterator[Point]:
        """Every point, in the order of the knobs' values."""
        return product(*(knob.values for knob in self.knobs))

    def sample(self, rng: random.Random) -> Point:
        """A point drawn uniformly."""
        return tuple(rng.choice(knob.values) for knob in self.knobs)

    def neighbour(self, point: Point, rng: random.Random) -> Point:
        """``point`` with one to three knobs moved, mostly to the next value up or down: values are ordered."""
        movable = [i for i, knob in enumerate(self.knobs) if len(knob.values) > 1]
        if not movable:
            return point
        count = min(len(movable), rng.choices((1, 2, 3), (0.6, 0.3, 0.1))[0])
        values = list(point)
        for i in rng.sample(movable, count):
            domain = self.knobs[i].values
            at = self._indices[i][values[i]]
            step = rng.choices((1, 2, len(domain)), (0.6, 0.2, 0.2))[0]
            if step == len(domain):
                at = rng.choice([j for j in range(len(domain)) if j != at])
            else:
                at = _inside(at + rng.choice((-step, step)), at, len(domain))
            values[i] = domain[at]
        return tuple(values)

    def cross(self, a: Point, b: Point, rng: random.Random) -> Point:
        """Each knob from one of the two parents."""
        return tuple(rng.choice(pair) for pair in zip(a, b, strict=True))

    def point(self, decisions: Mapping[str, int]) -> Point | None:
        """The point with these decisions, by name; None if they do not belong to this space (a record of an older
        version)."""
        if set(decisions) != {knob.name for knob in self.knobs}:
            return None
        values = tuple(decisions[knob.name] for knob in self.knobs)
        return values if all(v in index for v, index in zip(values, self._indices, strict=True)) else None

    def realise(self, point: Point) -> Candidate | None:
        """The candidate at ``point``; None if the decisions are invalid."""
        decisions = self._decisions(point)
        try:
            sch = schedule_with(self.space, self.task.func, self.target, decisions)
        except InvalidDecision:
            self.invalid["decision"] += 1
            return None
        except Exception as error:  # a defect in a space or in TVM costs this candidate, not the run
            self.invalid[type(error).__name__] += 1
            return None
        return Candidate(self.task, self.space.name, decisions, point, sch)

    def features_of(self, candidate: Candidate) -> SpaceFeatures | None:
        """What the space knows about a candidate on a GPU, as input of the cost model; None if it has no price. On CPUs
        the loops say everything."""
        if self.task.target.kind == "llvm":
            return None
        seconds = self.price(candidate.point)
        if seconds is None:
            return None
        asked = self.space.footprint(self.task.func, self.target, candidate.decisions)
        return SpaceFeatures(seconds, candidate.point, **(asdict(asked) if asked is not None else {}))

    def price(self, point: Point) -> float | None:
        """The estimated seconds of a point; None if the space has no price, or the point does not fit the machine."""
        try:
            return self.space.price(self.task.func, self.target, self._decisions(point))
        except InvalidDecision:
            return None

    def _decisions(self, point: Point) -> dict[str, int]:
        return {knob.name: value for knob, value in zip(self.knobs, point, strict=True)}

    def recall(self, record: Record) -> Candidate | None:
        """The candidate that a record is about, without its schedule; None if it does not belong to this space."""
        point = self.point(record.decisions) if record.space == self.space.name else None
        if point is None:
            return None
        return Candidate(self.task, record.space, dict(record.decisions), point, None, record.trace)


def _inside(wanted: int, at: int, size: int) -> int:
    """``wanted`` if it is an index, else one step to the side that has room."""
    if 0 <= wanted < size:
        return wanted
    return at + 1 if at == 0 else at - 1
