"""The price of a graph, from the tensor functions it lowers to: measured if the log knows them, else estimated.

Only functions that two graphs do not share are priced, and both graphs in the same way: by the log's times if it has
all of them, else by the analytic model's estimates of the schedules that would be built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cost_model.machine import machine
from cost_model.roofline import estimate, prior
from mlc.graph.task import Task
from schedules import registry
from schedules.free import usual_function
from schedules.space import first_seed

__all__ = ["Comparison", "bound", "call_seconds", "compare", "estimated"]

Price = Callable[[Task], "float | None"]


@dataclass(frozen=True)
class Comparison:
    """The seconds of functions that only one of two graphs calls. ``basis`` is ``log`` or ``estimate``."""

    ours: float
    theirs: float
    basis: str

    @property
    def saved(self) -> float:
        """The seconds that our graph saves per run."""
        return self.theirs - self.ours


def compare(ours: Sequence[Task], theirs: Sequence[Task], price: Price | None) -> Comparison:
    """Compare two graphs by their tasks, whose weights say how often each is called."""
    known = {task.key: task for task in [*ours, *theirs]}
    left, right = _calls(ours), _calls(theirs)
    only = left - right, right - left
    differing = sorted({*only[0], *only[1]})
    logged = {key: price(known[key]) for key in differing} if price is not None else {}
    if price is not None and all(seconds is not None for seconds in logged.values()):
        seconds, basis = {key: s for key, s in logged.items() if s is not None}, "log"
    else:
        seconds, basis = {key: estimated(known[key]) for key in differing}, "estimate"
    sums = [sum((seconds[key] + call_seconds(known[key])) * count for key, count in part.items()) for part in only]
    return Comparison(sums[0], sums[1], basis)


def bound(ours: Sequence[Task], theirs: Sequence[Task], price: Price) -> tuple[float, float | None]:
    """A lower bound on the time of functions that only ours calls, and the known time of those that only theirs calls
    (None if something is unknown)."""
    known = {task.key: task for task in [*ours, *theirs]}
    left, right = _calls(ours), _calls(theirs)
    least, total = 0.0, 0.0
    for key, n in (left - right).items():
        least += (estimate(known[key].func, known[key].target.tvm) + call_seconds(known[key])) * n
    for key, n in (right - left).items():
        seconds = price(known[key])
        if seconds is None:
            return least, None
        total += (seconds + call_seconds(known[key])) * n
    return least, total


def call_seconds(task: Task) -> float:
    """The seconds between one kernel's last instruction and the next one's first, apart from starting its threads."""
    return machine(task.target.tvm).call_seconds


def estimated(task: Task) -> float:
    """The analytic estimate, in seconds per call at the usual sizes, of the schedule that would be built untuned."""
    return _estimated(_Keyed(task))


def _calls(tasks: Sequence[Task]) -> Counter[str]:
    calls: Counter[str] = Counter()
    for task in tasks:
        calls[task.key] += task.weight
    return calls


class _Keyed:
    """A task as a cache key: equal to another task with the same key."""

    def __init__(self, task: Task) -> None:
        self.task, self._key = task, task.key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self._key == other._key


@lru_cache(maxsize=512)
def _estimated(keyed: _Keyed) -> float:
    """Seconds of the schedule that would be built untuned."""
    func, target = usual_function(keyed.task.func), keyed.task.target.tvm
    try:
        schedule, _ = first_seed(registry.find(func, target), func, target)
        return prior(schedule.mod, target)
    except Exception:  # a defect in a space must not keep a model from being compiled another way
        return estimate(func, target)
